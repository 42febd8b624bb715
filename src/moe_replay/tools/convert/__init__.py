"""`moe-replay convert`: a recipe from one training command of ms-swift, verl or SkyRL, or from its YAML file."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_replay.errors import MissingExtraError
from moe_replay.tools.convert.draft import UNKNOWN, ConversionError
from moe_replay.tools.convert.skyrl import from_skyrl
from moe_replay.tools.convert.swift import from_swift
from moe_replay.tools.convert.verl import from_verl
from moe_replay.utils.misc import one_line

TRAINERS = ("swift", "verl", "skyrl")
_EXPAND = "Put `moe-replay convert swift` (or verl, skyrl) in front of the training command in the script and run it"
_ENVIRONMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.S)
# The parts of a command line: comments, escapes, quoted text, and the rest.
_PART = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*) | \\. | '[^']*' | "(?P<quoted>(?:\\.|[^"\\])*)" | (?P<bare>[^\\'"\#]+|\#)""",
    re.S | re.X,
)
_EXPANSION = re.compile(r"\$[\w{(@*#?!]+|`")
_OPERATOR = re.compile(r"[;|&()<>]+")
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True, slots=True)
class Command:
    """A command without shell syntax."""

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # assignments in front of it
    unresolved: tuple[str, ...] = ()  # entries of a YAML file whose interpolation could not be resolved


def convert(trainer: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return a recipe as TOML with comments, and why it is not yet the run of the command; no reason: it is.

    trainer   swift, verl or skyrl
    words     a file, the text of a command, or the words of a command
    """
    if trainer not in TRAINERS:
        raise ConversionError("no such trainer", expected=" or ".join(TRAINERS), found=repr(trainer))
    command = read_command(words, is_hydra=trainer != "swift")
    if trainer == "swift":
        draft = from_swift(command.words, command.environment)
    else:
        draft = from_verl(command.words) if trainer == "verl" else from_skyrl(command.words)
    for entry in command.unresolved:
        draft.remark(entry, "the interpolation is not resolved", UNKNOWN)
    return draft.render()


def read_command(words: Sequence[str], *, is_hydra: bool = False) -> Command:
    """Read a command from its words, its text, or a file: YAML by its suffix, otherwise text.

    is_hydra   a YAML file holds nested keys, which become `a.b=value`; otherwise `--key value`
    """
    if len(words) != 1:
        return _command([list(words)])
    text, path = words[0], Path(words[0])
    is_file = os.path.isfile(text) or not (text.startswith("--") or any(character in text for character in " \n="))
    if is_file and path.suffix in (".yaml", ".yml"):
        return _from_yaml(path, is_hydra=is_hydra)
    if is_file:
        text = _read(path)
    return _command([shlex.split(line) for line in _lines(text)])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}", expected="a file, or a command") from error


def _command(lines: list[list[str]]) -> Command:
    """Return the only command of these lines; the other lines may set environment variables."""
    environment: dict[str, str] = {}
    commands = []
    for words in lines:
        rest = words[1:] if words[:1] == ["export"] else words
        while rest and (match := _ENVIRONMENT.fullmatch(rest[0])):
            environment[match[1]] = match[2]
            rest = rest[1:]
        if rest:
            commands.append(rest)
    if len(commands) != 1:
        shown = "; ".join(shlex.join(command[:3]) for command in commands)
        raise ConversionError("not a single command", found=shown or "none", remedy=_EXPAND)
    return Command(commands[0], environment)


def _lines(text: str) -> list[str]:
    """Split at newlines outside of quotes, without comments and continuations; raise for syntax that needs a shell."""
    text = text.replace("\\\r\n", "").replace("\\\n", "")
    lines, position = [""], 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            raise ConversionError("a quote is not closed", found=repr(text[position : position + 80]))
        bare, quoted = part["bare"] or "", re.sub(r"\\.", "", part["quoted"] or "")
        if syntax := _EXPANSION.search(bare + quoted) or _OPERATOR.search(bare):
            raise ConversionError(
                "shell syntax is not interpreted",
                expected="one command line with all variables expanded",
                found=repr(syntax[0]),
                remedy=_EXPAND,
            )
        first, *rest = bare.split("\n") if bare else ["" if part["comment"] else part[0]]
        lines[-1] += first
        lines += rest
        position = part.end()
    return lines


# ---- YAML ------------------------------------------------------------------------------------------------------------


def _from_yaml(path: Path, *, is_hydra: bool) -> Command:
    """Read options from a mapping, or Hydra's list of overrides (`.hydra/overrides.yaml`)."""
    try:
        import yaml
    except ImportError as missing:
        raise MissingExtraError("reading YAML needs PyYAML", remedy="pip install pyyaml") from missing
    try:
        content = yaml.safe_load(_read(path))
    except yaml.YAMLError as error:
        raise ConversionError(f"{path} is not valid YAML: {one_line(error)}") from error
    if isinstance(content, list) and all(isinstance(item, str) for item in content):
        return Command(content)
    if not isinstance(content, dict):
        raise ConversionError(f"{path} has no options", expected="a mapping, or a list of key=value")
    if not is_hydra:
        return Command([word for name, value in content.items() for word in _flag(name, value)])
    options = dict(_flattened(content))
    texts = {name: _hydra_text(_resolved(value, options)) for name, value in options.items()}
    unresolved = tuple(f"{name}={text}" for name, text in texts.items() if "${" in text)
    return Command([f"{name}={text}" for name, text in texts.items() if "${" not in text], unresolved=unresolved)


def _flag(name: str, value: Any) -> list[str]:
    """Return an option of ms-swift as words; an option that is null is not set."""
    if value is None:
        return []
    return [f"--{name}", *(_scalar_text(item) for item in (value if isinstance(value, list) else [value]))]


def _scalar_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)  # YAML has dates


def _hydra_text(value: Any) -> str:
    return f"[{','.join(map(_scalar_text, value))}]" if isinstance(value, list) else _scalar_text(value)


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _resolved(value: Any, options: Mapping[str, Any]) -> Any:
    """Return the value that a Hydra interpolation such as `${data.max_prompt_length}` refers to."""
    visited = set()
    while isinstance(value, str) and (match := _INTERPOLATION.fullmatch(value)) and match[1] in options:
        if value in visited:
            return value
        visited.add(value)
        value = options[match[1]]
    return value
