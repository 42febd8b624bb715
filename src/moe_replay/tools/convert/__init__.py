"""Commands of other trainers into recipes: `moe-replay convert`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moe_replay.tools.convert.draft import ConversionError, Draft
from moe_replay.tools.convert.shell_script import Command, Script, read_script
from moe_replay.tools.convert.swift import from_swift
from moe_replay.tools.convert.verl import from_verl

CONVERTERS: dict[str, Callable[[Sequence[Command]], Draft]] = {"swift": from_swift, "verl": from_verl}


def convert(trainer: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return a recipe as TOML with comments, and what our configuration would not accept of it.

    trainer   swift or verl
    words     a script, the text of a command, or the words of a command
    """
    if trainer not in CONVERTERS:
        raise ConversionError("no such trainer", expected=" or ".join(CONVERTERS), found=repr(trainer))
    script = _script(words)
    draft = CONVERTERS[trainer](script.commands)
    for part in script.skipped:
        draft.remark(part, "this part of the script is not followed")
    return draft.render()


def _script(words: Sequence[str]) -> Script:
    if len(words) != 1:
        return Script([Command(list(words), {})])
    path = Path(words[0])
    if any(sign in words[0] for sign in " \n=") or words[0].startswith("--"):
        return read_script(words[0])
    try:
        return read_script(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}", expected="a script, or a command") from error


__all__ = ["CONVERTERS", "ConversionError", "Draft", "convert"]
