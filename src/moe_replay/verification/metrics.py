"""`MetricAccumulator`: metrics of one step, accumulated on the device and reduced over all ranks at the end.

Everything is a sum or a maximum over tokens in one of two flat float64 vectors, whose layout follows from the arguments
of the accumulator alone. So ranks agree on it without exchanging names, also those that have seen no token, and one
all-reduce combines them. A mean is taken once, at the end, over all tokens of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.device import to_device
from moe_replay.verification.agreement import same_experts

_SUMS = ("tokens", "k1", "k3", "abs", "ratio", "ratio_squared", "frac_ratio_gt2")
_MAXIMA = ("abs", "ratio")
NUM_SUMS, NUM_MAXIMA = len(_SUMS), len(_MAXIMA)


def k3(difference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(p || q) of each token, from log q - log p of tokens sampled from p."""
    return difference.exp() - 1 - difference


def mismatch_terms(difference: Tensor) -> Tensor:
    """(7, N) float64: the terms of the sums of a `Mismatch`, from scored - sampled (N,) float64."""
    ratio, distance = difference.exp(), difference.abs()
    is_far = (distance > math.log(2.0)).double()
    ones = torch.ones_like(difference)
    return torch.stack([ones, -difference, k3(difference), distance, ratio, ratio.square(), is_far])


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums (7,) and maxima (2,) over tokens, float64; `+` combines them, as does an all-reduce of each."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def between(cls, sampled: Tensor, scored: Tensor, mask: Tensor | None = None) -> Mismatch:
        """Compare tokens sampled with log-probs `sampled` with their scores `scored` in another pass, both (N,).

        With d = scored - sampled and r = exp(d): k1 = -d and `k3` are unbiased estimates of
        KL(sampled || scored), since the tokens were drawn from `sampled`; `frac_ratio_gt2` counts max(r, 1/r) > 2.
        """
        difference = (scored.detach() - sampled.detach()).double()
        if mask is not None:
            difference = difference[mask.bool()]
        terms = mismatch_terms(difference)
        _, _, _, distance, ratio, *_ = terms
        has_tokens = difference.numel() > 0
        maxima = torch.stack([distance.max(), ratio.max()]) if has_tokens else difference.new_zeros(2)
        return cls(terms.sum(1), maxima)

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def summary(self) -> dict[str, float]:
        """Return means over all tokens, maxima, and the effective sample size as a fraction; empty without tokens."""
        values = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        largest = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        tokens = values["tokens"]
        if not tokens:
            return {}
        return {
            "k1_kl": values["k1"] / tokens,
            "k3_kl": values["k3"] / tokens,
            "logprob_abs_diff/mean": values["abs"] / tokens,
            "logprob_abs_diff/max": largest["abs"],
            "ratio/mean": values["ratio"] / tokens,
            "ratio/max": largest["ratio"],
            "ess": _effective_fraction(values["ratio"], values["ratio_squared"], tokens),
            "frac_ratio_gt2": values["frac_ratio_gt2"] / tokens,
        }


def _effective_fraction(ratio: float, ratio_squared: float, tokens: float) -> float:
    """Return (sum of ratios)^2 / (tokens * sum of squares); NaN where log-probs are too far apart for float64."""
    below = tokens * ratio_squared
    return ratio * ratio / below if below > 0 else math.nan


class ReducedMetrics(NamedTuple):
    """Metrics over all ranks."""

    metrics: dict[str, float]  # name -> value; metrics that no rank has measured are missing
    maxima: dict[str, float]  # name -> value of each of the declared maxima; 0 where no rank has measured it


class _Sums(NamedTuple):
    """Views of the vector of sums."""

    means: dict[str, Tensor]  # name -> (2,): sum over tokens, number of tokens
    totals: dict[str, Tensor]  # name -> (2,): sum, number of terms
    pairs: dict[str, Tensor]  # name -> (7,): sums of a `Mismatch`
    agreement: Tensor  # (L, 2): (token, layer) pairs that agree, and that were compared
    coverage: Tensor  # (3,): (token, layer) pairs, those of them with a recorded route, those that replayed it
    # (3,): choices of experts, recorded ones that the router would not have taken, those that were taken
    choices: Tensor
    load: Tensor  # (L, E): tokens routed to each expert


class _Maxima(NamedTuple):
    """Views of the vector of maxima."""

    pairs: dict[str, Tensor]  # name -> (2,): maxima of a `Mismatch`
    values: dict[str, Tensor]  # name -> (1,)


class MetricAccumulator:
    """Sums and maxima of this rank. Nothing waits for the device until `reduce`.

    topology   routers of the whole model, L layers of E experts
    device     device of the tensors added
    means      names of means over tokens
    totals     names of sums over micro-batches
    pairs      names of pairs of log-probs; their metrics are called mismatch/<pair>/...
    maxima     names of largest values, none of them negative
    """

    def __init__(
        self,
        topology: MoeTopology,
        device: torch.device,
        *,
        means: Sequence[str] = (),
        totals: Sequence[str] = (),
        pairs: Sequence[str] = (),
        maxima: Sequence[str] = (),
    ) -> None:
        self._topology = topology
        self._means, self._totals, self._pairs, self._maxima = map(tuple, (means, totals, pairs, maxima))
        self._slots = {layer: slot for slot, layer in enumerate(topology.layers)}
        self._slot_tensors: dict[tuple[int, ...], Tensor] = {}
        self._num_token_sums = 2 * len(self._means) + 2 * len(self._totals) + NUM_SUMS * len(self._pairs)
        num_layers, num_experts = len(topology.layers), topology.num_experts
        size = self._num_token_sums + 2 * num_layers + 6 + num_layers * num_experts
        self._sum_vector = torch.zeros(size, dtype=torch.float64, device=device)
        self._max_vector = self._sum_vector.new_zeros(NUM_MAXIMA * len(self._pairs) + len(self._maxima))
        self._sums = self._view_sums(self._sum_vector)
        self._largest = self._view_maxima(self._max_vector)

    def clear(self) -> None:
        self._sum_vector.zero_()
        self._max_vector.zero_()

    def merge(self, other: MetricAccumulator) -> None:
        """Add what an accumulator of the same layout has."""
        self._sum_vector.add_(other._sum_vector)
        _raise_to(self._max_vector, other._max_vector)

    # ---- tokens -------------------------------------------------------------------------------------------------

    def add_mean(self, name: str, values: Tensor) -> None:
        """Add the values (N,) of N tokens to a mean."""
        total = values.detach().sum(dtype=torch.float64)
        self._sums.means[name].add_(torch.stack([total, torch.full_like(total, values.numel())]))

    def add_total(self, name: str, value: Tensor) -> None:
        """Add a scalar to a sum over micro-batches."""
        term = value.detach().double()
        self._sums.totals[name].add_(torch.stack([term, torch.ones_like(term)]))

    def add_logprobs(self, pair: str, sampled: Tensor, scored: Tensor, mask: Tensor | None = None) -> None:
        """Add log-probs of the same tokens from two passes, as `Mismatch.between` takes them."""
        mismatch = Mismatch.between(sampled, scored, mask)
        self._sums.pairs[pair].add_(mismatch.sums)
        _raise_to(self._largest.pairs[pair], mismatch.maxima)

    def add_maximum(self, name: str, values: Tensor) -> None:
        """Raise a maximum to the largest of `values` (N,)."""
        if values.numel():
            _raise_to(self._largest.values[name], values.detach().max().double())

    # ---- routes -------------------------------------------------------------------------------------------------

    def add_agreement(self, recorded: RouteBatch, native: RouteBatch) -> None:
        """Compare recorded routes with what the routers of the trainer choose, on this rank's rows and layers."""
        if not recorded.layers:  # a pipeline chunk without routers
            return
        compared = recorded.valid & native.valid
        agreeing = same_experts(recorded, native) & compared
        counts = torch.stack([agreeing.sum(1), compared.sum(1)], dim=1)
        self._sums.agreement.index_add_(0, self._slots_of(recorded), counts.double())

    def add_load(self, routes: RouteBatch, layout: TokenLayout) -> None:
        """Count the tokens that the routes of a micro-batch send to each expert; padding does not count."""
        if not routes.layers:
            return
        tokens = _routed_tokens(routes, layout)
        load = self._sums.load.new_zeros((len(routes.layers), self._topology.num_experts))
        counted = tokens[:, :, None].expand_as(routes.routed_experts).double()
        load.scatter_add_(1, routes.routed_experts.long().flatten(1), counted.flatten(1))
        self._sums.load.index_add_(0, self._slots_of(routes), load)

    def add_coverage(self, routes: RouteBatch, layout: TokenLayout, *, replayed: bool) -> None:
        """Count the (token, layer) pairs of a micro-batch that have a route, and whether it was replayed."""
        if not routes.layers:
            return
        covered = _routed_tokens(routes, layout).sum(dtype=torch.float64)
        pairs = (layout.num_rows - layout.num_padding) * len(routes.layers)
        self._sums.coverage.add_(torch.stack([torch.full_like(covered, pairs), covered, covered * replayed]))

    def add_choices(self, choices: Mapping[int, Tensor], layout: TokenLayout) -> None:
        """Count the choices that a margin has decided, by layer as `Replaying.choices` has them; padding excluded."""
        if not choices:  # a pipeline chunk without routers
            return
        is_token = to_device(layout.rows != PADDING, self._sum_vector.device)
        differing, replaced = (torch.stack(list(choices.values())) * is_token).sum((0, 2), dtype=torch.float64)
        pairs = (layout.num_rows - layout.num_padding) * self._topology.top_k * len(choices)
        self._sums.choices.add_(torch.stack([torch.full_like(differing, pairs), differing, replaced]))

    def add_uncovered(self, tokens: int) -> None:
        """Count tokens that have no route in any layer."""
        self._sums.coverage[0] += tokens * len(self._slots)

    def _slots_of(self, routes: RouteBatch) -> Tensor:
        if routes.layers not in self._slot_tensors:
            slots = [self._slots[layer] for layer in routes.layers]
            self._slot_tensors[routes.layers] = torch.tensor(slots, device=self._sum_vector.device)
        return self._slot_tensors[routes.layers]

    # ---- the end of the step ------------------------------------------------------------------------------------

    def reduce(self, *, report_tokens: bool = True) -> ReducedMetrics:
        """Return the metrics over all ranks. Collective: call on every rank.

        report_tokens   whether the token metrics of this rank count: of the ranks that share their tokens, only those
                        of one may. Routes count on every rank, which has its own rows and layers.
        """
        sums, maxima = self._sum_vector.clone(), self._max_vector.clone()
        if not report_tokens:
            sums[: self._num_token_sums] = 0.0
            maxima.zero_()
        maxima.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # a MAX all-reduce may lose NaN
        if dist.is_initialized() and dist.get_world_size() > 1:
            sums, maxima = _reduced(sums, maxima)
        on_host = torch.cat([sums, maxima]).cpu()
        total, largest = self._view_sums(on_host[: len(sums)]), self._view_maxima(on_host[len(sums) :])
        values = {name: float(value) for name, value in largest.values.items()}
        return ReducedMetrics(_token_metrics(total, largest) | self._route_metrics(total), values)

    def _route_metrics(self, sums: _Sums) -> dict[str, float]:
        metrics: dict[str, float] = {}
        agreeing, compared = sums.agreement.numpy().T
        if compared.sum():
            metrics["routing/agreement"] = float(agreeing.sum() / compared.sum())
            for layer, slot in self._slots.items():
                if compared[slot]:
                    metrics[f"routing/agreement/layer_{layer:03d}"] = float(agreeing[slot] / compared[slot])
        pairs, covered, replayed = sums.coverage.tolist()
        if pairs:
            metrics["routing/replayed_fraction"] = replayed / pairs
            metrics["routing/unrouted_fraction"] = (pairs - covered) / pairs
        decided, differing, replaced = sums.choices.tolist()
        if decided:
            metrics["routing/differing_choices"] = differing / decided
            metrics["routing/replaced_choices"] = replaced / decided
        load = sums.load.numpy()
        used = load[load.sum(axis=1) > 0]
        if len(used):
            metrics["routing/load_violation"] = float(np.mean(used.max(axis=1) / used.mean(axis=1) - 1))
        return metrics

    # ---- layout of the vectors ----------------------------------------------------------------------------------

    def _view_sums(self, vector: Tensor) -> _Sums:
        num_layers = len(self._topology.layers)
        tokens, agreement, coverage, choices, load = vector.split(
            [self._num_token_sums, 2 * num_layers, 3, 3, num_layers * self._topology.num_experts]
        )
        widths = [2 * len(self._means), 2 * len(self._totals), NUM_SUMS * len(self._pairs)]
        means, totals, pairs = tokens.split(widths)
        return _Sums(
            _named(self._means, means, 2),
            _named(self._totals, totals, 2),
            _named(self._pairs, pairs, NUM_SUMS),
            agreement.view(num_layers, 2),
            coverage,
            choices,
            load.view(num_layers, -1),
        )

    def _view_maxima(self, vector: Tensor) -> _Maxima:
        pairs, values = vector.split([NUM_MAXIMA * len(self._pairs), len(self._maxima)])
        return _Maxima(_named(self._pairs, pairs, NUM_MAXIMA), _named(self._maxima, values, 1))


def _token_metrics(sums: _Sums, maxima: _Maxima) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values in sums.means.items():
        total, count = values.tolist()
        if count:
            metrics[name] = total / count
    for name, values in sums.totals.items():
        total, count = values.tolist()
        if count:
            metrics[name] = total
    for pair, values in sums.pairs.items():
        summary = Mismatch(values, maxima.pairs[pair]).summary()
        metrics |= {f"mismatch/{pair}/{key}": value for key, value in summary.items()}
    return metrics


def _reduced(sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums (n,) and maxima (m,) over all ranks, by one all-reduce with a row for the maxima of each rank."""
    rows = maxima.new_zeros(dist.get_world_size(), len(maxima))
    rows[dist.get_rank()] = maxima
    everything = torch.cat([sums, rows.flatten()])
    dist.all_reduce(everything)
    total, of_ranks = everything.split([len(sums), rows.numel()])
    return total, of_ranks.view_as(rows).amax(0)


def _routed_tokens(routes: RouteBatch, layout: TokenLayout) -> Tensor:
    """Return (L, R) bool: rows that hold a token and have a route."""
    return to_device(layout.rows != PADDING, routes.valid.device) & routes.valid


def _named(names: Sequence[str], vector: Tensor, width: int) -> dict[str, Tensor]:
    return dict(zip(names, vector.view(len(names), width).unbind(), strict=True)) if names else {}


def _raise_to(largest: Tensor, values: Tensor) -> None:
    torch.maximum(largest, values, out=largest)
