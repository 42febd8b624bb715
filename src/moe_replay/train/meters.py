"""The numbers of one step: sums, maxima and mismatches of this rank, combined over all ranks at the end.

Means are taken once, of sums over all tokens of all ranks; never of means.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from moe_replay.batch import RouteBatch
from moe_replay.diagnostics.metrics import same_experts
from moe_replay.diagnostics.mismatch import Mismatch
from moe_replay.gather import all_gather
from moe_replay.layout import PADDING, TokenLayout
from moe_replay.topology import MoeTopology


class Meters:
    """What this rank has counted since the step began."""

    def __init__(self, topology: MoeTopology) -> None:
        layers = len(topology.layers)
        self._slot = {layer: slot for slot, layer in enumerate(topology.layers)}
        self._means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._sums: dict[str, float] = defaultdict(float)
        self._same: dict[str, float] = {}
        self._mismatches: dict[str, Mismatch] = {}
        self._agreeing, self._compared = np.zeros(layers), np.zeros(layers)
        self._load = np.zeros((layers, topology.num_experts), np.int64)
        self._replayed = self._unrouted = 0

    # ---- counting -----------------------------------------------------------------------------------------------

    def mean(self, name: str, values: Tensor) -> None:
        """Tokens whose mean is wanted."""
        entry = self._means[name]
        entry[0] += float(values.detach().double().sum())
        entry[1] += values.numel()

    def sum(self, name: str, value: Tensor | float) -> None:
        """Part of a sum over all ranks."""
        self._sums[name] += float(value)

    def same(self, name: str, value: float) -> None:
        """A number that is the same on all ranks."""
        self._same[name] = value

    def mismatch(self, name: str, sampled: Tensor, scored: Tensor) -> None:
        """Log-probs of the same tokens from two passes."""
        found = Mismatch.between(sampled, scored)
        present = self._mismatches.get(name)
        self._mismatches[name] = found if present is None else present + found

    def agreement(self, rollout: RouteBatch, native: RouteBatch) -> None:
        """The rollout's routes against what the trainer's routers choose, on this rank's rows and layers."""
        covered = rollout.valid & native.valid
        slots = [self._slot[layer] for layer in rollout.layers]
        self._agreeing[slots] += (same_experts(rollout, native) & covered).sum(1).cpu().numpy()
        self._compared[slots] += covered.sum(1).cpu().numpy()

    def routes(self, taken: Iterable[RouteBatch], layout: TokenLayout, *, replayed: bool) -> None:
        """Routes of one micro-batch: how many tokens have one to replay, and how evenly they load the experts."""
        for batch in taken:
            tokens = torch.from_numpy(layout.rows != PADDING).to(batch.valid.device) & batch.valid
            routed = int(tokens.sum())
            if replayed:
                self._replayed += routed
                self._unrouted += (layout.num_rows - layout.num_padding) * len(batch.layers) - routed
            for slot, layer in enumerate(batch.layers):
                experts = batch.experts[slot][tokens[slot]].flatten().long()
                self._load[self._slot[layer]] += torch.bincount(experts, minlength=self._load.shape[1]).cpu().numpy()

    # ---- the end of the step ------------------------------------------------------------------------------------

    def combined(self, *, speaks: bool) -> dict[str, float]:
        """Over all ranks, on every rank. Of ranks that share their tokens only one speaks; of its routes, each does."""
        own = np.frombuffer(json.dumps(self._own(speaks)).encode(), np.uint8)
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
        return result | self._routing(parts) | self._same

    def _own(self, speaks: bool) -> dict[str, object]:
        mismatches = {name: [m.sums.tolist(), m.maxima.tolist()] for name, m in self._mismatches.items()}
        return {
            "means": dict(self._means) if speaks else {},
            "sums": dict(self._sums) if speaks else {},
            "mismatches": mismatches if speaks else {},
            "agreeing": self._agreeing.tolist(),
            "compared": self._compared.tolist(),
            "load": self._load.tolist(),
            "routed": [self._replayed, self._unrouted],
        }

    def _routing(self, parts: list[dict]) -> dict[str, float]:
        agreeing, compared, load, routed = (
            np.sum([part[name] for part in parts], axis=0) for name in ("agreeing", "compared", "load", "routed")
        )
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


def _mismatch(numbers: list[list[float]]) -> Mismatch:
    sums, maxima = (torch.tensor(part, dtype=torch.float64) for part in numbers)
    return Mismatch(sums, maxima)
