"""Gain from `batch.balance = "experts"` in a layout, from recorded traces."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_replay.errors import LayoutError, TraceFormatError
from moe_replay.routes.trace import RouteTrace
from moe_replay.tools.inspect import read_traces
from moe_replay.tools.plan.layout import aligned
from moe_replay.train.learn.balance import (
    Division,
    Units,
    balanced_division,
    best_possible,
    expert_rows,
    layer_ratios,
    loads_of,
    spread_evenly,
)
from moe_replay.train.learn.batches import divide

DEFAULT_BUDGET = 8192


class ExpertCounts(NamedTuple):
    """Samples of recorded traces."""

    tokens: np.ndarray  # (N,) int64
    rows: np.ndarray  # (N, L, E): rows of each expert, where routes were recorded
    layers: tuple[int, ...]  # (L,)
    top_k: int  # experts per token

    def units(self, ranks: int) -> Units:
        """Return the samples with the rows of each of a number of expert-parallel ranks."""
        by_rank = self.rows.reshape(*self.rows.shape[:2], ranks, -1).sum(3)
        return Units(self.tokens, spread_evenly(by_rank, self.tokens, self.top_k))


@dataclass(frozen=True, kw_only=True)
class EpLoads:
    """Loads at one expert-parallel size: rows of the busiest rank relative to the mean one.

    worst_by_tokens, worst_balanced   its loads
    """

    ep: int
    data_ranks: int = 0  # that train the samples
    micro_batches: int = 0  # of each
    by_tokens: float = 0.0  # as `batch.balance = "tokens"` divides samples
    balanced: float = 0.0  # as `batch.balance = "experts"` does
    limit: float = 0.0  # the least that any grouping of these samples can have
    worst_layer: int = -1  # the one with the highest load by tokens
    worst_by_tokens: float = 0.0
    worst_balanced: float = 0.0
    problem: str = ""  # why there are none; "": there are

    @property
    def experts_gain(self) -> float:
        """Fraction of the time of experts that balance saves."""
        return 1 - self.balanced / self.by_tokens if self.by_tokens else 0.0

    def step_gain(self, fraction: float) -> float:
        """Fraction of the time of a pass, if experts are this fraction of it with equal loads."""
        before = 1 - fraction + fraction * self.by_tokens
        return fraction * (self.by_tokens - self.balanced) / before if self.by_tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class BalancePlan:
    """Loads at several sizes."""

    samples: int
    tokens: int
    layers: int
    top_k: int
    num_experts: int
    budget: int  # tokens of a micro-batch at most
    expert_fraction: float | None  # of the operations of a pass, in routed experts; None: the model is not known
    sizes: tuple[EpLoads, ...]

    def fields(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {"experts_gain": row.experts_gain}
            | ({} if self.expert_fraction is None else {"step_gain": row.step_gain(self.expert_fraction)})
            for row in self.sizes
        ]
        return asdict(self) | {"sizes": rows}

    def __str__(self) -> str:
        fraction = self.expert_fraction
        head = ["ep", "data ranks", "micro-batches", "by tokens", "balanced", "limit", "worst layer", "experts save"]
        table = [[*head, "a pass saves"] if fraction is not None else head]
        for row in self.sizes:
            if row.problem:
                continue
            worst = f"{row.worst_layer}: {row.worst_by_tokens:.3f} to {row.worst_balanced:.3f}"
            loads = [f"{load:.3f}" for load in (row.by_tokens, row.balanced, row.limit)]
            counts = [str(count) for count in (row.ep, row.data_ranks, row.micro_batches)]
            saved = [] if fraction is None else [f"{row.step_gain(fraction):.1%}"]
            table.append([*counts, *loads, worst, f"{row.experts_gain:.1%}", *saved])
        lines = [
            f"{self.samples} samples with {self.tokens:,} tokens, {self.layers} layers, top {self.top_k} of "
            f"{self.num_experts} experts; at most {self.budget} tokens a micro-batch",
            "rows of the busiest expert-parallel rank relative to the mean, over all layers and micro-batches:",
            *(aligned(table) if len(table) > 1 else ()),
            *(f"ep {row.ep}: {row.problem}" for row in self.sizes if row.problem),
        ]
        if fraction is None:
            lines.append("a pass saves less: the fraction of it that experts take (--model)")
        else:
            lines.append(
                f"a pass: {fraction:.0%} of its operations are in routed experts, and ranks wait in each layer"
            )
        return "\n".join(lines)


# ---- traces ----------------------------------------------------------------------------------------------------------


def trace_files(path: Path) -> list[Path]:
    """Return the trace files of a run folder or another folder, by step, or the one file."""
    if not path.is_dir():
        return [path]
    folder = path / "traces" if (path / "traces").is_dir() else path
    paths = sorted(folder.glob("*.mrt"))
    if not paths:
        raise TraceFormatError(
            "the folder has no traces",
            expected="files traces/*.mrt",
            found=path,
            remedy="A run writes them with log.traces = 64, the number of samples per step",
        )
    return paths


def run_budget(path: Path) -> int:
    """Return the tokens per micro-batch of the run that has written a folder; the default where none is known."""
    config = path / "config.toml"
    if not config.is_file():
        return DEFAULT_BUDGET
    with config.open("rb") as file:
        return int(tomllib.load(file).get("batch", {}).get("tokens_per_micro_batch", DEFAULT_BUDGET))


def count_experts(traces: Iterable[RouteTrace], num_experts: int | None = None) -> ExpertCounts:
    """Count the rows of each expert in each trace.

    num_experts   of the model, where the traces do not know it
    """
    tokens, rows = [], []
    layers: tuple[int, ...] = ()
    top_k = 0
    for trace in traces:
        if not trace.covered_fraction:
            continue
        size = trace.num_experts or num_experts
        if size is None:
            raise LayoutError(
                "the traces do not know the number of experts",
                remedy="Name the model: --model, a folder or config.json",
            )
        if rows and (trace.layers, trace.top_k, size) != (layers, top_k, rows[0].shape[1]):
            raise LayoutError(
                "the traces are of different models",
                expected=f"{len(layers)} layers, top {top_k} of {rows[0].shape[1]}",
                found=f"{len(trace.layers)} layers, top {trace.top_k} of {size}",
            )
        layers, top_k = trace.layers, trace.top_k
        tokens.append(len(trace))
        rows.append(expert_rows(trace, size, size).astype(np.int32))
    if not rows:
        raise LayoutError("the traces have no routes", remedy="Record them with log.traces in a run that replays")
    return ExpertCounts(np.array(tokens, np.int64), np.stack(rows), layers, top_k)


def counts_of(path: Path, limit: int | None = None, num_experts: int | None = None) -> ExpertCounts:
    """Count the traces of a run folder or file, the first `limit` of them."""
    traces = (trace for file in trace_files(path) for trace in read_traces(file))
    return count_experts(islice(traces, limit), num_experts)


# ---- loads -----------------------------------------------------------------------------------------------------------


def plan_balance(
    counts: ExpertCounts,
    sizes: Sequence[int],
    *,
    budget: int,
    ranks_per_sample: int = 1,
    expert_tensor: int = 1,
    data_ranks: int | None = None,
    expert_fraction: float | None = None,
) -> BalancePlan:
    """Divide the samples as one update at each expert-parallel size, by tokens and by the load of experts.

    ranks_per_sample   that share each sample: tensor x context parallel
    expert_tensor      expert tensor parallel size
    data_ranks         that train the samples; None: those of one exchange
    """
    rows = []
    for ep in sizes:
        width = max(ep * expert_tensor // ranks_per_sample, 1)
        rows.append(_loads(counts, ep, width, width if data_ranks is None else data_ranks, budget))
    return BalancePlan(
        samples=len(counts.tokens),
        tokens=int(counts.tokens.sum()),
        layers=len(counts.layers),
        top_k=counts.top_k,
        num_experts=counts.rows.shape[2],
        budget=budget,
        expert_fraction=expert_fraction,
        sizes=tuple(rows),
    )


def _loads(counts: ExpertCounts, ep: int, width: int, data_ranks: int, budget: int) -> EpLoads:
    samples, num_experts = len(counts.tokens), counts.rows.shape[2]
    if ep > num_experts:
        return EpLoads(ep=ep, problem=f"more ranks than experts ({num_experts}); each rank holds at least one")
    if num_experts % ep:
        return EpLoads(ep=ep, problem=f"does not divide the {num_experts} experts, which both backends refuse")
    if data_ranks % width:
        return EpLoads(ep=ep, problem=f"needs a multiple of {width} data ranks, and there are {data_ranks}")
    if samples < 2 * data_ranks:
        return EpLoads(
            ep=ep, problem=f"needs {2 * data_ranks} samples for {data_ranks} data ranks, and there are {samples}"
        )
    units = counts.units(ep)
    by_tokens: Division = divide(counts.tokens.tolist(), data_ranks, budget, packed=True)
    balanced = balanced_division(by_tokens, units, width, budget, packed=True)
    layers = [layer_ratios(division, units, width) for division in (by_tokens, balanced)]
    worst = int(layers[0].argmax())
    return EpLoads(
        ep=ep,
        data_ranks=data_ranks,
        micro_batches=max(map(len, by_tokens)),
        by_tokens=loads_of(by_tokens, units, width).ratio,
        balanced=loads_of(balanced, units, width).ratio,
        limit=best_possible(units).ratio,
        worst_layer=counts.layers[worst],
        worst_by_tokens=float(layers[0][worst]),
        worst_balanced=float(layers[1][worst]),
    )
