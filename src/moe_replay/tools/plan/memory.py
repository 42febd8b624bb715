"""What a run holds on each GPU, phase by phase: trainer, logits, activations, and the engine on the same GPU.

Closed forms of a recipe and a model's config. Tensors of the model are counted exactly, activations by what a layer
keeps for its backward; `CONTEXT` and `ASLEEP` are what processes hold besides, as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from moe_replay.errors import LayoutError
from moe_replay.rollout.engine import devices_per_engine
from moe_replay.tools.plan.sizes import ModelSizes
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.units import GIB

CONTEXT = 2 * GIB
"""CUDA context, communication buffers and unused parts of torch's memory, of a trainer process."""
ASLEEP = 2 * GIB
"""What a worker of vLLM holds while it sleeps: context, workspaces, communication buffers."""
VLLM_SHARE = 0.92
"""gpu_memory_utilization where it is not set."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Parts = dict[str, float]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest GPU in each phase of a step, by what they are for.

    capacity   bytes of a GPU
    host       bytes of host memory that all ranks of a run keep together
    saved      bytes of a checkpoint that each rank writes
    staged     bytes of host memory that each rank holds while a checkpoint is written
    exported   bytes of the export in a checkpoint, written by all ranks together
    """

    phases: Mapping[str, Parts]
    capacity: float
    host: float
    saved: float = 0.0
    staged: float = 0.0
    exported: float = 0.0

    @cached_property
    def totals(self) -> dict[str, float]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def fits(self) -> bool:
        """Whether every phase fits on a GPU."""
        return max(self.totals.values()) <= self.capacity

    @property
    def trainer_peak(self) -> float:
        """Most bytes that the trainer itself allocates, without its context and the engine."""
        others = ("context", "engine", "engine, asleep", "engine's weights")
        return max(sum(size for name, size in parts.items() if name not in others) for parts in self.phases.values())

    def __str__(self) -> str:
        lines = [f"memory of the fullest GPU, in GiB of {self.capacity / GIB:.1f}:"]
        for phase, parts in self.phases.items():
            shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB)
            mark = "" if self.totals[phase] <= self.capacity else "  DOES NOT FIT"
            lines.append(f"  {phase:<22}{self.totals[phase] / GIB:>6.1f}  = {shown}{mark}")
        if self.host:
            lines.append(f"host memory, all ranks together: {self.host / GIB:.0f} GiB")
        if self.saved:
            parts = [f"{self.saved / GIB:.1f} GiB on each rank"]
            if self.staged:
                parts.append(f"{self.staged / GIB:.1f} of them in host memory while it is written")
            if self.exported:
                parts.append(f"an export of {self.exported / GIB:.1f} GiB by all ranks")
            lines.append(f"a checkpoint: {', '.join(parts)}")
        return "\n".join(lines)


def plan_memory(config: TrainConfig, sizes: ModelSizes, *, gpus: int, gpu_gib: float) -> MemoryPlan:
    """Return the memory of a run on `gpus` ranks, of a model of these sizes."""
    trainer = _fsdp(config, sizes, gpus) if config.backend.kind == "fsdp" else _megatron(config, sizes, gpus)
    engine = _Engine.of(config, sizes, gpu_gib * GIB)
    offload = config.backend.offload
    rest = {"context": CONTEXT} | ({"engine, asleep": ASLEEP} if config.rollout.sleep else {"engine": engine.total})
    rest = rest if engine.total else {"context": CONTEXT}
    held = {"weights": trainer.weights, "reference": trainer.reference}
    kept = {} if offload else {"optimizer state": trainer.optimizer, "gradients": trainer.kept_gradients}
    logits = {"logits": trainer.logits}
    phases: dict[str, Parts] = {
        "score": held | kept | {"gathered": trainer.gathered, "activations": trainer.scoring} | logits | rest,
        "forward, backward": held
        | {"gradients": trainer.gradients}
        | ({} if offload else {"optimizer state": trainer.optimizer})
        | {"gathered": trainer.gathered + trainer.reduced, "activations": trainer.activations}
        | logits
        | rest,
        "optimizer step": held | {"gradients": trainer.gradients, "optimizer state": trainer.optimizer} | rest,
    }
    if engine.total:
        part = {"engine's weights": engine.weights} if config.rollout.sleep else {}
        phases["sync of weights"] = held | kept | {"gathered": trainer.sent} | part | rest
        away = {} if offload else held | kept
        phases["sample"] = away | {"engine": engine.total, "context": CONTEXT}
    host = (trainer.weights + trainer.reference + trainer.optimizer) * gpus if offload else 0.0
    if config.rollout.sleep and engine.total:
        host += engine.weights * engine.gpus * (config.rollout.sleep_level == 1)
    saving = config.checkpoint
    saves = saving.every or saving.at_end
    saved = (trainer.saved_weights + (trainer.saved_optimizer if saving.optimizer else 0.0)) if saves else 0.0
    merges = not config.model.lora_rank or config.model.lora_merge
    exported = _BYTES[config.model.dtype] * sizes.total if saves and saving.export and merges else 0.0
    return MemoryPlan(phases, gpu_gib * GIB, host, saved, saved if saving.asynchronous else 0.0, exported)


# ---- trainer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    """Bytes of one rank.

    kept_gradients   between updates
    gathered         parameters gathered for a layer and the next one, and for embedding and head
    reduced          gradients of layers on their way to the ranks that keep them
    sent             a layer on its way to the engine, and one parameter that it is made of
    saved_weights    in a checkpoint; `saved_optimizer` likewise
    """

    weights: float
    gradients: float
    kept_gradients: float
    optimizer: float
    reference: float
    gathered: float
    reduced: float
    activations: float
    scoring: float
    logits: float
    sent: float
    saved_weights: float
    saved_optimizer: float


def _fsdp(config: TrainConfig, sizes: ModelSizes, ranks: int) -> _Trainer:
    compute = _BYTES[config.model.dtype]
    tokens = config.batch.tokens_per_micro_batch
    total, root = sizes.total, sizes.embedding * (1 if sizes.tied else 2)
    layer = sizes.layer
    trained = 0 if config.model.lora_rank else total
    own_reference = config.algorithm.beta > 0 and not (config.model.lora_rank and config.model.reference is None)
    working = sizes.layer_activations(tokens, compute)
    inputs = sizes.layers * tokens * sizes.hidden * compute
    recomputes = config.model.gradient_checkpointing
    return _Trainer(
        weights=4 * total / ranks,
        gradients=4 * trained / ranks,
        kept_gradients=0,
        optimizer=8 * trained / ranks,
        reference=4 * total / ranks if own_reference else 0,
        gathered=compute * (2 * layer + root),
        reduced=((compute + 8) * layer + (compute + 4) * root) if trained else 0,
        activations=inputs + 2 * working if recomputes else (sizes.layers + 1) * working,
        scoring=working,
        logits=_logits(config, sizes, 1),
        sent=compute * (max(sizes.layer, sizes.embedding) + sizes.largest),
        saved_weights=4 * trained / ranks,
        saved_optimizer=8 * trained / ranks,
    )


def _megatron(config: TrainConfig, sizes: ModelSizes, ranks: int) -> _Trainer:
    backend = config.backend
    compute = _BYTES[config.model.dtype]
    tp, pp, cp, ep = (
        backend.tensor_parallel,
        backend.pipeline_parallel,
        backend.context_parallel,
        backend.expert_parallel,
    )
    etp = backend.expert_tensor_parallel or tp
    if ranks % (tp * pp * cp) or ranks % (pp * ep * etp):
        raise LayoutError(
            "the parallel sizes do not divide the GPUs",
            expected=f"a multiple of {tp * pp * cp} and of {pp * ep * etp}",
            found=f"{ranks} GPUs",
        )
    experts = sizes.experts / (pp * ep * etp)
    vocabulary = sizes.embedding / tp * (2 if pp == 1 and not sizes.tied else 1)
    dense = sizes.dense / (pp * tp) + vocabulary
    state = 12 if compute == 2 else 8
    replicas = ranks // (tp * pp), ranks // (pp * ep * etp)  # of dense weights, of experts; they save a part each
    shards = replicas if backend.distributed_optimizer else (1, 1)
    tokens = config.batch.tokens_per_micro_batch / (tp * cp)
    in_flight = pp if not backend.virtual_pipeline else pp + (pp - 1) / backend.virtual_pipeline
    working = sizes.layer_activations(tokens, compute)
    inputs = sizes.layers / pp * tokens * sizes.hidden * compute
    granularity = backend.megatron.get("recompute_granularity")
    full = granularity == "full" or (config.model.gradient_checkpointing and granularity is None)
    local = experts + dense
    optimizer = state * (dense / shards[0] + experts / shards[1])
    saved = dense / replicas[0] + experts / replicas[1]
    return _Trainer(
        weights=compute * local,
        gradients=4 * local,
        kept_gradients=4 * local,
        optimizer=optimizer,
        reference=compute * local if config.algorithm.beta > 0 else 0,
        gathered=0,
        reduced=0,
        activations=in_flight * inputs + 2 * working if full else (in_flight * sizes.layers / pp + 1) * working,
        scoring=working,
        logits=_logits(config, sizes, tp),
        sent=compute * (max(sizes.layer, sizes.embedding) + sizes.largest),
        saved_weights=compute * saved,
        saved_optimizer=state * saved,
    )


def _logits(config: TrainConfig, sizes: ModelSizes, shards: int) -> float:
    """One slice in the compute type and three times in float32, and the gradient of the head in float32."""
    slice_of = config.batch.logit_chunk * (_BYTES[config.model.dtype] + 3 * 4) + 4 * sizes.hidden
    return slice_of * sizes.vocabulary / shards


# ---- engine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Engine:
    """vLLM on the trainer's GPUs: bytes of all it takes on a GPU and of its weights there, and its GPUs."""

    total: float = 0.0
    weights: float = 0.0
    gpus: int = 0

    @classmethod
    def of(cls, config: TrainConfig, sizes: ModelSizes, capacity: float) -> _Engine:
        rollout = config.rollout
        elsewhere = config.cluster.starts_engines and config.cluster.placement == "separate"
        if rollout.engine != "vllm" or elsewhere:
            return cls()
        options = rollout.options
        gpus, replicas = devices_per_engine(options), int(options.get("data_parallel_size") or 1)
        repeated = sizes.total - sizes.experts  # in each replica; the experts are spread over all of them
        weights = _BYTES.get(rollout.dtype, 2) * (replicas * repeated + sizes.experts) / gpus
        total = float(options.get("gpu_memory_utilization", VLLM_SHARE)) * capacity
        if "kv_cache_memory_bytes" in options:
            total = weights + float(options["kv_cache_memory_bytes"]) + ASLEEP
        if weights > total:
            raise LayoutError(
                "the engine's weights do not fit into its share of a GPU",
                expected=f"at most {total / GIB:.1f} GiB (rollout.options.gpu_memory_utilization)",
                found=f"{weights / GIB:.1f} GiB on each of {gpus}",
                remedy="Raise gpu_memory_utilization or tensor_parallel_size",
            )
        return cls(total, weights, gpus)
