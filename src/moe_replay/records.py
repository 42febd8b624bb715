"""The records that cross a boundary of the training loop. `tests/test_records.py` runs the examples, in order.

engine --Sample--> session --Trajectory--> rank 0 --RolloutBatch--> all ranks --MicroBatch--> backend
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moe_replay.errors import EngineError
from moe_replay.routes.trace import RouteTrace
from moe_replay.sampling_mask import LogitMask, SamplingMask

if TYPE_CHECKING:  # importing this module does not import torch
    from torch import Tensor

    from moe_replay.routes.batch import RouteBatch
    from moe_replay.routes.layout import TokenLayout

Layers = tuple[int, ...]  # decoder layers with a router
NOT_SAMPLED = -1  # in place of a weight version, for tokens that the model did not sample: prompts and observations


class FinishReason(StrEnum):
    """Reason why a sample ended."""

    STOP = "stop"  # a stop token, which is part of the completion
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # a weight update: the rest of the turn is still to be sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request. Log-probs are those of the distribution sampled from, temperature included.

    >>> SamplingParams(n=8, max_tokens=512, top_p=0.9).is_truncated
    True
    """

    n: int = 1  # samples per prompt
    max_tokens: int = 16  # new tokens
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # do not stop at the model's end-of-sequence token
    seed: int | None = None  # None: not reproducible
    seeds: tuple[int, ...] = ()  # of each prompt of a call, in place of `seed`; empty: all have `seed`
    sampling_mask: bool = False  # return the support that each token was sampled from; engines that cannot refuse
    routes: bool = True  # return routes; without them, traces cover no token (`unrouted_trace`)

    @property
    def is_truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def draws(self) -> int:
        """Number of samples to draw: greedy ones are identical, and some engines refuse to draw them twice."""
        return self.n if self.temperature > 0 else 1

    def __post_init__(self) -> None:
        in_range = {"n": self.n >= 1, "max_tokens": 1 <= self.max_tokens < 2**31, "top_k": 0 <= self.top_k < 2**31}
        in_range |= {"temperature": 0 <= self.temperature < math.inf, "top_p": 0 < self.top_p <= 1}
        in_range |= {"seed": all(0 <= seed < 2**63 for seed in (self.seed or 0, *self.seeds))}
        if name := next((name for name, is_fine in in_range.items() if not is_fine), ""):
            raise EngineError(f"sampling parameter {name} is out of range", found=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one prompt, as an engine returns it.

    >>> trace = RouteTrace([5, 6, 7], [[[0, 3]], [[1, 2]], [[0, 1]]], (4,), [True, True, False], 2, num_experts=8)
    >>> sample = Sample(prompt_ids=np.array([5, 6]), completion_ids=np.array([7]), logprobs=np.array([-0.5]),
    ...                 finish_reason=FinishReason.STOP, trace=trace, weight_version=2)
    >>> sample.trace.routed_experts[1].tolist()  # token 6 led to token 7: experts 1 and 2 of layer 4
    [[1, 2]]
    """

    prompt_ids: np.ndarray  # (P,) int32
    completion_ids: np.ndarray  # (C,) int32, including the stop token
    logprobs: np.ndarray  # (C,) float32 of the sampled tokens, at the sampling temperature
    finish_reason: FinishReason
    trace: RouteTrace  # routes of all P + C tokens; tokens that were not routed (the last one) are uncovered
    weight_version: int  # of the weights that sampled the last token; the trace has one for every token
    info: dict[str, str] = field(default_factory=dict)
    weights_id: str = ""  # of the update that those weights come from (`weights/identity.py`)
    sampling_mask: SamplingMask | None = None  # of the C tokens, where the parameters request it
    server: str = ""  # URL of the server that has sampled it; empty: an engine in this process

    def __post_init__(self) -> None:
        if self.sampling_mask is not None:
            self.sampling_mask.check_sampled(self.completion_ids)
        if len(self.logprobs) != (completion := len(self.completion_ids)):
            raise EngineError("a sample needs one log-prob per token", expected=completion, found=len(self.logprobs))
        if not np.array_equal(self.trace.token_ids, np.concatenate([self.prompt_ids, self.completion_ids])):
            raise EngineError("the trace of a sample is of other tokens than the sample", found=self.trace)


class EncodedTrajectory(NamedTuple):
    """The bytes of a trajectory as a rollout worker has written them to shared memory, for the store to pass on."""

    records: Mapping[Layers | None, memoryview]  # by the layers whose routes are in it; None: all of them
    layers: Layers  # that routes were recorded for
    texts: tuple[str, str] | None  # prompt and completion with special tokens; None: not logged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One finished sequence of T tokens, of one turn or several: prompt, completions and observations.

    >>> trace = RouteTrace.uncovered(np.array([5, 6, 7, 8], np.int32), (4,), 2, weight_version=2)
    >>> one = Trajectory(token_ids=trace.token_ids, logprobs=np.array([0, 0, -0.5, -0.1]),
    ...                  versions=np.array([NOT_SAMPLED, NOT_SAMPLED, 2, 2]), trace=trace,
    ...                  finish_reason=FinishReason.LENGTH, row=17, group=3, reward=1.0, advantage=0.7, episode=2)
    >>> len(one), one.sampled.tolist(), one.truncated
    (4, [False, False, True, True], True)
    """

    token_ids: np.ndarray  # (T,) int32
    logprobs: np.ndarray  # (T,) float32: of the sampled tokens, under the weights that sampled them; 0 elsewhere
    versions: np.ndarray  # (T,) int64: weight version that sampled the token, or NOT_SAMPLED
    trace: RouteTrace  # routes of the T tokens, for all layers or those that this process needs
    finish_reason: FinishReason  # of the last turn
    sampling_mask: SamplingMask | None = None  # of the T tokens, the whole vocabulary where nothing was sampled
    servers: tuple[tuple[int, str], ...] = ()  # (first token, URL) of each part that one server has sampled
    row: int = -1  # of the data set
    group: int = -1  # trajectories of one group answer the same prompt
    reward: float = math.nan  # weighted sum of the scores; NaN where no reward function scored it
    advantage: float = 0.0  # of every sampled token
    episode: int = -1  # number in the group; those of a rewritten history share it, in order; -1: a whole episode
    encoded: EncodedTrajectory | None = None  # on rank 0, of one that a worker has sampled: its trace covers no token

    def __post_init__(self) -> None:
        if self.sampling_mask is not None:
            self.sampling_mask.check_sampled(self.token_ids)
        if set(lengths := (len(self.logprobs), len(self.versions), len(self.trace))) != {len(self)}:
            raise EngineError("log-probs, versions, routes: one entry per token", expected=len(self), found=lengths)
        if not np.array_equal(self.trace.token_ids, self.token_ids):
            raise EngineError("the trace of a sequence is of other tokens than the sequence", found=self.trace)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> np.ndarray:
        """(T,) bool: tokens that the model sampled, which are those to train on."""
        return self.versions != NOT_SAMPLED

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    @property
    def layers(self) -> Layers:
        """All layers that routes were recorded for; the trace may have fewer."""
        return self.trace.layers if self.encoded is None else self.encoded.layers


class TrajectoryHeader(NamedTuple):
    """Numbers of a trajectory that every rank has, so that all divide a step in the same way: 61 bytes."""

    row: int
    group: int
    length: int  # tokens, prompt included
    num_scored: int  # sampled tokens that are trained on: all but one that begins the sequence
    reward: float
    advantage: float
    oldest: int  # weight versions that sampled its tokens; -1 if none is sampled
    newest: int
    truncated: bool
    episode: int = -1  # number in the group; trajectories of one count as one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample as text, for logs."""

    row: int  # of the data set
    group: int
    sample: int  # number of its episode in the group
    prompt: str  # with special tokens
    completion: str  # with special tokens and observations
    reward: float  # weighted sum, NaN if no function scored it
    advantage: float
    scores: Mapping[str, float]  # by name of the reward function
    tokens: int  # sampled
    finish_reason: str
    weight_version: int  # oldest weights that sampled a token of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The trajectories of one step as every rank sees them: headers here, bodies in a `TrajectoryStore`.

    >>> header = TrajectoryHeader(17, 3, 40, 30, 1.0, 0.7, oldest=4, newest=5, truncated=False, episode=2)
    >>> RolloutBatch(headers=[header, header], layers=(1, 2, 3)).num_tokens  # of one episode, in two samples
    80
    """

    headers: Sequence[TrajectoryHeader]
    layers: Layers  # that routes were recorded for
    number: int = 0  # of the batch in its store
    file: int = -1  # descriptor of the anonymous file with the bodies, in the process of rank 0
    sections: tuple[tuple[int, int], ...] = ()  # (start, size) in it for each set of layers
    servers: tuple[str, ...] = ("",)  # URLs of those that have sampled it
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the rollout; on rank 0
    completions: Sequence[Completion] = ()  # where they are logged; on rank 0

    @property
    def num_tokens(self) -> int:
        return sum(header.length for header in self.headers)


@dataclass(eq=False, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the model together. (B, W) is what this rank feeds; N sampled tokens are scored.

    >>> batch = make_micro_batch([one, one], [0.5, 0.5], TokenLayout.packed([4, 4]), torch.device("cpu"))
    >>> batch.input_ids.tolist(), batch.target_positions.tolist(), batch.sequence.tolist()
    ([[5, 6, 7, 8, 5, 6, 7, 8]], [1, 2, 5, 6], [0, 0, 1, 1])
    """

    trajectories: tuple[Trajectory, ...]
    layout: TokenLayout  # of this rank
    input_ids: Tensor  # (B, W) int64
    position_ids: Tensor  # (B, W) int64
    target_positions: Tensor  # (n,) int64: flattened positions of `input_ids` on this rank that predict a sampled token
    target_ids: Tensor  # (n,) int64: the sampled token that each of them predicts
    target_index: Tensor  # (n,) int64: which of the N sampled tokens that is; all N unless context parallel
    sequence: Tensor  # (N,) int64: index of the trajectory that each sampled token belongs to
    advantages: Tensor  # (N,) float32: of its trajectory
    loss_weights: Tensor  # (N,) float32: weight in the loss of the whole mini-batch
    rollout_logprobs: Tensor  # (N,) float32, as the rollout engine reported them
    logit_mask: LogitMask | None = None  # supports that the n targets were sampled from; None: the whole vocabulary
    old_logprobs: Tensor | None = None  # (N,) of the policy before the updates; None until scored
    ref_logprobs: Tensor | None = None  # (N,) of the reference model; None until scored, and without one
    chunk_layers: Sequence[Sequence[int]] = ()  # layers with a router in each chunk of the policy on this rank
    source_layers: Layers | None = None  # that routes were recorded for; None: those that the trajectories have
    rollout_routes: dict[int, RouteBatch] = field(default_factory=dict)  # chunk -> the engine's, kept on the device
    recorded_routes: dict[int, RouteBatch] = field(default_factory=dict)  # chunk -> of the pass with Routing("record")
    native_routes: dict[int, RouteBatch] = field(default_factory=dict)  # chunk -> the routers' choice under `observe`
    old_weights: dict[int, Any] = field(default_factory=dict)  # chunk -> `RoutingWeights` of the old-log-prob pass
    is_dummy: bool = False  # only keeps this rank in step with busier ones: zero weights, left out of all metrics
