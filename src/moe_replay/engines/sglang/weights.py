"""Weight updates of an SGLang server: a folder that it reads, memory of this process's GPU, or a broadcast.

folder        `/update_weights_from_disk`
tensor        `/update_weights_from_tensor`: handles of memory on a GPU of the server's machine, by SGLang's serializer
distributed   `/init_weights_update_group`, `/update_weights_from_distributed`: NCCL from this process to all workers

The server is paused while they arrive. SGLang neither names missing weights nor notices them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_replay.distributed.network import address_seen_by
from moe_replay.errors import EngineError, EngineOptionError, MissingExtraError
from moe_replay.utils.device import accelerator
from moe_replay.weights.checkpoint import grouped
from moe_replay.weights.source import Group, Tensors
from moe_replay.weights.transfer import TOKEN_BYTES, BroadcastGroup, TransferError, TransferStore

SglangWeights = Literal["folder", "tensor", "distributed"]
CHUNK_BYTES = 2**29
Post = Callable[[str, dict[str, Any]], Any]
"""(path, JSON) -> JSON of the answer; raises if the server refuses."""


class WeightCalls:
    """One of SGLang's update calls for one server.

    settings   of the server, its `/server_info`
    timeout_s  in which a broadcast must get on
    """

    def __init__(self, kind: str, settings: Mapping[str, Any], url: str, post: Post, timeout_s: float) -> None:
        _check(kind, settings, url)
        self._kind, self._url, self._post, self._timeout_s = kind, url, post, timeout_s
        self._workers = int(settings.get("tp_size") or 1)
        self._group: _Group | None = None

    def send(self, weights: Tensors, stamp: str) -> None:
        """Replace all weights of the paused server.

        stamp   version text that the server has from the first tensor on: of weights that are not complete
        """
        device = _device()
        for chunk in grouped(weights, CHUNK_BYTES, lambda tensor: tensor.detach().to(device).contiguous()):
            if self._kind == "tensor":
                self._by_memory(chunk, stamp)
            else:
                self._by_broadcast(chunk, stamp, device)

    def close(self) -> None:
        """Leave the group of the broadcasts; the next update makes another."""
        if self._group is not None:
            with suppress(EngineError):  # the server may be gone, or have left it
                self._post("/destroy_weights_update_group", {"group_name": self._group.name})
            self._group.close()
            self._group = None

    def _by_memory(self, chunk: Group, stamp: str) -> None:
        try:
            from sglang.srt.utils import MultiprocessingSerializer  # type: ignore[import-not-found]
        except ImportError as missing:
            raise MissingExtraError(
                "weights by SGLang's tensor call need SGLang in the trainer's environment",
                remedy="pip install sglang, or set rollout.options.weights = distributed or folder",
            ) from missing
        # A handle for each worker: those that open it count references to the memory.
        handles = [MultiprocessingSerializer.serialize(chunk, output_str=True) for _ in range(self._workers)]
        request = {"serialized_named_tensors": handles, "flush_cache": False, "weight_version": stamp}
        self._post("/update_weights_from_tensor", request)
        if _device().type == "cuda":
            torch.cuda.ipc_collect()

    def _by_broadcast(self, chunk: Group, stamp: str, device: torch.device) -> None:
        if self._group is None:
            self._group = _Group.meet(self._url, self._workers, device, self._post, self._timeout_s)
        request = {
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "group_name": self._group.name,
            "flush_cache": False,
            "weight_version": stamp,
        }
        with ThreadPoolExecutor(1) as thread:  # the workers answer when they have received
            answered = thread.submit(self._post, "/update_weights_from_distributed", request)
            try:
                for _, tensor in chunk:
                    self._group.broadcast(tensor, answered)
            except TransferError:
                self.close()
                if answered.done():
                    answered.result()  # says why
                raise
            answered.result()


def _check(kind: str, settings: Mapping[str, Any], url: str) -> None:
    if kind not in get_args(SglangWeights):
        raise EngineOptionError("unknown weight transport", expected=", ".join(get_args(SglangWeights)), found=kind)
    split = {name: int(settings.get(name) or 1) for name in ("pp_size", "dp_size")}
    if settings.get("enable_dp_attention"):
        split["dp_size"] = 1
    reasons = [f"--{name.replace('_', '-')} {size}" for name, size in split.items() if size > 1]
    if settings.get("quantization"):  # these calls load into weights that are quantized already
        reasons.append(f"--quantization {settings['quantization']}")
    if kind == "tensor" and _device().type != "cuda":
        reasons.append("no GPU here, whose memory the server could open")
    if kind == "distributed" and accelerator() not in (None, "cuda"):
        reasons.append(f"broadcasts are over NCCL or gloo, and the trainer computes on {accelerator()}")
    if reasons:
        raise EngineError(
            f"SGLang at {url} cannot take weights by {kind}",
            found=", ".join(reasons),
            remedy="Set rollout.options.weights = folder",
        )


def _device() -> torch.device:
    return torch.device("cuda" if accelerator() == "cuda" else "cpu")


class _Group:
    """This process and the workers of a server, as SGLang makes such a group: rank 0 is this process."""

    def __init__(self, name: str, store: TransferStore, group: BroadcastGroup) -> None:
        self.name, self._store, self._group = name, store, group

    @classmethod
    def meet(cls, url: str, workers: int, device: torch.device, post: Post, timeout_s: float) -> _Group:
        host = address_seen_by(url)
        store = TransferStore.listen_by_torch(host, timeout_s)
        name, size = f"moe-replay-{secrets.token_hex(TOKEN_BYTES)}", workers + 1  # who does not know it cannot join
        request = {
            "master_address": host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": "nccl" if device.type == "cuda" else "gloo",
        }
        prefixes = (name, f"{name}/", f"{device.type}/")  # those of torch.distributed for a group of this name
        with ThreadPoolExecutor(1) as thread:
            answered = thread.submit(post, "/init_weights_update_group", request)
            answered.add_done_callback(lambda call: _tell_failure(call, store))
            try:
                group = BroadcastGroup(store, 0, size, device.type, prefixes)
            except TransferError:
                if answered.done():
                    answered.result()
                raise
            answered.result()
        return cls(name, store, group)

    def broadcast(self, tensor: Tensor, answered: Future[Any]) -> None:
        """Send a tensor; raise if the server has answered before it had it."""

        def check() -> None:
            if answered.done() and answered.exception() is not None:
                raise TransferError(f"the server ended the update: {answered.exception()}")

        self._group.broadcast(tensor, check)

    def close(self) -> None:
        self._group.close()
        self._store.close()


def _tell_failure(call: Future[Any], store: TransferStore) -> None:
    error = call.exception()
    if error is not None:
        with suppress(TransferError):
            store.fail(str(error))
