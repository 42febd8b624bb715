"""vLLM's engine arguments: what moe-replay sets itself, what is refused, and the environment vLLM is started in."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moe_replay.errors import (
    EngineError,
    EngineName,
    EngineOptionError,
    EngineUnavailableError,
)
from moe_replay.rollout.vllm.capture import capture_arguments
from moe_replay.rollout.vllm.masks import check_mask_option
from moe_replay.rollout.vllm.quantization import quantization_options
from moe_replay.utils.device import cpu_has_bfloat16
from moe_replay.utils.messages import one_line

# Variables by which a launcher tells a trainer its process group: the engine's own processes form another group.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Options by which vLLM spreads the data-parallel replicas of one model over machines.
_REPLICAS_ELSEWHERE = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_backend",
)


def engine_arguments(engine: EngineName, model: str, capture: str, options: dict[str, Any]) -> Any:
    """Return vLLM's engine arguments for a model, a capture, and the caller's options."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fixed: dict[str, Any] = {
        "model": model,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "worker_extension_cls": "moe_replay.rollout.vllm.worker.WeightUpdates",
        "skip_tokenizer_init": True,  # token ids in, token ids out: nothing is re-tokenised
        "generation_config": "vllm",  # the model's own defaults would silently change the sampling
        **capture_arguments(capture, on_cpu=on_cpu()),
    }
    options = {name: _parsed(name, value) for name, value in options.items()}
    taken = sorted(fixed.keys() & options.keys())
    if taken:
        raise EngineOptionError("vLLM options that moe-replay sets itself", found=", ".join(taken))
    check_mask_option(engine, options, AsyncEngineArgs)
    unknown = sorted(options.keys() - {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    if unknown:
        raise EngineOptionError(f"{engine} does not have these options", found=", ".join(unknown))
    _check_parallelism(engine, capture, options)
    if options.get("dtype") == "bfloat16" and on_cpu() and not cpu_has_bfloat16():
        raise EngineOptionError(
            f"{engine} would end with an illegal instruction: this CPU does not compute in bfloat16",
            remedy="Use dtype float16 or float32",
        )
    if options.get("enable_lora") and capture == "vllm" and on_cpu():
        raise EngineOptionError(
            f"{engine} on CPU has LoRA with our capture of routes only", remedy='Use capture "ours"'
        )
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if on_cpu() and "max_num_batched_tokens" not in options:
        defaults["enable_chunked_prefill"] = False  # or seeds could not be used: see _check_seed
    try:
        return AsyncEngineArgs(**defaults | options | quantization_options(model, options) | fixed)
    except (ValueError, TypeError, LookupError, AttributeError) as wrong:
        raise EngineOptionError(f"{engine} does not take these options: {one_line(wrong)}") from wrong


def _parsed(name: str, value: Any) -> Any:
    """Return an option; objects and lists may be written as JSON, as on vLLM's command line."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError as wrong:
        raise EngineOptionError(f"the option {name} is not JSON: {one_line(wrong)}", found=value) from wrong


def _check_parallelism(engine: EngineName, capture: str, options: dict[str, Any]) -> None:
    replicas = int(options.get("data_parallel_size") or 1)
    elsewhere = sorted(name for name in _REPLICAS_ELSEWHERE if options.get(name) not in (None, False, "mp"))
    if elsewhere:
        raise EngineOptionError(
            f"the replicas of an {engine} engine are all on its machine, and started with it",
            found=", ".join(elsewhere),
            remedy="Set data_parallel_size alone, and start an engine on each machine",
        )
    if options.get("enable_eplb"):
        raise EngineOptionError(
            f"{engine} with a load balancer of experts (EPLB) moves them between its workers, and an update of weights "
            "would put each where it was at the start",
            remedy="Leave enable_eplb out",
        )
    shared = options.get("enable_expert_parallel") and replicas * int(options.get("tensor_parallel_size") or 1) > 1
    if (replicas > 1 or shared) and capture == "vllm" and on_cpu():
        raise EngineOptionError(
            f"{engine} on CPU has expert and data parallelism with our capture of routes only",
            remedy='Use capture "ours"',
        )


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Hide the process group of the trainer from the processes that vLLM starts."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def translated_errors(engine: EngineName) -> Iterator[None]:
    """Raise our errors in place of vLLM's: a request that it rejects, processes that have died."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except VLLMClientError as rejection:
        raise EngineError(f"{engine} rejected a request: {rejection}") from rejection
    except (EngineDeadError, EngineGenerateError) as failure:
        raise EngineUnavailableError(f"{engine} failed: {failure}", remedy="Its log names the cause") from failure


def on_cpu() -> bool:
    """Whether the installed vLLM computes on CPUs."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
