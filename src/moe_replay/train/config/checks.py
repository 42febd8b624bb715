"""Checks across settings that are valid one by one; each problem comes with what to change."""

from __future__ import annotations

from collections.abc import Iterator

from moe_replay.rollout.registry import engine_spec, server_engines, trainable_engines
from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.sections import BackendConfig, ModelConfig, RewardConfig, RolloutConfig, Section, Sections
from moe_replay.utils.plugins import PluginError, is_path

KEYS_OF_MEGATRON_SETTINGS = {
    "tensor_model_parallel_size": "backend.tensor_parallel",
    "expert_model_parallel_size": "backend.expert_parallel",
    "expert_tensor_parallel_size": "backend.expert_tensor_parallel",
    "pipeline_model_parallel_size": "backend.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "backend.virtual_pipeline",
    "context_parallel_size": "backend.context_parallel",
    "moe_enable_routing_replay": "replay.mode",
}
"""Settings of Megatron-Core that have a key of their own here."""


def problems(config: Sections) -> Iterator[str]:
    """Yield one line per problem: the key, what is wrong, what to change."""
    yield from _plugins(config)
    yield from _model(config.model, config.backend)
    yield from _backend(config.backend)
    yield from _data(config)
    yield from _rollout(config.rollout)
    yield from _algorithm(config)
    yield from _optim(config)
    yield from _reward(config.reward)


def _plugins(config: Sections) -> Iterator[str]:
    for name, section in config:
        for key, field in type(section).model_fields.items() if isinstance(section, Section) else ():
            if (plugin := PluginName.of(field)) is not None:
                value = getattr(section, key)
                found = map(plugin.problem, [value] if isinstance(value, str) else value or ())
                yield from (f"{name}.{key}: {problem}" for problem in found if problem)


def _model(model: ModelConfig, backend: BackendConfig) -> Iterator[str]:
    if model.lora_rank and backend.kind == "megatron":
        yield "model.lora_rank: LoRA needs backend.kind = fsdp; with megatron set lora_rank = 0"
    if model.lora_rank and not model.lora_targets:
        yield "model.lora_targets: no layers to adapt; name some, or set model.lora_rank = 0"
    if model.router_family is not None and backend.kind == "megatron":
        yield "model.router_family: Megatron-Core's own routers are replayed; remove it, or set backend.kind = fsdp"
    if model.attention.startswith("flash_attention"):
        if model.dtype == "float32":
            yield f"model.attention: {model.attention} does not support float32; set model.dtype = bfloat16 or use sdpa"
        if backend.device == "cpu":
            yield f"model.attention: {model.attention} needs a GPU; with backend.device = cpu use sdpa"


def _backend(backend: BackendConfig) -> Iterator[str]:
    if backend.kind == "megatron":
        if backend.virtual_pipeline and backend.pipeline_parallel == 1:
            yield "backend.virtual_pipeline: interleaving needs a pipeline; set backend.pipeline_parallel > 1 too"
        for name in backend.megatron.keys() & KEYS_OF_MEGATRON_SETTINGS.keys():
            yield f"backend.megatron.{name}: set {KEYS_OF_MEGATRON_SETTINGS[name]} instead"
        if backend.megatron.get("moe_router_fusion"):
            yield "backend.megatron.moe_router_fusion: a fused router cannot replay routes; remove it"
        return
    megatron_only = {
        "tensor_parallel": backend.tensor_parallel > 1,
        "expert_parallel": backend.expert_parallel > 1,
        "expert_tensor_parallel": (backend.expert_tensor_parallel or 1) > 1,
        "pipeline_parallel": backend.pipeline_parallel > 1,
        "virtual_pipeline": backend.virtual_pipeline is not None,
        "context_parallel": backend.context_parallel > 1,
        "megatron": bool(backend.megatron),
        "weight_family": backend.weight_family is not None,
        "distributed_optimizer": backend.distributed_optimizer,
    }
    for name, given in megatron_only.items():
        if given:
            yield f"backend.{name}: fsdp only shards data-parallel; set backend.kind = megatron"


def _data(config: Sections) -> Iterator[str]:
    if config.model.path and not config.data.path:
        yield "data.path: no prompts; name a .jsonl or .parquet file or a datasets folder"
    if config.eval.every and config.data.path and not config.data.eval_path:
        yield "eval.every: no evaluation prompts; set data.eval_path, or eval.every = 0"


def _rollout(rollout: RolloutConfig) -> Iterator[str]:
    try:
        takes_weights = engine_spec(rollout.engine).takes_weights
    except PluginError as error:
        if is_path(rollout.engine):
            yield f"rollout.engine: {error}"
        return
    if not takes_weights:
        yield f"rollout.engine: {rollout.engine} takes no weights; set one of {', '.join(trainable_engines())}"
    if rollout.is_server and not rollout.urls:
        yield f"rollout.urls: {rollout.engine} needs the addresses of its servers, e.g. http://127.0.0.1:8000"
    if not rollout.is_server and rollout.urls:
        servers = " or ".join(server_engines())
        yield f"rollout.urls: {rollout.engine} runs in this process; set rollout.engine = {servers}"
    for url in rollout.urls:
        if not url.startswith(("http://", "https://")):
            yield f"rollout.urls: {url!r} is not a URL; write http://{url}"
    if rollout.sleep and rollout.max_staleness:
        yield (
            "rollout.sleep: an engine that samples while the trainer works cannot sleep; "
            "set rollout.max_staleness = 0 or rollout.sleep = false"
        )


def _algorithm(config: Sections) -> Iterator[str]:
    rollout, updates = config.rollout, config.algorithm.updates_per_rollout
    if rollout.sequences % updates:
        fitting = [number for number in range(1, rollout.sequences + 1) if rollout.sequences % number == 0]
        yield (
            f"algorithm.updates_per_rollout: {rollout.prompts_per_step} prompts x {rollout.num_generations} "
            f"generations = {rollout.sequences} sequences cannot be split evenly into {updates} updates; "
            f"use {min(fitting, key=lambda number: abs(number - updates))}, or change rollout.prompts_per_step"
        )


def _optim(config: Sections) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        yield f"optim.betas: both must be at least 0 and below 1, found {config.optim.betas}"
    if config.optim.warmup_steps > config.steps:
        yield (
            f"optim.warmup_steps: the warm-up of {config.optim.warmup_steps} steps is longer than the run; "
            f"set at most steps = {config.steps}"
        )


def _reward(reward: RewardConfig) -> Iterator[str]:
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights: {len(reward.weights)} weights for {len(reward.functions)} functions; "
            "give one per reward function, or omit the weights"
        )
    for name in sorted({name for name in reward.functions if reward.functions.count(name) > 1}):
        yield f"reward.functions: {name!r} is listed twice; list it once, with a weight"
