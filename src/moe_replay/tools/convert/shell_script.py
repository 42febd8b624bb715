"""The commands of a shell script with their variables filled in. Nothing is run: conditions are only compared texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_replay.tools.convert.shell_words import SEPARATORS, Variables, expand, expand_text, split_words, without_names

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done", "function": "}"}
_REDIRECTION = re.compile(r"\d*(>>?|<|&>)")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, and the variables that were set before or in front of it."""

    words: list[str]
    variables: dict[str, str]


@dataclass(slots=True)
class Script:
    """Commands that a script would run.

    commands   in order, with variables filled in
    skipped    parts that were not followed: loops, functions, conditions that are more than a comparison of texts
    """

    commands: list[Command] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Branch:
    """An open `if`: whether its current branch is read, and whether one has been."""

    runs: bool
    has_run: bool


def read_script(text: str) -> Script:
    """Return the commands of a script."""
    script, variables = Script(), Variables()
    branches: list[_Branch] = []
    statements = _statements(text)
    for words in statements:
        _statement(words, statements, script, variables, branches)
    return script


def _statement(
    words: list[str], rest: Iterator[list[str]], script: Script, variables: Variables, branches: list[_Branch]
) -> None:
    while words and words[0] in ("then", "do", "{", "}", "time", "!", "else", "fi"):
        if words[0] == "else" and branches:
            branches[-1] = _Branch(not branches[-1].has_run, True)
        elif words[0] == "fi" and branches:
            branches.pop()
        words = words[1:]
    if not words:
        return
    runs = all(branch.runs for branch in branches)
    if words[0] in ("if", "elif"):
        holds = runs_here = _condition(words[1:], script, variables) if runs or words[0] == "elif" else False
        if words[0] == "elif" and branches:
            runs_here = holds and not branches[-1].has_run
            branches[-1] = _Branch(runs_here, branches[-1].has_run or runs_here)
        else:
            branches.append(_Branch(runs_here, runs_here))
    elif words[0] in _LOOPS or (words[1:3] == ["(", ")"] and not words[0].endswith("=")):
        closing = _LOOPS.get(words[0], "}")
        script.skipped.append(" ".join(words))
        while closing not in words:
            words = next(rest, [closing])
    elif runs:
        _run(words, script, variables)


def _run(words: list[str], script: Script, variables: Variables) -> None:
    """Apply assignments, and keep what is a command."""
    declares = words[0] in _DECLARES
    position, before = int(declares), dict(variables.texts)
    while position < len(words) and (match := _ASSIGNMENT.fullmatch(words[position])):
        name, adds, value = match.groups()
        if not value and words[position + 1 : position + 2] == ["("]:
            end = words.index(")", position) if ")" in words[position:] else len(words)
            items = [item for word in words[position + 2 : end] for item in expand(word, variables)]
            variables.arrays[name] = (variables.arrays.get(name, []) if adds else []) + items
            position = end + 1
            continue
        old = variables.texts.get(name, "") if adds else ""
        variables.texts[name] = old + expand_text(value, variables)
        position += 1
    if declares or position >= len(words):
        return
    kept = _without_redirections(words[position:])
    expanded = [item for word in kept for item in expand(word, variables)]
    script.commands.append(Command(expanded, dict(variables.texts)))
    variables.texts = before  # assignments in front of a command are for it alone


def _without_redirections(words: list[str]) -> list[str]:
    kept, is_target = [], False
    for word in words:
        found = _REDIRECTION.match(word)
        if not found and not is_target:
            kept.append(word)
        is_target = found is not None and found.end() == len(word)
    return kept


def _condition(words: list[str], script: Script, variables: Variables) -> bool:
    """Return whether a test of texts holds; False, and noted, for one that asks for more."""
    if "&&" in words:
        first = words.index("&&")
        return _condition(words[:first], script, variables) and _condition(words[first + 1 :], script, variables)
    texts = [without_names(expand_text(word, variables)) for word in words]
    match texts:
        case ["[" | "[[", "-z", value, "]" | "]]"]:
            return not value
        case ["[" | "[[", "-n", value, "]" | "]]"]:
            return bool(value)
        case ["[" | "[[", left, "=" | "==", right, "]" | "]]"]:
            return left == right
        case ["[" | "[[", left, "!=", right, "]" | "]]"]:
            return left != right
    script.skipped.append(f"if {' '.join(words)}")
    return False


def _statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; an array keeps its lines together, a condition its parts."""
    words: list[str] = []
    in_array = False
    for word in split_words(text):
        in_array = (in_array or (word == "(" and bool(words) and words[-1].endswith("="))) and word != ")"
        if word not in SEPARATORS or (words[:1] in (["if"], ["elif"]) and word in ("&&", "||")):
            words.append(word)
        elif words and not in_array:
            yield words
            words = []
    if words:
        yield words
