"""GPU memory of a run, phase by phase: trainer, logits, activations, and the engine on the same GPU.

Closed forms of a recipe and a model's config. The model's tensors are counted exactly, pipeline stage by stage,
activations by what a layer saves for its backward; `CONTEXT_BYTES` and `SLEEPING_ENGINE_BYTES` are measured overheads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from moe_replay.engines.base import devices_per_engine
from moe_replay.errors import LayoutError
from moe_replay.train.config.one_copy import check_alone, has_one_copy
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import GIB
from moe_replay.weights.model_sizes import ModelSizes

CONTEXT_BYTES = 2 * GIB
"""CUDA context, communication buffers and torch's unused cached memory in a trainer process."""
SLEEPING_ENGINE_BYTES = 2 * GIB
"""A sleeping vLLM worker: context, workspaces, communication buffers."""
ADAPTED_ENGINE_BYTES = 7 * GIB
"""What a vLLM with adapters of experts holds besides while it is awake: graphs, activations (measured: docs/gpu.md)."""
VLLM_MEMORY_UTILIZATION = 0.92
"""vLLM's default for gpu_memory_utilization."""
ROOM = 0.15
"""Fraction of a GPU that a run must leave free to keep activations in place of recomputing them."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Parts = dict[str, float]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest GPU in each phase of a step, by purpose.

    capacity   bytes per GPU
    stages     bytes on the fullest GPU of each pipeline stage, in its fullest phase; `phases` are of the fullest stage
    host       bytes of host memory, all ranks together
    saved      checkpoint bytes that each rank writes
    staged     bytes of host memory that each rank holds while a checkpoint is written
    exported   bytes of the export in a checkpoint, all ranks together
    """

    phases: Mapping[str, Parts]
    capacity: float
    host: float
    saved: float = 0.0
    staged: float = 0.0
    exported: float = 0.0
    stages: tuple[float, ...] = ()

    @cached_property
    def totals(self) -> dict[str, float]:
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def fits(self) -> bool:
        return max(self.totals.values()) <= self.capacity

    def __str__(self) -> str:
        lines = [f"memory of the fullest GPU in GiB, of {self.capacity / GIB:.1f}:"]
        for phase, parts in self.phases.items():
            shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB)
            mark = "" if self.totals[phase] <= self.capacity else "  DOES NOT FIT"
            lines.append(f"  {phase:<22}{self.totals[phase] / GIB:>6.1f}  = {shown}{mark}")
        if len(self.stages) > 1:
            peaks = (f"{stage}: {peak / GIB:.1f}" for stage, peak in enumerate(self.stages))
            lines.append(f"fullest phase of each pipeline stage in GiB: {', '.join(peaks)}")
        if self.host:
            lines.append(f"host memory, all ranks together: {self.host / GIB:.0f} GiB")
        if self.saved:
            parts = [f"{self.saved / GIB:.1f} GiB per rank"]
            if self.staged:
                parts.append(f"{self.staged / GIB:.1f} GiB per rank in host memory while it is written")
            if self.exported:
                parts.append(f"export {self.exported / GIB:.1f} GiB in total")
            lines.append(f"checkpoint: {', '.join(parts)}")
        return "\n".join(lines)


def with_memory_used(config: TrainConfig, sizes: ModelSizes, *, gpus: int, gpu_gib: float) -> TrainConfig:
    """Return the settings with what is "auto" and trades memory for time decided, the greater saving of time first.

    `model.gradient_checkpointing`: layers are recomputed unless memory is left without. Then
    `backend.reshard_after_forward`: gathered weights are freed unless memory is left with all of them. Activations are
    an estimate, so `ROOM` of a GPU must stay free in every phase.
    """
    for section, name in (("model", "gradient_checkpointing"), ("backend", "reshard_after_forward")):
        if getattr(getattr(config, section), name) != "auto":
            continue
        fast, lean = (
            config.model_copy(update={section: getattr(config, section).model_copy(update={name: choice})})
            for choice in (False, True)
        )
        config = fast if _leaves_room(fast, sizes, gpus, gpu_gib) else lean
    return config


def _leaves_room(config: TrainConfig, sizes: ModelSizes, gpus: int, gpu_gib: float) -> bool:
    backend = config.backend
    if backend.reshard_after_forward == "auto":
        backend = backend.model_copy(update={"reshard_after_forward": True})
    plan = plan_memory(config.model_copy(update={"backend": backend}), sizes, gpus=gpus, gpu_gib=gpu_gib)
    return max(plan.totals.values()) <= (1 - ROOM) * gpu_gib * GIB


def plan_memory(config: TrainConfig, sizes: ModelSizes, *, gpus: int, gpu_gib: float) -> MemoryPlan:
    if gpus < 1 or not 0 < gpu_gib < math.inf:
        raise LayoutError("no GPUs to plan for", expected="at least 1, with memory", found=f"{gpus} of {gpu_gib:g} GiB")
    config = with_memory_used(config, sizes, gpus=gpus, gpu_gib=gpu_gib)
    engine = _Engine.of(config, sizes, gpus, gpu_gib * GIB, is_shared=has_one_copy(config, gpus, "cuda"))
    if config.backend.kind == "fsdp":
        trainers = [_fsdp(config, sizes, gpus)]
    else:
        stages = _layers_of_stages(config, sizes.layers)
        trainers = [_stage(config, sizes, gpus, number, layers) for number, layers in enumerate(stages)]
    by_stage = [_phases(config, trainer, engine) for trainer in trainers]
    peaks = tuple(max(sum(parts.values()) for parts in phases.values()) for phases in by_stage)
    fullest = peaks.index(max(peaks))
    trainer = trainers[fullest]
    held = sum(trainer.weights + trainer.adapters + trainer.reference + trainer.optimizer for trainer in trainers)
    host = sum(trainer.offloaded for trainer in trainers) * gpus
    host += held * gpus / len(trainers) if config.backend.offload else 0.0
    if config.rollout.sleep and engine.total and not engine.is_shared:
        host += engine.weights * engine.gpus * (config.rollout.sleep_level == 1 or config.rollout.lora)
    checkpoint = config.checkpoint
    saves = checkpoint.every or checkpoint.at_end
    saved = (trainer.saved_weights + (trainer.saved_optimizer if checkpoint.optimizer else 0.0)) if saves else 0.0
    merges = not config.model.lora_rank or config.model.lora_merge
    exported = _BYTES[config.model.dtype] * sizes.total if saves and checkpoint.export and merges else 0.0
    staged = saved if checkpoint.asynchronous else 0.0
    return MemoryPlan(by_stage[fullest], gpu_gib * GIB, host, saved, staged, exported, peaks)


def _phases(config: TrainConfig, trainer: _Trainer, engine: _Engine) -> dict[str, Parts]:
    offload = config.backend.offload
    rest: Parts = {"context": CONTEXT_BYTES}
    lasting: Parts = {"shared weights": engine.weights} if engine.is_shared else {}
    awake = lasting | {"engine": engine.total - sum(lasting.values())}
    if engine.total:
        asleep = {"sleeping engine": SLEEPING_ENGINE_BYTES + (engine.adapters if engine.is_shared else 0)}
        rest |= lasting | asleep if config.rollout.sleep else awake
    held = {"weights": trainer.weights, "adapters": trainer.adapters, "reference": trainer.reference}
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
        loaded = {"engine weights": engine.weights} if config.rollout.sleep and not engine.is_shared else {}
        phases["weight sync"] = held | kept | {"gathered": trainer.sent} | loaded | rest
        resident = {} if offload else held | kept
        phases["sample"] = resident | awake | {"context": CONTEXT_BYTES}
    return phases


# ---- remedies --------------------------------------------------------------------------------------------------------


Change = tuple[str, dict[str, Any]]
"""A setting in words, and its new values by section."""


def smallest_remedy(config: TrainConfig, sizes: ModelSizes, *, gpus: int, gpu_gib: float) -> str | None:
    """Return the fewest changes of settings, else of the number of GPUs, with which a run fits; None: none found."""
    changes = list(_changes(config))
    for count in (gpus * 2**power for power in range(7)):
        for number in range(len(changes) + 1):
            for chosen in combinations(changes, number):
                changed = config
                for _, sections in chosen:
                    updated = {name: getattr(changed, name).model_copy(update=keys) for name, keys in sections.items()}
                    changed = changed.model_copy(update=updated)
                with suppress(LayoutError):  # parallel sizes that do not divide the GPUs
                    if not plan_memory(changed, sizes, gpus=count, gpu_gib=gpu_gib).fits:
                        continue
                    return " and ".join([*[f"{count} GPUs"] * (count > gpus), *(text for text, _ in chosen)])
    return None


def _changes(config: TrainConfig) -> Iterator[Change]:
    megatron = {name: value for name, value in config.backend.megatron.items() if name != "recompute_granularity"}
    if config.backend.megatron.get("recompute_granularity") not in (None, "full"):
        text = "model.gradient_checkpointing = true without backend.megatron.recompute_granularity"
        yield text, {"model": {"gradient_checkpointing": True}, "backend": {"megatron": megatron}}
    elif not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing = true", {"model": {"gradient_checkpointing": True}}
    if config.backend.kind == "megatron" and not config.backend.distributed_optimizer:
        yield "backend.distributed_optimizer = true", {"backend": {"distributed_optimizer": True}}
    tokens = config.batch.tokens_per_micro_batch
    if tokens // 2 >= config.max_length:
        smaller = max(tokens // 4, config.max_length)
        yield f"batch.tokens_per_micro_batch = {smaller}", {"batch": {"tokens_per_micro_batch": smaller}}
    shares_gpus = config.rollout.engine == "vllm" and not config.rollout.max_staleness
    if shares_gpus and not config.rollout.sleep and config.cluster.placement != "separate":
        yield "rollout.sleep = true", {"rollout": {"sleep": True}}
    if not config.backend.offload:
        yield "backend.offload = true", {"backend": {"offload": True}}
    if config.backend.kind == "fsdp" and config.model.gradient_checkpointing != "offload":
        yield 'model.gradient_checkpointing = "offload"', {"model": {"gradient_checkpointing": "offload"}}
    doubled = 2 * config.backend.context_parallel
    yield f"backend.context_parallel = {doubled}", {"backend": {"context_parallel": doubled}}
    if config.backend.kind == "fsdp":
        doubled = 2 * config.backend.expert_parallel
        yield f"backend.expert_parallel = {doubled}", {"backend": {"expert_parallel": doubled}}


def check_width(config: TrainConfig, gpus_per_node: int) -> None:
    """Raise if an engine needs more GPUs than a machine has."""
    width = devices_per_engine(config.rollout.options)
    if config.rollout.engine == "vllm" and width > gpus_per_node:
        raise LayoutError(
            "rollout.options: an engine runs on one machine",
            expected=f"at most {gpus_per_node} GPUs (--ranks-per-node), the product of its parallel sizes",
            found=width,
            remedy="Lower tensor_parallel_size, or reach a larger engine by rollout.urls",
        )


# ---- trainer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Trainer:
    """Bytes per rank.

    weights          0 where they are the engine's
    adapters         of LoRA, which are trained; `gradients` and `optimizer` are then theirs
    kept_gradients   gradients kept between updates
    gathered         parameters gathered for a layer and the next one, and for embedding and head
    reduced          gradients being reduce-scattered
    offloaded        hidden states in host memory
    sent             a layer being sent to the engine, and one gathered parameter of it
    saved_weights    in a checkpoint; `saved_optimizer` likewise
    """

    weights: float
    adapters: float
    gradients: float
    kept_gradients: float = 0.0
    optimizer: float
    reference: float
    gathered: float = 0.0
    reduced: float = 0.0
    activations: float
    scoring: float
    logits: float
    offloaded: float = 0.0
    sent: float
    saved_weights: float
    saved_optimizer: float


def _fsdp(config: TrainConfig, sizes: ModelSizes, ranks: int) -> _Trainer:
    if config.model.base_dtype is not None:
        check_alone(config.model.base_dtype, ranks)
    compute = _BYTES[config.model.dtype]
    experts, contexts = config.backend.expert_parallel, config.backend.context_parallel
    if ranks % experts or ranks % contexts or sizes.num_experts % experts:
        raise LayoutError(
            "the parallel sizes do not divide the GPUs, or not the experts",
            expected=f"a multiple of {experts} (backend.expert_parallel) and of {contexts} (backend.context_parallel)",
            found=f"{ranks} GPUs, {sizes.num_experts} experts",
        )
    tokens = config.batch.tokens_per_micro_batch / contexts
    total, root = sizes.total, sizes.embedding * (1 if sizes.tied else 2)
    layer = max(of_experts / experts + dense for of_experts, dense in sizes.by_layer)
    whole = sum(of_experts / experts + dense for of_experts, dense in sizes.by_layer)
    adapters = sizes.adapter_parameters(config.model.lora_rank, config.model.lora_target_modules)
    trained = adapters if config.model.lora_rank else total
    is_shared = has_one_copy(config, ranks, "cuda")
    frozen = (compute if adapters else 4) * total
    dequantised = 0
    if config.model.base_dtype is not None:  # with a scale for each block; one tensor is dequantised at a time
        frozen = (1 + 4 / 128**2) * (total - root) + compute * root
        dequantised = sizes.largest
    if is_shared or dequantised:  # frozen weights are not in shards: adapters alone are gathered
        layer = whole = root = adapters / sizes.layers
    working = sizes.layer_activations(tokens, compute)
    # rows on their way to experts and back, if every rank gets as many as it sends
    travelling = 2 * tokens * sizes.top_k * sizes.hidden * compute if experts > 1 else 0
    states = tokens * sizes.hidden * compute
    recomputes, offloads = config.model.gradient_checkpointing, config.model.gradient_checkpointing == "offload"
    inputs = states * (1 if offloads else sizes.layers)
    largest = sizes.largest if experts == 1 else sizes.embedding
    return _Trainer(
        weights=0 if is_shared else frozen / ranks,
        adapters=4 * adapters / ranks,
        gradients=4 * trained / ranks,
        optimizer=8 * trained / ranks,
        reference=compute * total / ranks if config.has_reference else 0,
        gathered=compute * (dequantised + (2 * layer if config.backend.reshard_after_forward else whole) + root),
        reduced=0 if adapters else (compute + 8) * layer + (compute + 4) * root,
        activations=(inputs + 2 * working if recomputes else (sizes.layers + 1) * working) + travelling,
        scoring=working + travelling,
        logits=_logits(config, sizes, 1),
        offloaded=sizes.layers * 2 ** math.ceil(math.log2(states)) if offloads else 0,  # as torch pins memory
        sent=0 if config.rollout.lora else compute * (max(layer, sizes.embedding) + largest),
        saved_weights=4 * trained / ranks,
        saved_optimizer=8 * trained / ranks,
    )


def _layers_of_stages(config: TrainConfig, layers: int) -> list[list[int]]:
    """Return the decoder layers of each stage; where they do not divide evenly, the first stages have one more."""
    pp, chunks = config.backend.pipeline_parallel, config.backend.virtual_pipeline or 1
    ends = [config.backend.megatron.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    first, last = (int(end) if isinstance(end, int) else None for end in ends)
    counts: list[int | None] = [None] * (pp * chunks)
    if pp > 1:
        counts[0] = None if first is None else first // chunks
        counts[-1] = None if last is None else last // chunks
    open_chunks = counts.count(None)
    layers_per_stage, more = divmod(layers - sum(filter(None, counts)), max(open_chunks, 1))
    stages: list[list[int]] = [[] for _ in range(pp)]
    begin = 0
    for number, count in enumerate(counts):
        if count is None:
            count, more = layers_per_stage + (more > 0), more - 1
        stages[number % pp] += range(begin, min(begin + count, layers))
        begin += count
    return stages


def _stage(config: TrainConfig, sizes: ModelSizes, ranks: int, number: int, layers: list[int]) -> _Trainer:
    """Return what a rank of a pipeline stage of Megatron-Core holds."""
    backend = config.backend
    compute = _BYTES[config.model.dtype]
    tp, pp, cp = backend.tensor_parallel, backend.pipeline_parallel, backend.context_parallel
    ep, etp = backend.expert_parallel, backend.expert_tensor_parallel or tp
    if ranks % (tp * pp * cp) or ranks % (pp * ep * etp):
        raise LayoutError(
            "the parallel sizes do not divide the GPUs",
            expected=f"a multiple of {tp * pp * cp} and of {pp * ep * etp}",
            found=f"{ranks} GPUs",
        )
    is_first, is_last = number == 0, number == pp - 1
    experts = sum(sizes.by_layer[layer][0] for layer in layers) / (ep * etp)
    vocabulary = sizes.embedding * (1 if is_first and is_last and sizes.tied else is_first + is_last)
    dense = (sum(sizes.by_layer[layer][1] for layer in layers) + vocabulary) / tp
    state = 12 if compute == 2 else 8
    replicas = ranks // (tp * pp), ranks // (pp * ep * etp)  # of dense weights, of experts; they save a part each
    shards = replicas if backend.distributed_optimizer else (1, 1)
    tokens = config.batch.tokens_per_micro_batch / (tp * cp)
    ahead, chunks = pp - number - 1, backend.virtual_pipeline or 1
    in_flight = ahead + 1 if chunks == 1 else (2 * ahead + (chunks - 1) * pp + 1) / chunks
    working = sizes.layer_activations(tokens, compute)
    inputs = len(layers) * tokens * sizes.hidden * compute
    granularity = backend.megatron.get("recompute_granularity")
    full = granularity == "full" or (config.model.gradient_checkpointing and granularity is None)
    local = experts + dense
    # adapters are divided about as their layers are
    adapters = sizes.adapter_parameters(config.model.lora_rank, config.model.lora_target_modules) * local / sizes.total
    trained = adapters / local if config.model.lora_rank else 1
    optimizer = trained * state * (dense / shards[0] + experts / shards[1])
    saved = trained * (dense / replicas[0] + experts / replicas[1])
    return _Trainer(
        weights=compute * local,
        adapters=compute * adapters,
        gradients=4 * trained * local,
        kept_gradients=4 * trained * local,
        optimizer=optimizer,
        reference=compute * local if config.has_reference else 0,
        activations=in_flight * inputs + 2 * working if full else (in_flight * len(layers) + 1) * working,
        scoring=working,
        logits=_logits(config, sizes, tp) if is_last else 0,
        sent=0 if config.rollout.lora else compute * (max(sizes.layer, sizes.embedding) + sizes.largest),
        saved_weights=compute * saved,
        saved_optimizer=state * saved,
    )


def _logits(config: TrainConfig, sizes: ModelSizes, shards: int) -> float:
    """One chunk in the compute dtype and three times in float32, and the head's gradient in float32, if it is trained.

    Compiled, a chunk has four times the tokens and is there twice in the compute dtype: about the same.
    """
    per_token_id = config.batch.logit_chunk * (_BYTES[config.model.dtype] + 3 * 4)
    if not config.model.lora_rank:
        per_token_id += 4 * sizes.hidden
    return per_token_id * sizes.vocabulary / shards


# ---- engine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Engine:
    """vLLM on the trainer's GPUs: one engine, or all that the run starts.

    total       bytes per GPU, of which `weights` and room for `adapters`
    gpus        that they run on
    is_shared   the trainer computes with its weights
    """

    total: float = 0.0
    weights: float = 0.0
    adapters: float = 0.0
    gpus: int = 0
    is_shared: bool = False

    @classmethod
    def of(cls, config: TrainConfig, sizes: ModelSizes, ranks: int, capacity: float, *, is_shared: bool) -> _Engine:
        rollout, model = config.rollout, config.model
        is_separate = config.cluster.starts_engines and config.cluster.placement == "separate"
        if rollout.engine != "vllm" or is_separate:
            return cls()
        options = rollout.options
        gpus, replicas = devices_per_engine(options), int(options.get("data_parallel_size") or 1)
        replicated = sizes.total - sizes.experts  # in each replica; experts are sharded over all replicas
        size = _BYTES.get(rollout.dtype, 2)
        weights = size * (replicas * replicated + sizes.experts) / gpus
        adapters = awake = 0.0
        if rollout.lora:
            lora = (model.lora_rank, model.lora_target_modules)
            adapters = size * sizes.adapter_parameters(*lora, split=True) / gpus
            if adapters * gpus > size * sizes.adapter_parameters(*lora):  # some are of experts
                awake = ADAPTED_ENGINE_BYTES
        total = float(options.get("gpu_memory_utilization", VLLM_MEMORY_UTILIZATION)) * capacity
        if "kv_cache_memory_bytes" in options:
            total = weights + adapters + float(options["kv_cache_memory_bytes"]) + SLEEPING_ENGINE_BYTES
            total += awake
        if weights > total:
            raise LayoutError(
                "the engine's weights do not fit into its GPU memory",
                expected=f"at most {total / GIB:.1f} GiB (rollout.options.gpu_memory_utilization)",
                found=f"{weights / GIB:.1f} GiB on each of {gpus} GPUs",
                remedy="Raise gpu_memory_utilization or tensor_parallel_size",
            )
        engines = config.cluster.engines if config.cluster.starts_engines else None
        if rollout.engines_per_node is not None:
            engines = ranks // gpus  # they divide all devices of each machine
        return cls(total, weights, adapters, (engines or 1) * gpus, is_shared)
