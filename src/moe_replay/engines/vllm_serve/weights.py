"""Weight updates of vLLM's own server: from a folder that it reads, or by its endpoints for weight transfer.

The server is paused during an update. The client knows from the server's settings which endpoints it has.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from moe_replay.distributed.network import address_seen_by, free_port
from moe_replay.engines.http import between
from moe_replay.engines.vllm_serve.wire import WORKER_EXTENSION, ServerSettings
from moe_replay.errors import EngineError, EngineOptionError, MissingExtraError
from moe_replay.utils.device import accelerator
from moe_replay.utils.processes import owned_folder
from moe_replay.weights.checkpoint import as_folder, packed, read_tensors, safetensors_files
from moe_replay.weights.source import Tensors

WeightKind = Literal["auto", "folder", "ipc", "nccl"]
"""auto: ipc or nccl where the server was started for it and there is a GPU here; a folder otherwise."""
CHUNK_BYTES = 2**30
Post = Callable[[str, object], Any]
"""(path, JSON) -> JSON of the answer."""
Send = Callable[[Tensors | Path], None]
"""Replaces all weights of a server, which is paused."""


def weight_route(kind: str, settings: ServerSettings, url: str, post: Post, folder: Path | None) -> Send:
    """Return the way of weights to a server.

    folder   for weights on their way, which the server reads too; None: the temporary folder of this machine
    """
    if kind not in get_args(WeightKind):
        raise EngineOptionError("unknown weight transport", expected=", ".join(get_args(WeightKind)), found=kind)
    offered = settings.transfer_backend
    if kind == "auto":
        kind = offered if offered in ("ipc", "nccl") and accelerator() == "cuda" else "folder"
    if kind == "folder":
        return partial(_load_files if settings.has_extension else _reload_folder, post, folder)
    if offered != kind:
        raise EngineError(
            f"vLLM at {url} was not started to take weights by {kind}",
            found=f"weight transfer by {offered or 'nothing'}",
            remedy=f"Start it with --weight-transfer-config '{json.dumps({'backend': kind})}', or use weights = folder",
        )
    client = _sync_client(post)
    return partial(_send_by_ipc, post, client) if kind == "ipc" else _NcclTransfer(post, url, client).send


# ---- folders ---------------------------------------------------------------------------------------------------------


def _reload_folder(post: Post, parent: Path | None, weights: Tensors | Path) -> None:
    """Have the workers read a folder by vLLM's own `reload_weights`, which does not notice missing weights."""
    with as_folder(weights, parent) as folder:
        kwargs = {"weights_path": str(folder.absolute())}
        post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def _load_files(post: Post, parent: Path | None, weights: Tensors | Path) -> None:
    """Have our extension of vLLM's workers read files one by one; it names weights that are missing or unknown."""

    def call(method: str, *arguments: str) -> None:
        answer = post("/collective_rpc", {"method": method, "args": list(arguments)})
        failed = [text for text in answer["results"] if text]
        if failed:
            raise EngineError(
                f"vLLM could not update its weights: {failed[0]}",
                found=f"in {method} of {WORKER_EXTENSION}",
                remedy="Send every weight under its name in the checkpoint; the server must be able to read the folder",
            )

    call("replay_begin_update")
    for file in safetensors_files(weights) if isinstance(weights, Path) else _written_files(parent, weights):
        call("replay_load", str(file.absolute()))
    call("replay_finish_update")


def _written_files(parent: Path | None, weights: Tensors) -> Iterator[Path]:
    """Yield one file after the other, which is deleted when the next one is requested."""
    with owned_folder(parent) as folder:
        folder.chmod(0o755)  # the server may belong to another user
        file = folder / "weights.safetensors"
        for chunk in packed(weights, CHUNK_BYTES):
            file.write_bytes(chunk)
            yield file
            file.unlink()


# ---- weight transfer -------------------------------------------------------------------------------------------------


def _send_by_ipc(post: Post, client: Any, weights: Tensors | Path) -> None:
    """Show a server on the same GPU device memory of this process. vLLM pickles the handles for HTTP, so the server
    must have been started with VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
    import torch
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    client.init_weight_transfer_engine({"packed": True})
    with _weight_update(post):
        chunks = packed_ipc_producer(
            iterator=((name, tensor.detach()) for name, tensor in read_tensors(weights)),
            gpu_uuid=str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=CHUNK_BYTES,
        )
        for chunk in chunks:  # its memory is used again for the next one, after the server has answered
            described = {name: getattr(chunk, name) for name in ("names", "dtype_names", "shapes", "tensor_sizes")}
            client.update_weights(described | {"ipc_handles": chunk.ipc_handle})
    torch.cuda.ipc_collect()


class _NcclTransfer:
    """A broadcast from this process to all workers of the server, on other GPUs than this process has."""

    def __init__(self, post: Post, url: str, client: Any) -> None:
        self._post, self._url, self._client = post, url, client
        self._group: Any = None

    def send(self, weights: Tensors | Path) -> None:
        import torch

        if self._group is None:
            self._group = self._open_group()
        tensors = ((name, tensor.detach().cuda().contiguous()) for name, tensor in read_tensors(weights))
        with _weight_update(self._post), ThreadPoolExecutor(1) as thread:
            while chunk := list(itertools.islice(tensors, 64)):
                described = {
                    "names": [name for name, _ in chunk],
                    "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
                    "shapes": [list(tensor.shape) for _, tensor in chunk],
                }
                received = thread.submit(self._client.update_weights, described)
                for _, tensor in chunk:
                    self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
                torch.cuda.current_stream().synchronize()
                received.result()

    def _open_group(self) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = address_seen_by(self._url)
        port = free_port(address)
        size = 1 + int(self._post("/get_world_size", None)["world_size"])
        rendezvous = {"master_address": address, "master_port": port, "world_size": size}
        settings = rendezvous | {"rank_offset": 1, "packed": False}
        with ThreadPoolExecutor(1) as thread:  # the workers answer when they have met this process
            answered = thread.submit(self._client.init_weight_transfer_engine, settings)
            group = trainer_init(NCCLTrainerInitInfo(rank=0, packed=False, **rendezvous))
            answered.result()
        return group


def _weight_update(post: Post) -> AbstractContextManager[None]:
    return between(post, "/start_weight_update", "/finish_weight_update")


def _sync_client(post: Post) -> Any:
    """Return vLLM's client of its endpoints, whose requests go through `post`."""
    try:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    except ImportError as missing:
        raise MissingExtraError(
            "weights by ipc or nccl need vLLM in the trainer's environment",
            remedy="pip install 'moe-replay[vllm]', or use weights = folder",
        ) from missing

    class Client(HTTPVLLMWeightSyncClient):
        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            post(f"/{path}", json)

    return Client("")
