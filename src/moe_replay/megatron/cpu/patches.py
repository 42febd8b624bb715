"""Patches for Megatron-Core to run without CUDA, with their reasons and when each can be removed.

Line numbers are those of megatron-core 0.16.1; 0.12.1 to 0.15.3 run with the same patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._device import _device_constructors

SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
}
"""Settings of a `TransformerConfig` that a CPU needs; with a layer spec made by `use_transformer_engine=False`."""


class Patch(NamedTuple):
    """One patch.

    name      what it replaces
    upstream  file and line that need it
    until     when it can be removed
    apply     applies the patch and registers how to undo it
    """

    name: str
    upstream: str
    until: str
    apply: Callable[[ExitStack], None]


def _replace(undo: ExitStack, owner: ModuleType | type, name: str, value: object) -> None:
    present = vars(owner)
    if name in present:
        undo.callback(setattr, owner, name, present[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


# ---- torch ----------------------------------------------------------------------------------------------------------


def _no_compiler(undo: ExitStack) -> None:
    import torch._dynamo.config

    undo.enter_context(torch._dynamo.config.patch(disable=True))  # deleting a setting could not be undone


def _current_device(undo: ExitStack) -> None:
    _replace(undo, torch.cuda, "current_device", lambda: torch.device("cpu"))


def _factories(undo: ExitStack) -> None:
    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    # `with torch.device(...)` identifies the factories by identity and lists them on first use. It must list the
    # originals, or tensors meant for another device (a model being loaded on "meta") silently end up on the CPU.
    _device_constructors()
    for name in ("zeros", "ones", "tensor"):
        _replace(undo, torch, name, on_cpu(getattr(torch, name)))


def _tensor_cuda(undo: ExitStack) -> None:
    _replace(undo, torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def _random_state(undo: ExitStack) -> None:
    from megatron.core.tensor_parallel import random

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    _replace(undo, torch.cuda, "get_rng_state", get_state)
    _replace(undo, torch.cuda.random, "get_rng_state", get_state)
    _replace(undo, torch.cuda, "manual_seed", torch.default_generator.manual_seed)
    _replace(undo, random, "_set_cuda_rng_state", set_state)


def _synchronize(undo: ExitStack) -> None:
    _replace(undo, torch.cuda, "synchronize", lambda *args: None)


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
    _replace(undo, torch.cuda, "Stream", _Stream)
    for name in ("current_stream", "default_stream"):
        _replace(undo, torch.cuda, name, lambda *args, **kwargs: stream)
    _replace(undo, torch.cuda, "stream", lambda *args: nullcontext())


def _type_names(undo: ExitStack) -> None:
    native = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = native(self, *args, **kwargs)
        is_name = isinstance(found, str) and not found.startswith("torch.cuda.")
        return found.replace("torch.", "torch.cuda.", 1) if is_name else found

    _replace(undo, torch.Tensor, "type", cuda_type)


# ---- Megatron-Core --------------------------------------------------------------------------------------------------


def _gating_without_te(undo: ExitStack) -> None:
    from megatron.core.transformer.moe import moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        _replace(undo, moe_utils, "te_general_gemm", None)


def _splits_as_numbers(undo: ExitStack) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if "maybe_move_tensor_to_cpu" in vars(token_dispatcher):
        _replace(undo, token_dispatcher, "maybe_move_tensor_to_cpu", on_host)


def _norm_of_a_sequence_shard(undo: ExitStack) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    native = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sharded = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = native(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sharded
        for parameter in norm.parameters():
            parameter.sequence_parallel = sharded  # its gradient is summed over the tensor-parallel ranks
        return norm

    _replace(undo, WrappedTorchNorm, "__new__", staticmethod(new))


def _checkpoint_without_fp8(undo: ExitStack) -> None:
    from megatron.core.tensor_parallel import random

    kind = getattr(random, "CheckpointWithoutOutput", None)
    if kind is None or "fp8" not in inspect.signature(kind.__init__).parameters:
        return
    native = kind.__init__
    _replace(undo, kind, "__init__", lambda self, fp8=None: native(self, fp8 or None))


def _latent_attention_without_te(undo: ExitStack) -> None:
    from megatron.core.transformer import multi_latent_attention

    if "HAVE_TE" in vars(multi_latent_attention):
        _replace(undo, multi_latent_attention, "HAVE_TE", False)


TRANSFORMER_ENGINE_PATCHES = (
    Patch(
        "gating without Transformer Engine",
        "moe_utils.py:34 binds te_general_gemm only if Transformer Engine imports; :1192 reads it always",
        "when the name is bound to None in the except branch",
        _gating_without_te,
    ),
    Patch(
        "checkpoint without fp8",
        "tensor_parallel/random.py:636 `self.fp8 = fp8 is not None` is true for the default False",
        "when the comparison is fixed",
        _checkpoint_without_fp8,
    ),
    Patch(
        "latent attention without Transformer Engine",
        "multi_latent_attention.py:62 sets HAVE_TE although its classes are None",
        "when HAVE_TE is False without its classes",
        _latent_attention_without_te,
    ),
    Patch(
        "norm of a sequence shard",
        "torch_norm.py:32 refuses sequence parallelism; the norm is token-wise and needs a mark on its weight only",
        "when WrappedTorchNorm sets parameter.sequence_parallel itself",
        _norm_of_a_sequence_shard,
    ),
)
"""What Megatron-Core needs wherever Transformer Engine is not installed, on a GPU as well."""

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
        _current_device,
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
        _tensor_cuda,
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
        _synchronize,
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
