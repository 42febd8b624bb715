"""A configuration from a TOML file and a command line, and back to TOML.

Defaults, then the file, then the command line: later values win, and only the result has to be valid.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_replay.train.config.command_line import apply_overrides
from moe_replay.train.config.foreign.advice import advice
from moe_replay.train.config.keys import (
    ALIASES,
    ConfigError,
    all_fields,
    enclosing_table,
    fields_of,
    sections,
    suggestion,
)
from moe_replay.train.config.sections import Section
from moe_replay.train.config.tiny import shrink
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.secrets import is_secret_name, mask_passwords


def load_config(path: Path | None, overrides: Sequence[str] = (), *, tiny: bool = False) -> TrainConfig:
    """Load the configuration of a run: defaults <- TOML file <- command line (`--replay.mode r2 --optim.lr 1e-6`).

    tiny   the method of the file on the embedded default: model, data, lengths, engine and sizes are replaced
    """
    tables = {} if path is None else _read(path)
    tables = shrink(tables) if tiny else tables
    apply_overrides(tables, overrides)
    try:
        return TrainConfig.model_validate(tables)
    except ValidationError as error:
        where = "the configuration" if path is None else str(path)
        raise ConfigError("\n  ".join([f"{where} is invalid", *_problems(error)])) from error


def to_toml(config: TrainConfig) -> str:
    """Return the whole configuration as TOML, without tokens and passwords; None values are left out."""
    parts = []
    for name, section in sections():
        values: Section = getattr(config, name) if name else config
        keys = [key.removeprefix(f"{name}.") for key, _ in fields_of(name, section)]
        lines = [f"{key} = {toml_value(value)}" for key, value in _items(values, keys)]
        parts.append("\n".join([f"[{name}]", *lines] if name else lines))
    return "\n\n".join(parts) + "\n"


def _items(section: Section, keys: list[str]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        value = getattr(section, key)
        if value is not None and key != "token":
            yield key, _without_secrets(value)


def _without_secrets(value: Any) -> Any:
    """Return a setting with passwords in URLs masked, and without options that are tokens or passwords."""
    if isinstance(value, str):
        return mask_passwords(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items() if not is_secret_name(key)}
    return [_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def toml_value(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(toml_value, value)) + "]"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(f"{path} cannot be read: it is not a file", remedy="Name a TOML file")
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        told = advice(str(path).partition("=")[0].lstrip("+")).removeprefix("; ")
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy=told or "Name a TOML file") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from error
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", remedy="Save it as text in UTF-8") from error
    except ValueError as error:  # of TOML, or an integer of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for other, ours in ALIASES.items():
        table, key = enclosing_table(tables, other)
        if key in table:
            target, name = enclosing_table(tables, ours)
            if name in target:
                raise ConfigError(f"{path}: {other} and {ours} are the same setting", remedy="Use only one of them")
            target[name] = table.pop(key)
    return tables


def _problems(error: ValidationError) -> list[str]:
    """Return one line per problem."""
    fields, lines = all_fields(), dict[str, None]()
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            lines[f"{key}: no such key{suggestion(key)}"] = None
        elif not key:  # a line for each of `checks.problems`
            lines |= dict.fromkeys(str(problem["ctx"]["error"]).split("\n"))
        else:
            name = next((name for name in fields if f"{key}.".startswith(f"{name}.")), key)
            text = f" ({fields[name].description})" if name in fields else ""
            message = problem["msg"].removeprefix("Input ")
            found = "" if is_secret_name(name) else f", found {_shortened(mask_passwords(repr(problem['input'])))}"
            lines[f"{key}: {message}{found}{text}"] = None
    return [_shortened(line, 1000) for line in lines]


def _shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
