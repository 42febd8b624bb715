"""What a checkpoint is made of, what is damaged in one, and errors."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from moe_replay.distributed.ranks import from_rank_0
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.rollout.adapter import Adapter
from moe_replay.rollout.weights.source import WeightSource
from moe_replay.routes.topology import MoeTopology
from moe_replay.train.run import manifest
from moe_replay.utils.files import Write

RECORD, EXPORT, ADAPTER = "trainer.json", "hf", "adapter"


class CheckpointError(MoeReplayError):
    """A checkpoint that cannot be written, or that this run cannot resume from."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written, e.g. because the disk is full."""

    exit_status = ExitStatus.FAILED


class Policy(Protocol):
    """The part of a `Backend` that checkpoints need."""

    topology: MoeTopology

    @property
    def device(self) -> torch.device: ...

    def stage(self) -> Write: ...

    def load(self, folder: Path) -> None: ...

    def weight_source(self) -> WeightSource: ...

    def adapter(self) -> Adapter | None: ...

    def state_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The state of the training loop.

    step       last completed step
    version    weight version of the engine, once it has been synced
    data       `PromptStream.state`
    counters   other counts that the loop keeps across steps
    seconds    of training, over all sessions of the run
    """

    step: int
    version: int
    data: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def lost(self) -> str:
        """Description of what the checkpoint does not hold, for a message; empty if it holds everything."""
        if self.counters.get("optimizer", 1.0):
            return ""
        return (
            " without the optimizer's state, which the checkpoint does not have (checkpoint.optimizer = false): "
            "the moments of AdamW start at zero, so this is not the same run as one that was never stopped"
        )


def damage_of(folder: Path) -> str:
    """Return what is damaged in a checkpoint, "" if nothing is. All ranks call it."""
    from_rank_0(lambda: _check_format(folder), "reading a checkpoint")
    # An export is not needed to resume, and may have been deleted.
    return manifest.damage_on_all_ranks(folder, ignore=(f"{EXPORT}/", f"{ADAPTER}/"))


def _check_format(folder: Path) -> str:
    """Raise if a checkpoint has no manifest because it is older than manifests."""
    try:
        version = None if (folder / manifest.FILE).exists() else json.loads((folder / RECORD).read_text())["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        version = None  # damaged
    if version == 1:
        raise CheckpointError(
            f"{folder} was written by an earlier version, without digests",
            expected=manifest.FILE,
            remedy=f"Start a new run whose model.path is the {EXPORT} folder in it",
        )
    return ""


def describe_routers(topology: MoeTopology) -> str:
    """Return how many routers a model has and what they choose from."""
    kinds = sorted({f"top {moe.top_k} of {moe.num_experts}" for moe in topology.moe_layers})
    routers = f"{len(topology.layers)} in {topology.num_layers} layers, {' and '.join(kinds)}"
    return f"{topology.model_type} {routers}".strip()
