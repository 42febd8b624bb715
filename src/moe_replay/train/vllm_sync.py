"""Updates of plain vLLM servers by vLLM's own transfer engines, in which all ranks of the trainer send."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from moe_replay.distributed.ranks import from_rank_0, raise_on_all_ranks, rank, world_size
from moe_replay.errors import EngineError
from moe_replay.rollout.plain_vllm.weights import own_address
from moe_replay.rollout.types import Probe
from moe_replay.rollout.vllm.layer_shares import LayerShares
from moe_replay.rollout.vllm.transfer_engines import (
    EngineTransfer,
    FleetClient,
    find_rendezvous,
    require_engine,
    trainer_side,
)
from moe_replay.rollout.weights.source import WeightSource
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.utils.messages import one_line

DOING = "updating the weights of the engine"


class VllmSync:
    """Sends weights by the engine `config.kind`. All ranks make and call it; rank 0 alone has the servers.

    The trainer's side of the engine is kept from one update to the next, and made anew after a failure and when a
    server has been restarted.
    """

    def __init__(self, config: WeightsConfig) -> None:
        with raise_on_all_ranks(f"looking for what weights.kind = {config.kind!r} needs"):
            require_engine(config.kind)
        self._config = config
        self._shares: LayerShares | None = None
        self._side: Any = None
        self._client: FleetClient | None = None

    def send(self, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None) -> int:
        """Send all weights and return their bytes."""
        if self._shares is None:
            self._shares = LayerShares(source, replicated=self._config.kind == "nccl_m2n")
        shares = self._shares
        shares.use(source)
        with ThreadPoolExecutor(1) as thread:
            update = _Update(self._config.kind, thread, engine, version, probe)
            rendezvous = json.loads(
                from_rank_0(lambda: self._rendezvous(update), "preparing an update of the engine's weights")
            )
            with raise_on_all_ranks(DOING):
                with ExitStack() as undo:
                    undo.push(partial(self._broke_off, update, shares))
                    self._send(shares, rendezvous)
                    shares.finish()
                    undo.pop_all()
                update.end()
                update.result()
        return sum(info.nbytes for info in shares.metadata())

    def _rendezvous(self, update: _Update) -> str:
        """Pause all servers; on rank 0."""
        servers = update.wait_for_servers()
        rendezvous = find_rendezvous(self._config.kind, servers, own_address)
        if self._client is None:
            self._client = FleetClient(self._config.kind, servers)
        self._client.renew(servers)
        return json.dumps(rendezvous | {"timeout_s": self._config.timeout_s})

    def _send(self, shares: LayerShares, rendezvous: dict[str, Any]) -> None:
        if rendezvous["is_new"]:
            self._drop()
        if self._side is None:
            self._side = trainer_side(self._config.kind, shares, self._client, rendezvous, rank(), world_size())
        self._side.send_weights()

    def _broke_off(
        self, update: _Update, shares: LayerShares, kind: type | None, error: BaseException | None, traceback: object
    ) -> None:
        self._drop()  # while the servers are paused
        update.end("broke off" if error is None else one_line(error))
        if isinstance(error, Exception):  # else this process is ending, and must not wait for the others
            shares.finish()

    def _drop(self) -> None:
        """End the trainer's side of the engine."""
        if self._client is not None:
            self._client.abandon()
        side, self._side = self._side, None
        if side is not None:
            side.shutdown()


class _Update:
    """The update of the servers, which runs beside the ranks' own part; nothing on ranks other than 0."""

    def __init__(
        self, kind: str, thread: ThreadPoolExecutor, engine: SyncedEngine | None, version: int, probe: Probe | None
    ) -> None:
        self._transfer: EngineTransfer | None = None
        self._call: Future[None] | None = None
        if engine is not None:
            self._transfer = EngineTransfer(kind, engine.servers())
            self._call = thread.submit(engine.update_weights, self._transfer, version, probe)
            self._call.add_done_callback(self._ended)

    def _ended(self, call: Future[None]) -> None:
        """Release the thread that waits for the servers."""
        assert self._transfer is not None
        error = call.exception()
        self._transfer.end("the servers' update has ended" if error is None else one_line(error))

    def wait_for_servers(self) -> Any:
        assert self._transfer is not None
        try:
            return self._transfer.wait_for_servers()
        except EngineError:
            self.result()  # says more
            raise

    def end(self, error: str | None = None) -> None:
        if self._transfer is not None:
            self._transfer.end(error)

    def result(self) -> None:
        if self._call is not None:
            self._call.result()
