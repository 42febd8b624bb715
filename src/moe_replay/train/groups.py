"""Groups of samples: each is sampled, played with its environment and scored, here or by a driver process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from moe_replay.rollout.engine import Sampler
from moe_replay.rollout.types import SampledSequence, SamplingParams
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt
from moe_replay.train.reward_pool.scoring import Samples, Scores, open_scorer
from moe_replay.train.rewards import Reward, total
from moe_replay.train.sequences import FirstTurns, SequenceSampler
from moe_replay.train.tools import ToolSet
from moe_replay.train.truncation import check_mask
from moe_replay.train.types import Group, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """A group to be sampled.

    number    of the group in the run
    params    of its samples
    first     of their first turn, if it has others
    is_kept   whether its trajectories are needed; else its scores alone, as in an evaluation
    """

    prompt: Prompt
    number: int
    params: SamplingParams
    first: SamplingParams | None = None
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
        """Start groups; `together`: first turns are sampled with the parameters of the first of them."""
        ...

    def wait(self, future: Future[Any], give_up: Callable[[], bool] | None = None) -> bool:
        """Wait for a result; return False if `give_up`, asked from time to time, says so."""
        ...

    def result(self, future: Future[T]) -> T:
        """Wait for a result and return it."""
        ...

    def close(self) -> None:
        """End everything that runs."""
        ...


class LocalGroups:
    """Groups that this process samples, in its own event loops."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Sampler,
        tokenizer: Any,
        rewards: Sequence[Reward],
        max_length: int,
        tools: ToolSet | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._sampler = SequenceSampler(config, engine, tokenizer, max_length, tools)
        self._scorer = open_scorer(config.reward, rewards)
        self._sampler.start(self._scorer.start())

    @property
    def timeouts(self) -> int:
        """Samples so far whose reward took too long, or ended its process."""
        return self._scorer.timeouts

    def submit(self, tasks: Sequence[GroupTask], *, together: bool) -> list[RunningGroup]:
        """Start groups."""
        firsts = [task.first or task.params for task in tasks]
        turns = self._sampler.first_turns([task.prompt for task in tasks], firsts, together=together)
        return [self._start(task, first_turns) for task, first_turns in zip(tasks, turns, strict=True)]

    def wait(self, future: Future[Any], give_up: Callable[[], bool] | None = None) -> bool:
        """Wait for a result; return False if `give_up`, asked from time to time, says so."""
        return self._sampler.wait(future, give_up)

    def result(self, future: Future[T]) -> T:
        """Wait for a result, and for environments."""
        return self._sampler.result(future)

    def check_environments(self) -> None:
        """Raise if an environment has blocked its event loop for too long; to be called every few seconds."""
        self._sampler.check_environments()

    def close(self) -> None:
        """End the loops, and the processes of rewards."""
        self._sampler.close()
        self._scorer.close()

    def _start(self, task: GroupTask, turns: FirstTurns) -> RunningGroup:
        sampled: Future[None] = Future()
        return RunningGroup(self._sampler.start(self._run(task, turns, sampled)), sampled)

    async def _run(self, task: GroupTask, turns: FirstTurns, sampled: Future[None]) -> Group:
        try:
            sequences = await self._sampler.sample(task.prompt, task.params, turns)
        finally:
            sampled.set_result(None)
        for sequence in sequences:
            check_mask(sequence, task.params, task.prompt.row)
        scores = await self._score(task.prompt, sequences)
        if not task.is_kept:
            return Group([], scores)
        rewards = total(self._rewards, scores).tolist()
        trajectories = [
            Trajectory.of(sequence, row=task.prompt.row, group=task.number, reward=reward)
            for sequence, reward in zip(sequences, rewards, strict=True)
        ]
        return Group(trajectories, scores)

    async def _score(self, prompt: Prompt, sequences: Sequence[SampledSequence]) -> Scores:
        completions = [sequence.token_ids[len(prompt.token_ids) :] for sequence in sequences]
        samples = await asyncio.to_thread(Samples.of, prompt, completions, self._tokenizer)
        return await self._scorer.score(samples)
