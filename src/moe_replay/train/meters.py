"""The numbers of one step: sums, maxima and mismatches of this rank, combined over all ranks at the end.

Means are taken once, of sums over all tokens of all ranks; never of means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import same_experts
from moe_replay.diagnostics.mismatch import Mismatch
from moe_replay.distributed.collectives import all_gather
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.topology import MoeTopology


class StepSummary(NamedTuple):
    """Numbers of a step over all ranks.

    metrics             name -> value
    first_update_diff   largest difference between log-probs of the old-log-prob pass and of the step's first update
    """

    metrics: dict[str, float]
    first_update_diff: float


class Meters:
    """What this rank has counted since the step began. It stays on the device until the end: nothing waits for it."""

    def __init__(self, topology: MoeTopology) -> None:
        self._topology = topology
        self._slot = {layer: slot for slot, layer in enumerate(topology.layers)}
        self._means: dict[str, list[Tensor]] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._same: dict[str, float] = {}
        self._mismatches: dict[str, Mismatch] = {}
        self._first_update_diff = torch.zeros((), dtype=torch.float64)
        self._agreements: list[tuple[list[int], Tensor]] = []
        self._loads: list[tuple[list[int], Tensor]] = []
        self._routed: list[Tensor] = []

    # ---- counting -----------------------------------------------------------------------------------------------

    def mean(self, name: str, values: Tensor) -> None:
        """Tokens whose mean is wanted."""
        total = values.detach().sum(dtype=torch.float64)
        self._means.setdefault(name, []).append(torch.stack([total, torch.full_like(total, values.numel())]))

    def sum(self, name: str, value: Tensor) -> None:
        """Part of a sum over all ranks."""
        self._sums.setdefault(name, []).append(value.detach().double())

    def same(self, name: str, value: float) -> None:
        """A number that is the same on all ranks."""
        self._same[name] = value

    def mismatch(self, name: str, sampled: Tensor, scored: Tensor) -> None:
        """Log-probs of the same tokens from two passes."""
        found = Mismatch.between(sampled, scored)
        present = self._mismatches.get(name)
        self._mismatches[name] = found if present is None else present + found

    def first_update(self, old: Tensor, train: Tensor) -> None:
        """Log-probs (N,) of the old-log-prob pass and of the first update of the step."""
        largest = (train.detach() - old).abs().max().double()
        self._first_update_diff = torch.maximum(self._first_update_diff.to(largest.device), largest)

    def agreement(self, rollout: RouteBatch, native: RouteBatch) -> None:
        """The rollout's routes against what the trainer's routers choose, on this rank's rows and layers."""
        covered = rollout.valid & native.valid
        counts = torch.stack([(same_experts(rollout, native) & covered).sum(1), covered.sum(1)])
        self._agreements.append(([self._slot[layer] for layer in rollout.layers], counts))

    def routes(self, taken: Iterable[RouteBatch], layout: TokenLayout, *, replayed: bool) -> None:
        """Routes of one micro-batch: how many tokens have one to replay, and how evenly they load the experts."""
        for batch in taken:
            tokens = torch.from_numpy(layout.rows != PADDING).to(batch.valid.device) & batch.valid
            load = batch.experts.new_zeros((len(batch.layers), self._topology.num_experts), dtype=torch.int64)
            counted = tokens[:, :, None].expand_as(batch.experts).long()
            load.scatter_add_(1, batch.experts.long().flatten(1), counted.flatten(1))
            self._loads.append(([self._slot[layer] for layer in batch.layers], load))
            if replayed:
                routed = tokens.sum()
                pairs = (layout.num_rows - layout.num_padding) * len(batch.layers)
                self._routed.append(torch.stack([routed, pairs - routed]))

    # ---- the end of the step ------------------------------------------------------------------------------------

    def combined(self, *, reports: bool) -> StepSummary:
        """Over all ranks, on every rank. Of ranks that share their tokens one reports them; routes count on each."""
        own = np.frombuffer(json.dumps(self._own(reports)).encode(), np.uint8)
        parts = [json.loads(part.tobytes()) for part in all_gather(own)]
        result: dict[str, float] = {}
        for name in sorted({name for part in parts for name in part["means"]}):
            total, count = np.sum([part["means"].get(name, [0.0, 0.0]) for part in parts], axis=0).tolist()
            if count:
                result[name] = total / count
        for name in sorted({name for part in parts for name in part["sums"]}):
            result[name] = float(sum(part["sums"].get(name, 0.0) for part in parts))
        for name in sorted({name for part in parts for name in part["mismatches"]}):
            found = [_mismatch(part["mismatches"][name]) for part in parts if name in part["mismatches"]]
            whole = sum(found[1:], start=found[0])
            result |= {f"mismatch/{name}/{key}": value for key, value in whole.summary().items()}
        largest = float(np.max([part["first_update"] for part in parts]))  # not a number where any is
        return StepSummary(result | self._routing(parts) | self._same, largest)

    def _own(self, reports: bool) -> dict[str, object]:
        layers = len(self._topology.layers)
        mismatches = {name: [m.sums.tolist(), m.maxima.tolist()] for name, m in self._mismatches.items()}
        return {
            "means": {name: torch.stack(parts).sum(0).tolist() for name, parts in self._means.items()}
            if reports
            else {},
            "sums": {name: float(torch.stack(parts).sum()) for name, parts in self._sums.items()} if reports else {},
            "mismatches": mismatches if reports else {},
            "first_update": float(self._first_update_diff),
            "agreement": _by_layer(self._agreements, layers, (2,), layer_axis=1),
            "load": _by_layer(self._loads, layers, (self._topology.num_experts,), layer_axis=0),
            "routed": torch.stack(self._routed).sum(0).tolist() if self._routed else [0, 0],
        }

    def _routing(self, parts: list[dict]) -> dict[str, float]:
        agreement, load, routed = (np.sum([part[name] for part in parts], axis=0) for name in _OF_ROUTES)
        agreeing, compared = agreement.T
        result: dict[str, float] = {}
        if compared.sum():
            result["routing/agreement"] = float(agreeing.sum() / compared.sum())
            for layer, slot in self._slot.items():
                if compared[slot]:
                    result[f"routing/agreement/layer_{layer:03d}"] = float(agreeing[slot] / compared[slot])
        if routed.sum():
            result["routing/replayed_fraction"] = float(routed[0] / routed.sum())
            result["routing/unrouted_fraction"] = float(routed[1] / routed.sum())
        used = load[load.sum(axis=1) > 0]
        if len(used):
            # how much the busiest expert of a layer has beyond an even share, over layers
            result["routing/load_violation"] = float((used.max(axis=1) / used.mean(axis=1) - 1).mean())
        return result


_OF_ROUTES = ("agreement", "load", "routed")


def _by_layer(
    parts: Sequence[tuple[list[int], Tensor]], layers: int, shape: tuple[int, ...], layer_axis: int
) -> list[list[int]]:
    """(layers of the model, *shape): counts of micro-batches, each for some of the layers, added up."""
    whole = np.zeros((layers, *shape), np.int64)
    for slots, counts in parts:
        whole[slots] += counts.movedim(layer_axis, 0).cpu().numpy()
    return whole.tolist()


def _mismatch(numbers: list[list[float]]) -> Mismatch:
    sums, maxima = (torch.tensor(part, dtype=torch.float64) for part in numbers)
    return Mismatch(sums, maxima)
