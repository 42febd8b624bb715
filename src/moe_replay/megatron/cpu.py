"""Megatron-Core on a CPU over gloo, with every form of parallelism, without a GPU or Transformer Engine.

    from moe_replay.megatron import cpu as megatron_cpu

    megatron_cpu.enable()           # or `with megatron_cpu.enabled():`, which undoes it at the end
    config = TransformerConfig(**megatron_cpu.SETTINGS, num_layers=4, ...)

Megatron-Core requires CUDA in dozens of places that do not need it; `PATCHES` lists the replacements, why each is
needed and when it can be removed. Training with `backend.device = "cpu"` enables them, to try a recipe before GPUs are
booked. Nothing is patched on import, and enabling is refused where CUDA is available.

Context parallelism, packed sequences and multi-latent attention need a core attention that Megatron-Core provides only
through Transformer Engine: `megatron/core_attention.py` has one in torch, put into a layer spec by
`use_plain_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import _device_constructors

from moe_replay.errors import MissingExtraError, ReplayStateError
from moe_replay.megatron.core_attention import PlainCoreAttention, use_plain_attention
from moe_replay.megatron.without_transformer_engine import TRANSFORMER_ENGINE_PATCHES, Patch, replace_attribute

__all__ = ["PATCHES", "SETTINGS", "Patch", "PlainCoreAttention", "enable", "enabled", "use_plain_attention"]

SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
}
"""Settings of a `TransformerConfig` for a CPU; use them with a layer spec of `use_transformer_engine=False`."""


@functools.cache
def enable() -> ExitStack:
    """Patch Megatron-Core to run on the CPU in this process; closing what is returned takes it back."""
    undo = ExitStack()
    _apply(undo)
    return undo


@contextmanager
def enabled() -> Iterator[None]:
    with ExitStack() as undo:
        _apply(undo)
        yield


def _apply(undo: ExitStack) -> None:
    if torch.cuda.is_available():
        raise ReplayStateError(
            "Megatron-Core is not patched for the CPU where CUDA is available",
            found=f"{torch.cuda.device_count()} devices",
            remedy="Hide the devices with CUDA_VISIBLE_DEVICES=",
        )
    for patch in PATCHES:
        try:
            patch.apply(undo)
        except ModuleNotFoundError as missing:
            undo.close()
            raise MissingExtraError(
                "Megatron-Core is not installed", found=missing, remedy="pip install 'moe-replay[megatron]'"
            ) from missing


# ---- torch ----------------------------------------------------------------------------------------------------------


def _no_compiler(undo: ExitStack) -> None:
    import torch._dynamo.config

    undo.enter_context(torch._dynamo.config.patch(disable=True))  # deleting a setting could not be undone


def _factories(undo: ExitStack) -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def cpu_factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return cpu_factory

    # `with torch.device(...)` identifies the factories by identity and lists them on first use. It must list the
    # originals, or tensors meant for another device (a model being loaded on "meta") silently end up on the CPU.
    _device_constructors()
    for name in ("zeros", "ones", "tensor"):
        replace_attribute(undo, torch, name, on_cpu(getattr(torch, name)))


def _random_state(undo: ExitStack) -> None:
    from megatron.core.tensor_parallel import random

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    replace_attribute(undo, torch.cuda, "get_rng_state", get_state)
    replace_attribute(undo, torch.cuda.random, "get_rng_state", get_state)
    replace_attribute(undo, torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    replace_attribute(undo, random, "_set_cuda_rng_state", set_state)


class _Stream:
    """A no-op stream for synchronous execution. A class, since other modules use it in annotations."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _streams(undo: ExitStack) -> None:
    stream = _Stream()
    replace_attribute(undo, torch.cuda, "Stream", _Stream)
    for name in ("current_stream", "default_stream"):
        replace_attribute(undo, torch.cuda, name, lambda *args, **kwargs: stream)
    replace_attribute(undo, torch.cuda, "stream", lambda *args: nullcontext())


def _type_names(undo: ExitStack) -> None:
    native = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = native(self, *args, **kwargs)
        is_cpu_name = isinstance(result, str) and not result.startswith("torch.cuda.")
        return result.replace("torch.", "torch.cuda.", 1) if is_cpu_name else result

    replace_attribute(undo, torch.Tensor, "type", cuda_type)


# ---- Megatron-Core ---------------------------------------------------------------------------------------------------


def _splits_as_numbers(undo: ExitStack) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if "maybe_move_tensor_to_cpu" in vars(token_dispatcher):
        replace_attribute(undo, token_dispatcher, "maybe_move_tensor_to_cpu", on_host)


PATCHES = (
    Patch(
        "no compiler",
        "jit.py:21 compiles small functions with torch.compile: 24 s of C++ for the first iteration",
        "when jit_fuser can be chosen before import",
        _no_compiler,
    ),
    Patch(
        "current device",
        "device=torch.cuda.current_device() in dozens of places: router.py:90, p2p_communication.py:313, ...",
        "when Megatron-Core asks an accelerator-neutral function",
        lambda undo: replace_attribute(undo, torch.cuda, "current_device", lambda: torch.device("cpu")),
    ),
    Patch(
        "factories",
        "device='cuda' in schedules.py:596, transformer/utils.py:35; pin_memory in rope_utils.py:64",
        "when Megatron-Core asks an accelerator-neutral function",
        _factories,
    ),
    Patch(
        "Tensor.cuda",
        "rope_utils.py:64 (context parallel), language_module.py:244 (tied embeddings)",
        "when Megatron-Core asks an accelerator-neutral function",
        lambda undo: replace_attribute(undo, torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
    ),
    Patch(
        "random state",
        "tensor_parallel/random.py: the state tracker and CheckpointFunction know the CUDA generator only",
        "when the tracker takes a device",
        _random_state,
    ),
    Patch(
        "synchronize",
        "p2p_communication.py:242 and :398 wait for the device after batched messages",
        "when the wait is left to the backend",
        lambda undo: replace_attribute(undo, torch.cuda, "synchronize", lambda *args: None),
    ),
    Patch(
        "streams",
        "token_dispatcher.py:445 and shared_experts.py make streams when they are built",
        "when Megatron-Core asks an accelerator-neutral function",
        _streams,
    ),
    Patch(
        "type names",
        "optimizer.py:671, distrib_optimizer.py:361, clip_grads.py:167 compare Tensor.type() with 'torch.cuda...'",
        "when they compare dtypes",
        _type_names,
    ),
    Patch(
        "splits as numbers",
        "moe_utils.py:1078 turns split sizes into numbers only on their way from a GPU",
        "when maybe_move_tensor_to_cpu honours as_numpy for CPU tensors",
        _splits_as_numbers,
    ),
    *TRANSFORMER_ENGINE_PATCHES,
)
