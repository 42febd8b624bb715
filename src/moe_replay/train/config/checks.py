"""Checks across settings; every problem comes with a remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from math import isqrt
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moe_replay.engines.registry import EngineSpec, engine_names, engine_spec, server_engines, trainable_engines
from moe_replay.errors import EngineOptionError
from moe_replay.train.config.foreign.options import PARALLEL_SIZES
from moe_replay.train.config.registries import WEIGHT_TRANSPORTS, PluginName
from moe_replay.train.config.section import Section
from moe_replay.train.config.sections import (
    BackendConfig,
    ClusterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Sections,
)
from moe_replay.utils.plugins import PluginError, import_path, is_path
from moe_replay.utils.secrets import is_masked, is_secret_name, mask_passwords

MODES_OF_POLICIES = {
    "ids": ("off", "r2", "r3", "auto"),
    "ids+gates": ("r2",),
    "margin": ("r2", "r3"),
    "drop": ("r3",),
    "shift": ("off", "r2", "r3"),
}
KEYS_OF_MEGATRON_SETTINGS = PARALLEL_SIZES | {"moe_enable_routing_replay": "replay.mode"}
"""TransformerConfig fields with a separate key here."""

MANY = 2**20
"""Upper bound for counts of ranks or sequences."""
LARGEST = 2**31 - 1
"""Upper bound for every other integer setting, except `_UNLIMITED`."""
LONGEST_NAME = 255
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # a lone surrogate stands for a byte that is not UTF-8
_OF_ENVIRONMENTS = ("max_turns", "environment_timeout_s", "environment_threads")
_RANDOM_IN_MEGATRON = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")
_UNLIMITED = ("seed", "rollout.options", "backend.megatron", "rollout.prompts_per_step", "rollout.num_generations")
_LIMITED = (
    "model.lora_rank",
    "rollout.max_turns",
    "algorithm.updates_per_rollout",
    "algorithm.num_iterations",
    "algorithm.max_refills",
)


def problems(config: Sections) -> Iterator[str]:
    """Yield one line per problem: key, problem, remedy."""
    unusable = list(_unusable(config))
    yield from unusable
    if unusable:
        return  # so that the other checks need not handle such values
    for key, plugin, name in plugin_names(config):
        if problem := plugin.problem(name):
            yield f"{key}: {problem}"
    yield from _model(config.model, config.backend)
    yield from _backend(config.backend)
    is_apart = config.backend.kind == "megatron" or not config.batch.packed or config.backend.context_parallel > 1
    if config.batch.share_prompts is True and is_apart:
        yield (
            "batch.share_prompts: Megatron-Core, padded rows and context parallel compute each sample apart; set "
            '"auto" or false'
        )
    if config.batch.balance == "experts" and config.backend.expert_parallel == 1:
        yield (
            'batch.balance: "experts" evens out expert-parallel ranks, and every rank has all experts; set '
            'backend.expert_parallel, or "tokens"'
        )
    yield from _data(config)
    yield from _rollout(config.rollout)
    yield from _engine(config)
    yield from _cluster(config)
    yield from _algorithm(config)
    yield from _policy(config)
    yield from _optim(config)
    yield from _reward(config.reward)
    if config.checkpoint.push_to_hub and not (config.checkpoint.export and config.checkpoint.at_end):
        yield "checkpoint.push_to_hub: there is no export at the end; set checkpoint.export and checkpoint.at_end"


def warnings(config: Sections) -> Iterator[str]:
    """Yield one line per setting that differs from its default and that nothing reads without another setting."""
    rollout, algorithm = config.rollout, config.algorithm
    is_own = is_path(algorithm.loss)  # may read any setting of a loss
    needed: dict[str, tuple[bool, Iterable[str]]] = {
        'algorithm.advantage_turns = "discounted"': (
            algorithm.advantage_turns == "discounted",
            ["algorithm.advantage_discount"],
        ),
        "algorithm.beta": (algorithm.beta > 0, ["model.reference"]),
        "algorithm.dynamic_sampling": (algorithm.dynamic_sampling, ["algorithm.max_refills"]),
        'algorithm.loss = "ppo_clip"': (is_own or algorithm.loss == "ppo_clip", ["algorithm.delta"]),
        'algorithm.loss = "sapo"': (is_own or algorithm.loss == "sapo", ["algorithm.tau_pos", "algorithm.tau_neg"]),
        "algorithm.rollout_correction": (
            algorithm.rollout_correction != "off",
            ["algorithm.rollout_correction_low", "algorithm.rollout_correction_high"],
        ),
        "checkpoint.push_to_hub": (bool(config.checkpoint.push_to_hub), ["checkpoint.hub_private"]),
        'cluster.launcher = "ray"': (
            config.cluster.launcher == "ray",
            [f"cluster.{name}" for name in ClusterConfig.model_fields],
        ),
        "eval.every": (config.eval.every > 0, ["eval.prompts", "eval.temperature"]),
        "log.completions": (config.log.completions, ["log.num_completions_to_print"]),
        "model.lora_rank": (config.model.lora_rank > 0, ["model.lora_alpha"]),
        "rollout.environment": (
            rollout.environment is not None,
            [*(f"rollout.{name}" for name in _OF_ENVIRONMENTS), "algorithm.advantage_turns"],
        ),
        "rollout.lora": (rollout.lora, ["rollout.share_weights"]),
        "rollout.sleep": (rollout.sleep, ["rollout.sleep_level"]),
        "rollout.tools": (bool(rollout.tools), ["rollout.tool_format", "rollout.tool_timeout_s"]),
        "rollout.top_p or rollout.top_k": (rollout.is_truncated, ["rollout.sampling_mask"]),
    }
    for need, (is_set, keys) in needed.items():
        for key in [] if is_set else keys:
            section, _, name = key.partition(".")
            table = getattr(config, section)
            if (value := getattr(table, name)) != type(table).model_fields[name].default:
                yield f"{key} = {value} has no effect without {need}"


def _unusable(config: Sections) -> Iterator[str]:
    """Yield values of the right type that no file, path or tensor can have."""
    for key, value in _values(config):
        largest = MANY if key in _LIMITED or "parallel" in key else LARGEST
        if isinstance(value, int) and value > largest and key not in _UNLIMITED:
            yield f"{key}: {value} is too large; use at most {largest}"
        if isinstance(value, str) and _NO_TEXT.search(value):
            shown = "the value" if is_secret_name(key) else mask_passwords(repr(value))
            yield f"{key}: {shown} is not valid text; remove NUL characters and bytes that are not UTF-8"
    paths = {"model.path": config.model.path, "model.reference": config.model.reference, "data.path": config.data.path}
    paths |= {"data.eval_path": config.data.eval_path, "output": None if config.output is None else str(config.output)}
    for key, path in paths.items():
        if path is not None and any(len(os.fsencode(part)) > LONGEST_NAME for part in path.split("/")):
            yield f"{key}: a file name of more than {LONGEST_NAME} bytes; shorten it"
    if config.output is not None and config.output == Path():
        yield "output: empty path; name a folder, or omit it for a new one in runs/"
    if config.rollout.sequences > MANY:
        yield (
            f"rollout.prompts_per_step, rollout.num_generations: {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.num_generations} are too many sequences per step; use at most {MANY}"
        )


def _values(config: Sections) -> Iterator[tuple[str, Any]]:
    """Yield every setting, and every item of lists and tables, by the name of its key."""
    for name, section in config:
        for key, value in section if isinstance(section, Section) else [("", section)]:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            for item in items if isinstance(items, (tuple, list)) else [value]:
                yield f"{name}.{key}".rstrip("."), str(item) if isinstance(item, Path) else item


def plugin_names(config: Sections) -> Iterator[tuple[str, PluginName, str]]:
    """Yield key, annotation and name of every implementation that the settings name."""
    for section_name, section in config:
        for key, field in type(section).model_fields.items() if isinstance(section, Section) else ():
            if (plugin := PluginName.of(field)) is not None:
                value = getattr(section, key)
                names = [value] if isinstance(value, str) else value or ()
                yield from ((f"{section_name}.{key}", plugin, name) for name in names)


def _model(model: ModelConfig, backend: BackendConfig) -> Iterator[str]:
    if model.lora_rank and not model.lora_target_modules:
        yield "model.lora_target_modules: no layers to adapt; name some, or set model.lora_rank = 0"
    if model.base_dtype is not None and (not model.lora_rank or backend.kind != "fsdp"):
        yield "model.base_dtype: only of frozen weights on FSDP2; set model.lora_rank and backend.kind = fsdp"
    if model.gradient_checkpointing == "offload" and backend.kind == "megatron":
        yield (
            "model.gradient_checkpointing: offload is of FSDP2; set true, or Megatron-Core's own "
            "backend.megatron.fine_grained_activation_offloading with offload_modules"
        )
    for name in model.lora_target_modules:
        if not name or "." in name:
            yield f"model.lora_target_modules: {name!r} is not the last part of a module name; write e.g. q_proj"
    if not model.lora_rank and (model.lora_target_modules != ModelConfig().lora_target_modules or not model.lora_merge):
        yield "model.lora_rank: 0 trains all weights; set a rank, or remove the other lora settings"
    if model.router_family is not None and backend.kind == "megatron":
        yield "model.router_family: not used with Megatron-Core routers; remove it, or set backend.kind = fsdp"
    if model.attn_implementation.startswith(("flash_attention", "varlen", "flex")):
        attention = f"model.attn_implementation: {model.attn_implementation}"
        if model.dtype == "float32":
            yield f"{attention} does not support float32; set model.dtype = bfloat16 or use sdpa"
        if backend.device == "cpu":
            yield f"{attention} needs a GPU; with backend.device = cpu use sdpa"
    is_ours = model.attn_implementation in ("auto", "varlen", "flex", "blocks")
    if backend.kind == "fsdp" and backend.context_parallel > 1 and not is_ours:
        yield (
            f"backend.context_parallel: {model.attn_implementation} sees only the tokens of one rank; set "
            "model.attn_implementation = auto"
        )


def _backend(backend: BackendConfig) -> Iterator[str]:
    if backend.kind == "megatron":
        if backend.virtual_pipeline and backend.pipeline_parallel == 1:
            yield "backend.virtual_pipeline: interleaving needs a pipeline; set backend.pipeline_parallel > 1 too"
        for name in backend.megatron.keys() & KEYS_OF_MEGATRON_SETTINGS.keys():
            yield f"backend.megatron.{name}: set {KEYS_OF_MEGATRON_SETTINGS[name]} instead"
        for name in _RANDOM_IN_MEGATRON:
            if backend.megatron.get(name):
                yield f"backend.megatron.{name}: two passes over the same tokens would differ; remove it"
        if backend.megatron.get("moe_router_fusion"):
            yield "backend.megatron.moe_router_fusion: a fused router cannot replay routes; remove it"
        return
    if backend.tensor_parallel > 1:
        yield (
            "backend.tensor_parallel: fsdp gathers each layer whole and divides experts only "
            "(backend.expert_parallel); set backend.kind = megatron"
        )
    megatron_only = {
        "expert_tensor_parallel": (backend.expert_tensor_parallel or 1) > 1,
        "pipeline_parallel": backend.pipeline_parallel > 1,
        "virtual_pipeline": backend.virtual_pipeline is not None,
        "megatron": bool(backend.megatron),
        "weight_family": backend.weight_family is not None,
        "distributed_optimizer": backend.distributed_optimizer,
    }
    for name, is_set in megatron_only.items():
        if is_set:
            yield f"backend.{name}: fsdp has no such setting; set backend.kind = megatron"


def _data(config: Sections) -> Iterator[str]:
    if config.model.path and not config.data.path:
        yield "data.path: no prompts; name a .jsonl or .parquet file or a datasets folder"
    if config.eval.every and config.data.path and not config.data.eval_path:
        yield "eval.every: no evaluation prompts; set data.eval_path, or eval.every = 0"


def _rollout(rollout: RolloutConfig) -> Iterator[str]:
    try:
        spec = engine_spec(rollout.engine)
    except PluginError as error:
        if is_path(rollout.engine):
            yield f"rollout.engine: {error}"
        return
    if not spec.takes_weights:
        yield f"rollout.engine: {rollout.engine} cannot be updated; set one of {', '.join(trainable_engines())}"
    if rollout.replays_sampling_mask and not spec.returns_masks:
        yield (
            f"rollout.sampling_mask: {rollout.engine} does not return sampling masks, so importance ratios would be "
            "biased; set top_p = 1 and top_k = 0, or accept the bias with sampling_mask = off"
        )
    yield from _engine_options(rollout, spec)
    if rollout.is_server and not rollout.urls:
        yield f"rollout.urls: {rollout.engine} needs server URLs, e.g. http://127.0.0.1:8000"
    if not rollout.is_server and rollout.urls:
        servers = " or ".join(server_engines())
        yield f"rollout.urls: {rollout.engine} runs in this process; set rollout.engine = {servers}"
    for url in rollout.urls:
        shown = url if "@" not in url else f"...@{url.rpartition('@')[2]}"  # a password may stand before it
        if not url.startswith(("http://", "https://")):
            yield f"rollout.urls: {shown!r} is not an HTTP URL; write http://{shown.rpartition('://')[2]}"
        elif problem := _url_problem(url):
            yield f"rollout.urls: {shown!r} {problem}; write e.g. http://10.0.0.2:8000"
        elif is_masked(url):
            yield f"rollout.urls: the password of {url} is masked; restore it"
    for url in sorted({url for url in rollout.urls if rollout.urls.count(url) > 1}):
        yield f"rollout.urls: {mask_passwords(url)!r} is listed twice; list each server once"
    if rollout.engines_per_node is not None and rollout.is_server:
        yield (
            f"rollout.engines_per_node: {rollout.engine} is reached by rollout.urls; "
            "name the engine to start on the trainer nodes, e.g. vllm, or remove it"
        )
    if rollout.min_servers is not None and rollout.min_servers > len(rollout.urls):
        yield f"rollout.min_servers: {rollout.min_servers} of {len(rollout.urls)} servers; lower it, or add urls"
    if rollout.environment == "tools" and not rollout.tools:
        yield "rollout.tools: the environment has no tools; name functions, e.g. my_tools:search"
    if rollout.tools and rollout.environment is None:
        yield "rollout.tools: tool calls need an environment to run them; set rollout.environment = tools, or your own"
    if rollout.sleep and rollout.max_staleness:
        yield (
            "rollout.sleep: an engine that samples during training cannot sleep; "
            "set rollout.max_staleness = 0 or rollout.sleep = false"
        )


def _engine_options(rollout: RolloutConfig, spec: EngineSpec) -> Iterator[str]:
    if not spec.takes_capture:
        if rollout.capture != "auto":
            yield (
                f"rollout.capture: {rollout.engine} has no capture option; remove it"
                + (", and set it when starting the servers" if spec.is_server else "")
            )
    elif "capture" in rollout.options:
        yield "rollout.options.capture: set rollout.capture instead"
    if spec.check_options:
        try:
            import_path(spec.check_options, kind="check", key="rollout.engine")(rollout.capture, rollout.options)
        except EngineOptionError as error:
            key = "rollout.options" if rollout.capture == "auto" else "rollout.capture"
            suffix = "" if error.found is None else f", found {error.found}"
            yield f"{key}: {error.problem}{suffix}; {error.remedy}"


def _engine(config: Sections) -> Iterator[str]:
    """Yield what other settings ask of the engine and it does not do."""
    rollout, transport = config.rollout, WEIGHT_TRANSPORTS.get(config.weight_sync.transport)
    if rollout.lora and not config.model.lora_rank:
        yield "rollout.lora: no adapter to send; set model.lora_rank"
    try:
        spec = engine_spec(rollout.engine)
    except PluginError:  # reported by `problems`
        return
    if transport is not None and transport.is_transfer and not spec.takes_transfers:
        yield f"weight_sync.transport: {rollout.engine} takes tensors in requests only; set auto or http"
    if rollout.lora and not spec.takes_lora:
        takers = " and ".join(engine_names(lambda spec: spec.takes_lora))
        yield f"rollout.lora: only {takers} take adapters; remove it to send merged weights"
    if rollout.workers > 1 and not spec.is_server and not config.starts_servers:
        yield (
            f"rollout.workers: {rollout.engine} runs in the process of rank 0, out of reach of workers; set "
            f"rollout.workers = 1, rollout.engines_per_node, or rollout.engine = {' or '.join(server_engines())}"
        )


def _cluster(config: Sections) -> Iterator[str]:
    cluster, rollout = config.cluster, config.rollout
    if cluster.launcher != "ray":
        return
    if cluster.engines is not None and rollout.engines_per_node is not None:
        yield "cluster.engines: rollout.engines_per_node starts engines too; remove one of them"
    if cluster.engines is not None and rollout.is_server:
        yield (
            f"cluster.engines: {rollout.engine} is reached by rollout.urls; "
            "name the engine to start, e.g. rollout.engine = vllm, or remove it"
        )
    if cluster.placement == "separate":
        return
    if cluster.engines is None:
        yield "cluster.placement: no engines to place; set cluster.engines, or remove it"
    elif cluster.engines % cluster.trainer_nodes:
        yield (
            f"cluster.placement: {cluster.engines} engines cannot be spread evenly over {cluster.trainer_nodes} "
            f"trainer nodes; set cluster.engines to a multiple of {cluster.trainer_nodes}"
        )
    if rollout.max_staleness:
        yield (
            "cluster.placement: engines on the trainer's GPUs cannot sample during training; "
            "set rollout.max_staleness = 0 or cluster.placement = separate"
        )


def _url_problem(url: str) -> str | None:
    """Return why a URL cannot be that of a server, or None."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # also for a port that is not a number, or above 65535
        why = error if "@" not in url else "special characters in a user or password are written as %.."
        return f"cannot be used: {why}"
    if not parts.hostname or any(character.isspace() for character in url) or not url.isprintable():
        return "has no host" if not parts.hostname else "contains white space"
    if port == 0:
        return "has port 0"
    return "has a query or a fragment" if parts.query or parts.fragment else None


def _algorithm(config: Sections) -> Iterator[str]:
    rollout, updates = config.rollout, config.algorithm.updates_per_rollout
    if rollout.sequences % updates:
        small = [n for n in range(1, isqrt(rollout.sequences) + 1) if rollout.sequences % n == 0]
        divisors = sorted({*small, *(rollout.sequences // n for n in small)})
        yield (
            f"algorithm.updates_per_rollout: {rollout.prompts_per_step} prompts x {rollout.num_generations} "
            f"generations = {rollout.sequences} sequences cannot be split evenly into {updates} updates; "
            f"use {min(divisors, key=lambda n: abs(n - updates))}, or change rollout.prompts_per_step"
        )
    if config.algorithm.old_logprobs != "rollout":
        return
    if config.algorithm.rollout_correction != "off":
        yield (
            "algorithm.rollout_correction: with old_logprobs = rollout the ratio old policy / rollout is 1: there is "
            "nothing to correct; set it to off, or old_logprobs = auto"
        )
    if config.replay.mode == "r2" and config.updates_per_step > 1:
        yield (
            "replay.mode: r2 records routes in the old-log-prob pass, which old_logprobs = rollout leaves out; set r3, "
            "or old_logprobs = auto"
        )


def _policy(config: Sections) -> Iterator[str]:
    policy, mode = config.replay.policy, config.replay.mode
    modes = MODES_OF_POLICIES[policy]
    if mode not in modes:
        reason = {
            "ids+gates": "engines report no gate weights, so the trainer must have recorded them",
            "margin": "there must be routes to replay",
            "drop": "only routes of a rollout may lack tokens",
            "shift": "auto may choose importance correction in its place",
        }[policy]
        yield f"replay.policy: {policy} needs replay.mode = {' or '.join(modes)}, found {mode}: {reason}"
    if policy == "drop" and config.backend.pipeline_parallel > 1:
        yield "replay.policy: drop needs all layers' routes where the loss is; set backend.pipeline_parallel = 1"
    if policy == "shift":
        yield from _shift(config)
    if (policy == "margin") != (config.replay.margin is not None):
        yield "replay.margin: policy = margin needs it, as a difference of log routing weights; no other policy has one"


def _shift(config: Sections) -> Iterator[str]:
    backend = config.backend
    if max(backend.tensor_parallel, backend.pipeline_parallel, backend.context_parallel) > 1:
        yield (
            "replay.policy: shift needs the routers of all layers and tokens on the rank of the loss; set "
            "backend.tensor_parallel, pipeline_parallel and context_parallel to 1"
        )
    if config.updates_per_step == 1 or config.algorithm.old_logprobs == "rollout":
        yield (
            "replay.policy: shift compares later updates with the old-log-prob pass; set "
            "algorithm.updates_per_rollout or num_iterations above 1, and old_logprobs = auto or always"
        )
    if is_path(config.algorithm.loss):
        yield "replay.policy: shift scales importance ratios of our own losses; set one of them in algorithm.loss"


def _optim(config: Sections) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        yield f"optim.betas: both must be at least 0 and below 1, found {config.optim.betas}"
    if config.data.epochs is None and (problem := warmup_problem(config, config.steps)):
        yield problem


def warmup_problem(config: Sections, steps: int) -> str | None:
    """Return the problem if the warm-up is longer than a run of `steps` steps, else None."""
    warmup = config.optim.warmup_steps
    if warmup <= steps:
        return None
    return f"optim.warmup_steps: the warm-up of {warmup} steps is longer than the run; set at most steps = {steps}"


def _reward(reward: RewardConfig) -> Iterator[str]:
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights: {len(reward.weights)} weights for {len(reward.functions)} functions; "
            "give one per reward function, or omit the weights"
        )
    if reward.on_timeout == "unscored" and not reward.workers:
        yield (
            "reward.on_timeout: 'unscored' needs worker processes, since a thread cannot be killed; "
            "set reward.workers, or reward.on_timeout = 'error'"
        )
    for name in sorted({name for name in reward.functions if reward.functions.count(name) > 1}):
        yield f"reward.functions: {name!r} is listed twice; list it once, with a weight"
