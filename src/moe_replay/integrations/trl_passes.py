"""Samples on their way through TRL's batches, and the forward passes in which they meet the model's routers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import LayoutError
from moe_replay.integrations.trl_numbers import RunningNumbers
from moe_replay.replay.controller import RouterReplay
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.trace import RouteTrace


@dataclass(frozen=True, slots=True)
class RoutedSample:
    """One prompt and its completion, T = P + C tokens. TRL shuffles and splits a list of them like any tensor.

    token_ids       (T,)
    prompt_length   P
    trace           where its tokens went; None while nobody has recorded it
    logprobs        (C,) of the rollout, where it says them
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    trace: RouteTrace | None = None
    logprobs: Sequence[float | None] | None = None


def batch_layout(samples: Sequence[RoutedSample], prompt_width: int, width: int) -> TokenLayout:
    """Prompts padded on the left, completions on the right: each sample is one run of columns across the seam."""
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
    """Stands in for the model while TRL scores a batch: TRL calls it once for each slice of the batch, in order."""

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
        """The model's answer for one slice."""


class RecordingPass(RoutedPass):
    """The model routes as it likes; `recorded` has the samples with the routes that it took."""

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
    """The model takes the routes of the samples; with `numbers`, what it would have taken is compared with them."""

    def __init__(self, *args: Any, numbers: RunningNumbers | None = None) -> None:
        super().__init__(*args)
        self.numbers = numbers

    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        batch = routes_of(samples, layout, inputs["input_ids"].device)
        with self.replay.replay(batch, observe=self.numbers is not None) as replaying:
            output = self.model(**inputs)
        if self.numbers is not None:
            self.numbers.add_routes(batch, replaying.native(), replayed=True)
        return output


class ComparingPass(RoutedPass):
    """The model routes as it likes, and that is compared with the routes of the samples."""

    def __init__(self, *args: Any, numbers: RunningNumbers) -> None:
        super().__init__(*args)
        self.numbers = numbers

    def forward(self, samples: Sequence[RoutedSample], layout: TokenLayout, inputs: dict[str, Any]) -> Any:
        batch = routes_of(samples, layout, inputs["input_ids"].device)
        with self.replay.record() as recording:
            output = self.model(**inputs)
        self.numbers.add_routes(batch, recording.batch(), replayed=False)
        return output


def routes_of(samples: Sequence[RoutedSample], layout: TokenLayout, device: torch.device) -> RouteBatch:
    """The routes of samples that all have them."""
    return RouteBatch.from_traces([s.trace for s in samples if s.trace is not None], layout).to(device)


def rollout_logprobs(samples: Sequence[RoutedSample], like: Tensor) -> Tensor | None:
    """(B, C) log-probs that the rollout reported, NaN where it did not; None where it reported none at all."""
    if all(sample.logprobs is None for sample in samples):
        return None
    padded = torch.full(like.shape, torch.nan)
    for row, sample in enumerate(samples):
        known = [torch.nan if value is None else float(value) for value in sample.logprobs or ()]
        padded[row, : len(known)] = torch.tensor(known)
    return padded.to(like.device)
