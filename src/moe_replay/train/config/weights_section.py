"""Settings of how weights reach the engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.section import Section
from moe_replay.train.weight_kinds import WEIGHT_KINDS

WeightKindChoice = Annotated[str, PluginName(lambda: WEIGHT_KINDS, "kind of weight updates")]


class WeightsConfig(Section):
    """Transfer of the policy's weights to the engine after every update (docs/weights-sync.md)."""

    kind: WeightKindChoice = "auto"
    """How weights travel. auto: ipc if trainer and engine share their GPUs, nccl between GPUs of different cards or
    machines, else http. sharded_rdt and nccl_m2n are for servers of `vllm serve` that were started with them."""
    chunk_mib: int = Field(512, ge=1)
    """Size of the buffer that weights go through with ipc and nccl, in MiB; a larger tensor gets a larger one."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that ipc and nccl may take for one chunk; then the update has failed."""
    delta: bool = False
    """Send only what has changed since the last update, in requests, to servers of `moe-replay rollout`. Rank 0 and
    each server keep a copy of the weights in host memory."""
    full_every: int = Field(20, ge=1)
    """With delta: all weights are sent once in this many updates."""
