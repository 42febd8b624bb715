"""Samples in TRL's batches, forward passes that record, replay or compare their routes, and the metrics of those."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import LayoutError
from moe_replay.replay.controller import RouterReplay
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.verification.metrics import MetricAccumulator

PAIRS = ("rollout_vs_old", "rollout_vs_train", "old_vs_train")


class ReplayMetrics:
    """Agreement and coverage of routes, and mismatch of log-probs, under the names of docs/metrics.md."""

    def __init__(self, topology: MoeTopology, device: torch.device) -> None:
        self._accumulator = MetricAccumulator(topology, device, pairs=PAIRS)

    def add_routes(self, recorded: RouteBatch, native: RouteBatch, layout: TokenLayout, *, replayed: bool) -> None:
        """Add the recorded routes of one micro-batch, and those that the model's own routers choose."""
        self._accumulator.add_agreement(recorded, native)
        self._accumulator.add_coverage(recorded, layout, replayed=replayed)
        self._accumulator.add_load(recorded if replayed else native, layout)

    def add_uncovered(self, tokens: int) -> None:
        """Add tokens without a recorded route."""
        self._accumulator.add_uncovered(tokens)

    def add_logprobs(self, pair: str, sampled: Tensor | None, scored: Tensor | None, mask: Tensor) -> None:
        """Add log-probs (B, C) of one micro-batch from two passes; a pass that does not exist, or NaN, is left out."""
        if sampled is None or scored is None:
            return
        known = mask.bool() & ~(sampled.isnan() | scored.isnan())
        self._accumulator.add_logprobs(pair, sampled, scored, known)

    def flush(self) -> dict[str, float]:
        """Return the metrics over all ranks, and start again. Collective: call on every rank."""
        metrics = self._accumulator.reduce().metrics
        self._accumulator.clear()
        return metrics


@dataclass(frozen=True, slots=True)
class RoutedSample:
    """One prompt and its completion, T = P + C tokens. TRL shuffles and splits a list of them like any tensor.

    token_ids       (T,)
    prompt_length   P
    trace           routes of its tokens; None until recorded
    logprobs        (C,) as the rollout reported them; None where it did not
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    trace: RouteTrace | None = None
    logprobs: Sequence[float | None] | None = None


def batch_layout(samples: Sequence[RoutedSample], prompt_width: int, width: int) -> TokenLayout:
    """Return the layout of a TRL batch: prompts padded on the left, completions on the right."""
    fed = np.full((len(samples), width), PADDING, np.int64)
    first = 0
    for row, sample in enumerate(samples):
        start, length = prompt_width - sample.prompt_length, len(sample.token_ids)
        if start < 0 or start + length > width:
            raise LayoutError(
                "a sample does not fit in the batch that TRL made of it",
                sample=row,
                expected=f"at most {prompt_width} + {width - prompt_width} tokens",
                found=f"{sample.prompt_length} + {length - sample.prompt_length} tokens",
            )
        fed[row, start : start + length] = np.arange(first, first + length)
        first += length
    return TokenLayout(fed, tuple(len(sample.token_ids) for sample in samples), (width,))


class RoutedPass(ABC):
    """Stand-in for the model while TRL scores a batch: TRL calls it once for each slice of the batch, in order."""

    def __init__(
        self, model: Callable[..., Any], replay: RouterReplay, samples: Sequence[RoutedSample], prompt_width: int
    ) -> None:
        self.model = model
        self.replay = replay
        self.samples = samples
        self.prompt_width = prompt_width
        self._begun = 0

    def __call__(self, **inputs: Any) -> Any:
        rows, width = inputs["input_ids"].shape
        samples = self.samples[self._begun : self._begun + rows]
        self._begun += rows
        return self.forward(samples, batch_layout(samples, self.prompt_width, width), inputs)

    @abstractmethod
    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        """Run the model on one slice."""


class RecordingPass(RoutedPass):
    """Pass with native routing; `recorded` has the samples with the routes that were taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[RoutedSample] = []

    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        with self.replay.record() as recording:
            output = self.model(**inputs)
        traces = recording.traces(layout, [sample.token_ids for sample in samples])
        self.recorded += [replace(sample, trace=trace) for sample, trace in zip(samples, traces, strict=True)]
        return output


class ReplayingPass(RoutedPass):
    """Pass that replays the routes of the samples; with `metrics` they are compared with the native choice."""

    def __init__(self, *args: Any, metrics: ReplayMetrics | None = None) -> None:
        super().__init__(*args)
        self.metrics = metrics

    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        batch = routes_of(samples, layout, inputs["input_ids"].device)
        with self.replay.replay(batch, observe=self.metrics is not None) as replaying:
            output = self.model(**inputs)
        if self.metrics is not None:
            self.metrics.add_routes(batch, replaying.native(), layout, replayed=True)
        return output


class ComparingPass(RoutedPass):
    """Pass with native routing, which is compared with the routes of the samples."""

    def __init__(self, *args: Any, metrics: ReplayMetrics) -> None:
        super().__init__(*args)
        self.metrics = metrics

    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        batch = routes_of(samples, layout, inputs["input_ids"].device)
        with self.replay.record() as recording:
            output = self.model(**inputs)
        self.metrics.add_routes(batch, recording.batch(), layout, replayed=False)
        return output


def routes_of(samples: Sequence[RoutedSample], layout: TokenLayout, device: torch.device) -> RouteBatch:
    return RouteBatch.from_traces([s.trace for s in samples if s.trace is not None], layout, device=device)


def rollout_logprobs(samples: Sequence[RoutedSample], like: Tensor) -> Tensor | None:
    """Return (B, C) log-probs as the rollout reported them, NaN where it did not; None where it reported none."""
    if all(sample.logprobs is None for sample in samples):
        return None
    padded = torch.full(like.shape, torch.nan)
    for row, sample in enumerate(samples):
        reported = [torch.nan if value is None else float(value) for value in sample.logprobs or ()]
        padded[row, : len(reported)] = torch.tensor(reported)
    return padded.to(like.device)
