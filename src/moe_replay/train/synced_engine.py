"""`SyncedEngine`: the engine of a run. Its samples come from weights that this run has sent, or are refused."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from moe_replay.errors import EngineError, EngineName
from moe_replay.rollout.adapter import Adapter, adapter_update
from moe_replay.rollout.engine import Engine, put_to_sleep, receivers_of, wake_for_update
from moe_replay.rollout.pool import EnginePool
from moe_replay.rollout.pool_member import ServerState
from moe_replay.rollout.types import Probe, Sample, SamplingParams
from moe_replay.rollout.weights.identity import WeightsLedger, identifies_weights, new_weights_id, takes_weights_id
from moe_replay.rollout.weights.transfer import Receivers
from moe_replay.rollout.weights.types import Weights
from moe_replay.routes.topology import MoeTopology


class Followers(Protocol):
    """Other processes that sample from the same servers."""

    def follow_update(self, version: int, weights_id: str) -> None:
        """Hold requests back, and accept samples of this update from now on; returns when all do."""
        ...

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Resume after an update, with the servers that have taken it."""
        ...


class SyncedEngine:
    """An engine with the ids of the weights that it was sent. Nothing is checked before the first update.

    An engine of the user's own whose `update_weights` has no parameter `weights_id` is checked by version alone.

    followers   notified before and after every update; None: only this process samples
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._run_id = secrets.token_hex(6)
        self._ledger = WeightsLedger("the rollout engine")
        self.followers: Followers | None = None

    @property
    def name(self) -> EngineName:
        return self.engine.name

    @property
    def topology(self) -> MoeTopology:
        return self.engine.topology

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    @property
    def one_call_at_a_time(self) -> bool:
        """Whether concurrent calls of the engine wait for each other, so that fewer and larger ones are faster."""
        return bool(getattr(self.engine, "one_call_at_a_time", False))

    def healthy(self) -> bool:
        """Whether the engine is alive."""
        return self.engine.healthy()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt; raise if one is of other weights than were sent."""
        groups = self.engine.generate(prompts, params)
        for samples in groups:
            self._check(samples)
        return groups

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt; raise if one is of other weights than were sent."""
        samples = await self.engine.generate_one(prompt, params)
        self._check(samples)
        return samples

    def _check(self, samples: Sequence[Sample]) -> None:
        self._ledger.check(samples, identifies_weights(self.engine))

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Send weights under a new id, or under the same one as before if they are of the same version."""
        weights_id = self._new_id(version, probe)
        with self._followed(version, weights_id):
            if takes_weights_id(self.engine):
                self.engine.update_weights(weights, version, probe, weights_id=weights_id)
            else:
                self.engine.update_weights(weights, version, probe)

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None) -> None:
        """Send an adapter in the same way; raise if the engine takes none."""
        update = adapter_update(self.engine)
        weights_id = self._new_id(version, probe)
        with self._followed(version, weights_id):
            update(adapter, version, probe, weights_id=weights_id)

    @contextmanager
    def _followed(self, version: int, weights_id: str) -> Iterator[None]:
        """Have other processes that sample wait while the servers are updated."""
        if self.followers is None:
            yield
            return
        self.followers.follow_update(version, weights_id)
        try:
            yield
        finally:
            states: Mapping[str, ServerState] = getattr(self.engine, "server_states", {})
            self.followers.follow_servers(states)

    # ---- in such a process --------------------------------------------------------------------------------------

    def follow_update(self, version: int, weights_id: str) -> None:
        """Accept samples of an update that another process sends to the servers, and hold requests back meanwhile."""
        self._ledger.record(version, weights_id)
        self._pool.follow_update(version, weights_id)

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Resume after such an update."""
        self._pool.follow_servers(states)

    @property
    def _pool(self) -> EnginePool:
        if not isinstance(self.engine, EnginePool):
            raise EngineError(
                f"{self.name} cannot be used by several processes",
                expected="a pool of servers",
                remedy="Set rollout.drivers = 1",
            )
        return self.engine

    def _new_id(self, version: int, probe: Probe | None) -> str:
        weights_id = self._ledger.id_of(version) or new_weights_id(self._run_id, version, probe)
        self._ledger.record(version, weights_id)
        return weights_id

    def transfer_targets(self, version: int) -> dict[str, Receivers] | None:
        """Return the workers that would take part in a transfer, by URL; None if an engine takes no transfers.

        Engines that cannot be reached are left out, and with weights that were sent before those that have them;
        none may be left.
        """
        of_pool = getattr(self.engine, "receivers_by_url", None)
        if of_pool is None:
            own_thread = getattr(self.engine, "receives_in_caller", False)
            found = {"": None if own_thread else receivers_of(self.engine)}
        else:
            found = of_pool(self._ledger.id_of(version) or "")
        known = {url: one for url, one in found.items() if one is not None}
        return known if len(known) == len(found) else None

    def servers(self) -> int:
        """Return how many servers the engine consists of."""
        return int(getattr(self.engine, "servers", 1))

    def unreachable(self) -> list[str]:
        """Return the servers that do not answer."""
        of_pool = getattr(self.engine, "unreachable", None)
        return [] if of_pool is None else of_pool()

    def bytes_sent(self) -> int | None:
        """Return the bytes that the last update sent to an engine in requests; None if that is not known."""
        return getattr(self.engine, "bytes_sent", None)

    def lacks_weights(self) -> bool:
        """Return whether a server that can be reached has lost the weights that it was sent."""
        lacks = getattr(self.engine, "lacks_weights", None)
        return lacks is not None and lacks()

    def wait_for_servers(self) -> bool:
        """Wait while no server can be reached, if lost ones are replaced; return whether one can be then."""
        wait = getattr(self.engine, "wait_for_servers", None)
        return wait is not None and wait()

    def sleep(self, level: int = 1) -> None:
        """Free the engine's memory; with level 2 it need not keep its weights, where it can drop them."""
        put_to_sleep(self.engine, level)

    def wake(self) -> None:
        """Undo `sleep`."""
        self.engine.wake()

    def wake_for_update(self) -> None:
        """Wake the engine for the update that comes next."""
        wake_for_update(self.engine)

    def close(self) -> None:
        """Release all resources of the engine."""
        self.engine.close()
