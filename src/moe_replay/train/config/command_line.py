"""Command line overrides: `--section.key value` for every key.

Arguments are parsed by pydantic, like values in a file; only the number of arguments per option is decided here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from moe_replay.train.config.keys import ALIASES, ConfigError, all_fields, enclosing_table, suggestion
from moe_replay.train.config.registries import PluginName
from moe_replay.utils.secrets import READABLE_BY_ALL, has_password, is_secret_name

OPTIONS = "rollout.options"


def apply_overrides(tables: dict[str, Any], words: Sequence[str]) -> None:
    """Apply command line options to the tables of a recipe; nested tables are merged key by key.

    The recipe's `rollout.options` are dropped if the command line selects another engine.
    """
    engine, problems = _engine(tables), list[ConfigError]()
    table, key = enclosing_table(tables, OPTIONS)
    of_file = table.pop(key, None)
    for option, values in _options(words):
        try:
            _apply(tables, option, values)
        except ConfigError as problem:
            problems.append(problem)
    if len(problems) > 1:
        raise ConfigError("\n  ".join(["the command line is invalid", *map(str, problems)]))
    if problems:
        raise problems[0]
    if of_file is not None and engine == _engine(tables):
        table[key] = of_file | table.get(key, {}) if isinstance(of_file, dict) else of_file


def _apply(tables: dict[str, Any], option: str, values: list[str]) -> None:
    fields = all_fields()
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
    previous = table.get(key)
    table[key] = previous | value if isinstance(value, dict) and isinstance(previous, dict) else value


def _engine(tables: dict[str, Any]) -> Any:
    table, key = enclosing_table(tables, "rollout.engine")
    return table.get(key, all_fields()["rollout.engine"].default)


def choices(field: FieldInfo) -> list[str]:
    """Return the accepted values of a key, if they can be listed."""
    kind = field.annotation
    if (plugin := PluginName.of(field)) is not None:
        return ["|".join([*plugin.names(), *plugin.forms])]
    return ["|".join(map(str, get_args(kind)))] if get_origin(kind) is Literal else []


def default_text(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value in (None, "", {}) else str(value)


def _options(words: Sequence[str]) -> list[tuple[str, list[str]]]:
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
    return options


def _without_no(name: str) -> str:
    """`replay.no_observe` -> `replay.observe`."""
    section, dot, key = name.rpartition(".")
    return f"{section}{dot}{key.removeprefix('no_')}"


def parse_value(option: str, words: list[str], kind: Any) -> Any:
    """Convert the arguments of an option to the value in a file."""
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
        remedy = "Put the recipe before all options" if words else None
        raise ConfigError(f"{option} takes one value", found=" ".join(words) or "none", remedy=remedy)
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
