"""Costs of a step at assumed rates: seconds of passes, bytes between ranks, a weight update by each transport."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.tools.plan.layout import aligned, size
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.model_sizes import ModelSizes

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# ---- passes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """The passes of a step in which every sequence has its maximum length.

    score, train   PFLOP of the scoring passes, and of all updates; recomputation does not count
    """

    score: float
    train: float
    tokens: int  # of all sequences
    rate: float  # PFLOP/s of all GPUs together, as assumed
    assumed: str  # how, in words
    gpus: int

    @property
    def seconds(self) -> float:
        return (self.score + self.train) / self.rate

    def __str__(self) -> str:
        parts = {"score": self.score, "updates": self.train}
        passes = ", ".join(
            f"{name} {flops:,.1f} PFLOP in {flops / self.rate:,.1f} s" for name, flops in parts.items() if flops
        )
        rate = f"{self.tokens / self.seconds / self.gpus:,.0f} tokens/s per GPU"
        return f"passes over {self.tokens:,} tokens a step: {passes} ({rate}), at {self.assumed}"


def plan_speed(config: TrainConfig, sizes: ModelSizes, *, gpus: int, peak_tflops: float, mfu: float) -> SpeedPlan:
    """Return the operations of a step and how long they take; `mfu` is the fraction of the peak that passes reach."""
    algorithm, sequences = config.algorithm, config.rollout.sequences
    scored = config.max_length - min(config.data.max_prompt_length, config.max_length - 1)
    flops = sizes.forward_flops([config.max_length], scored)
    separate = {"always": 1.0, "rollout": 0.0, "auto": 1 - 1 / algorithm.updates_per_rollout}[algorithm.old_logprobs]
    forwards = separate + (1 if algorithm.beta else 0)
    update = flops.update(frozen=config.model.lora_rank > 0) * algorithm.num_iterations
    return SpeedPlan(
        score=sequences * forwards * flops.forward / 1e15,
        train=sequences * update / 1e15,
        tokens=sequences * config.max_length,
        rate=gpus * peak_tflops * mfu / 1e3,
        assumed=f"{mfu:.0%} of {peak_tflops:g} TFLOP/s on {gpus} GPUs",
        gpus=gpus,
    )


# ---- between ranks of FSDP2 ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank receives for one micro-batch, its own part included."""

    # parameters, in all-gathers: a layer before its forward and before its backward, embedding and head once
    gathered: float
    reduced: float  # gradients that go into reduce-scatters, in float32; of adapters they are not counted
    exchanged: float  # rows that travel to experts and back, if every rank gets as many as it sends

    @property
    def total(self) -> float:
        return self.gathered + self.reduced + self.exchanged

    def __str__(self) -> str:
        parts = {"gathered": self.gathered, "gradients": self.reduced, "to experts and back": self.exchanged}
        shown = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items() if nbytes)
        return f"into a rank for each micro-batch of an update: {shown or 'nothing'}"


def plan_traffic(config: TrainConfig, sizes: ModelSizes, *, gpus: int) -> Traffic:
    """Return what a micro-batch of `batch.tokens_per_micro_batch` tokens moves."""
    compute = _BYTES[config.model.dtype]
    experts, contexts = config.backend.expert_parallel, config.backend.context_parallel
    layers = sum(others for _, others in sizes.by_layer) if gpus > 1 else 0  # one rank gathers nothing
    layers += sizes.experts / experts if gpus > experts else 0  # nor one that has its experts alone
    root = sizes.total - sum(map(sum, sizes.by_layer)) if gpus > 1 else 0
    rows = config.batch.tokens_per_micro_batch / contexts * sizes.top_k * sizes.hidden * compute
    moe_layers = sum(1 for of_experts, _ in sizes.by_layer if of_experts)
    # There and back: in the forward, when it is computed again ("auto" counts as that), in the backward.
    trips = 6 if config.model.gradient_checkpointing else 4
    return Traffic(
        gathered=compute * (2 * layers + root),
        reduced=0 if config.model.lora_rank else 4 * (layers + root),
        exchanged=trips * moe_layers * rows if experts > 1 else 0,
    )


# ---- weight updates --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Assumed GB/s of each part of an update."""

    network: float = 12.5  # into or out of a node; default 100 Gbit/s
    device: float = 200.0  # between GPUs of a node, into one of them
    copy: float = 50.0  # through a device buffer into the engine's tensors; measured on an H200 with 11 GB
    # http, rank 0: to host memory, serialize, send; half of the time at 0.35 GB/s, as measured on an H200
    sender: float = 0.7
    server: float = 0.7  # http, server: read, write for its workers, load; the other half


@dataclass(frozen=True)
class SyncCost:
    """One update by one transport."""

    kind: str
    sent: float  # bytes that leave rank 0, or with ipc the memory of all ranks
    seconds: float  # sum of all parts, without overlap


def plan_sync(
    parameters: int, *, nodes: int = 1, servers: int = 1, itemsize: int = 2, rates: Rates | None = None
) -> list[SyncCost]:
    """Return the cost of updating all weights by each transport.

    nodes     trainer nodes
    servers   rollout servers that are updated
    """
    rate, whole = rates or Rates(), float(parameters * itemsize)
    gigabytes = whole / 1e9
    # The sending rank's node already holds 1/nodes of the weights.
    gather = gigabytes * (nodes - 1) / nodes / rate.network + gigabytes / nodes / rate.device
    copy = gigabytes / rate.copy
    http = max(gigabytes / rate.sender, servers * gigabytes / rate.network) + gigabytes / rate.server
    return [
        SyncCost("ipc", whole, gather + copy),
        SyncCost("nccl", whole, gather + gigabytes / rate.network + copy),
        SyncCost("http", servers * whole, gather + http),
    ]


def sync_text(costs: list[SyncCost], rates: Rates | None = None) -> str:
    """Format the costs as a table, with the assumed rates."""
    rate = rates or Rates()
    rows = [("weight update", "sent", "seconds")]
    rows += [(cost.kind, size(cost.sent), f"{cost.seconds:,.1f}") for cost in costs]
    assumed = (
        f"assumed rates in GB/s: network per node {rate.network:g}, between GPUs {rate.device:g}, "
        f"into the engine's tensors {rate.copy:g}, http {rate.sender:g} to send and {rate.server:g} to load"
    )
    return "\n".join([*aligned(rows), assumed])
