"""vLLM's own transfer engines that need more than this package has: `sharded_rdt` (Ray, NIXL) and `nccl_m2n`.

Servers are plain `vllm serve`, started with the same engine. All ranks of the trainer send, each by vLLM's trainer side
of the engine, while rank 0 calls the servers' endpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from moe_replay.errors import EngineError, MissingExtraError
from moe_replay.rollout.vllm.layer_shares import LayerShares
from moe_replay.rollout.weights.transfer import Transfer, TransferError

ENGINES: dict[str, tuple[str, str]] = {
    "sharded_rdt": ("vllm.distributed.weight_transfer.sharded_rdt_trainer", "0.30"),
    "nccl_m2n": ("vllm.distributed.weight_transfer.m2n_trainer", "0.32"),
}
"""Module of the trainer's side, and the first release of vLLM that has it of those that are supported."""
RAY = (2, 56)
"""Oldest release of Ray that vLLM's `sharded_rdt` accepts."""
RAY_NAMESPACE = "moe-replay"
Post = Callable[[str, object], Any]


def require_engine(kind: str) -> None:
    """Raise unless what an engine needs beside the trainer is installed here."""
    module, release = ENGINES[kind]
    if find_spec("vllm") is None or find_spec(module) is None:
        found = f"vLLM {_installed('vllm')}" if find_spec("vllm") else "no vLLM"
        raise MissingExtraError(
            f"weights.kind = {kind!r} needs vLLM {release} or later beside the trainer",
            found=found,
            remedy=f"pip install 'vllm>={release},<0.33', or set weights.kind = \"auto\"",
        )
    if kind == "sharded_rdt":
        have = _installed("ray")
        if not have or tuple(int(part) for part in have.split(".")[:2]) < RAY:
            wanted = ".".join(map(str, RAY))
            raise MissingExtraError(
                f"weights.kind = {kind!r} needs Ray {wanted} or later",
                found=f"Ray {have}" if have else "no Ray",
                remedy=f"pip install 'ray>={wanted}', or set weights.kind = \"auto\"",
            )
        if not any(find_spec(name) for name in ("nixl", "rixl")):
            raise MissingExtraError(
                f"weights.kind = {kind!r} needs NIXL", remedy='pip install nixl, or set weights.kind = "auto"'
            )
    elif find_spec("nccl") is None or find_spec("nccl.m2n") is None:
        raise MissingExtraError(
            f"weights.kind = {kind!r} needs NVIDIA's nccl-extensions (nccl.m2n) and NCCL 2.30.5 or later",
            remedy='Build and install it, with VLLM_NCCL_SO_PATH at the same NCCL, or set weights.kind = "auto"',
        )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Server(NamedTuple):
    """A server that waits for weights.

    workers     processes of its engine
    tensor      size of its tensor-parallel groups
    is_new      it does not have the weights that it was sent last: it must be told of the trainer again
    """

    post: Post
    workers: int
    tensor: int = 1
    is_new: bool = False


class EngineTransfer(Transfer):
    """One update of all servers by an engine of vLLM's, for `update_weights`; it has no messages of ours.

    servers   that must take part; the update fails if one does not
    """

    def __init__(self, kind: str, servers: int) -> None:
        super().__init__({}, ())
        self.kind, self._expected = kind, servers
        self._joined: dict[str, Server] = {}
        self._error: str | None = None
        self._changed = threading.Condition()
        self._has_ended = False

    def take_part(self, url: str, server: Server) -> None:
        """Wait while the weights of a server are replaced; raise if that failed. Called where the server is paused."""
        with self._changed:
            self._joined[url] = server
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended)
            if self._error is not None:
                raise TransferError(f"the transfer of weights broke off: {self._error}")

    def wait_for_servers(self) -> Mapping[str, Server]:
        """Return all servers once they wait; raise if one cannot take part."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or len(self._joined) == self._expected)
            if self._error is not None:
                raise TransferError(f"the transfer of weights broke off: {self._error}")
            return dict(sorted(self._joined.items()))

    def end(self, error: str | None = None) -> None:
        """Release all servers, or fail their updates; the first call counts."""
        with self._changed:
            if not self._has_ended:
                self._has_ended, self._error = True, error
            self._changed.notify_all()


class FleetClient:
    """The endpoints of all servers as vLLM's trainer side calls them (`VLLMWeightSyncClient`)."""

    def __init__(self, kind: str, servers: Mapping[str, Server]) -> None:
        self._kind, self._servers = kind, servers
        self._is_open = False

    def renew(self, servers: Mapping[str, Server]) -> None:
        """Call these servers from now on."""
        self._servers = servers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell every server where the trainer is, and with several of them which one it is."""
        numbered = self._kind == "sharded_rdt"
        of_server = [
            init_info | ({"replica_rank": number, "num_replicas": len(self._servers)} if numbered else {})
            for number in range(len(self._servers))
        ]
        self._on_all("/init_weight_transfer_engine", [{"init_info": one} for one in of_server])

    def start_weight_update(self) -> None:
        """Open an update."""
        self._is_open = True
        self._on_all("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have every server receive; returns when all have."""
        self._on_all("/update_weights", [{"update_info": update_info}] * len(self._servers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update. Versions are stamped by the engine's client."""
        self._on_all("/finish_weight_update")
        self._is_open = False

    def abandon(self) -> None:
        """End an update that failed, or the servers would refuse the next."""
        if self._is_open:
            self._is_open = False
            with suppress(EngineError):  # what went wrong before says more
                self._on_all("/finish_weight_update")

    def _on_all(self, path: str, contents: list[Any] | None = None) -> None:
        posts = [server.post for server in self._servers.values()]
        with ThreadPoolExecutor(len(posts)) as threads:
            calls = [
                threads.submit(post, path, content)
                for post, content in zip(posts, contents or [None] * len(posts), strict=True)
            ]
        for call in calls:
            call.result()


def trainer_side(
    kind: str, shares: LayerShares, client: FleetClient | None, rendezvous: Mapping[str, Any], rank: int, ranks: int
) -> Any:
    """Return vLLM's trainer side of an engine, which has met the servers. Called by all ranks.

    client   on rank 0
    rendezvous   what `find_rendezvous` returned there
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    workers, servers = rendezvous["workers"], rendezvous["servers"]
    info: Any
    source: Any = shares
    if kind == "sharded_rdt":
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

        require_ray_worker()
        info = ShardedRDTTrainerInitInfo(
            rank=rank,
            num_consumers=workers,
            workers_per_replica=workers // servers,
            trainer_actor_namespace=RAY_NAMESPACE,
            stall_timeout_s=rendezvous["timeout_s"],
        )
    else:
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo  # type: ignore[import-not-found]

        source = _replicated_source(shares, ranks)
        info = M2NTrainerInitInfo(
            rank=rank,
            master_address=rendezvous["host"],
            master_port=rendezvous["port"],
            world_size=ranks + workers,
            num_trainer_ranks=ranks,
            dst_mesh_dims=(workers // rendezvous["tensor"], rendezvous["tensor"]),
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)  # type: ignore[arg-type]


def find_rendezvous(
    kind: str, servers: Mapping[str, Server], address: Callable[[str], tuple[str, int]]
) -> dict[str, Any]:
    """Return what all ranks must know of the servers; raise if the engine cannot serve them.

    address   returns this machine's address as a server sees it, and a free port
    """
    sizes = {url: server.workers for url, server in servers.items()}
    if len(set(sizes.values())) > 1:
        raise EngineError(f"weights.kind = {kind!r} needs servers of one size", found=sizes)
    if kind == "nccl_m2n" and len(servers) > 1:
        raise EngineError(
            "weights.kind = 'nccl_m2n' has one server, which may have many workers",
            found=f"{len(servers)} servers",
            remedy='Set weights.kind = "sharded_rdt" or "nccl"',
        )
    url, first = next(iter(servers.items()))
    host, port = address(url)
    return {
        "workers": sum(sizes.values()),
        "servers": len(servers),
        "tensor": first.tensor,
        "host": host,
        "port": port,
        "is_new": any(server.is_new for server in servers.values()),
    }


def require_ray_worker() -> None:
    """Raise unless this rank is a Ray worker with a GPU: vLLM's actor beside it is placed on that one."""
    import ray  # type: ignore[import-not-found]

    if not ray.is_initialized() or not ray.get_gpu_ids():
        raise EngineError(
            "weights.kind = 'sharded_rdt' needs every rank of the trainer in a Ray worker with a GPU of its own",
            found="a Ray worker without a GPU" if ray.is_initialized() else "a process outside of Ray",
            remedy='Set cluster.kind = "ray" with the cluster of the servers, or weights.kind = "auto"',
        )


def _replicated_source(shares: LayerShares, ranks: int) -> Any:
    """Return the shares as the source of `nccl_m2n`, which every rank has in full."""
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, M2NParamMeta  # type: ignore[import-not-found]
    from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource  # type: ignore[import-not-found]

    class Source(M2NWeightSource):
        def mesh(self) -> Any:
            return M2NMesh((ranks, 1), 0)

        def metadata(self) -> list[Any]:
            return [M2NParamMeta(name, dtype, shape, None) for name, dtype, shape in shares.metadata()]

        def __iter__(self) -> Any:
            return ((name, tensor.contiguous()) for name, tensor in shares)

    return Source()
