"""Options of other trainers and their counterparts: for `moe-replay convert`, and for advice on unknown options."""

from __future__ import annotations

from moe_replay.train.config.foreign import openrlhf, skyrl, swift, verl
from moe_replay.train.config.foreign.options import Option, Table

TRAINERS: dict[str, Table] = {
    "ms-swift": swift.OPTIONS,
    "TRL": swift.TRL_OPTIONS,
    "verl": verl.OPTIONS,
    "SkyRL": skyrl.OPTIONS,
    "OpenRLHF": openrlhf.OPTIONS,
}
TABLES = ("rollout.options", "backend.megatron")
"""Keys that are tables, with the options of the engine and of Megatron-Core as entries."""


def advice(name: str, dashes: str = "") -> str:
    """Return the counterpart of another trainer's option as part of a sentence; empty if no known trainer has it.

    name   dotted or plain, with underscores, as in `actor_rollout_ref.rollout.n`
    """
    options = {trainer: table[name] for trainer, table in TRAINERS.items() if name in table}
    if not options:
        return ""
    first = next(iter(options.values()))
    names = [trainer for trainer, option in options.items() if _target(option) == _target(first)]
    trainers = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if not first.key:
        return f"; this {trainers} option has no counterpart here: {first.note}"
    note = f" ({first.note})" if first.note else ""
    return f"; {name} of {trainers} is {_shown(first.key, dashes)} here{note}"


def _shown(key: str, dashes: str) -> str:
    """Return a key as written; on a command line, an entry of a table follows the table's name."""
    table, _, entry = key.rpartition(".")
    if table not in TABLES:
        return f"{dashes}{key}"
    return f"{dashes}{table} {entry} ..." if dashes else f"{entry} in the table {table}"


def _target(option: Option) -> str:
    return option.key or option.note
