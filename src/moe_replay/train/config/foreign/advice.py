"""Advice on options of other trainers that are given to this one."""

from __future__ import annotations

from moe_replay.train.config.foreign import openrlhf, swift, trl, verl
from moe_replay.train.config.foreign.options import Option, Table

TRAINERS: dict[str, Table] = {
    "ms-swift": swift.OPTIONS,
    "TRL": trl.OPTIONS,
    "verl": verl.OPTIONS,
    "OpenRLHF": openrlhf.OPTIONS,
}
TABLES = ("rollout.options", "backend.megatron")
"""Keys that are tables: their entries are options of the engine and of Megatron-Core."""


def advice(name: str, dashes: str = "") -> str:
    """Return what an option of another trainer is here; empty if no trainer that is known has it.

    name   dotted or plain, with underscores, as in `actor_rollout_ref.rollout.n`
    """
    found = {trainer: table[name] for trainer, table in TRAINERS.items() if name in table}
    if not found:
        return ""
    first = next(iter(found.values()))
    names = [trainer for trainer, option in found.items() if _target(option) == _target(first)]
    trainers = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if not first.key:
        return f"; it is an option of {trainers} without a counterpart here: {first.note}"
    note = f" ({first.note})" if first.note else ""
    return f"; {name} of {trainers} is {_shown(first.key, dashes)} here{note}"


def _shown(key: str, dashes: str) -> str:
    """Return a key as it is written; an entry of a table follows the name of the table on a command line."""
    table, _, entry = key.rpartition(".")
    if table not in TABLES:
        return f"{dashes}{key}"
    return f"{dashes}{table} {entry} ..." if dashes else f"{entry} in the table {table}"


def _target(option: Option) -> str:
    return option.key or option.note
