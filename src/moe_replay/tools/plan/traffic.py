"""Bytes that the FSDP2 backend moves into a rank for one micro-batch of an update, with and without expert parallel."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.tools.plan.layout import size
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.model_sizes import ModelSizes

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank receives for one micro-batch, its own part included.

    gathered    parameters, in all-gathers: a layer before its forward and before its backward, embedding and head once
    reduced     gradients that go into reduce-scatters, in float32; of adapters they are not counted
    exchanged   rows that travel to experts and back, if every rank gets as many as it sends
    """

    gathered: float
    reduced: float
    exchanged: float

    @property
    def total(self) -> float:
        return self.gathered + self.reduced + self.exchanged

    def __str__(self) -> str:
        parts = {"gathered": self.gathered, "gradients": self.reduced, "to experts and back": self.exchanged}
        shown = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes)
        return f"into a rank for each micro-batch of an update: {shown or 'nothing'}"


def plan_traffic(config: TrainConfig, sizes: ModelSizes, *, gpus: int, recomputes: bool | None = None) -> Traffic:
    """Return what a micro-batch of `batch.tokens_per_micro_batch` tokens moves.

    recomputes   whether layers are computed again in the backward; None: as configured, "auto" as yes
    """
    compute = _BYTES[config.model.dtype]
    experts, contexts = config.backend.expert_parallel, config.backend.context_parallel
    recomputes = bool(config.model.gradient_checkpointing) if recomputes is None else recomputes
    layers = sum(others for _, others in sizes.by_layer) if gpus > 1 else 0  # one rank gathers nothing
    layers += sizes.experts / experts if gpus > experts else 0  # nor one that has its experts alone
    root = sizes.total - sum(map(sum, sizes.by_layer)) if gpus > 1 else 0
    rows = config.batch.tokens_per_micro_batch / contexts * sizes.top_k * sizes.hidden * compute
    moe_layers = sum(1 for of_experts, _ in sizes.by_layer if of_experts)
    trips = 6 if recomputes else 4  # there and back: in the forward, when it is computed again, in the backward
    return Traffic(
        gathered=compute * (2 * layers + root),
        reduced=0 if config.model.lora_rank else 4 * (layers + root),
        exchanged=trips * moe_layers * rows if experts > 1 else 0,
    )
