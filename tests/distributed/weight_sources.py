"""What a rank does with the weight source of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_replay.megatron.weights.checkpoint import stage_folder
from moe_replay.train.backends.base import Backend
from tests.distributed.megatron_lora import lora_config
from tests.distributed.megatron_training import make_config, open_backend

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "broadcast", "gather")


class LiveMemory(TorchDispatchMode):
    """The most bytes of tensors made inside this context that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if type(one) is Tensor and one.device.type != "meta":
                storage = one.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: kept for key, kept in self._made.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that this rank sends and receives, and its collective calls."""
    counts = {"sent": 0, "received": 0, "collectives": 0}
    send = dist.batch_isend_irecv

    def exchange(operations: list[dist.P2POp]) -> Any:
        for one in operations:
            counts["sent" if one.op is dist.isend else "received"] += one.tensor.nbytes
        return send(operations)

    def collective(call: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            counts["collectives"] += 1
            return call(*args, **options)

        return counting

    patched = {name: collective(getattr(dist, name)) for name in COLLECTIVES} | {"batch_isend_irecv": exchange}
    with mock.patch.multiple(dist, **patched):
        yield counts


def read_source(folder: str, kind: str, settings: dict[str, Any], of_receivers: list[list[int]]) -> list[dict]:
    """Read the weights for each set of receivers: tensors, names by group, what was sent, and the memory it took."""
    backend = open_backend(make_config(folder, kind, **settings))
    return [read(backend, receivers) for receivers in of_receivers]


def read_merged(folder: str, kind: str, settings: dict[str, Any], of_receivers: list[list[int]]) -> list[dict]:
    """Read the weights of a policy with adapters that change them."""
    backend: Any = open_backend(lora_config(folder, kind, ["q_proj", "gate_proj", "up_proj", "down_proj"], **settings))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        if kind == "fsdp":
            ups = [p.to_local() for name, p in backend.model.named_parameters() if "lora_B" in name]
        else:
            ups = [own.up for own in backend._adapters.values()]
        for up in ups:
            up.normal_()
    return [read(backend, receivers) for receivers in of_receivers]


def read_owned(folder: str, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Read the weights of a policy with adapters: gathered on this rank, and what it hands over itself."""
    backend: Any = open_backend(lora_config(folder, "fsdp", ["q_proj", "down_proj"], **settings))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            if "lora_B" in name:
                parameter.to_local().normal_()
    everyone, source = range(dist.get_world_size()), backend.weight_source()
    gathered = {name: tensor.clone() for group in source.groups(everyone) for name, tensor in group}
    owned = {}
    for handed in source.owned_groups((0,), lambda _: (), parts=True):
        assert handed.owner is not None or dist.get_rank() == 0 or not handed.tensors
        owned |= {name: tensor.clone() for name, tensor in handed.tensors}
    return [gathered, owned]


def read(backend: Backend, receivers: list[int]) -> dict[str, Any]:
    source: Any = backend.weight_source()
    source._bucket_bytes = 1  # one parameter at a time, as for layers that are large beside a bucket
    metadata = [(name, str(dtype), list(shape)) for name, dtype, shape in source.metadata()]
    tensors: dict[str, Tensor] = {}
    names, sizes = [], []
    last: list[tuple[str, Tensor]] = []
    with counted() as counts, LiveMemory() as memory:
        for group in source.groups(receivers):
            assert not last, "the group before is still alive"
            names.append([name for name, _ in group])
            sizes.append(sum(tensor.nbytes for _, tensor in group))
            with torch.utils._python_dispatch._disable_current_modes():
                tensors |= {name: tensor.clone() for name, tensor in group}
            last = group
    return {
        "tensors": tensors,
        "names": names,
        "largest": max(sizes),
        "metadata": metadata,
        "peak": memory.peak,
        **counts,
    }


def export(folder: str, kind: str, settings: dict[str, Any], out: str) -> dict[str, Any]:
    """Export the weights: bytes of the files of this rank, the largest group, and the memory that it took."""
    backend = open_backend(make_config(folder, kind, **settings))
    source: Any = backend.weight_source()
    source._bucket_bytes = 1
    with LiveMemory() as memory:
        write = stage_folder(source, Path(folder), file_bytes=20_000)
    files = write(Path(out))
    sizes = {path.name: path.stat().st_size for path in files if path.suffix == ".safetensors"}
    return {"sizes": sizes, "peak": memory.peak, "wrote": sorted(path.name for path in files)}
