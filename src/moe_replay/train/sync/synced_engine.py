"""`SyncedEngine`: the engine of a run. Its samples come from weights that this run has sent, or are refused."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from moe_replay.engines.base import Engine, Refusals, Sampler, ServerState
from moe_replay.engines.requests import LOWEST_LOGPROB, first_impossible
from moe_replay.errors import EngineAnswerError, EngineName
from moe_replay.records import Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.identity import Probe, WeightsLedger, new_weights_id
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.source import Weights
from moe_replay.weights.transfer import Receivers, Transfer


class Followers(Protocol):
    """Other processes that sample from the same servers."""

    def follow_update(self, version: int, weights_id: str) -> None:
        """Hold requests back, and accept samples of this update from now on; returns when all do."""

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Resume after an update, with the servers that have taken it."""

    @property
    def refusals(self) -> Refusals:
        """Requests so far whose answer was refused in these processes."""


class SyncedEngine(Sampler):
    """An engine with the ids of the weights that it was sent. Nothing is checked before the first update.

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
    def is_serial(self) -> bool:
        return self.engine.is_serial

    def healthy(self) -> bool:
        return self.engine.healthy()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt; raise if one is of other weights than were sent, or impossible."""
        groups = self.engine.generate(prompts, params)
        for samples in groups:
            self._check(samples)
        return groups

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt; raise if one is of other weights than were sent, or impossible."""
        samples = await self.engine.generate_one(prompt, params)
        self._check(samples)
        return samples

    def _check(self, samples: Sequence[Sample]) -> None:
        self._ledger.check(samples)
        for index, sample in enumerate(samples):
            if (impossible := first_impossible(sample.logprobs)) is not None:
                raise EngineAnswerError(
                    f"{self.name} returned an impossible log-prob",
                    sample=index,
                    expected=f"from {LOWEST_LOGPROB:g} to 0",
                    found=impossible,
                    remedy="Its weights, or what it computes with them, overflow: after a step of training, lower "
                    "optim.lr. Nothing was trained on the sample",
                )

    @property
    def refusals(self) -> Refusals:
        """Requests so far whose answer was refused, here and in the processes that follow."""
        followed = Counter() if self.followers is None else Counter(self.followers.refusals)
        return followed + Counter(self.engine.refusals)

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Send weights under a new id, or under the same one as before if they are of the same version."""
        with self._update(version, probe) as weights_id:
            self.engine.update_weights(weights, version, probe, weights_id)

    def receive_weights(self, transfer: Transfer, version: int, probe: Probe | None = None) -> None:
        """Have the engine take part in a transfer, under an id as for `update_weights`."""
        with self._update(version, probe) as weights_id:
            self.engine.receive_weights(transfer, version, probe, weights_id)

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None) -> None:
        """Send an adapter under an id as for `update_weights`; raise if the engine takes none."""
        with self._update(version, probe) as weights_id:
            self.engine.update_adapter(adapter, version, probe, weights_id)

    @contextmanager
    def _update(self, version: int, probe: Probe | None) -> Iterator[str]:
        """Yield the id of an update; other processes that sample wait while the servers are updated."""
        weights_id = self._ledger.id_of(version) or new_weights_id(self._run_id, version, probe)
        self._ledger.record(version, weights_id)
        if self.followers is None:
            yield weights_id
            return
        self.followers.follow_update(version, weights_id)
        try:
            yield weights_id
        finally:
            self.followers.follow_servers(self.engine.server_states)

    def transfer_targets(self, version: int) -> dict[str, Receivers] | None:
        """Return the workers that would take part in a transfer, by URL; None if an engine takes no transfers.

        Engines that cannot be reached are left out, and with weights that were sent before those that have them;
        none may be left.
        """
        by_url = self.engine.receivers_by_url(self._ledger.id_of(version) or "")
        targets = {url: receivers for url, receivers in by_url.items() if receivers is not None}
        return targets if len(targets) == len(by_url) else None

    def bytes_sent(self) -> int | None:
        """Return the bytes that the last update sent to a server in requests; None: not known."""
        return self.engine.bytes_sent

    def shared_digests(self) -> Mapping[str, str]:
        return self.engine.shared_digests()

    # ---- servers and memory -------------------------------------------------------------------------------------

    def server_count(self) -> int:
        return self.engine.server_count()

    def unreachable(self) -> list[str]:
        return self.engine.unreachable()

    def exclude(self, url: str, cause: str) -> None:
        self.engine.exclude(url, cause)

    def lacks_weights(self) -> bool:
        return self.engine.lacks_weights()

    def wait_for_servers(self) -> bool:
        return self.engine.wait_for_servers()

    def sleep(self, level: int = 1) -> None:
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.wake()

    def wake_for_update(self) -> None:
        self.engine.wake_for_update()

    # ---- in a process that only samples -------------------------------------------------------------------------

    def follow_update(self, version: int, weights_id: str) -> None:
        """Accept samples of an update that another process sends to the servers, and hold requests back until then."""
        self._ledger.record(version, weights_id)
        self.engine.follow_update(version, weights_id)

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Resume after such an update."""
        self.engine.follow_servers(states)

    def close(self) -> None:
        self.engine.close()
