"""The shift test of every step: whether the rollout's routes belong to the tokens and layers they are used for."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from moe_replay.diagnostics.shift import ShiftTable
from moe_replay.diagnostics.verdict import judge
from moe_replay.diagnostics.watch import AlignmentWatch
from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends.base import Backend

Routes = Mapping[int, RouteBatch]
"""Chunk of the policy on this rank -> routes of its layers; a chunk without routers has routes of no layer."""


class Alignment:
    """Samples the first micro-batch of each rank, and judges the samples of all ranks together."""

    def __init__(self, backend: Backend, step: int, watch: AlignmentWatch | None = None) -> None:
        topology = backend.topology
        self._table = ShiftTable.empty(topology.layers, topology.top_k, topology.num_experts, backend.device)
        self._step = step
        self._watch = watch or AlignmentWatch()
        self._seen: tuple[Routes, Routes, TokenLayout] | None = None

    def look_at(self, native: Routes, rollout: Routes, layout: TokenLayout) -> None:
        """Sample what the trainer's routers choose and what the rollout recorded, for the rows of one micro-batch."""
        if self._seen is not None:
            return
        self._seen = native, rollout, layout
        for chunk, given in _with_routers(rollout):
            self._table += self._watch.measure(native[chunk], given, layout, self._step)

    def checked(self) -> float:
        """Return 1 if aligned, NaN with too few tokens to tell; raise on every rank if not. All ranks call it."""
        sums = self._table.vector()
        dist.all_reduce(sums)
        verdict = judge(self._table.with_vector(sums))
        if verdict.status == "misaligned":
            raise AlignmentError(
                f"the rollout's routes are not those of the tokens they are used for: {verdict.detail}{self._named()}",
                expected="routes that agree best with the trainer's own at the same token and layer",
                remedy="Nothing was trained on them; `moe-replay verify` shows where they go wrong",
            )
        return verdict.metric

    def _named(self) -> str:
        """Name the cause, from the whole first micro-batch of this rank."""
        if self._seen is None:
            return ""
        native, rollout, layout = self._seen
        found = [self._watch.explain(native[chunk], given, layout).verdict for chunk, given in _with_routers(rollout)]
        return "".join(f"; {one.detail}" for one in found if one.status == "misaligned")


def _with_routers(routes: Routes) -> list[tuple[int, RouteBatch]]:
    return [(chunk, batch) for chunk, batch in routes.items() if batch.layers]
