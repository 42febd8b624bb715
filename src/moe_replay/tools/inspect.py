"""Statistics of trace files: tokens, layers, coverage, weight versions and expert load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.errors import AlignmentError, TraceFormatError
from moe_replay.routes.codec import MAGIC
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import TraceFile


def read_traces(path: str | Path) -> Iterator[RouteTrace]:
    """Yield the traces of a `TraceFile` one at a time, or the single trace of a `RouteTrace.to_bytes` file."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC))
            blob = head + file.read() if head == MAGIC else None
    except OSError as missing:
        raise TraceFormatError("the file cannot be read", found=missing) from missing
    if blob is not None:
        yield RouteTrace.from_bytes(blob)
        return
    with TraceFile(path) as traces:
        yield from traces


@dataclass(slots=True)
class LayerSummary:
    """Statistics of one decoder layer over all traces."""

    layer: int
    tokens: int = 0  # tokens of the traces that have this layer
    covered: int = 0  # tokens with a route in this layer
    # (E,) int64, number of times each expert was selected
    load: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, load: np.ndarray, tokens: int, covered: int) -> None:
        size = max(len(self.load), len(load))
        self.load = np.pad(self.load, (0, size - len(self.load))) + np.pad(load, (0, size - len(load)))
        self.tokens += tokens
        self.covered += covered

    @property
    def entropy(self) -> float:
        """Normalized entropy of the load: 1 for equal loads, 0 for a single expert."""
        total = self.load.sum()
        if len(self.load) < 2 or not total:
            return 0.0
        fractions = self.load[self.load > 0] / total
        return float(-(fractions * np.log(fractions)).sum() / np.log(len(self.load))) + 0.0

    @property
    def peak(self) -> float:
        """Load of the busiest expert relative to the mean."""
        return float(self.load.max() / self.load.mean()) if self.load.any() else 0.0

    @property
    def unused(self) -> int:
        return int(np.count_nonzero(self.load == 0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "tokens": self.tokens,
            "covered": self.covered,
            "entropy": self.entropy,
            "peak": self.peak,
            "unused": self.unused,
            "load": self.load.tolist(),
        }


@dataclass(slots=True)
class TraceSummary:
    """Statistics over all traces of a file."""

    traces: int = 0
    tokens: int = 0
    longest: int = 0
    covered: int = 0  # cells with a route
    cells: int = 0  # (token, layer) pairs
    # number of traces for each (top_k, num_experts); num_experts is None if a trace does not say
    routers: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)  # number of tokens for each weight version
    duplicates: int = 0  # cells with the same expert twice, which no router produces
    repeated: int = 0  # traces with the same tokens as an earlier one
    layers: dict[int, LayerSummary] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Fraction of (token, layer) pairs with a route."""
        return self.covered / self.cells if self.cells else 0.0

    def to_dict(self) -> dict[str, Any]:
        routers = sorted(self.routers.items(), key=str)
        return {
            "traces": self.traces,
            "tokens": self.tokens,
            "longest": self.longest,
            "coverage": self.coverage,
            "routers": [{"top_k": k, "num_experts": e, "traces": n} for (k, e), n in routers],
            "weight_versions": {str(version): tokens for version, tokens in sorted(self.versions.items())},
            "duplicates": self.duplicates,
            "repeated_traces": self.repeated,
            "layers": [self.layers[layer].to_dict() for layer in sorted(self.layers)],
        }

    def differences(self, topology: MoeTopology) -> list[str]:
        """Return how these traces contradict a model; empty if they fit."""
        differences = []
        if sorted(self.layers) != list(topology.layers):
            differences.append(f"layers: {list(topology.layers)} in the model, {sorted(self.layers)} in the traces")
        for top_k, experts in self.routers:
            if top_k != topology.top_k:
                differences.append(f"experts per token: {topology.top_k} in the model, {top_k} in the traces")
            if experts not in (None, topology.num_experts):
                differences.append(f"experts: {topology.num_experts} in the model, {experts} in the traces")
        largest = max((len(summary.load) for summary in self.layers.values()), default=0)
        if largest > topology.num_experts and not differences:
            differences.append(f"expert {largest - 1} was selected, but the model has {topology.num_experts}")
        return differences

    def check(self, topology: MoeTopology) -> None:
        if differences := self.differences(topology):
            raise AlignmentError(
                f"the traces do not match the model: {'; '.join(differences)}",
                remedy="Check the model, its top-k setting and the layer numbering of the engine",
            )


def summarize(traces: Iterable[RouteTrace]) -> TraceSummary:
    """Summarize traces in one pass, with one trace in memory at a time."""
    summary, digests = TraceSummary(), set()
    for trace in traces:
        tokens, valid = len(trace), trace.valid
        summary.traces += 1
        summary.tokens += tokens
        summary.longest = max(summary.longest, tokens)
        summary.covered += int(np.count_nonzero(valid))
        summary.cells += valid.size
        summary.routers[trace.top_k, trace.num_experts] += 1
        for version, count in zip(*np.unique(trace.token_versions, return_counts=True), strict=True):
            summary.versions[int(version)] += int(count)
        summary.duplicates += _duplicates(trace)
        digest = blake2b(trace.token_ids.tobytes(), digest_size=16).digest()
        summary.repeated += digest in digests
        digests.add(digest)
        for slot, layer in enumerate(trace.layers):
            covered = trace.routed_experts[valid[:, slot], slot]
            load = np.bincount(covered.ravel(), minlength=trace.num_experts or 0)
            summary.layers.setdefault(layer, LayerSummary(layer)).add(load, tokens, len(covered))
    return summary


def _duplicates(trace: RouteTrace) -> int:
    """Count valid cells with a duplicate expert, which decoding a trace does not check."""
    ordered = np.sort(trace.routed_experts, axis=2)
    is_duplicate = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    return int(np.count_nonzero(is_duplicate & trace.valid))
