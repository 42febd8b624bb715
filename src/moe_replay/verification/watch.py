"""Alignment tests in training: `AlignmentWatch` samples what a rank replays, `AlignmentCheck` judges all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.device import indices_to_device
from moe_replay.verification.agreement import expert_overlap
from moe_replay.verification.alignment_verdict import Verdict, judge
from moe_replay.verification.sequential import (
    NEAR_SHIFTS,
    EvidenceHistory,
    PlaceCounts,
    RowSample,
    count_places,
    evidence_of,
)
from moe_replay.verification.shift import (
    HERE,
    SHIFTS,
    ShiftTable,
    check_comparable,
    experts_counted,
    foreign_pairs,
    loads_of,
    pair_sums,
)
from moe_replay.verification.verify import VerifyReport, compare
from moe_replay.verification.wrong_rows import above_chance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentWatch:
    """The shift test and the sequential test on a random sample of what one rank replays, cheap enough for every step.

    Each step looks at other layers, sequences and tokens. `measure` returns sums: added over micro-batches and ranks
    (`table.vector()` in an all-reduce) they are the same on every rank, and so is `judge(table, history)`.

    layers      layers looked at on each rank
    sequences   sequences looked at in each micro-batch
    tokens      tokens of each of them, two thirds sampled ones; more where there are fewer sequences
    """

    layers: int = 8
    sequences: int = 8
    tokens: int = 16
    seed: int = 0

    def measure(
        self,
        native: RouteBatch,
        replayed: RouteBatch,
        layout: TokenLayout,
        step: int,
        sampled: np.ndarray | None = None,
    ) -> ShiftTable:
        """Return the sums of one micro-batch: what its routers would choose (`observe=True`), and what was replayed.

        sampled   (num_tokens,) bool: which of the layout's concatenated tokens were sampled. They are tested apart from
                  prompts; without it, the second half of each sequence apart from the first

        Does not synchronize with the device, if `replayed` is there.
        """
        if not native.layers:  # a pipeline stage without routers has nothing to add
            device = native.routed_experts.device
            return ShiftTable.empty(native.source_layers, native.top_k, native.num_experts or 0, device)
        _check_sampled(sampled, layout)
        replayed = _as_replayed(replayed, native)
        check_comparable(native, replayed, layout)
        chance = np.random.default_rng([self.seed, step])
        count = min(self.layers, len(native.layers))
        layers = tuple(sorted(chance.choice(native.layers, count, replace=False).tolist()))
        rows = self.sequences * self.tokens
        sample = RowSample.draw(layout, chance, sequences=self.sequences, rows=rows, sampled=sampled)
        num_experts, model = experts_counted(native, replayed), (native.source_layers, native.top_k)
        if not sample.rows.size:
            return ShiftTable.empty(*model, num_experts, native.routed_experts.device)
        routes = SampledRoutes.gather(native, replayed, sample, layers)
        counts = routes.counts(num_experts)
        sums = routes.shift_sums(counts, num_experts)
        shared = counts.in_replayed[:, 0] / native.top_k
        scores = above_chance(shared, routes.covered, routes.chance(sums), native.top_k)
        evidence = evidence_of(counts, routes.covered[:, None], routes.known, native.top_k).summed(routes.segments)
        units = torch.stack(scores.at_chance())  # two of each sequence
        return ShiftTable(
            *model,
            *routes.spread(sums, len(native.source_layers)),
            sequences=units.unflatten(1, (-1, 2)).any(2).sum(1, dtype=torch.float64),
            log_wealth=evidence.log_wealth,
            unit_counts=evidence.unit_counts,
        )

    def explain(self, native: RouteBatch, replayed: RouteBatch, layout: TokenLayout) -> VerifyReport:
        """Return the whole comparison of one micro-batch of this rank, to name what `judge` has found. Slow."""
        ids = [np.arange(length) for length in layout.lengths]  # positions stand in for token ids
        traces = (batch.to_traces(ids, layout, unverified=True) for batch in (native, _as_replayed(replayed, native)))
        wide = layout.fed.shape[0] > 1 and layout.context_shard is None
        return compare(*traces, width=layout.fed.shape[1] if wide else None)


class AlignmentCheck:
    """Adds up what one rank measures in a step, and judges the sums of all ranks together.

    Evidence that is too weak for a verdict accumulates over steps. It is not saved: a resumed run starts without any.

    topology          routers of the whole model
    device            of the routes
    on_misalignment   stop: raise; warn: log the cause, forget the evidence and go on
    """

    def __init__(
        self,
        topology: MoeTopology,
        device: torch.device,
        watch: AlignmentWatch | None = None,
        *,
        on_misalignment: Literal["stop", "warn"] = "stop",
    ) -> None:
        self.watch = watch or AlignmentWatch()
        self._empty = ShiftTable.empty(topology.layers, topology.top_k, topology.num_experts, device)
        self._table = self._empty
        self._history = EvidenceHistory()
        self._warns = on_misalignment == "warn"
        self._seen: dict[tuple[int, ...], tuple[RouteBatch, RouteBatch, TokenLayout]] = {}

    @property
    def evidence(self) -> float:
        """Evidence against alignment so far, as a power of ten."""
        return self._history.log10

    def add(
        self,
        native: RouteBatch,
        replayed: RouteBatch,
        layout: TokenLayout,
        step: int,
        sampled: np.ndarray | None = None,
    ) -> None:
        """Add a micro-batch of this rank, or of one of its pipeline chunks: the arguments of `AlignmentWatch.measure`.

        Its routes are kept until `check`, those of the latest micro-batch of each chunk, to name the cause.
        """
        if replayed.layers:
            self._table += self.watch.measure(native, replayed, layout, step, sampled)
            self._seen[native.layers] = native, replayed, layout

    def check(self) -> Verdict:
        """Return the verdict on the step. Collective: call on every rank; if routes are misaligned, all of them raise.

        One wait for the device.
        """
        sums = self._table.vector()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        verdict = judge(self._empty.with_vector(sums.cpu()), self._history)
        micro_batches, self._seen, self._table = self._seen, {}, self._empty
        if verdict.status != "misaligned":
            return verdict
        explained = [self.watch.explain(*routes).verdict for routes in micro_batches.values()]
        causes = "".join(f"; {finding.detail}" for finding in explained if finding.status == "misaligned")
        error = AlignmentError(
            f"the rollout's routes are not those of the tokens they are used for: {verdict.detail}{causes}",
            expected="routes that agree best with the trainer's own at the same token and layer",
            remedy="Nothing was trained on the routes of this step; `moe-replay verify` shows where they go wrong",
        )
        if not self._warns:
            raise error
        logger.warning("%s", error.problem)
        self._history = EvidenceHistory()
        return verdict


def _check_sampled(sampled: np.ndarray | None, layout: TokenLayout) -> None:
    if sampled is not None and (sampled.dtype != bool or sampled.shape != (layout.num_tokens,)):
        raise AlignmentError(
            "`sampled` does not say for each token of the micro-batch whether it was sampled",
            expected=f"bool ({layout.num_tokens},): the tokens of all sequences, concatenated",
            found=f"{sampled.dtype} {sampled.shape}",
        )


def _as_replayed(replayed: RouteBatch, native: RouteBatch) -> RouteBatch:
    """Return what `replay` made of a batch: the layers that ran, on their device."""
    chosen = replayed if replayed.layers == native.layers else replayed.select_layers(native.layers)
    return chosen.to(native.routed_experts.device)


# In `RowSample.index`: the rows at each token shift, and the next token.
_MOVED = [0 if shift == 0 else 1 + NEAR_SHIFTS.index(-shift) for shift in SHIFTS]
_NEXT = _MOVED[HERE + 1]


class SampledRoutes(NamedTuple):
    """Routes of the rows of a sample (U units of M rows) and of their alternatives, in l layers that were drawn."""

    native: Tensor  # (l, 1 + P + C, U, M, K): of own rows, of the alternatives, of controls
    exists: Tensor  # (1 + P + C, U, M) bool: where there is such a row
    known: Tensor  # (l or 1, 1 + P + C, U, M) bool: where it has a native route
    replayed: Tensor  # (l, S, S, U, M, K): at each shift of layers and tokens
    replayed_known: Tensor  # (l, S, S, U, M) bool: where anything is replayed
    nearby: Tensor  # (s, U, M, K): replayed in own rows of each layer that is at most two from one of the l
    nearby_known: Tensor  # (s, U, M) bool
    layers: Tensor  # (l,) int64: indices of the l layers in the table
    loads: Tensor  # (l + s,) int64: indices in its loads of the l layers, natively, and of the s layers, replayed
    same_layer: Tensor  # (l,) int64: of these l + s, what the l layers replay
    segments: Tensor  # (segments, U) float64: 1 for the segment of each unit, else 0

    @classmethod
    def gather(
        cls, native: RouteBatch, replayed: RouteBatch, sample: RowSample, layers: tuple[int, ...]
    ) -> SampledRoutes:
        """Gather what a sample needs of two batches with the same layers and rows, without synchronizing."""
        slots = np.searchsorted(native.layers, layers)
        around = slots[:, None] + np.array(SHIFTS)  # (l, S)
        inside = (around >= 0) & (around < len(native.layers))
        reach = np.unique(around[inside])
        of_table = np.searchsorted(native.source_layers, native.layers)
        index = sample.index
        rows, drawn, there, near, indices, loads, same_layer, segments = indices_to_device(
            native.routed_experts.device,
            np.concatenate([index, index[_MOVED]]),
            slots[:, None],
            np.where(inside, around, -1)[..., None],
            reach[:, None],
            of_table[slots],
            np.concatenate([2 * of_table[slots], 2 * of_table[reach] + 1]),
            len(slots) + np.searchsorted(reach, slots),
            sample.segments,
        )
        # An index of -1 means none. It reads the last row or layer, which then is not counted.
        exists, moved_exist = (rows >= 0).split([len(index), len(SHIFTS)])
        everywhere, own_rows, moved = rows[: len(index)].flatten(), rows[0].flatten(), rows[len(index) :].flatten()
        known = exists[None]
        if not all(native.all_valid):
            known = native.valid[drawn, everywhere].view(-1, *index.shape) & known
        shape, around_shape, top_k = sample.rows.shape, (*around.shape, *moved_exist.shape), native.top_k
        return cls(
            native=native.routed_experts[drawn, everywhere].view(-1, *index.shape, top_k),
            exists=exists,
            known=known,
            replayed=replayed.routed_experts[there, moved].view(*around_shape, top_k),
            replayed_known=replayed.valid[there, moved].view(around_shape)
            & (moved_exist & (there >= 0)[..., None, None]),
            nearby=replayed.routed_experts[near, own_rows].view(-1, *shape, top_k),
            nearby_known=replayed.valid[near, own_rows].view(-1, *shape) & exists[0],
            layers=indices,
            loads=loads,
            same_layer=same_layer,
            segments=segments.double(),
        )

    @property
    def covered(self) -> Tensor:
        """(l, U, M) bool: own rows that replay a route."""
        return self.replayed_known[:, HERE, HERE]

    def counts(self, num_experts: int) -> PlaceCounts:
        """Return what the alternatives have in common with their rows."""
        return count_places(self.native.long(), self.replayed[:, HERE, HERE].long()[:, None], num_experts)

    def shift_sums(self, counts: PlaceCounts, num_experts: int) -> ShiftSums:
        """Return the sums of the shift test over the rows of the sample."""
        chosen, top_k = self.native[:, 0], self.native.shape[-1]
        shared = expert_overlap(chosen[:, None, None], self.replayed).double()
        follows = self.covered & self.known[:, _NEXT]
        overlap = (counts.in_own[:, _NEXT] * follows).sum((1, 2), dtype=torch.float64) / top_k
        return ShiftSums(
            pairs=pair_sums(shared, self.replayed_known & self.covered[:, None, None]),
            loads=loads_of(
                torch.cat([chosen, self.nearby]).flatten(1, 2),
                torch.cat([self.covered, self.nearby_known]).flatten(1),
                num_experts,
            ),
            next_token_overlap=torch.stack([overlap, follows.sum((1, 2), dtype=torch.float64)], 1),
        )

    def chance(self, sums: ShiftSums) -> Tensor:
        """Return (l,): what routes of different tokens share, NaN or 1 without any."""
        loads, top_k = sums.loads[: len(self.layers)], self.native.shape[-1]
        common, pairs = foreign_pairs(loads, sums.loads[self.same_layer], sums.pairs[:, HERE, HERE], top_k)
        return (common / pairs).clamp(0, 1)

    def spread(self, sums: ShiftSums, layers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs (L, S, S, 5), loads (L, 2, E + 1), next_token_overlap (L, 2) of a table of L layers."""
        loads = sums.loads.new_zeros(2 * layers, sums.loads.shape[1]).index_copy_(0, self.loads, sums.loads)
        pairs, next_token_overlap = (
            part.new_zeros(layers, *part.shape[1:]).index_copy_(0, self.layers, part)
            for part in (sums.pairs, sums.next_token_overlap)
        )
        return pairs, loads.unflatten(0, (layers, 2)), next_token_overlap


class ShiftSums(NamedTuple):
    """Sums of `ShiftTable`: pairs (l, S, S, 5), loads (l + s, E + 1), next_token_overlap (l, 2)."""

    pairs: Tensor
    loads: Tensor
    next_token_overlap: Tensor
