"""Settings of how weights reach the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moe_replay.train.config.section import Section

VLLM_ENGINES = ("sharded_rdt", "nccl_m2n")
WeightKind = Literal["auto", "http", "ipc", "nccl", "sharded_rdt", "nccl_m2n"]


class WeightsConfig(Section):
    """How the policy's weights reach the engine after every update (docs/weights-sync.md)."""

    kind: WeightKind = "auto"
    """auto: ipc if trainer and engine share their GPUs, nccl between GPUs of different cards or machines, else http.
    sharded_rdt and nccl_m2n are engines of vLLM's own, for servers of `vllm serve` that were started with them."""
    chunk_mib: int = Field(512, ge=1)
    """Size of the buffer that weights go through with ipc and nccl, in MiB; a larger tensor gets a larger one."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that ipc and nccl may take for one chunk; then the update has failed."""
    delta: bool = False
    """Send only what has changed since the last update, in requests, to servers of `moe-replay rollout`. Rank 0 and
    each server keep a copy of the weights in host memory."""
    full_every: int = Field(20, ge=1)
    """With delta: all weights are sent every so many updates."""
