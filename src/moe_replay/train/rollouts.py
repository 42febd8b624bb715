"""Groups of samples for the trainer: drawn, sampled, scored; in step with training, or some steps ahead of it.

Groups are handed out in the order in which their prompts were drawn. At the beginning of a step there are at most
`prompts_per_step * (1 + max_staleness)` of them under way, so none is ever older than `max_staleness` steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from moe_replay.rollout.engine import Engine
from moe_replay.rollout.loop import LoopThread
from moe_replay.rollout.session import Session
from moe_replay.rollout.types import Sample, SamplingParams
from moe_replay.train.advantages import has_signal, load_advantages
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt, PromptStream
from moe_replay.train.environments import load_environment, run_environment
from moe_replay.train.episode import Episode
from moe_replay.train.rewards import Reward, score, total
from moe_replay.train.trajectory import Trajectory

PROBE_TOKENS = 128

Progress = Callable[[int, int], None]
"""(samples done, samples wanted)"""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt, with their rewards: `rewards` (n,) the sums, `scores` (n,) for each function."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    rewards: np.ndarray
    scores: dict[str, np.ndarray]


class Harvest(NamedTuple):
    """What one step trains on, and what there is to say about it."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]


class _Pending(NamedTuple):
    """A group under way, and where the stream of prompts stood before it."""

    group: Future[Group]
    stream: dict[str, int]
    number: int


class Rollouts:
    """Samples for one step after the other, by an engine that the trainer's weights are put into in between."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        stream: PromptStream,
        tokenizer: Any,
        rewards: Sequence[Reward],
        max_length: int,
    ) -> None:
        self.engine = engine
        self._config = config
        self._stream = stream
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_length = max_length
        self._advantages = load_advantages(config.algorithm.baseline)
        self._environment = load_environment(config.rollout.environment)
        self._loop = LoopThread("rollouts")
        self._pending: deque[_Pending] = deque()
        self._next_group = 0
        self._params = SamplingParams(
            n=config.rollout.num_generations,
            max_tokens=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
        )

    @property
    def example(self) -> tuple[int, ...]:
        """Tokens of some prompts one after the other, for engine and trainer to be compared on."""
        some = [token for prompt in self._stream.prompts[:PROBE_TOKENS] for token in prompt.token_ids]
        return tuple((some * 2)[: max(2, min(PROBE_TOKENS, self._max_length - 1))])

    # ---- where it stands ----------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, int]:
        """All that a resumed run needs; groups that are under way will be sampled again."""
        if self._pending:
            return {**self._pending[0].stream, "group": self._pending[0].number}
        return {**self._stream.state, "group": self._next_group}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken."""
        self._stream.restore(state)
        self._next_group = int(state["group"])

    def close(self) -> None:
        """Give up what is under way."""
        for pending in self._pending:
            pending.group.cancel()
        self._pending.clear()
        self._loop.close()

    # ---- one step -----------------------------------------------------------------------------------------------

    def next(self, version: int, progress: Progress | None = None) -> Harvest:
        """The samples of the next step; `version` is that of the weights that will be trained on them."""
        wanted = self._config.rollout.prompts_per_step
        self._submit(wanted * (1 + self._config.rollout.max_staleness) - len(self._pending))
        kept: list[Group] = []
        without_signal: list[Group] = []
        refills = self._config.algorithm.max_refills if self._config.algorithm.dynamic_sampling else 0
        while len(kept) < wanted:
            if not self._pending and refills == 0:
                break
            if not self._pending:
                refills -= 1
                self._submit(wanted - len(kept))
            group = self._pending.popleft().group.result()
            useful = bool(has_signal(group.rewards[None])[0])
            (kept if useful or not self._config.algorithm.dynamic_sampling else without_signal).append(group)
            if progress is not None:
                progress(len(kept) * self._params.n, wanted * self._params.n)
        # Too few groups with a signal: the others complete the batch, with advantages of zero.
        kept += without_signal[: wanted - len(kept)]
        return self._harvest(kept, len(without_signal), version)

    def _harvest(self, groups: Sequence[Group], dropped: int, version: int) -> Harvest:
        rewards = np.stack([group.rewards for group in groups])
        advantages = self._advantages(rewards)
        trajectories = [
            trajectory.with_advantage(reward, advantage)
            for group, group_rewards, group_advantage in zip(groups, rewards, advantages, strict=True)
            for trajectory, reward, advantage in zip(group.trajectories, group_rewards, group_advantage, strict=True)
        ]
        scored = rewards[~np.isnan(rewards)]
        lengths = np.array([int(t.sampled.sum()) for t in trajectories])
        stale = np.array([version - int(t.versions[t.sampled].min(initial=version)) for t in trajectories])
        metrics = {
            "reward/mean": float(scored.mean()) if scored.size else float("nan"),
            "reward/std": float(scored.std()) if scored.size else float("nan"),
            "reward/unscored": float(np.isnan(rewards).mean()),
            "completion/length_mean": float(lengths.mean()),
            "completion/length_max": float(lengths.max()),
            "completion/length_min": float(lengths.min()),
            "completion/truncated": float(np.mean([t.truncated for t in trajectories])),
            "completion/groups_without_signal": float(np.mean(~has_signal(rewards))),
            "completion/groups_dropped": float(dropped),
            "completion/staleness_mean": float(stale.mean()),
            "completion/staleness_max": float(stale.max()),
        }
        for reward in self._rewards:
            every = np.concatenate([group.scores[reward.name] for group in groups])
            if not np.isnan(every).all():
                metrics[f"reward/{reward.name}"] = float(np.nanmean(every))
        return Harvest(trajectories, metrics)

    # ---- sampling -----------------------------------------------------------------------------------------------

    def _submit(self, count: int) -> None:
        if count <= 0:
            return
        places = []
        for _ in range(count):
            before = self._stream.state
            (prompt,) = self._stream.draw(1)
            places.append((prompt, before, self._next_group))
            self._next_group += 1
        sampled = self._sampled([prompt for prompt, _, _ in places], first=places[0][2])
        for (prompt, before, number), samples in zip(places, sampled, strict=True):
            future = asyncio.run_coroutine_threadsafe(self._group(prompt, number, samples), self._loop.loop)
            self._pending.append(_Pending(future, before, number))

    def _sampled(self, prompts: Sequence[Prompt], first: int) -> list[Callable[[], Awaitable[list[Sample]]]]:
        """How each group gets its first turn: all in one call, or each by itself where training goes on meanwhile."""
        if self._config.rollout.max_staleness == 0:
            ids = [prompt.token_ids for prompt in prompts]
            call = asyncio.to_thread(self.engine.generate, ids, self._seeded(first))
            together = asyncio.run_coroutine_threadsafe(call, self._loop.loop)

            async def share(index: int) -> list[Sample]:
                return (await asyncio.wrap_future(together))[index]

            return [lambda index=index: share(index) for index in range(len(prompts))]
        return [
            lambda prompt=prompt, number=first + index: self.engine.generate_one(prompt.token_ids, self._seeded(number))
            for index, prompt in enumerate(prompts)
        ]

    def _seeded(self, group: int) -> SamplingParams:
        """The seed depends on the run and on the group alone; one group's samples differ among themselves."""
        if not self._config.rollout.reproducible:
            return self._params
        seed = int(np.random.SeedSequence([self._config.seed, group]).generate_state(1)[0] >> 1)
        return replace(self._params, seed=seed)

    async def _group(self, prompt: Prompt, number: int, first: Callable[[], Awaitable[list[Sample]]]) -> Group:
        samples = await first()
        params = replace(self._seeded(number), n=1)
        episodes = await asyncio.gather(
            *(self._run_episode(sample, prompt, _of_sample(params, index)) for index, sample in enumerate(samples))
        )
        trajectories = tuple(Trajectory.of(episode.session, prompt.row, number) for episode in episodes)
        scores = await asyncio.to_thread(self._scores, prompt, trajectories)
        return Group(prompt, trajectories, total(self._rewards, scores), scores)

    async def _run_episode(self, sample: Sample, prompt: Prompt, params: SamplingParams) -> Episode:
        episode = Episode(
            prompt=prompt,
            session=Session(prompt.token_ids),
            engine=self.engine,
            params=params,
            tokenizer=self._tokenizer,
            max_length=self._max_length,
            max_turns=self._config.rollout.max_turns,
        )
        await episode.start(sample)
        if self._environment is not None:
            await run_environment(self._environment, episode)
        return episode

    # ---- rewards ------------------------------------------------------------------------------------------------

    def _scores(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
        completions = [t.token_ids[len(prompt.token_ids) :] for t in trajectories]
        return score_completions(self._rewards, prompt, completions, self._tokenizer)

    def evaluate(self, prompts: Sequence[Prompt], temperature: float) -> dict[str, float]:
        """Mean rewards of one completion of each prompt. The engine samples by its own routes: nothing is replayed."""
        seed = self._config.seed if self._config.rollout.reproducible else None
        params = replace(self._params, n=1, temperature=temperature, seed=seed)
        groups = self.engine.generate([prompt.token_ids for prompt in prompts], params)
        scores = [
            score_completions(self._rewards, prompt, [sample.completion_ids for sample in samples], self._tokenizer)
            for prompt, samples in zip(prompts, groups, strict=True)
        ]
        every = {name: np.concatenate([one[name] for one in scores]) for name in scores[0]}
        found = {"eval/reward": float(np.nanmean(total(self._rewards, every)))}
        return found | {f"eval/{name}": float(np.nanmean(values)) for name, values in every.items()}


def score_completions(
    rewards: Sequence[Reward], prompt: Prompt, completions: Sequence[np.ndarray], tokenizer: Any
) -> dict[str, np.ndarray]:
    """(n,) for each reward function; completions are text, or messages where the prompt is."""
    texts: list[Any] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    if not isinstance(prompt.content, str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    count = len(completions)
    columns = {name: [value] * count for name, value in prompt.columns.items()}
    columns.setdefault("completion_ids", [ids.tolist() for ids in completions])
    return score(rewards, [prompt.content] * count, texts, columns)


def _of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Later turns of the samples of a group draw other numbers than each other."""
    return params if params.seed is None else replace(params, seed=params.seed + 1 + index)
