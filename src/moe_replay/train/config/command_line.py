"""The command line of a configuration: `--section.key value` for every key, and what its help says.

Arguments become values by the same rules as in a file: pydantic parses them. All that has to be known here is how many
arguments an option takes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from moe_replay.train.config.keys import (
    ALIASES,
    ConfigError,
    all_fields,
    enclosing_table,
    suggestion,
)
from moe_replay.train.config.plugin_names import PluginName
from moe_replay.utils.secrets import READABLE_BY_ALL, has_password, is_secret_name

OPTIONS = "rollout.options"


def apply_overrides(tables: dict[str, Any], words: Sequence[str]) -> None:
    """Apply the options of a command line to the tables of a file; tables inside a section are merged key by key.

    The file's `rollout.options` are those of the file's engine: where the command line names another engine, they are
    left out.
    """
    fields = all_fields()
    engine = _engine(tables)
    of_file = _pop_options(tables)
    for option, values in _options(words):
        name = option.removeprefix("--").replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in fields and (switch := _without_no(name)) in fields and fields[switch].annotation is bool:
            name, values = switch, [*values, "false"]
        if name not in fields:
            raise ConfigError(f"{option}: no such option{suggestion(name, '--')}")
        table, key = enclosing_table(tables, name)
        names = [name, *values[::2]] if get_origin(fields[name].annotation) is dict else [name]
        if any(map(is_secret_name, names)) or any(map(has_password, values)):
            raise ConfigError(
                f"{option}: a token or password {READABLE_BY_ALL}",
                remedy="Put it into the recipe; a token may be in $MOE_REPLAY_TOKEN",
            )
        value = parse_value(option, values, fields[name].annotation)
        known = table.get(key)
        table[key] = known | value if isinstance(value, dict) and isinstance(known, dict) else value
    if of_file is not None and engine == _engine(tables):
        table, key = enclosing_table(tables, OPTIONS)
        table[key] = of_file | table.get(key, {}) if isinstance(of_file, dict) else of_file


def _engine(tables: dict[str, Any]) -> Any:
    table, key = enclosing_table(tables, "rollout.engine")
    return table.get(key, all_fields()["rollout.engine"].default)


def _pop_options(tables: dict[str, Any]) -> Any:
    table, key = enclosing_table(tables, OPTIONS)
    return table.pop(key, None)


def choices(field: FieldInfo) -> list[str]:
    """Return the values that a key accepts, where they can be listed."""
    kind = field.annotation
    if (plugin := PluginName.of(field)) is not None:
        return ["|".join([*plugin.names(), *plugin.forms])]
    return ["|".join(map(str, get_args(kind)))] if get_origin(kind) is Literal else []


def default_text(field: FieldInfo) -> str:
    """Return the default as one would write it on a command line."""
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value in (None, "", {}) else str(value)


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """["--a", "1", "2", "--b=3"] -> ("--a", ["1", "2"]), ("--b", ["3"])."""
    options: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            options.append((option, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} belongs to no option", expected="--section.key value")
    yield from options


def _without_no(name: str) -> str:
    """`replay.no_observe` -> `replay.observe`."""
    section, dot, key = name.rpartition(".")
    return f"{section}{dot}{key.removeprefix('no_')}"


def parse_value(option: str, words: list[str], kind: Any) -> Any:
    """Convert the arguments of an option to what a file would hold."""
    kinds = (kind, *get_args(kind))
    if any(get_origin(part) is tuple for part in kinds):
        return None if NoneType in kinds and _is_none(words) else words
    if get_origin(kind) is dict:
        if len(words) % 2:
            raise ConfigError(f"{option} takes pairs of a name and a value", found=" ".join(words))
        return {name: parse_scalar(word) for name, word in zip(words[::2], words[1::2], strict=True)}
    if kind is bool and not words:
        return True
    if len(words) != 1:
        raise ConfigError(
            f"{option} takes one value", found=" ".join(words) or "none", remedy="Put the recipe before all options"
        )
    return None if NoneType in kinds and _is_none(words) else words[0]


def _is_none(words: list[str]) -> bool:
    return [word.lower() for word in words] == ["none"]


def parse_scalar(word: str) -> Any:
    """Convert an argument of unknown type: a number, true, false or a list as in TOML, otherwise text."""
    try:
        value = tomllib.loads(f"value = {word.lower() if word in ('True', 'False') else word}")["value"]
    except (ValueError, RecursionError):  # no TOML, thousands of digits, or nested too deeply
        return word
    return value if isinstance(value, (int, float, bool, list)) else word
