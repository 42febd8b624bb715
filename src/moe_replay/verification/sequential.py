"""The sequential test of alignment: paired comparisons with alternatives, and evidence that accumulates over steps.

A row has replayed routes. The row itself and an alternative (a token before or after, the same position of another
sequence, a row at random) have native routes. Only the experts that one of the two has and the other has not tell them
apart: the vote of a (row, layer) is the fraction of these that the replayed routes share with the alternative, less the
fraction that they share with the row itself: from -1, all of them evidence for the row, to 1, all for the alternative.

The null hypothesis, given everything seen before: the expected vote is at most

- AHEAD for a given alternative. It does not matter how well engine and trainer agree, since both rows are compared
  with the same replayed routes;
- -BEHIND for a random row: routes agree with native ones that much better than chance.

Against each of these the test bets: wealth grows by 1 + stake * (vote - bound), whose expectation is then at most 1.
There is a bet on every hypothesis: which alternative the routes of a unit (`RowSample`) belong to; whether all of
its rows, some of them or some of its layers are affected; whether few or many units are. Wealth is multiplied over
rows, layers, units, ranks and steps, and averaged over hypotheses.

Equal questions (the same two sets of experts in the same layer of a unit, as in repeated text) count once. Rows that
have almost the same routes count less, in other sequences not at all: it may be the same prompt.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.utils.device import to_device

PROMPT, SAMPLED, UNKNOWN = SEGMENTS = range(3)
NUM_CONTROLS = 4
SAMPLED_FRACTION = 2 / 3  # of the rows that are drawn from a sequence
NEAR_SHIFTS = (1, -1, 2, -2)
MAX_SHIFT = 12
NEAR_SEQUENCES = (1, -1, 2, -2, 3, -3)
OTHER_SEQUENCES = 6
SHIFTS = (*NEAR_SHIFTS, *(sign * shift for shift in range(3, MAX_SHIFT + 1) for sign in (1, -1)))
NUM_ALTERNATIVES = len(SHIFTS) + len(NEAR_SEQUENCES) + OTHER_SEQUENCES


@dataclass(frozen=True, eq=False, slots=True)
class RowSample:
    """Rows of U units, up to M each, and for each row the alternatives: other rows that its routes may belong to."""

    rows: np.ndarray  # (U, M) int64: rows of the layout; -1 where a unit has fewer
    sequence: np.ndarray  # (U,) int64: the sequence of each unit
    segment: np.ndarray  # (U,) int64: PROMPT, SAMPLED or UNKNOWN
    # (P, U, M) int64: other rows, -1 where this rank has none: first the token that many tokens before, for each of
    # `SHIFTS`; then the same position in other sequences, the nearest first
    alternatives: np.ndarray
    controls: np.ndarray  # (NUM_CONTROLS, U, M) int64: rows drawn at random

    @classmethod
    def draw(
        cls,
        layout: TokenLayout,
        chance: np.random.Generator,
        *,
        sequences: int,
        rows: int,
        sampled: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> RowSample:
        """Draw `rows` rows altogether, from at most `sequences` sequences, uniformly within each unit.

        sampled   (num_tokens,) bool: which of the concatenated tokens were sampled
        allowed   rows to draw from; all that hold a token where None
        """
        allowed = np.flatnonzero(layout.rows != PADDING) if allowed is None else allowed
        row_of = np.full(layout.num_tokens + 1, PADDING)
        row_of[layout.rows[allowed]] = allowed
        before = np.concatenate([[0], np.cumsum(row_of[:-1] != PADDING)])[layout.starts]  # tokens before each
        chosen = chance.permutation(np.flatnonzero(np.diff(before)))[:sequences]
        per_sequence = max(rows // max(len(chosen), 1), 2)
        units, segments = [], []
        for sequence in chosen:
            tokens = slice(layout.starts[sequence], layout.starts[sequence + 1])
            for segment, part in _split(
                row_of[tokens], None if sampled is None else sampled[tokens], per_sequence, chance
            ):
                units.append(part)
                segments.append(segment)
        widest = max(map(len, units), default=0)
        picked = np.full((len(units), widest), PADDING)
        for unit, part in enumerate(units):
            picked[unit, : len(part)] = part
        of_unit = np.repeat(chosen, 2)
        return cls(
            rows=picked,
            sequence=of_unit,
            segment=np.array(segments, np.int64),
            alternatives=_alternatives(layout, picked, of_unit, row_of, chance),
            controls=_controls(picked, allowed, chance),
        )

    @property
    def present(self) -> np.ndarray:
        """(U, M) bool: where there is a row."""
        return self.rows != PADDING

    @property
    def index(self) -> np.ndarray:
        """(1 + P + NUM_CONTROLS, U, M) int64: `rows`, then `alternatives`, then `controls`."""
        return np.concatenate([self.rows[None], self.alternatives, self.controls])

    @property
    def segments(self) -> np.ndarray:
        """(segments, U) float64: 1 for the segment of each unit, else 0."""
        return (self.segment == np.array(SEGMENTS)[:, None]).astype(np.float64)

    def part(self, first: int, last: int) -> RowSample:
        """Return the units from `first` up to `last`."""
        units = slice(first, last)
        return RowSample(
            rows=self.rows[units],
            sequence=self.sequence[units],
            segment=self.segment[units],
            alternatives=self.alternatives[:, units],
            controls=self.controls[:, units],
        )


def _split(
    rows: np.ndarray, sampled: np.ndarray | None, per_sequence: int, chance: np.random.Generator
) -> list[tuple[int, np.ndarray]]:
    """Return two units of one sequence, `per_sequence` rows together: prompt and sampled tokens, or two halves.

    rows      (T,) rows of its tokens, PADDING for those that are not drawn from
    sampled   (T,) bool, or None where not known
    """
    here = rows != PADDING
    if sampled is None:
        allowed = rows[here]
        half = len(allowed) // 2
        parts, num_sampled = (allowed[:half], allowed[half:]), per_sequence // 2
        segments = (UNKNOWN, UNKNOWN)
    else:
        parts, num_sampled = (rows[here & ~sampled], rows[here & sampled]), round(SAMPLED_FRACTION * per_sequence)
        segments = (PROMPT, SAMPLED)
    last = min(len(parts[1]), max(num_sampled, per_sequence - len(parts[0])))
    return [
        (segment, chance.choice(part, count, replace=False))
        for segment, part, count in zip(segments, parts, (min(per_sequence - last, len(parts[0])), last), strict=True)
    ]


def _alternatives(
    layout: TokenLayout, picked: np.ndarray, sequence: np.ndarray, row_of: np.ndarray, chance: np.random.Generator
) -> np.ndarray:
    lengths, starts = np.array(layout.lengths), layout.starts
    known = picked != PADDING
    position = np.where(known, layout.rows[picked] - starts[sequence][:, None], 0)  # (U, M)
    moved = position - np.array(SHIFTS)[:, None, None]
    others = _others(sequence, len(lengths), chance)
    there = np.concatenate([moved, np.broadcast_to(position, (len(others), *position.shape))])
    origin = np.concatenate([np.broadcast_to(sequence, (len(SHIFTS), len(sequence))), others])[..., None]  # (P, U, 1)
    inside = known & (origin != PADDING) & (there >= 0) & (there < lengths[origin])
    return np.where(inside, row_of[np.where(inside, starts[origin] + there, layout.num_tokens)], PADDING)


def _others(sequence: np.ndarray, count: int, chance: np.random.Generator) -> np.ndarray:
    """Return (alternatives, U): the nearest sequences, then others at random; -1 where there are too few."""
    near = [step for step in NEAR_SEQUENCES if 2 * abs(step) < count or 2 * step == count]
    far = [step for step in chance.permutation(count).tolist() if step and not {step, step - count} & set(near)]
    steps = [*near, *[None] * (len(NEAR_SEQUENCES) - len(near)), *far[:OTHER_SEQUENCES]]
    steps += [None] * (len(NEAR_SEQUENCES) + OTHER_SEQUENCES - len(steps))
    return np.stack([np.full_like(sequence, PADDING) if step is None else (sequence + step) % count for step in steps])


def _controls(picked: np.ndarray, allowed: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    if not len(allowed):
        return np.full((NUM_CONTROLS, *picked.shape), PADDING)
    drawn = allowed[chance.integers(0, len(allowed), (NUM_CONTROLS, *picked.shape))]
    return np.where((drawn == picked) | (picked == PADDING), PADDING, drawn)


class AlternativeKind(IntEnum):
    """Kinds of rows that routes may belong to instead of their own."""

    SHIFTED = 0
    OTHER_SEQUENCE = 1
    FOREIGN = 2


FALSE_ALARMS = 1e-10  # a step, at most: 1e-6 in a run of 10,000 steps
AHEAD = 0.05
BEHIND = 0.25
STAKES = ((0.3, 0.4), (0.9, 1.2))  # on an alternative, on none; below 1 / (1 + AHEAD) and 1 / (1 - BEHIND)
DISTINCT = 0.2  # fraction of their experts, over all layers, in which two rows must differ to count fully
SOME = (0.1, 0.5)  # of the rows or layers of a unit
AFFECTED = (0.05, 0.5)  # fraction of the units
NUM_KINDS = 1 + 2 * len(SOME)
SUSPECT = math.log(1000)  # wealth of a unit that is counted as affected
NUM_HYPOTHESES = NUM_ALTERNATIVES + 1
WEALTH_SHAPE = (len(SEGMENTS), len(AFFECTED), NUM_KINDS, len(STAKES), 1 + NUM_HYPOTHESES)
COUNTS_SHAPE = (len(SEGMENTS), 1 + len(AlternativeKind))
_LARGE = 30.0
_BITS = 12  # of a count of experts
_MASK = (1 << _BITS) - 1
_NEAR, _FAR = len(NEAR_SHIFTS), NUM_ALTERNATIVES - len(NEAR_SHIFTS)
# A third each for the near shifts, for all other alternatives, and for none of them.
_LOG_PRIOR = -np.log(3.0 * np.array([_NEAR] * _NEAR + [_FAR] * _FAR + [1]))
# One half for a separate alternative in each unit, one half for one alternative in all.
_BET_PRIOR = -math.log(2 * math.prod(WEALTH_SHAPE[:-1])) + np.append(0.0, _LOG_PRIOR)


class _Constants(NamedTuple):
    """Constants on a device."""

    stakes: Tensor  # (stakes, 1, H, 1, 1) float32
    some: Tensor  # (some, 1, 1, 1, 1) float32
    affected: Tensor  # (affected, 1, 1, 1, 1) float64
    prior: Tensor  # (H, 1) float64: log
    alternative: Tensor  # (3, H) float64: 1 for the `AlternativeKind` of each hypothesis
    numbers: Tensor  # (3, 1) int64


class EvidenceSums(NamedTuple):
    """Evidence of all units of a row sample."""

    log_wealth: Tensor  # (WEALTH_SHAPE) float64, for any alternative in each unit and for one alternative in all
    # (COUNTS_SHAPE) float64: units with votes by segment, and the suspect ones by `AlternativeKind`
    unit_counts: Tensor
    suspects: Tensor  # (U,) bool: units that are probably affected


class UnitEvidence(NamedTuple):
    """Evidence against the alignment of each unit of a row sample."""

    log_wealth: Tensor  # (kinds, stakes, H, U) float64, for each of H hypotheses: the alternatives, and none of them
    counted: Tensor  # (U,) bool: units with at least one vote

    def summed(self, segments: Tensor) -> EvidenceSums:
        """Return the evidence of all units together, and which of them are suspect.

        segments   (segments, U) float64: 1 for the segment of each unit, else 0
        """
        constants = _constants(self.log_wealth.device)
        weighted = self.log_wealth + constants.prior
        any_place = weighted.logsumexp(2, keepdim=True)  # (kinds, stakes, 1, U)
        bets = _mixed(torch.cat([any_place, self.log_wealth], 2), constants.affected)
        by_unit = any_place.logsumexp((0, 1), keepdim=True)  # (1, 1, 1, U)
        by_alternative = constants.alternative @ (weighted - by_unit).exp().sum((0, 1))  # (3, U): how probable each is
        suspect = by_unit.flatten() > SUSPECT + math.log(NUM_KINDS * len(STAKES))
        alternatives = (by_alternative.argmax(0) == constants.numbers) & suspect
        return EvidenceSums(
            log_wealth=(bets @ segments.T).movedim(-1, 0),
            unit_counts=segments @ torch.cat([self.counted[None], alternatives]).double().T,
            suspects=suspect,
        )


class PlaceCounts(NamedTuple):
    """Overlap of the native routes of a row, of its P alternatives and of C controls with those of the row."""

    name: Tensor  # (L, 1 + P + C, U, M) int32: names the set of experts
    in_own: Tensor  # (L, 1 + P + C, U, M) int64: how many of them the row itself has natively
    in_replayed: Tensor  # (L, 1 + P + C, U, M) int64: how many of them the row replays


def count_places(native: Tensor, replayed: Tensor, num_experts: int) -> PlaceCounts:
    """Return the counts of native routes (L, 1 + P + C, U, M, K) and replayed ones (L, 1, U, M, K), int64 both."""
    ids = torch.cat([native[:, :1], replayed], 1)
    member = torch.zeros(*ids.shape[:-1], num_experts, dtype=torch.int64, device=ids.device).scatter_(-1, ids, 1)
    # What is known of each expert in one number: name, whether the row itself has it, whether the replayed route does.
    # Then one gather and one sum serve three counts.
    facts = _names(num_experts, ids.device).add(member[:, :1], alpha=1 << _BITS).add_(member[:, 1:])
    sums = facts.expand(-1, native.shape[1], -1, -1, -1).gather(-1, native).sum(-1)
    return PlaceCounts((sums >> (2 * _BITS)).int(), (sums >> _BITS) & _MASK, sums & _MASK)


def unit_evidence(native: RouteBatch, replayed: RouteBatch, sample: RowSample, num_experts: int) -> UnitEvidence:
    index = to_device(sample.index, native.routed_experts.device)
    known = native.valid[:, index] & (index >= 0)  # an index of -1 is that of some row
    counts = count_places(
        native.routed_experts[:, index].long(), replayed.routed_experts[:, index[:1]].long(), num_experts
    )
    return evidence_of(counts, replayed.valid[:, index[:1]], known, native.top_k)


def evidence_of(counts: PlaceCounts, covered: Tensor, known: Tensor, top_k: int) -> UnitEvidence:
    """Return the evidence of these counts. Does not synchronize with the device.

    covered   (L, 1, U, M) bool: own rows with a replayed route
    known     (L or 1, 1 + P + C, U, M) bool: rows with native routes
    """
    constants = _constants(covered.device)
    votes, weights = _votes(counts, covered & known[:, :1], known[:, 1:], top_k)
    at_alternative, at_random = votes[:, :NUM_ALTERNATIVES], votes[:, NUM_ALTERNATIVES:]
    controls = weights[:, NUM_ALTERNATIVES:]
    used = controls.sum(1, keepdim=True)
    mean = (at_random * controls).sum(1, keepdim=True) / used.clamp(min=1)
    ahead = torch.cat([at_alternative - AHEAD, mean + BEHIND], 1)  # (L, H, U, M)
    weight = torch.cat([weights[:, :NUM_ALTERNATIVES], used.clamp(max=1)], 1)
    # Of a row that is compared with random ones, it is itself the question.
    own_name = counts.name[:, :1]
    question = torch.cat([counts.name[:, 1 : 1 + NUM_ALTERNATIVES], own_name], 1).add_(own_name, alpha=31)
    counted = weight > 0
    weight = weight / _times_asked(question, counted)

    gain = torch.log1p(constants.stakes * ahead) * weight  # (stakes, L, H, U, M)
    by_row, by_layer = gain.sum(1), gain.sum(-1)  # (stakes, H, U, M), (stakes, L, H, U)
    mixed = _mixed(torch.cat([by_row, by_layer.movedim(1, -1)], -1), constants.some)  # (some, stakes, H, U, M + L)
    rows = by_row.shape[-1]
    kinds = [by_row.sum(-1)[None], mixed[..., :rows].sum(-1), mixed[..., rows:].sum(-1)]
    return UnitEvidence(torch.cat(kinds).double(), counted.any(dim=(0, 1, 3)))


def log_evidence(log_wealth: np.ndarray) -> float:
    """Return the log of the mean wealth over all bets, whose logs are given (WEALTH_SHAPE)."""
    logs = log_wealth + _BET_PRIOR
    largest = logs.max()
    return float(largest + np.log(np.exp(logs - largest).sum()))


@dataclass(eq=False, slots=True)
class EvidenceHistory:
    """Evidence against alignment, accumulated over the steps of a run (CUSUM on log-wealth).

    A bet that has lost is opened again in the next step, so that a fault that begins late is found as fast as one from
    the beginning. In N steps of a healthy run the evidence reaches `1 / FALSE_ALARMS` with a probability of at most
    `N * FALSE_ALARMS`.
    """

    log_wealth: np.ndarray = field(default_factory=lambda: np.zeros(WEALTH_SHAPE))  # (WEALTH_SHAPE)
    # (COUNTS_SHAPE) since the evidence was last below 1
    unit_counts: np.ndarray = field(default_factory=lambda: np.zeros(COUNTS_SHAPE))
    steps: int = 0  # number of these steps

    def add(self, log_wealth: np.ndarray, unit_counts: np.ndarray) -> None:
        """Add the sums of one step, over all ranks."""
        if log_evidence(self.log_wealth) <= 0:
            self.unit_counts, self.steps = np.zeros(COUNTS_SHAPE), 0
        self.log_wealth = np.maximum(self.log_wealth, 0) + log_wealth
        self.unit_counts, self.steps = self.unit_counts + unit_counts, self.steps + 1

    @property
    def log10(self) -> float:
        """Logarithm of the evidence to base 10, at least 0."""
        return max(log_evidence(self.log_wealth) / math.log(10), 0.0)

    @property
    def alarming(self) -> bool:
        """Whether the evidence has reached `1 / FALSE_ALARMS`."""
        return log_evidence(self.log_wealth) >= -math.log(FALSE_ALARMS)

    def strongest(self) -> Finding:
        """Return the finding of the hypothesis with the most evidence."""
        segment, _, kind, _, column = np.unravel_index((self.log_wealth + _BET_PRIOR).argmax(), WEALTH_SHAPE)
        units, *suspects = self.unit_counts[segment].astype(int).tolist()
        if column:
            number = int(column) - 1
            alternative = AlternativeKind(int(np.searchsorted([len(SHIFTS), NUM_ALTERNATIVES], number, side="right")))
        else:  # of each unit another one
            number = NUM_ALTERNATIVES
            alternative = AlternativeKind(int(np.argmax(suspects))) if any(suspects) else AlternativeKind.FOREIGN
        return Finding(
            segment=int(segment),
            part=("", *[" in some rows"] * len(SOME), *[" in some layers"] * len(SOME))[kind],
            alternative=alternative,
            shift=SHIFTS[number] if alternative is AlternativeKind.SHIFTED and column else None,
            units=units,
            suspects=sum(suspects),
        )


class Finding(NamedTuple):
    """The most probable fault.

    units, suspects   units looked at, and those that are probably affected
    """

    segment: int  # PROMPT, SAMPLED or UNKNOWN
    part: str  # in words, where not all rows and layers of a unit are affected
    alternative: AlternativeKind  # where the routes belong to instead
    shift: int | None  # by how many tokens they are late, where all by the same number
    units: int
    suspects: int


@functools.cache
def _names(num_experts: int, device: torch.device) -> Tensor:
    """Return a random number for each expert (E,) int64, above the bits of two counts."""
    return to_device(np.random.default_rng(0).integers(1, 1 << 24, num_experts) << (2 * _BITS), device)


@functools.cache
def _constants(device: torch.device) -> _Constants:
    alternative = np.repeat(np.eye(len(AlternativeKind)), [len(SHIFTS), NUM_ALTERNATIVES - len(SHIFTS), 1], axis=1)
    stakes = np.array([[on_one] * NUM_ALTERNATIVES + [on_none] for on_one, on_none in STAKES], np.float32)
    arrays = (
        stakes[:, None, :, None, None],
        np.array(SOME, np.float32)[:, None, None, None, None],
        np.array(AFFECTED)[:, None, None, None, None],
        _LOG_PRIOR[:, None],
        alternative,
        np.arange(len(AlternativeKind))[:, None],
    )
    return _Constants(*(to_device(array, device) for array in arrays))


def _votes(counts: PlaceCounts, covered: Tensor, known: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return votes and their weights, (L, P + C, U, M) each."""
    differing = top_k - counts.in_own[:, 1:]
    ahead = counts.in_replayed[:, 1:] - counts.in_replayed[:, :1]
    compared = covered & known
    differing_compared = differing * compared
    possible = top_k * compared.sum(0, keepdim=True)
    difference = differing_compared.sum(0, keepdim=True) / (DISTINCT * possible.clamp(min=1))  # (1, P + C, U, M)
    weight = difference.clamp(max=1)
    weight[:, len(SHIFTS) :].floor_()
    return ahead / differing.clamp(min=1), weight * (differing_compared > 0)


def _times_asked(question: Tensor, counted: Tensor) -> Tensor:
    """Return how often each question (L, H, U, M) occurs in its unit and layer, at least 1."""
    same = (question[..., None] == question[..., None, :]) & counted[..., None, :]
    return same.sum(-1, dtype=torch.int32).clamp(min=1)


def _mixed(log_wealth: Tensor, shares: Tensor) -> Tensor:
    """Return the log of `1 - share + share * wealth` (...) for each of the shares (n, 1, ...); exactly 0 for 1."""
    small = log_wealth.clamp(max=_LARGE)
    return torch.log1p(shares * torch.expm1(small)) + (log_wealth - small)
