"""The keys of a configuration by their dotted names, and what is said about a key that is not one of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.sections import Section
from moe_replay.train.config.train_config import TrainConfig

OTHER_NAMES = {
    "router_replay_mode": "replay.mode",
    "replay.router_replay_mode": "replay.mode",
    "steps_per_generation": "algorithm.updates_per_rollout",
    "algorithm.steps_per_generation": "algorithm.updates_per_rollout",
}
"""Names that other trainers have for our keys; accepted wherever ours are."""


class ConfigError(MoeReplayError):
    """A configuration that cannot be read, or that cannot work."""


def sections() -> Iterator[tuple[str, type[Section]]]:
    """("", the keys outside of sections), then ("model", its section) and so on, in their order."""
    yield "", TrainConfig
    for name, field in TrainConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation


def fields_of(name: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """("replay.mode", its field) for every key of one section."""
    inner = {name for name, _ in sections()} if section is TrainConfig else set()
    prefix = f"{name}." if name else ""
    yield from ((prefix + key, field) for key, field in section.model_fields.items() if key not in inner)


def all_fields() -> dict[str, FieldInfo]:
    """Dotted name -> field, for every key of every section."""
    return {key: field for name, section in sections() for key, field in fields_of(name, section)}


def holder(tables: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """The table that a dotted key belongs into, made if there is none, and the name that the key has there."""
    section, _, key = dotted.rpartition(".")
    table = tables.setdefault(section, {}) if section else tables
    return (table if isinstance(table, dict) else {}), key


def suggestion(key: str, dashes: str = "") -> str:
    """What to write in place of a key that does not exist; empty where nothing is like it."""
    known = [*all_fields(), *TrainConfig.model_fields, *OTHER_NAMES]
    ends = {name.rpartition(".")[2]: name for name in reversed(known)}
    end = key.rpartition(".")[2]
    near = [ends[end]] if end in ends else difflib.get_close_matches(key, known, n=1)
    near = near or [ends[other] for other in difflib.get_close_matches(end, list(ends), n=1)]
    return f"; did you mean {dashes}{near[0]}?" if near else ""
