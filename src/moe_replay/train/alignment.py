"""The alignment tests of every step: whether the rollout's routes belong to the tokens and layers they are used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch.distributed as dist

from moe_replay.diagnostics.sequential import EvidenceHistory
from moe_replay.diagnostics.shift import ShiftTable
from moe_replay.diagnostics.verdict import judge
from moe_replay.diagnostics.watch import AlignmentWatch
from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends.base import Backend
from moe_replay.train.micro_batch import MicroBatch

Routes = Mapping[int, RouteBatch]
"""Chunk of the policy on this rank -> routes of its layers; a chunk without routers has routes of no layer."""


class Alignment:
    """Samples one micro-batch of each rank in every step, and judges the samples of all ranks together.

    Evidence that is too weak for a verdict accumulates over steps. It is not saved: a resumed run starts without any.
    """

    def __init__(self, backend: Backend, watch: AlignmentWatch | None = None) -> None:
        topology = backend.topology
        self._empty = ShiftTable.empty(topology.layers, topology.top_k, topology.num_experts, backend.device)
        self._table = self._empty
        self._watch = watch or AlignmentWatch()
        self._history = EvidenceHistory()
        self._seen: tuple[Routes, Routes, TokenLayout] | None = None

    def choose(self, batches: Sequence[MicroBatch], step: int) -> MicroBatch | None:
        """Return the micro-batch to look at, chosen at random from those of this rank that are no dummies."""
        candidates = [batch for batch in batches if not batch.is_dummy]
        chance = np.random.default_rng([self._watch.seed, step, 1])
        return candidates[int(chance.integers(len(candidates)))] if candidates else None

    def look_at(self, batch: MicroBatch, step: int) -> None:
        """Sample what the trainer's routers choose and what the rollout recorded, for the rows of a micro-batch."""
        native, rollout, layout = self._seen = batch.native_routes, batch.rollout_routes, batch.layout
        sampled = np.concatenate([trajectory.sampled for trajectory in batch.trajectories])
        for chunk, given in _with_routers(rollout):
            self._table += self._watch.measure(native[chunk], given, layout, step, sampled)

    def check(self) -> dict[str, float]:
        """Return the metrics of the step; raise on every rank if routes are not aligned. All ranks call it."""
        sums = self._table.vector()
        dist.all_reduce(sums)
        verdict = judge(self._empty.with_vector(sums.cpu()), self._history)  # the only wait for the device
        if verdict.status == "misaligned":
            raise AlignmentError(
                f"the rollout's routes are not those of the tokens they are used for: {verdict.detail}{self._named()}",
                expected="routes that agree best with the trainer's own at the same token and layer",
                remedy="Nothing was trained on the routes of this step; `moe-replay verify` shows where they go wrong",
            )
        self._table, self._seen = self._empty, None
        return {"routing/aligned": verdict.metric, "routing/misalignment_evidence": round(self._history.log10, 2)}

    def _named(self) -> str:
        """Name the cause, from the whole micro-batch that this rank looked at."""
        if self._seen is None:
            return ""
        native, rollout, layout = self._seen
        found = [self._watch.explain(native[chunk], given, layout).verdict for chunk, given in _with_routers(rollout)]
        return "".join(f"; {one.detail}" for one in found if one.status == "misaligned")


def _with_routers(routes: Routes) -> list[tuple[int, RouteBatch]]:
    return [(chunk, batch) for chunk, batch in routes.items() if batch.layers]
