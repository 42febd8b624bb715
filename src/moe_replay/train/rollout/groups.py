"""Groups of samples: each is sampled turn by turn, played with its environment and scored, here or by a worker.

Sequences are independent: where the engine runs calls concurrently, the second turn of a sequence begins as soon as its
first turn ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from moe_replay.engines.base import Sampler
from moe_replay.engines.event_loop import LoopThread, gather_or_cancel
from moe_replay.engines.session import Session
from moe_replay.errors import AlignmentError, EngineError
from moe_replay.records import Sample, SamplingParams, Trajectory
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.batches import episodes_of
from moe_replay.train.rollout.environments import (
    EnvironmentLoops,
    Episode,
    EpisodeError,
    LoopBoundSampler,
    environment_name,
    load_environment,
    run_environment,
)
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.reward_pool import Samples, Scores, open_scorer
from moe_replay.train.rollout.rewards import Reward, total
from moe_replay.train.rollout.tools import ToolSet
from moe_replay.utils.processes import WATCH

T = TypeVar("T")
ShouldStop = Callable[[], bool]
STOP_CHECK_S = 5.0
"""Seconds between two calls of `should_stop` during a wait."""


@dataclass(frozen=True, slots=True)
class Group:
    """The n episodes of one prompt, of a trajectory each or several; an evaluation has their scores alone.

    scores   (n,) by name of the reward function, NaN where it did not score an episode
    """

    trajectories: Sequence[Trajectory]
    scores: Scores

    @property
    def rewards(self) -> np.ndarray:
        """(n,) float64: weighted sums of the scores."""
        return np.array([episode[0].reward for episode in self.episodes], np.float64)

    @property
    def episodes(self) -> list[list[Trajectory]]:
        return [[self.trajectories[index] for index in episode] for episode in episodes_of(self.trajectories)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """A group to be sampled.

    index     of the group in the run
    params    of its samples
    is_kept   whether its trajectories are needed; else its scores alone, as in an evaluation
    """

    prompt: Prompt
    index: int
    params: SamplingParams
    is_kept: bool = True


class RunningGroup(NamedTuple):
    """A group in flight, and when it is sampled: before it is scored."""

    group: Future[Group]
    sampled: Future[None]


class GroupSampler(Protocol):
    """Samples and scores groups.

    timeouts   samples so far whose reward took too long, or ended its process
    """

    @property
    def timeouts(self) -> int: ...

    def submit(self, tasks: Sequence[GroupTask], *, together: bool) -> list[RunningGroup]:
        """Start groups; `together`: a serial engine samples their first turns in one call."""

    def wait(self, future: Future[Any], should_stop: ShouldStop | None = None) -> bool:
        """Wait for a result; return False if `should_stop`, called from time to time, returns True."""

    def close(self) -> None:
        """End everything that runs."""


class FirstTurns:
    """The first turns of the n samples of a prompt, used in the event loop.

    calls_each   a call for each sample, or else one for the prompt
    batch        samples of several prompts, from one call for all; those of this prompt are at `index`
    """

    def __init__(
        self,
        engine: Sampler,
        prompt: Prompt,
        params: SamplingParams,
        *,
        calls_each: bool,
        batch: Future[list[list[Sample]]] | None = None,
        index: int = 0,
    ) -> None:
        self.n = params.n
        self._engine, self._prompt, self._params, self._calls_each = engine, prompt, params, calls_each
        self._batch, self._index = batch, index
        self._call: asyncio.Task[list[Sample]] | None = None

    async def sample(self, number: int) -> Sample:
        if self._calls_each:
            params = _of_sample(self._params, number)
            (sample,) = await self._engine.generate_one(self._prompt.token_ids, params)
            return sample
        if self._call is None:
            self._call = asyncio.ensure_future(self._of_prompt())
        return (await self._call)[number]

    async def _of_prompt(self) -> list[Sample]:
        if self._batch is not None:
            return (await asyncio.wrap_future(self._batch))[self._index]
        return await self._engine.generate_one(self._prompt.token_ids, self._params)


class LocalGroups:
    """Groups that this process samples, in its own event loops.

    A serial engine (`Sampler.is_serial`) is given the first turns of a step in one call.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Sampler,
        tokenizer: Any,
        rewards: Sequence[Reward],
        max_length: int,
        tools: ToolSet | None = None,
    ) -> None:
        self._engine = engine
        self._config = config.rollout
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_length = max_length
        self._tools = tools
        self._environment = load_environment(config.rollout.environment)
        self._loop = LoopThread("rollouts")
        self._environments = EnvironmentLoops(config.rollout.environment_threads if self._environment else 0)
        self._engine_for_episodes = LoopBoundSampler(engine, self._loop.loop)
        self._scorer = open_scorer(config.reward, rewards)
        self.start(self._scorer.start())

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.loop)

    @property
    def timeouts(self) -> int:
        return self._scorer.timeouts

    def submit(self, tasks: Sequence[GroupTask], *, together: bool) -> list[RunningGroup]:
        prompts, params = [task.prompt for task in tasks], [task.params for task in tasks]
        turns = self.first_turns(prompts, params, together=together)
        return [self._start(task, first_turns) for task, first_turns in zip(tasks, turns, strict=True)]

    def close(self) -> None:
        self._environments.close()
        self._loop.close()
        self._scorer.close()

    def _start(self, task: GroupTask, turns: FirstTurns) -> RunningGroup:
        sampled: Future[None] = Future()
        return RunningGroup(self.start(self._run(task, turns, sampled)), sampled)

    async def _run(self, task: GroupTask, turns: FirstTurns, sampled: Future[None]) -> Group:
        try:
            sequences = await self.sample(task.prompt, task.params, turns)
        finally:
            sampled.set_result(None)
        for sequence in sequences:
            check_mask(sequence, task.params, task.prompt.row)
        scores = await self._score(task.prompt, sequences)
        if not task.is_kept:
            return Group([], scores)
        rewards = total(self._rewards, scores).tolist()
        trajectories = [
            replace(sequence, row=task.prompt.row, group=task.index, reward=rewards[sequence.episode])
            for sequence in sequences
        ]
        for trajectory in trajectories:
            check_versions(trajectory)
        return Group(trajectories, scores)

    async def _score(self, prompt: Prompt, sequences: Sequence[Trajectory]) -> Scores:
        first_sampled = [int(np.flatnonzero(one.sampled).min(initial=len(one))) for one in sequences]
        parts = [sequence.token_ids[first:] for sequence, first in zip(sequences, first_sampled, strict=True)]
        completions = [np.concatenate([parts[index] for index in episode]) for episode in episodes_of(sequences)]
        samples = await asyncio.to_thread(Samples.of, prompt, completions, self._tokenizer)
        return await self._scorer.score(samples)

    # ---- first turns --------------------------------------------------------------------------------------------

    def first_turns(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, together: bool
    ) -> list[FirstTurns]:
        """Return the first turns of each prompt; `params` of each, which differ in seeds alone.

        With an environment every sample is a separate call, so that no turn waits for the first turn of another
        sample. Without one every prompt is, so that its samples are scored while others are sampled.

        together   a serial engine gets one call for all; none of its results is there before the last one
        """
        is_serial = self._engine.is_serial
        calls_each = self._environment is not None and not is_serial
        batch = self.start(self._sample_serially(prompts, params)) if together and is_serial else None
        return [
            FirstTurns(self._engine, prompt, of_prompt, calls_each=calls_each, batch=batch, index=index)
            for index, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True))
        ]

    async def _sample_serially(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[list[Sample]]:
        """Return the samples of each prompt, from one call for all; their parameters differ in seeds alone."""
        of_call = replace(params[0], seeds=tuple(of_sample.seed for of_sample in params if of_sample.seed is not None))
        token_ids = [prompt.token_ids for prompt in prompts]
        return await asyncio.to_thread(self._engine.generate, token_ids, of_call)

    # ---- sequences ----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Prompt, params: SamplingParams, first_turns: FirstTurns) -> list[Trajectory]:
        """Return the sequences of all episodes of a prompt, in order; later turns have `params`, and their own seed."""
        episodes = (self._run_episode(prompt, params, first_turns, number) for number in range(first_turns.n))
        return list(chain.from_iterable(await gather_or_cancel(episodes)))

    async def _run_episode(
        self, prompt: Prompt, params: SamplingParams, first_turns: FirstTurns, number: int
    ) -> list[Trajectory]:
        episode = Episode(
            prompt=prompt,
            session=Session(prompt.token_ids),
            engine=self._engine_for_episodes,
            params=_later_turns(params, number),
            tokenizer=self._tokenizer,
            max_length=self._max_length,
            max_turns=self._config.max_turns,
            tools=self._tools,
        )
        await episode.start(await first_turns.sample(number))
        if self._environment is not None:
            limit_s = self._config.environment_timeout_s
            await self._environments.run(run_environment(self._environment, episode, limit_s))
        return [replace(sequence, episode=number) for sequence in episode.finish()]

    # ---- waiting ------------------------------------------------------------------------------------------------

    def wait(self, future: Future[Any], should_stop: ShouldStop | None = None) -> bool:
        """Wait for a result; return False if `should_stop`, called every few seconds, returns True.

        An environment that blocks its event loop is an error, not a wait forever.
        """
        if self._environment is None and should_stop is None:
            wait([future])
            return True
        limit_s = math.inf if self._environment is None else self._config.environment_timeout_s
        last_asked = time.monotonic()
        with WATCH.waiting(limit_s):  # without a gap between the waits inside, each of which restarts its timer
            while True:
                with WATCH.waiting(limit_s):
                    if wait([future], timeout=1.0).done:
                        return True
                self.check_environments()
                if should_stop is not None and time.monotonic() - last_asked >= STOP_CHECK_S:
                    if should_stop():
                        return False
                    last_asked = time.monotonic()

    def check_environments(self) -> None:
        """Raise if an environment has blocked its event loop for too long."""
        limit_s = self._config.environment_timeout_s
        if self._environment is not None and self._environments.blocked_s() > limit_s:
            raise EpisodeError(
                f"environment {environment_name(self._environment)} has blocked the event loop for {limit_s:g} s",
                remedy="Await what takes long, e.g. with asyncio.to_thread, or raise rollout.environment_timeout_s",
            )


def check_versions(trajectory: Trajectory) -> None:
    """Raise unless each log-prob and the route that led to it come from the same weights.

    The log-prob of token p was computed by the pass over token p - 1, so that token's route must have the weight
    version that sampled p. Earlier tokens may have been routed by earlier weights: they are kept as sampled.
    """
    routed = trajectory.trace.token_versions
    leading = trajectory.sampled[1:] & trajectory.trace.valid[:-1].any(axis=1)
    mismatched = np.flatnonzero(leading & (routed[:-1] != trajectory.versions[1:]))
    if mismatched.size:
        token = int(mismatched[0])
        raise AlignmentError(
            "a token was routed by other weights than those its log-prob was computed with",
            sample=f"row {trajectory.row}",
            token=token,
            expected=f"routes of weight version {trajectory.versions[token + 1]}",
            found=f"version {routed[token]} ({mismatched.size} tokens)",
            remedy="Keep routes as_sampled when a sequence is resumed after a weight update",
        )


def check_mask(sequence: Trajectory, params: SamplingParams, row: int) -> None:
    """Raise if a sequence has no mask although its parameters request it; `row` of the data set is for errors."""
    if params.sampling_mask and sequence.sampling_mask is None:
        raise EngineError(
            "the engine returned samples without their sampling mask",
            sample=f"row {row}",
            expected=f"the support of each token under top_p {params.top_p}, top_k {params.top_k}",
            remedy='Use an engine that returns it, or accept the bias with rollout.sampling_mask = "off"',
        )


def _of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one sample of a group as a separate call, with its own seed."""
    if params.seed is None:
        return replace(params, n=1)
    return replace(params, n=1, seed=int(np.random.SeedSequence([params.seed, index]).generate_state(1)[0] >> 1))


def _later_turns(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a sample's later turns, with a seed that differs within the group."""
    return replace(params, n=1, seed=None if params.seed is None else params.seed + 1 + index)
