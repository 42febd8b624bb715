"""Weight updates inside a vLLM worker: transfers, the copy plan that makes them fast, and models that copy themselves.

vLLM's loaders run Python for every tensor of every expert, several times: thousands of calls a layer. All they do is
copy slices of tensors into slices of parameters, the same ones in every update. The first update records those copies,
and compares each parameter with what was copied into it once vLLM has processed it. If all are equal, and nothing else
is computed from the tensors, later updates are the copies alone. Otherwise vLLM's loaders do every update.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_replay.errors import EngineError
from moe_replay.weights.source import TensorInfo
from moe_replay.weights.staging import WeightReceiver, copy_all, device_id, openable_devices
from moe_replay.weights.transfer import TransferError

logger = logging.getLogger("vllm.moe_replay")  # has a handler in vLLM's processes
_LAYER = re.compile(r"\blayers\.\d+\.")


class TransferLoader:
    """Loads transfers into one worker's model: the first by vLLM's loaders, later ones by the copy plan if possible.

    worker    vLLM's, with the methods of `WeightUpdates`
    by_plan   whether the running transfer needs none of vLLM's loaders
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._device: torch.device = worker.model_runner.device
        self._receiver: WeightReceiver | None = None
        self._plan: CopyPlan | None = None
        self._recorder: CopyRecorder | None = None
        self.by_plan = False
        self._names: set[str] = set()

    def device_id(self) -> str:
        """Return type and id of the worker's device, and those whose memory it can open, a line each."""
        return "\n".join([self._device.type, device_id(self._device), *openable_devices(self._device)])

    def join(self, settings: str) -> None:
        from moe_replay.weights.messages import TransferSettings

        self.leave()
        self.by_plan, self._names = self._plan is not None, set()
        if not self.by_plan and self._can_use_plan():
            self._recorder = CopyRecorder()
        parallel = self._worker.vllm_config.parallel_config  # ranks start at 0 in each replica
        index = int(parallel.data_parallel_rank) * int(parallel.world_size) + int(self._worker.rank)
        self._receiver = WeightReceiver(TransferSettings.model_validate_json(settings), index, self._device)

    @property
    def joined(self) -> bool:
        return self._receiver is not None

    def _can_use_plan(self) -> bool:
        """Whether vLLM computes with the parameters as loaded: on CPUs and with quantization it converts them."""
        runner = self._worker.model_runner
        return self._device.type == "cuda" and runner.model_config.quantization is None

    def receive(self, message: str) -> None:
        if self._receiver is None:
            raise EngineError("no transfer has been joined")
        tensors = self._receiver.receive(message)
        self._names.update(name for name, _ in tensors)
        if self._plan is not None and self.by_plan:
            self._plan.load(tensors)
            self._receiver.acknowledge()
            return
        copies = {name: tensor.clone() for name, tensor in tensors}  # layers keep them until they are complete
        self._receiver.acknowledge()
        if not copies:  # rows of tensors that are not complete
            return
        if self._recorder is None:
            self._worker.replay_load_tensors(copies)
            return
        self._recorder.announce(copies.items())
        with self._recorder:
            self._worker.replay_load_tensors(copies)

    def recording(self) -> AbstractContextManager[Any]:
        """Record what happens to layers in this context, if the running transfer is recorded."""
        return self._recorder or nullcontext()

    def fail(self, text: str) -> None:
        """Report to the sender that this worker has failed."""
        if self._receiver is not None:
            self._receiver.fail(text, lost=text.startswith(TransferError.__name__))
        self._receiver = self._recorder = None

    def missing(self) -> list[str]:
        """Return the tensors that earlier updates had and this one lacks."""
        return [] if self._plan is None else sorted(self._plan.infos.keys() - self._names)

    def finish_by_plan(self) -> None:
        """Have attention layers compute what they derive from their weights."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        runner = self._worker.model_runner
        for module in runner.get_model().modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(runner.model_config.dtype)

    def leave(self, *, complete: bool = False) -> None:
        """End the transfer; a complete one that was recorded yields the copy plan."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        recorder, self._recorder = self._recorder, None
        if complete and recorder is not None:
            self._plan, reason = recorder.plan()
            if self._plan is None:
                logger.info("weight updates use vLLM's loaders: %s", reason)
            else:
                logger.info("weight update used vLLM's loaders; later updates use the recorded copy plan")


# ---- the copy plan ---------------------------------------------------------------------------------------------------


class _Slice(NamedTuple):
    """A part of a tensor's memory, by elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Slice:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def within(self, tensor: Tensor) -> Tensor:
        """Return this part of the storage of a tensor."""
        return torch.as_strided(tensor, self.size, self.stride, self.offset)

    def view(self, tensor: Tensor) -> Tensor:
        """Return this part counted from where a tensor begins in its storage."""
        return torch.as_strided(tensor, self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(slots=True)
class _Write:
    """A copy of a slice of an incoming tensor into memory of a layer that is being loaded."""

    name: str
    source: Tensor
    target: _Slice


@dataclass(slots=True)
class CopyPlan:
    """The copies of one worker: for each tensor of the checkpoint, slices of it and their targets.

    infos    name, dtype and shape of every tensor of an update
    copies   none for a tensor that this worker does not hold
    """

    infos: dict[str, TensorInfo] = field(default_factory=dict)
    copies: dict[str, list[tuple[_Slice, Tensor]]] = field(default_factory=dict)

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise at the first tensor with a name or shape that earlier updates did not have."""
        for name, tensor in tensors:
            info = self.infos.get(name)
            if info is None:
                raise EngineError("no such tensor in earlier updates", found=name)
            if info.shape != tuple(tensor.shape):
                raise EngineError(f"wrong shape of {name}", expected=info.shape, found=tuple(tensor.shape))

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check all tensors, then copy them to their parameters."""
        self.check(tensors)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensor in tensors:
            for part, target in self.copies.get(name, ()):
                targets.append(target)
                whole = part.offset == 0 and part.size == tensor.shape and part.stride == tensor.stride()
                sources.append(tensor if whole else part.view(tensor))
        copy_all(targets, sources)


class CopyRecorder(TorchDispatchMode):
    """Records, while it is active, where the announced tensors are copied to."""

    def __init__(self) -> None:
        super().__init__()
        self._infos: dict[str, TensorInfo] = {}
        self._incoming: dict[int, tuple[str, StorageWeakRef]] = {}  # by address of their memory
        self._loading: dict[int, tuple[Tensor, list[_Write]]] = {}  # memory of layers that are being loaded
        self._copies: dict[str, list[tuple[_Slice, Tensor]]] = {}
        self._unequal: list[Tensor] = []
        self._reason = ""

    def announce(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Name the tensors that are loaded next; each has its own memory.

        vLLM keeps them until their layer is complete, which may be after tensors that are announced later. Those it
        has released are forgotten: their memory may hold something else.
        """
        self._incoming = {
            address: (name, storage) for address, (name, storage) in self._incoming.items() if not storage.expired()
        }
        for name, tensor in tensors:
            self._infos[name] = TensorInfo.of(name, tensor)
            self._incoming[_memory(tensor)] = (name, StorageWeakRef(tensor.untyped_storage()))

    def _incoming_name(self, tensor: Tensor) -> str | None:
        """Return the name of the announced tensor that a tensor shares its memory with."""
        name, storage = self._incoming.get(_memory(tensor), ("", None))
        return None if storage is None or storage.expired() else name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        else:
            self._used(args, result)
        return result

    def _copied(self, target: Tensor, source: Tensor) -> None:
        if target.is_meta or source.is_meta or _memory(target) == _memory(source):
            return
        name = self._incoming_name(source)
        if name is not None:
            _, writes = self._loading.setdefault(_memory(target), (target, []))
            writes.append(_Write(name, source, _Slice.of(target)))
            return
        loaded = self._loading.pop(_memory(source), None)
        if loaded is not None:
            self._placed(target, source, loaded[1])

    def _placed(self, target: Tensor, source: Tensor, writes: list[_Write]) -> None:
        """Record where the content of a loaded parameter went, if it is unchanged there."""
        if _Slice.of(target) != _Slice.of(source):
            self._reason = self._reason or f"{writes[0].name} is stored in another layout"
            return
        if sum(math.prod(write.target.size) for write in writes) < target.numel():
            self._reason = self._reason or f"the parameter of {writes[0].name} was copied in part only"
            return
        for write in writes:
            part = write.target.within(target)
            self._unequal.append((part != write.source.to(part.dtype)).any())
            self._copies.setdefault(write.name, []).append((_Slice.of(write.source), part))

    def _used(self, args: Any, result: Any) -> None:
        """Note a tensor that is used for anything but a copy."""
        outputs = {_memory(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta}
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                name = self._incoming_name(leaf)
                if name is not None and outputs and _memory(leaf) not in outputs:
                    self._reason = self._reason or f"{name} is converted while it is loaded"

    def plan(self) -> tuple[CopyPlan | None, str]:
        """Return the plan of the recorded update, or None and the reason why there is none."""
        pending = [writes[0].name for _, writes in self._loading.values()]
        if not self._reason and pending:
            self._reason = f"{pending[0]} is stored in another layout"
        if not self._reason and self._unequal and bool(torch.stack(self._unequal).any()):
            self._reason = "weights are changed after they were loaded"
        if not self._reason and not self._copies:
            self._reason = "nothing was copied"
        self._incoming, self._loading, self._unequal = {}, {}, []
        return (None, self._reason) if self._reason else (CopyPlan(self._infos, self._copies), "")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- models that copy weights themselves -----------------------------------------------------------------------------


class CopiedWeights:
    """Modules whose weights the model's `load_weights` copies into their parameters, past vLLM's loaders (gpt-oss).

    During an update vLLM's parameters are placeholders without memory, which their loaders replace. A copy into such a
    placeholder goes nowhere, without an error. Here those modules get memory before the copy, and are converted to the
    layout of the kernels as soon as all of their parameters have been copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._waiting: dict[str, Any] = {}
        self._loaded: set[str] = set()
        if type(model).__name__.startswith("GptOss"):
            self._waiting = {name: module for name, module in model.named_modules() if _copies(module)}

    def expect(self, names: Iterable[str]) -> None:
        """Allocate the modules of all decoder layers that tensors of these names belong to."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        layers = {match[0] for name in names if (match := _LAYER.search(name))}
        for name, module in self._waiting.items():
            if (match := _LAYER.search(name)) and match[0] in layers:
                materialize_layer(module, get_layerwise_info(module))

    def process(self, loaded: Iterable[str] | None) -> None:
        """Convert the modules whose parameters have all been loaded; `loaded` are the model's parameter names."""
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

        if not self._waiting:
            return
        self._loaded.update(loaded or ())
        for name, module in list(self._waiting.items()):
            if {f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)} <= self._loaded:
                _layerwise_process(module, get_layerwise_info(module))
                del self._waiting[name]


def _copies(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return "sinks" in parameters or "w13_weight" in parameters
