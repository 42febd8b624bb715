"""Configuration keys by dotted name, and suggestions for unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.foreign import advice
from moe_replay.train.config.section import Section
from moe_replay.train.config.train_config import TrainConfig

ALIASES = {
    "router_replay_mode": "replay.mode",
    "replay.router_replay_mode": "replay.mode",
    "steps_per_generation": "algorithm.updates_per_rollout",
    "algorithm.steps_per_generation": "algorithm.updates_per_rollout",
    "num_iterations": "algorithm.num_iterations",
    "log_completions": "log.completions",
}
"""Names from other trainers, accepted wherever ours are."""

RENAMED = {
    "model.attention": "model.attn_implementation",
    "model.lora_targets": "model.lora_target_modules",
    "backend.rank_timeout_s": "backend.heartbeat_timeout_s",
    "data.max_prompt_tokens": "data.max_prompt_length",
    "rollout.drivers": "rollout.workers",
    "weights": "weight_sync",
    "weights.kind": "weight_sync.transport",
    "replay.compare_every": "replay.score_native_every",
    "algorithm.baseline": "algorithm.advantage",
    "algorithm.policy_loss": "algorithm.loss",
    "algorithm.level": "algorithm.importance_sampling_level",
    "algorithm.correction": "algorithm.rollout_correction",
    "algorithm.correction_low": "algorithm.rollout_correction_low",
    "algorithm.correction_high": "algorithm.rollout_correction_high",
    "optim.max_bad_steps": "optim.max_skipped_updates",
    "log.shown_completions": "log.num_completions_to_print",
    "cluster.kind": "cluster.launcher",
}
"""Former names of keys: not accepted, but an error names the new one."""


class ConfigError(MoeReplayError):
    """The configuration cannot be read or is invalid."""


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Yield ("", the keys outside of sections), then ("model", its section) and so on, in order."""
    yield "", TrainConfig
    for name, field in TrainConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield name, field.annotation


def fields_of(name: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield ("replay.mode", its field) for every key of one section."""
    inner = {name for name, _ in sections()} if section is TrainConfig else set()
    prefix = f"{name}." if name else ""
    yield from ((prefix + key, field) for key, field in section.model_fields.items() if key not in inner)


def all_fields() -> dict[str, FieldInfo]:
    """Return dotted name -> field for every key of every section."""
    return {key: field for name, section in sections() for key, field in fields_of(name, section)}


def enclosing_table(tables: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Return the table of a dotted key, created if missing, and the key within it."""
    section, _, key = dotted.rpartition(".")
    table = tables.setdefault(section, {}) if section else tables
    return (table if isinstance(table, dict) else {}), key


def suggestion(key: str, dashes: str = "") -> str:
    """Suggest a key for an unknown one, by its name here or in another trainer; empty if nothing is similar.

    dashes   prefix of an option; empty for a key in a file, where a section is a key too
    """
    if key in RENAMED:
        return f"; it is now {dashes}{RENAMED[key]}"
    names = [*all_fields(), *ALIASES]
    tables = [name for name, _ in sections() if name]
    ends = {name.rpartition(".")[2]: name for name in reversed(names)}
    end = key.rpartition(".")[2]
    foreign = advice(key, dashes) or advice(end, dashes)
    if end in ends:
        return f"; did you mean {dashes}{ends[end]}?{'' if ends[end] in foreign else foreign.replace(';', '', 1)}"
    if foreign:
        return foreign
    if key in tables:  # on a command line; in a file it is a valid key
        return f"; it is a section: --{key}.{_keys_of(key)}"
    near = difflib.get_close_matches(key, names if dashes else [*names, *tables], n=1)
    near = near or [ends[match] for match in difflib.get_close_matches(end, list(ends), n=1)]
    return f"; did you mean {dashes}{near[0]}?" if near else ""


def _keys_of(section: str) -> str:
    names = [name.removeprefix(f"{section}.") for name in all_fields() if name.startswith(f"{section}.")]
    return names[0] if len(names) == 1 else f"{{{','.join(names[:3])},...}}"
