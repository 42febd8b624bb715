"""Rollout batches for the trainer: prompts are drawn, sampled and scored, in step with training or some steps ahead.

Groups are returned in the order in which their prompts were drawn. At the start of a step at most
`prompts_per_step * (1 + max_staleness)` of them are in flight, so none is ever older than `max_staleness` steps.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from moe_replay.engines.base import REFUSALS, Refusals
from moe_replay.errors import AlignmentError, EngineUnavailableError
from moe_replay.records import Completion, RolloutBatch, SamplingParams, Trajectory
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.replay_mode import asks_for_routes
from moe_replay.train.learn.server_checks import server_metric
from moe_replay.train.rollout.advantages import has_signal, load_advantages, turn_factors
from moe_replay.train.rollout.groups import Group, GroupSampler, GroupTask, LocalGroups, RunningGroup, ShouldStop
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rewards import Reward, total
from moe_replay.train.rollout.tools import ToolSet
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.trajectories.store import InProcessStore, TrajectoryStore
from moe_replay.utils.device import device_type
from moe_replay.utils.misc import ProgressCallback

logger = logging.getLogger(__name__)
PROBE_TOKENS = 128
UNLIKELY = -30.0
"""Log-prob of a whole sample below which it is not drawn twice: 1e-13."""


class _PendingGroup(NamedTuple):
    """A group in flight, and the state before its prompt was drawn."""

    running: RunningGroup
    state: dict[str, int]


@dataclass(slots=True)
class _Collected:
    """Groups of the step that is being sampled, and the state before its first prompt was drawn."""

    state_before: dict[str, int]
    refills: int
    kept: list[Group] = field(default_factory=list)
    without_signal: list[Group] = field(default_factory=list)


class Rollouts:
    """Produces one rollout batch per step, from an engine whose weights are synced by the trainer in between."""

    def __init__(
        self,
        config: TrainConfig,
        engine: SyncedEngine,
        stream: PromptStream,
        tokenizer: Any,
        rewards: Sequence[Reward],
        max_length: int,
        tools: ToolSet | None = None,
        groups: GroupSampler | None = None,
        store: TrajectoryStore | None = None,
    ) -> None:
        """Sample with an engine, or with `groups` where that is not this process; batches go into a store."""
        self.engine = engine
        self._config = config
        reproducible = config.rollout.reproducible
        self._is_reproducible = device_type(config.backend.device) == "cpu" if reproducible == "auto" else reproducible
        self._stream = stream
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_length = max_length
        self._store = store or InProcessStore()
        self._advantages = load_advantages(config.algorithm.advantage)
        self._groups = groups or LocalGroups(config, engine, tokenizer, rewards, max_length, tools)
        self._pending: deque[_PendingGroup] = deque()
        self._collected: _Collected | None = None
        self._next_group = 0
        self._timeouts_before = 0
        self._refusals_before: Refusals = {}
        self._has_duplicates = False
        self._params = replace(sampling_params(config.rollout), routes=asks_for_routes(config))

    @property
    def probe_tokens(self) -> tuple[int, ...]:
        """Tokens of the first prompts, concatenated, on which engine and trainer are compared."""
        tokens = [token for prompt in self._stream.prompts[:PROBE_TOKENS] for token in prompt.token_ids]
        return tuple((tokens * 2)[: max(2, min(PROBE_TOKENS, self._max_length - 1))])

    # ---- state --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, int]:
        """State that a resumed run needs; groups in flight will be sampled again."""
        return self._pending[0].state if self._pending else self._drawn

    @property
    def _drawn(self) -> dict[str, int]:
        """How many prompts have been drawn."""
        return {**self._stream.state, "group": self._next_group}

    def restore(self, state: Mapping[str, int]) -> None:
        self._stream.restore(state)
        self._next_group = int(state["group"])

    def close(self) -> None:
        self._cancel_pending()
        self._groups.close()

    def _cancel_pending(self) -> None:
        for pending in self._pending:
            pending.running.group.cancel()
        self._pending.clear()
        self._collected = None

    def _epochs(self) -> float:
        """Return how often the batches so far have passed over the prompts; groups in flight do not count."""
        state = self.state
        return state["epoch"] + state["position"] / len(self._stream.prompts)

    # ---- one step -----------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether groups are being sampled, or have been, that `next` has not returned."""
        return self._collected is not None or bool(self._pending)

    def withdraw(self) -> None:
        """Cancel the batch that is being sampled, if there is one; `next` samples the same prompts again."""
        if self._collected is not None:
            before = self._collected.state_before
            self._cancel_pending()
            self.restore(before)

    def begin(self) -> _Collected:
        """Begin to sample the batch of the next step, if that has not begun; `next_batch` returns it."""
        if self._collected is None:
            before = self.state
            ahead = 1 + self._config.rollout.max_staleness
            self._submit(self._config.rollout.prompts_per_step * ahead - len(self._pending))
            refills = self._config.algorithm.max_refills if self._config.algorithm.dynamic_sampling else 0
            self._collected = _Collected(before, refills)
        return self._collected

    def next_batch(
        self, version: int, should_stop: ShouldStop | None = None, progress: ProgressCallback | None = None
    ) -> RolloutBatch | None:
        """Return the rollout batch of the next step, or None once `should_stop` returns True.

        After None, the next call continues with the same groups.

        version   of the weights that will be trained on the batch
        """
        collected = self.begin()
        try:
            if not self._collect(collected, should_stop, progress):
                return None
        except EngineUnavailableError:  # all of it can be sampled again, by an engine that is available again
            self.withdraw()
            raise
        self._collected = None
        missing = self._config.rollout.prompts_per_step - len(collected.kept)
        # Too few groups with a signal: the others complete the batch, with advantages of zero.
        groups = collected.kept + collected.without_signal[:missing]
        return self._batch(groups, len(collected.without_signal), version)

    def _collect(
        self, collected: _Collected, should_stop: ShouldStop | None, progress: ProgressCallback | None
    ) -> bool:
        """Add the groups of a step in order; return False if it stopped before the last one."""
        num_prompts = self._config.rollout.prompts_per_step
        while len(collected.kept) < num_prompts:
            if not self._pending and collected.refills == 0:
                break
            if not self._pending:
                collected.refills -= 1
                self._submit(num_prompts - len(collected.kept))
            if not self._groups.wait(self._pending[0].running.group, should_stop):
                return False
            group = self._pending.popleft().running.group.result()
            useful = bool(has_signal(group.rewards[None])[0])
            counts = useful or not self._config.algorithm.dynamic_sampling
            (collected.kept if counts else collected.without_signal).append(group)
            if progress is not None:
                progress(len(collected.kept) * self._params.n, num_prompts * self._params.n)
        return True

    def _batch(self, groups: Sequence[Group], dropped: int, version: int) -> RolloutBatch:
        rewards = np.stack([group.rewards for group in groups])
        played = [episode for group in groups for episode in group.episodes]
        episodes = self._with_advantages(played, self._advantages(rewards).ravel().tolist())
        trajectories = [trajectory for episode in episodes for trajectory in episode]
        scored = rewards[~np.isnan(rewards)]
        lengths = np.array([sum(int(t.sampled.sum()) for t in episode) for episode in played])
        ages = [version - np.concatenate([t.versions[t.sampled] for t in episode]) for episode in played]
        self._check_staleness(ages, version)
        staleness = np.array([age.max(initial=0) for age in ages])
        metrics = {
            "reward/mean": float(scored.mean()) if scored.size else float("nan"),
            "reward/std": float(scored.std()) if scored.size else float("nan"),
            "reward/unscored": float(np.isnan(rewards).mean()),
            "reward/timeouts": float(self._timeouts()),
            "completion/length_mean": float(lengths.mean()),
            "completion/length_max": float(lengths.max()),
            "completion/length_min": float(lengths.min()),
            "completion/truncated": float(np.mean([episode[-1].truncated for episode in played])),
            "reward/frac_groups_zero_std": float(np.mean(~has_signal(rewards))),
            "completion/groups_dropped": float(dropped),
            "completion/staleness_mean": float(staleness.mean()),
            "completion/staleness_max": float(staleness.max()),
            "data/epoch": self._epochs(),
        }
        metrics |= self._refusals()
        metrics["servers/duplicates"] = float(self._duplicates(trajectories))
        for reward in self._rewards:
            scores = np.concatenate([group.scores[reward.name] for group in groups])
            if not np.isnan(scores).all():
                metrics[f"reward/{reward.name}"] = float(np.nanmean(scores))
        metrics |= mask_metrics(trajectories)
        if self._config.rollout.environment is not None:
            metrics |= rewriting_metrics(played)
        completions = self._completions(groups, episodes)
        servers = tuple(sorted({url for trajectory in trajectories for _, url in trajectory.servers})) or ("",)
        return replace(self._store.put(trajectories), servers=servers, metrics=metrics, completions=completions)

    def _with_advantages(
        self, episodes: Sequence[Sequence[Trajectory]], advantages: Sequence[float]
    ) -> list[list[Trajectory]]:
        """Return the trajectories of each episode that are trained on, with its advantage (`advantage_turns`)."""
        turns, discount = self._config.algorithm.advantage_turns, self._config.algorithm.advantage_discount
        return [
            [
                replace(trajectory, advantage=advantage * factor)
                for trajectory, factor in zip(episode, turn_factors(len(episode), turns, discount), strict=True)
                if factor
            ]
            for episode, advantage in zip(episodes, advantages, strict=True)
        ]

    def _completions(self, groups: Sequence[Group], episodes: Sequence[Sequence[Trajectory]]) -> list[Completion]:
        if not self._config.log.completions:
            return []
        scores = [
            (sample, {name: float(values[sample]) for name, values in group.scores.items()})
            for group in groups
            for sample in range(len(group.rewards))
        ]
        return [
            completion_of(trajectory, sample, sample_scores, self._tokenizer)
            for episode, (sample, sample_scores) in zip(episodes, scores, strict=True)
            for trajectory in episode
        ]

    def _timeouts(self) -> int:
        """Return the samples since the last batch whose reward took too long, or ended its process."""
        before, self._timeouts_before = self._timeouts_before, self._groups.timeouts
        return self._timeouts_before - before

    def _refusals(self) -> dict[str, float]:
        """Return how many answers of servers were refused since the last batch; the first of each kind is logged."""
        before, self._refusals_before = self._refusals_before, self.engine.refusals
        for url, reason in self._refusals_before.keys() - before.keys():
            logger.warning(
                "rollout server %s: refused %s. Further ones are counted in %s",
                *(url, REFUSALS[reason], server_metric(url, f"refused_{reason}")),
            )
        new = Counter(self._refusals_before) - Counter(before)
        by_server = {server_metric(url, f"refused_{reason}"): float(count) for (url, reason), count in new.items()}
        return {"servers/refused": float(new.total()), **by_server}

    def _duplicates(self, trajectories: Sequence[Trajectory]) -> int:
        """Return the number of copies among trajectories that are too unlikely to be sampled twice; log the first."""
        if not self._params.temperature:
            return 0
        first: dict[bytes, Trajectory] = {}
        unlikely = [t for t in trajectories if float(t.logprobs[t.sampled].sum()) < UNLIKELY]
        copies = [(first[key], t) for t in unlikely if first.setdefault(key := t.token_ids.tobytes(), t) is not t]
        if copies and not self._has_duplicates:
            self._has_duplicates = True
            first_copy, second_copy = copies[0]
            urls = ", ".join(dict.fromkeys(url for trajectory in copies[0] for _, url in trajectory.servers))
            logger.warning(
                "%d samples are bit for bit those of another request (rows %d and %d%s): a server or a proxy repeats "
                "answers, or requests have the same seed. Further ones are counted in servers/duplicates",
                *(len(copies), first_copy.row, second_copy.row, f", {urls}" if urls else ""),
            )
        return len(copies)

    def _check_staleness(self, ages: Sequence[np.ndarray], version: int) -> None:
        """Raise if a token was sampled by weights older than `max_staleness` steps, or newer than the trainer's."""
        limit = self._config.rollout.max_staleness
        for sample, age in enumerate(ages):
            outside = age[(age < 0) | (age > limit)]
            if outside.size:
                raise AlignmentError(
                    "a sequence was sampled by weights of another step than it is trained on",
                    sample=sample,
                    expected=f"version {version}, at most {limit} steps older (rollout.max_staleness)",
                    found=f"version {version - int(outside[0])} ({outside.size} tokens)",
                    remedy="The engine missed a weight update, or something else updates it",
                )

    # ---- sampling -----------------------------------------------------------------------------------------------

    def _submit(self, count: int) -> None:
        if count <= 0:
            return
        states, tasks = [], []
        for _ in range(count):
            states.append(self._drawn)
            (prompt,) = self._stream.draw(1)
            # The seed of a group depends only on the run and its index; its samples still differ.
            params = replace(self._params, seed=self._seed(self._next_group))
            tasks.append(GroupTask(prompt=prompt, index=self._next_group, params=params))
            self._next_group += 1
        started = self._groups.submit(tasks, together=self._config.rollout.max_staleness == 0)
        self._pending += map(_PendingGroup, started, states)

    def finish_running(self) -> None:
        """Wait until all groups in flight are sampled, so that each comes from one version of the weights."""
        for pending in self._pending:
            self._groups.wait(pending.running.sampled)

    def _seed(self, *indices: int) -> int | None:
        """Return the seed of a group of the run with these indices; None if samples need not be reproducible."""
        if not self._is_reproducible:
            return None
        return int(np.random.SeedSequence([self._config.seed, *indices]).generate_state(1)[0] >> 1)

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluation(self, prompts: Sequence[Prompt], temperature: float) -> Evaluation:
        """Return an evaluation on these prompts: one sequence each, played with the environment if there is one.

        The engine routes natively: nothing is replayed.
        """
        params = replace(self._params, n=1, temperature=temperature, sampling_mask=False, routes=False)
        tasks = [
            GroupTask(prompt=prompt, index=-1, params=replace(params, seed=self._seed(number, 1)), is_kept=False)
            for number, prompt in enumerate(prompts)
        ]
        return Evaluation(self._groups, tasks, self._rewards)


def completion_of(trajectory: Trajectory, sample: int, scores: Mapping[str, float], tokenizer: Any) -> Completion:
    """Return a trajectory as text, special tokens included."""
    prompt, completion = texts_of(trajectory, tokenizer)
    return Completion(
        row=trajectory.row,
        group=trajectory.group,
        sample=sample,
        prompt=prompt,
        completion=completion,
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        scores=scores,
        tokens=int(trajectory.sampled.sum()),
        finish_reason=trajectory.finish_reason.value,
        weight_version=int(trajectory.versions[trajectory.sampled].min(initial=np.iinfo(np.int64).max)),
    )


def texts_of(trajectory: Trajectory, tokenizer: Any) -> tuple[str, str]:
    """Return the texts of prompt and completion; those of an encoded trajectory came with it."""
    if trajectory.encoded is not None:
        assert trajectory.encoded.texts is not None, "a worker sends the texts where completions are logged"
        return trajectory.encoded.texts
    start = int(trajectory.sampled.argmax())
    before, after = trajectory.token_ids[:start], trajectory.token_ids[start:]
    return (tokenizer.decode(before, skip_special_tokens=False), tokenizer.decode(after, skip_special_tokens=False))


def sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """Return the parameters of a run's samples, with masks where sampling is truncated and the bias not accepted."""
    if rollout.is_truncated and not rollout.replays_sampling_mask:
        logger.warning(
            "top_p and top_k truncate the distribution that is sampled from, and rollout.sampling_mask is off: ratios "
            "are biased; mismatch/rollout_vs_old/ratio/mean shows by how much"
        )
    return SamplingParams(
        n=rollout.num_generations,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        sampling_mask=rollout.replays_sampling_mask,
    )


def mask_metrics(sequences: Sequence[Trajectory]) -> dict[str, float]:
    """Return what top-p and top-k left of the vocabulary, over all sampled tokens; nothing without masks."""
    kept, shares = [np.zeros(0)], [np.zeros(0)]
    for sequence in sequences:
        mask = sequence.sampling_mask
        if mask is not None:
            sizes = mask.sizes[sequence.sampled]
            kept.append(sizes)
            shares.append(sizes / mask.vocab_size)
    sizes, fractions = np.concatenate(kept), np.concatenate(shares)
    if not sizes.size:
        return {}
    return {
        "sampling/kept_tokens_mean": float(sizes.mean()),
        "sampling/kept_tokens_max": float(sizes.max()),
        "sampling/kept_fraction": float(fractions.mean()),
        "sampling/single_token": float(np.mean(sizes == 1)),
    }


def rewriting_metrics(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return how many samples an episode has, and how many of their tokens are computed again in the next sample."""
    counts = np.array([len(episode) for episode in episodes])
    tokens = sum(len(trajectory) for episode in episodes for trajectory in episode)
    repeated = sum(
        _common_beginning(sample.token_ids, next_sample.token_ids)
        for episode in episodes
        for sample, next_sample in pairwise(episode)
    )
    return {
        "completion/samples_mean": float(counts.mean()),
        "completion/samples_max": float(counts.max()),
        "completion/repeated_tokens": float(repeated),
        "completion/repeated_fraction": repeated / tokens,
    }


def _common_beginning(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    return int(np.flatnonzero(a[:length] != b[:length]).min(initial=length))


# ---- evaluation ------------------------------------------------------------------------------------------------------


class Evaluation:
    """Tasks of one sample each, in flight from the first question for their metrics on."""

    def __init__(self, groups: GroupSampler, tasks: Sequence[GroupTask], rewards: Sequence[Reward]) -> None:
        self._groups = groups
        self._tasks = tasks
        self._rewards = rewards
        self._running: list[RunningGroup] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._running)

    def metrics(self, should_stop: ShouldStop | None) -> dict[str, float] | None:
        """Return the metrics, or None once `should_stop` returns True; the next call waits for the same sequences."""
        if not self._tasks:
            return {}
        self._running = self._running or self._groups.submit(self._tasks, together=True)
        try:
            for running in self._running:
                if not self._groups.wait(running.group, should_stop):
                    return None
            by_prompt = [running.group.result().scores for running in self._running]
        except EngineUnavailableError:  # all of them can be sampled again, by an engine that is available again
            self.withdraw()
            raise
        scores = {name: np.concatenate([of_prompt[name] for of_prompt in by_prompt]) for name in by_prompt[0]}
        metrics = {"eval/reward": float(np.nanmean(total(self._rewards, scores)))}
        return metrics | {f"eval/{name}": float(np.nanmean(values)) for name, values in scores.items()}

    def withdraw(self) -> None:
        for running in self._running:
            running.group.cancel()
        self._running = []
