"""vLLM's engine arguments: those that moe-replay sets, those it refuses, quantization, and the GPU memory fraction."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_replay.engines.base import StartRequest
from moe_replay.engines.vllm.release import check_options, on_cpu
from moe_replay.engines.vllm.shared import SHARED
from moe_replay.errors import EngineError, EngineName, EngineOptionError, EngineUnavailableError
from moe_replay.utils.device import accelerator, cpu_has_bfloat16, device_module
from moe_replay.utils.misc import GIB, one_line

WORKER_MODULE = "moe_replay.engines.vllm.capture_worker"
MEMORY_OPTION = "rollout.options.gpu_memory_utilization"
MAX_GPU_FRACTION = 0.92  # vLLM's default, for a GPU with nothing else on it
MIN_GPU_FRACTION = 0.05
MARGIN = GIB  # left for buffers of other processes
ROUTERS = r"re:.*\.(gate|router)$"
"""Names of routers in vLLM's models, for its setting `ignore`."""
# With speculative decoding a sequence has several tokens in a step: vLLM computes the sizes.
_GRAPH_OPTIONS = {
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("enforce_eager", "speculative_config"),
}
_FP8 = "fp8_per_tensor"  # the meaning of "fp8" for unquantized checkpoints before vLLM 0.31

# A launcher's description of the trainer's process group; the engine's processes form another group.
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


def engine_arguments(
    engine: EngineName, model: str, capture: str, options: dict[str, Any], *, share_weights: bool = False
) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fixed: dict[str, Any] = {
        "model": model,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, temperature included
        "worker_extension_cls": "moe_replay.engines.vllm.worker.WeightUpdates",
        "skip_tokenizer_init": True,  # token ids in, token ids out: nothing is retokenized
        "generation_config": "vllm",  # the model's own defaults would silently change the sampling
        **capture_arguments(capture, on_cpu=on_cpu()),
    }
    if share_weights:
        fixed["additional_config"] = {**fixed.get("additional_config", {}), SHARED: True}
    options = {name: _parsed(name, value) for name, value in options.items()}
    overridden = sorted(fixed.keys() & options.keys())
    if overridden:
        raise EngineOptionError("vLLM options that moe-replay sets itself", found=", ".join(overridden))
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
            f"{engine} on CPU supports LoRA only with capture by KV slot", remedy='Use capture "kv_slot"'
        )
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if on_cpu() and "max_num_batched_tokens" not in options:
        defaults["enable_chunked_prefill"] = False  # seeds need it: see release.check_no_seed
    try:
        return AsyncEngineArgs(**defaults | options | quantization_options(model, options) | fixed)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise EngineOptionError(f"{engine} does not take these options: {one_line(error)}") from error


def _parsed(name: str, value: Any) -> Any:
    """Return an option; objects and lists may be written as JSON, as on vLLM's command line."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise EngineOptionError(f"option {name} is not valid JSON: {one_line(error)}", found=value) from error


def _check_parallelism(engine: EngineName, capture: str, options: dict[str, Any]) -> None:
    check_options(capture, options)
    replicas = int(options.get("data_parallel_size") or 1)
    shared = options.get("enable_expert_parallel") and replicas * int(options.get("tensor_parallel_size") or 1) > 1
    if (replicas > 1 or shared) and capture == "vllm" and on_cpu():
        raise EngineOptionError(
            f"{engine} on CPU supports expert and data parallelism only with capture by KV slot",
            remedy='Use capture "kv_slot"',
        )


# ---- batch sizes -----------------------------------------------------------------------------------------------------


def batch_options(request: StartRequest) -> dict[str, Any]:
    """Return options for as many sequences as a run samples, with CUDA graphs for them; the user's options win.

    By default vLLM captures 51 graphs, the largest for 512 sequences, and runs larger batches without graphs.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    options = request.options
    world = int(options.get("tensor_parallel_size") or 1) * int(options.get("pipeline_parallel_size") or 1)
    sequences = int(options.get("max_num_seqs") or AsyncEngineArgs.get_batch_defaults(world)[1][UsageContext.LLM_CLASS])
    if "max_num_seqs" not in options and request.max_sequences is not None:
        sequences = min(sequences, request.max_sequences)
    defaults: dict[str, Any] = {"max_num_seqs": sequences}
    if not options.keys() & _GRAPH_OPTIONS:
        defaults["cudagraph_capture_sizes"] = graph_sizes(sequences)
        if request.lora is not None:  # every request has the adapter: no second set of graphs for those without
            defaults["compilation_config"] = {"cudagraph_specialize_lora": False}
    return {name: value for name, value in defaults.items() if name not in options}


def graph_sizes(sequences: int) -> list[int]:
    """Return batch sizes to capture CUDA graphs for, up to `sequences`; a batch is padded to the next of them."""
    sizes, size = [1, 2, 4], 8
    while size < sequences:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += octave // (4 if size >= 128 else 2)
    return [size for size in sizes if size < sequences] + [sequences]


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Hide the trainer's process group from the processes that vLLM starts."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def translated_errors(engine: EngineName) -> Iterator[None]:
    """Raise our errors in place of vLLM's, for rejected requests and dead processes."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except VLLMClientError as rejection:
        raise EngineError(f"{engine} rejected a request: {rejection}") from rejection
    except (EngineDeadError, EngineGenerateError) as failure:
        raise EngineUnavailableError(f"{engine} failed: {failure}", remedy="Its log names the cause") from failure


def capture_arguments(capture: str, *, on_cpu: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"enable_return_routed_experts": capture != "kv_slot"}
    if capture != "vllm":
        arguments["worker_cls"] = f"{WORKER_MODULE}.{'CpuWorker' if on_cpu else 'GpuWorker'}"
        arguments["additional_config"] = {"moe_replay_capture": True}  # part of the cache key of compiled code
    elif not on_cpu:
        arguments["worker_cls"] = f"{WORKER_MODULE}.GpuWorkerWithoutCapture"
    return arguments


# ---- quantization ----------------------------------------------------------------------------------------------------


def quantization_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for vLLM's online quantization; none if it is off or the caller has configured it.

    The trainer stays in bfloat16, and every weight update is quantized again. Routers are left out: they are a
    thousandth of the weights, and rounding them changes which experts are chosen.
    """
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    method = options.get("quantization")
    if method == "fp8" and not _is_quantized(model):
        method = _FP8
    if method not in ONLINE_QUANT_SHORTHAND_NAMES or options.get("quantization_config"):
        return {}
    return {"quantization": method, "quantization_config": {"ignore": [ROUTERS]}}


def _is_quantized(model: str) -> bool:
    """Whether the weights on disk are quantized; vLLM then reads the method from the same file."""
    config = Path(model) / "config.json"
    return config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8"))


# ---- GPU memory -----------------------------------------------------------------------------------------------------


def gpu_memory_fraction(request: StartRequest) -> float | None:
    """Return the fraction of this GPU's memory for vLLM next to the trainer, and print it; None: vLLM's default.

    Only if the options set neither the fraction nor the size of the KV cache, and this process uses the GPU.
    """
    if {"gpu_memory_utilization", "kv_cache_memory_bytes"} & request.options.keys():
        return None
    kind = accelerator()
    if kind is None or not (gpu := device_module(torch.device(kind))).is_initialized():
        return None
    free, total = gpu.mem_get_info()
    fraction, reserved = split_gpu_memory(free, total, gpu.memory_allocated(), sleeps=request.sleep)
    print(
        f"vLLM: using {fraction:.2f} of GPU memory: {free / GIB:.1f} of {total / GIB:.1f} GiB are free, "
        f"{reserved / GIB:.1f} GiB of it reserved for the trainer (override with {MEMORY_OPTION})",
        file=sys.stderr,
        flush=True,
    )
    return fraction


def split_gpu_memory(free: int, total: int, allocated: int, *, sleeps: bool) -> tuple[float, int]:
    """Return the fraction of a GPU's memory for vLLM, and the bytes reserved for the trainer.

    allocated   bytes that the trainer has allocated: its weights
    sleeps      the engine frees its memory while the trainer works; otherwise the reserve is for gradients and
                optimizer state, three times the weights, and a tenth of the GPU for activations
    """
    reserved = MARGIN if sleeps or not allocated else MARGIN + 3 * allocated + total // 10
    fraction = min((free - reserved) / total, MAX_GPU_FRACTION)
    if fraction < MIN_GPU_FRACTION:
        raise EngineError(
            "not enough GPU memory for vLLM next to the trainer",
            expected=f"at least {MIN_GPU_FRACTION:.0%} of {total / GIB:.1f} GiB",
            found=f"{free / GIB:.1f} GiB free, of which the trainer will need {reserved / GIB:.1f}",
            remedy=f"Set rollout.sleep = true and backend.offload = true, use a server, or set {MEMORY_OPTION}",
        )
    return int(fraction * 100) / 100, reserved


def not_started(engine: str, cause: str) -> EngineError:
    """Return the error for an engine that did not start; `cause` is vLLM's own message."""
    remedy = f"Set {MEMORY_OPTION} lower, or free GPU memory: " if "memory utilization" in cause else ""
    return EngineError(f"{engine} did not start with routes. {remedy}{cause}")
