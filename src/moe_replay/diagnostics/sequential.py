"""The sequential test of alignment: paired comparisons of places, and evidence that accumulates over steps.

A row has given routes. Its own place and another one (a token before or after, the same position of another sequence, a
row at random) have native routes. Only the experts that one of the two places has and the other has not tell them
apart: the vote of a (row, layer) is the fraction of these that the given routes share with the other place, minus the
fraction that they share with the own one: -1 where all speak for the own place, 1 where all speak for the other.

The null hypothesis, whatever was seen before: the expected vote is at most

- AHEAD for a given other place. It does not matter how well engine and trainer agree, since both places are compared
  with the same given routes;
- -BEHIND for a random row: routes agree with native ones that much better than chance.

Against each of these the test bets: capital grows by 1 + stake * (vote - bound), whose expectation is then at most 1.
There is a bet on every hypothesis: which place the routes of a unit (`row_sample.py`) belong to instead; whether all of
its rows, some of its rows or some of its layers are affected; whether few or many units are. Capital is multiplied over
rows, layers, units, ranks and steps, and averaged over hypotheses.

Equal questions (the same two sets of experts in the same layer of a unit, as in repeated text) count once. Places that
are routed almost alike count less, in other sequences not at all: it may be the same prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.row_sample import NEAR_SHIFTS, NUM_PLACES, SEGMENTS, SHIFTS, RowSample
from moe_replay.routes.batch import RouteBatch
from moe_replay.utils.device import to_device


class Place(IntEnum):
    """Where routes may belong to instead of their own row."""

    SHIFTED = 0
    OTHER_SEQUENCE = 1
    FOREIGN = 2


FALSE_ALARMS = 1e-10  # a step, at most: 1e-6 in a run of 10,000 steps
AHEAD = 0.05
BEHIND = 0.25
STAKES = ((0.3, 0.4), (0.9, 1.2))  # on a place, on none; below 1 / (1 + AHEAD) and 1 / (1 - BEHIND)
DISTINCT = 0.2  # fraction of their experts, over all layers, in which two places must differ to count fully
SOME = (0.1, 0.5)  # of the rows or layers of a unit
AFFECTED = (0.05, 0.5)  # fraction of the units
NUM_KINDS = 1 + 2 * len(SOME)
SUSPECT = math.log(1000)  # capital of a unit that is counted as affected
NUM_HYPOTHESES = NUM_PLACES + 1
SHAPE = (len(SEGMENTS), len(AFFECTED), NUM_KINDS, len(STAKES), 1 + NUM_HYPOTHESES)
TALLY = (len(SEGMENTS), 1 + len(Place))
_LARGE = 30.0
_BITS = 12  # of a count of experts
_MASK = (1 << _BITS) - 1
_NEAR, _FAR = len(NEAR_SHIFTS), NUM_PLACES - len(NEAR_SHIFTS)
# A third each for the near shifts, for all other places, and for no place at all.
_LOG_PRIOR = -np.log(3.0 * np.array([_NEAR] * _NEAR + [_FAR] * _FAR + [1]))
# One half for a place of its own in each unit, one half for one place in all.
_BET_PRIOR = -math.log(2 * math.prod(SHAPE[:-1])) + np.append(0.0, _LOG_PRIOR)


class UnitEvidence(NamedTuple):
    """Evidence against the alignment of each unit of a row sample.

    capital   (kinds, stakes, H, U) float64: log-capital for each of H hypotheses: the places, and none of them
    counted   (U,) bool: units with at least one vote
    """

    capital: Tensor
    counted: Tensor

    def pooled(self, segment: Tensor) -> Tensor:
        """Return log-capital (SHAPE) of all units together, for any place in each unit and for one place in all.

        segment   (U,) int64
        """
        any_place = (self.capital + self._prior).logsumexp(2, keepdim=True)
        of_unit = torch.cat([any_place, self.capital], 2)
        bets = torch.stack([_mixed(of_unit, share) for share in AFFECTED])  # (affected, kinds, stakes, 1 + H, U)
        return torch.einsum("akshu,gu->gaksh", bets, _one_hot(segment))

    def suspects(self) -> Tensor:
        """Return the `Place` of each unit that is probably affected, -1 for the others, (U,) int64."""
        sizes = len(SHIFTS), NUM_PLACES - len(SHIFTS), 1
        parts = (self.capital + self._prior).split(sizes, 2)
        by_place = torch.stack([part.logsumexp((0, 1, 2)) for part in parts])  # (3, U)
        tests = math.log(NUM_KINDS * len(STAKES))
        return torch.where(by_place.logsumexp(0) - tests > SUSPECT, by_place.argmax(0), -1)

    def tally(self, segment: Tensor) -> Tensor:
        """Return (TALLY): units with votes in each segment, and those of them that are suspect, by `Place`."""
        found = self.suspects()
        columns = [self.counted, *(found == number for number in range(len(Place)))]
        return _one_hot(segment) @ torch.stack(columns, 1).double()

    @property
    def _prior(self) -> Tensor:
        return to_device(_LOG_PRIOR, self.capital.device)[:, None]


def unit_evidence(native: RouteBatch, given: RouteBatch, sample: RowSample, num_experts: int) -> UnitEvidence:
    """Return the evidence of a row sample, over all layers of the batches. Does not synchronize with the device."""
    device = native.experts.device
    index = np.concatenate([sample.rows[None], sample.places, sample.controls]).astype(np.int32)
    votes, weight, names = _votes(native, given, to_device(index, device).long(), num_experts)
    (at_place, at_random), (weight, controls) = (
        part.split([NUM_PLACES, len(sample.controls)], 1) for part in (votes, weight)
    )
    used = controls.sum(1, keepdim=True)
    mean = (at_random * controls).sum(1, keepdim=True) / used.clamp(min=1)
    ahead = torch.cat([at_place - AHEAD, mean + BEHIND], 1)  # (L, H, U, M)
    weight = torch.cat([weight, used.clamp(max=1)], 1)
    # Of a row that is compared with random ones, its own place is the question.
    question = 31 * names[:, :1] + torch.cat([names[:, 1 : 1 + NUM_PLACES], names[:, :1]], 1)
    counted = weight > 0
    weight = weight / _times_asked(question, counted)

    kinds = []
    for stake in STAKES:
        stakes = to_device(np.array([stake[0]] * NUM_PLACES + [stake[1]], np.float32), device)[:, None, None]
        gain = torch.log1p(stakes * ahead) * weight
        by_row, by_layer = gain.sum(0), gain.sum(-1)  # (H, U, M), (L, H, U)
        some_rows = [_mixed(by_row, share).sum(-1) for share in SOME]
        some_layers = [_mixed(by_layer, share).sum(0) for share in SOME]
        kinds.append(torch.stack([by_row.sum(-1), *some_rows, *some_layers]))
    return UnitEvidence(torch.stack(kinds, 1).double(), counted.any(0).any(0).any(-1))


def log_evidence(capital: np.ndarray) -> float:
    """Return the log of the mean capital over all bets, whose logs are given (SHAPE)."""
    return float(np.logaddexp.reduce((capital + _BET_PRIOR).ravel()))


@dataclass(eq=False, slots=True)
class EvidenceHistory:
    """Evidence against alignment, accumulated over the steps of a run (CUSUM on log-capital).

    A bet that has lost is opened again in the next step, so that a fault that begins late is found as fast as one from
    the beginning. In N steps of a healthy run the evidence reaches `1 / FALSE_ALARMS` with a probability of at most
    `N * FALSE_ALARMS`.

    capital   (SHAPE) log-capital
    tally     (TALLY) counts since the evidence was last below 1
    steps     number of these steps
    """

    capital: np.ndarray = field(default_factory=lambda: np.zeros(SHAPE))
    tally: np.ndarray = field(default_factory=lambda: np.zeros(TALLY))
    steps: int = 0

    def add(self, capital: np.ndarray, tally: np.ndarray) -> None:
        """Add the sums of one step, over all ranks."""
        if log_evidence(self.capital) <= 0:
            self.tally, self.steps = np.zeros(TALLY), 0
        self.capital = np.maximum(self.capital, 0) + capital
        self.tally, self.steps = self.tally + tally, self.steps + 1

    @property
    def log10(self) -> float:
        """Logarithm of the evidence to base 10, at least 0."""
        return max(log_evidence(self.capital) / math.log(10), 0.0)

    @property
    def alarming(self) -> bool:
        """Whether the evidence has reached `1 / FALSE_ALARMS`."""
        return log_evidence(self.capital) >= -math.log(FALSE_ALARMS)

    def strongest(self) -> Finding:
        """Return what the hypothesis with the most evidence says."""
        segment, _, kind, _, column = np.unravel_index((self.capital + _BET_PRIOR).argmax(), SHAPE)
        units, *suspects = self.tally[segment].astype(int).tolist()
        if column:
            number = int(column) - 1
            place = Place(int(np.searchsorted([len(SHIFTS), NUM_PLACES], number, side="right")))
        else:  # of each unit another place
            number, place = NUM_PLACES, Place(int(np.argmax(suspects))) if any(suspects) else Place.FOREIGN
        return Finding(
            segment=int(segment),
            part=("", *[" in some rows"] * len(SOME), *[" in some layers"] * len(SOME))[kind],
            place=place,
            shift=SHIFTS[number] if place is Place.SHIFTED and column else None,
            units=units,
            suspects=sum(suspects),
        )


class Finding(NamedTuple):
    """What is most probably wrong.

    segment    PROMPT, SAMPLED or UNKNOWN
    part       in words, where not all rows and layers of a unit are affected
    place      where the routes belong to instead
    shift      by how many tokens they are late, where all by the same number
    units, suspects   units looked at, and those that are probably affected
    """

    segment: int
    part: str
    place: Place
    shift: int | None
    units: int
    suspects: int


def _votes(native: RouteBatch, given: RouteBatch, index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return votes and their weights, (L, P, U, M) each, and numbers (L, 1 + P, U, M) that name the sets of experts.

    index   (1 + P, U, M): own rows and those of P other places, -1 for none
    """
    exists, index = index >= 0, index.clamp(min=0)
    routes = native.experts[:, index].long()  # (L, 1 + P, U, M, K)
    taken = given.experts[:, index[:1]].long()
    # What is known of each expert in one number: its name, whether the own place has it, whether the given routes do.
    # Then one gather and one sum serve three counts.
    names = to_device(np.random.default_rng(0).integers(1, 1 << 24, num_experts) << (2 * _BITS), index.device)
    facts = names.expand(*taken.shape[:-1], num_experts).clone()
    facts += torch.zeros_like(facts).scatter_(-1, routes[:, :1], 1 << _BITS)
    facts += torch.zeros_like(facts).scatter_(-1, taken, 1)
    sums = facts.expand(-1, routes.shape[1], -1, -1, -1).gather(-1, routes).sum(-1)
    name, in_own, in_taken = sums >> (2 * _BITS), (sums >> _BITS) & _MASK, sums & _MASK

    differing = native.top_k - in_own[:, 1:]
    ahead = in_taken[:, 1:] - in_taken[:, :1]
    covered = (given.valid & native.valid)[:, index[:1]] & exists[:1]
    compared = covered & exists[1:] & native.valid[:, index[1:]]
    possible = native.top_k * compared.sum(0, keepdim=True)
    difference = (differing * compared).sum(0, keepdim=True) / (DISTINCT * possible.clamp(min=1))  # (1, P, U, M)
    weight = difference.clamp(max=1)
    weight[:, len(SHIFTS) :].floor_()
    weight = weight * (compared & (differing > 0))
    return ahead / differing.clamp(min=1), weight, name.int()


def _times_asked(question: Tensor, counted: Tensor) -> Tensor:
    """Return how often each question (L, H, U, M) occurs in its unit and layer, at least 1."""
    same = (question[..., None] == question[..., None, :]) & counted[..., None, :]
    return same.sum(-1, dtype=torch.int32).clamp(min=1)


def _mixed(log_capital: Tensor, share: float) -> Tensor:
    """Return the log of `1 - share + share * capital`; exactly 0 for a capital of 1."""
    small = torch.log1p(share * torch.expm1(log_capital.clamp(max=_LARGE)))
    return torch.where(log_capital < _LARGE, small, log_capital + math.log(share))


def _one_hot(segment: Tensor) -> Tensor:
    """Return (segments, U) float64."""
    return (segment == torch.arange(len(SEGMENTS), device=segment.device)[:, None]).double()
