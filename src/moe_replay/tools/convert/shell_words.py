"""Words of a shell script, and the values of their variables. Nothing is run.

`$(command)` and variables that the script does not assign stay as they are written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moe_replay.errors import MoeReplayError

SEPARATORS = ("&&", "||", ";;", ";", "|", "&", "\n")
CLOSING = {"{": "}", "(": ")"}
SPACE = " \t\r"
_NAME = r"[A-Za-z_]\w*"
_PARAMETER = re.compile(
    rf"(?P<name>{_NAME}|[0-9@*#?$!-])(?P<every>\[[@*]\])?(?:(?P<colon>:?)(?P<sign>[-=?+])(?P<word>.*))?", re.S
)
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: abs(left) // abs(right) * (1 if left * right >= 0 else -1),
    ast.Mod: lambda left, right: left - right * int(left / right),
}


class ScriptError(MoeReplayError):
    """A script that cannot be read."""


@dataclass(slots=True)
class Variables:
    """Variables and arrays that a script has assigned so far."""

    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)


def split_words(text: str) -> Iterator[str]:
    """Yield the words of a script as they are written, and the separators of its commands; comments are left out.

    A word keeps its quotes. An opening and a closing parenthesis are separate words, as in `NAME=( a b )`.
    """
    position = 0
    text = text.replace("\\\r\n", "").replace("\\\n", "")
    while position < len(text):
        if text[position] in SPACE:
            position += 1
        elif text[position] == "#":
            position = _line_end(text, position)
        elif separator := next((sign for sign in SEPARATORS if text.startswith(sign, position)), None):
            yield separator
            position += len(separator)
        elif text[position] in "()":
            yield text[position]
            position += 1
        else:
            end = _word_end(text, position)
            yield text[position:end]
            position = end


def expand(word: str, variables: Variables) -> list[str]:
    """Return the expansion of a word: usually one text, none for an empty variable, several for an array."""
    fields, current, quoted, is_array = [], "", False, False
    for text, splits, protected in _parts(word, variables):
        quoted |= protected
        is_array |= "\0" in text
        if not splits:
            current += text
            continue
        pieces = text.split("\0") if "\0" in text else text.split()
        if text[:1].isspace() and current:
            fields.append(current)
            current = ""
        for number, piece in enumerate(pieces):
            if number and current:
                fields.append(current)
                current = ""
            current += piece
        if text[-1:].isspace() and current:
            fields.append(current)
            current = ""
    return [*fields, current] if current or (quoted and not fields and not is_array) else fields


def expand_text(word: str, variables: Variables) -> str:
    """Return the expansion of a word in an assignment, where nothing is split."""
    return "".join(text.strip("\0").replace("\0", " ") for text, _, _ in _parts(word, variables))


def _parts(word: str, variables: Variables) -> Iterator[tuple[str, bool, bool]]:
    """Yield (text, whether it is split at white space, whether it is quoted) for the parts of a word."""
    position, quoted = 0, False
    while position < len(word):
        sign = word[position]
        if sign == "'" and not quoted:
            end = _find(word, "'", position + 1)
            yield word[position + 1 : end], False, True
            position = end + 1
        elif sign == '"':
            quoted = not quoted
            yield "", False, True
            position += 1
        elif sign == "\\" and position + 1 < len(word):
            escapes = not quoted or word[position + 1] in '"\\$`'
            yield word[position + escapes : position + 2], False, quoted
            position += 2
        elif sign == "$" and (end := _variable_end(word, position)) > position + 1:
            text = _value(word[position + 1 : end], variables)
            yield text, not quoted or "\0" in text, quoted
            position = end
        else:
            yield sign, False, quoted
            position += 1


def _value(written: str, variables: Variables) -> str:
    """Return the value of what follows a $; items of an array are separated by NUL."""
    if written.startswith("(("):
        return _arithmetic(written[2:-2], variables)
    match = _PARAMETER.fullmatch(written[1:-1] if written.startswith("{") else written)
    if match is None or written.startswith("("):
        return f"${written}"  # a command, or a form of expansion that only a shell knows
    name, sign = match["name"], match["sign"]
    if match["every"]:
        return "\0".join(variables.arrays.get(name, [])) or "\0"
    known = variables.texts.get(name)
    if known is None and name in variables.arrays:
        known = next(iter(variables.arrays[name]), "")
    if known is None and (name in "@*" or name.isdecimal()):
        known = "\0" if name in "@*" else ""  # arguments of the script: it is read without any
    missing = known is None or (match["colon"] == ":" and not known)
    if sign in ("-", "=") and missing:
        known = expand_text(match["word"], variables)
        if sign == "=":
            variables.texts[name] = known
    elif sign == "+":
        known = "" if missing else expand_text(match["word"], variables)
    return f"${written}" if known is None else known


def _arithmetic(expression: str, variables: Variables) -> str:
    """Return the whole number that `$((...))` evaluates to; as it is written where it is more than + - * / %."""
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda found: variables.texts.get(found[1]) or "0", expression)
    try:
        return str(_number(ast.parse(text.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return f"$(({expression}))"


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_number(left), _number(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
    raise ValueError("not a sum of whole numbers")


def _word_end(text: str, position: int) -> int:
    while position < len(text) and text[position] not in f"{SPACE}\n;|&()":
        sign = text[position]
        if sign == "'":
            position = _find(text, "'", position + 1) + 1
        elif sign == '"':
            position = _quote_end(text, position)
        elif sign == "`":
            position = _find(text, "`", position + 1) + 1
        elif sign == "$":
            position = max(_variable_end(text, position), position + 1)
        elif sign in "<>" and text.startswith((f"{sign}&", f"{sign}("), position):
            position += 2  # a redirection: `2>&1`
        else:
            position += 2 if sign == "\\" else 1
    return min(position, len(text))


def _quote_end(text: str, position: int) -> int:
    start, position = position, position + 1
    while position < len(text) and text[position] != '"':
        if text[position] == "$":
            position = max(_variable_end(text, position), position + 1)
        else:
            position += 2 if text[position] == "\\" else 1
    if position >= len(text):
        raise _unclosed(text, '"', start)
    return position + 1


def _variable_end(text: str, position: int) -> int:
    """Return where the variable, command or sum ends that begins with the $ at a position; that of the $ if none."""
    opening = text[position + 1 : position + 2]
    if opening in CLOSING:
        depth, end = 0, position + 1
        while end < len(text):
            depth += (text[end] == opening) - (text[end] == CLOSING[opening])
            end += 1
            if not depth:
                return end
        raise _unclosed(text, f"${opening}", position)
    name = re.compile(rf"{_NAME}|[0-9@*#?!]").match(text, position + 1)
    return position + 1 if name is None else name.end()


def _find(text: str, sign: str, position: int) -> int:
    found = text.find(sign, position)
    if found < 0:
        raise _unclosed(text, sign, position - 1)
    return found


def _line_end(text: str, position: int) -> int:
    found = text.find("\n", position)
    return len(text) if found < 0 else found


def _unclosed(text: str, sign: str, position: int) -> ScriptError:
    line = text[position : _line_end(text, position)]
    return ScriptError("the script cannot be read: a quote or bracket is not closed", found=f"{sign} in {line[:80]!r}")


def names_of(value: str) -> list[str]:
    """Return the names of variables that are still in a text because the script does not assign them."""
    return re.findall(rf"\$\{{?({_NAME})", value)


def without_names(value: str) -> str:
    """Return a text without the variables that the script does not assign: a shell takes them for empty."""
    return re.sub(rf"\$(\{{{_NAME}\}}|{_NAME})", "", value)
