"""Load a configuration from a TOML recipe and the command line, and write it as TOML.

Defaults, then the recipe, then the command line: later values win, and only the result must be valid.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_replay.demo import RECIPE
from moe_replay.train.config.command_line import apply_overrides
from moe_replay.train.config.foreign import advice
from moe_replay.train.config.keys import (
    ALIASES,
    ConfigError,
    all_fields,
    enclosing_table,
    fields_of,
    sections,
    suggestion,
)
from moe_replay.train.config.section import Section
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.secrets import is_secret_name, mask_passwords

METHOD: dict[str, tuple[str, ...]] = {
    "model": ("base_dtype", "gradient_checkpointing", "lora_rank", "lora_alpha", "lora_target_modules", "lora_merge"),
    "backend": ("kind", "distributed_optimizer"),
    "rollout": ("temperature", "max_staleness", "max_turns", "reproducible"),
    "batch": ("packed",),
    "log": ("completions", "tensorboard", "traces"),
}
"""Keys that `--tiny` keeps; it keeps the sections in `WHOLE` entirely."""
WHOLE = ("replay", "algorithm", "optim")
ENVIRONMENT = "moe_replay.demo.task:second_try"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all-linear")
"""Modules of the embedded model that can have a LoRA adapter."""
PROMPTS, SAMPLES, STEPS = 4, 4, 3
NO_MODEL = 'model.path: the recipe names no model; set a folder or a Hub name, or "" for the embedded tiny model'


def load_config(path: Path | None, overrides: Sequence[str] = (), *, tiny: bool = False) -> TrainConfig:
    """Load the configuration of a run: defaults <- TOML file <- command line (`--replay.mode r2 --optim.lr 1e-6`).

    tiny   replace model, data, lengths, engine and sizes by those of the embedded default
    """
    tables = {} if path is None else _read(path)
    tables = shrink(tables) if tiny else tables
    apply_overrides(tables, overrides)
    lines = [] if path is None or _names_model(tables) else [NO_MODEL]
    try:
        config = TrainConfig.model_validate(tables)
    except ValidationError as error:
        where = "the configuration" if path in (None, RECIPE) else str(path)
        lines = [*_problems(error), *_further_problems(tables, error), *lines]
        raise ConfigError("\n  ".join([f"{where} is invalid", *lines])) from error
    if lines:
        raise ConfigError("\n  ".join([f"{path} is invalid", *lines]))
    return config


def _names_model(tables: Mapping[str, Any]) -> bool:
    model = tables.get("model", {})
    return not isinstance(model, dict) or "path" in model  # anything but a table is reported by pydantic


def shrink(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with model, data, lengths and sizes of the embedded default.

    The method stays: replay, loss, optimizer, backend, LoRA, staleness, multi-turn.
    """
    tiny = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    tiny |= {"name": f"{tables.get('name', 'run')}-tiny", "steps": STEPS, "checkpoint": {"every": 0}}
    tiny |= {"seed": tables["seed"]} if "seed" in tables else {}
    given = {name: table for name, table in tables.items() if isinstance(table, dict)}
    tiny |= {name: dict(given.get(name, {})) for name in WHOLE}
    for section, keys in METHOD.items():
        method = {key: value for key, value in given.get(section, {}).items() if key in keys}
        tiny[section] = tiny.get(section, {}) | method
    tiny["rollout"] |= {"prompts_per_step": PROMPTS, "num_generations": SAMPLES}
    tiny["rollout"]["dtype"] = "float32"  # vLLM in bfloat16 ends with an illegal instruction on some CPUs
    if find_spec("vllm") is None:
        tiny["rollout"] |= {"engine": "transformers", "options": {}}
    if "environment" in given.get("rollout", {}):
        tiny["rollout"]["environment"] = ENVIRONMENT
    targets = tiny["model"].pop("lora_target_modules", [])
    if targets := [name for name in targets if name in LAYERS] if isinstance(targets, list) else targets:
        tiny["model"]["lora_target_modules"] = targets
    updates = tiny["algorithm"].get("updates_per_rollout", 1)
    tiny["algorithm"]["updates_per_rollout"] = gcd(updates, PROMPTS * SAMPLES) if isinstance(updates, int) else updates
    tiny["optim"].pop("warmup_steps", None)
    return tiny


def to_toml(config: TrainConfig) -> str:
    """Return the whole configuration as TOML, without tokens, passwords and None values."""
    parts = []
    for name, section in sections():
        values: Section = getattr(config, name) if name else config
        keys = [key.removeprefix(f"{name}.") for key, _ in fields_of(name, section)]
        shown = {key: getattr(values, key) for key in keys if key != "token"}
        lines = [f"{key} = {toml_value(_without_secrets(value))}" for key, value in shown.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines] if name else lines))
    return "\n\n".join(parts) + "\n"


def _without_secrets(value: Any) -> Any:
    """Mask passwords in URLs, and drop options that are tokens or passwords."""
    if isinstance(value, str):
        return mask_passwords(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(item) for key, item in value.items() if not is_secret_name(key)}
    return [_without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def toml_value(value: Any) -> str:
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
        if path.exists() and not path.is_file():  # reading a pipe or device may block forever
            raise ConfigError(f"{path} cannot be read: it is not a file", remedy="Name a TOML file")
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        foreign = advice(str(path).partition("=")[0].lstrip("+")).removeprefix("; ")
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy=foreign or "Name a TOML file") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from error
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", remedy="Save it as text in UTF-8") from error
    except ValueError as error:  # invalid TOML, or an integer of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for alias, setting in ALIASES.items():
        table, key = enclosing_table(tables, alias)
        if key in table:
            target, name = enclosing_table(tables, setting)
            if name in target:
                raise ConfigError(f"{path}: {alias} and {setting} are the same setting", remedy="Use only one of them")
            target[name] = table.pop(key)
    return tables


def _problems(error: ValidationError) -> list[str]:
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
            is_secret = any(is_secret_name(str(part)) for part in problem["loc"])
            suffix = "" if is_secret else f", found {_shortened(mask_passwords(repr(problem['input'])))}"
            lines[f"{key}: {message}{suffix}{text}"] = None
    return [_shortened(line, 1000) for line in lines]


def _further_problems(tables: dict[str, Any], error: ValidationError) -> list[str]:
    """Return the problems across settings, which are found once each setting is valid: without those in `error`."""
    invalid = {".".join(map(str, problem["loc"][:2])) for problem in error.errors() if problem["loc"]}
    valid = {
        name: {key: item for key, item in value.items() if f"{name}.{key}" not in invalid}
        if isinstance(value, dict)
        else value
        for name, value in tables.items()
        if name not in invalid
    }
    try:
        TrainConfig.model_validate(valid)
    except ValidationError as further:
        return [line for line in _problems(further) if not any(key in line for key in invalid)] if invalid else []
    return []


def _shortened(text: str, length: int = 200) -> str:
    return text if len(text) <= length else f"{text[:length]}..."
