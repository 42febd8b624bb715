"""Rollout batches for the trainer: prompts are drawn, sampled and scored, in step with training or some steps ahead.

Groups are returned in the order in which their prompts were drawn. At the start of a step at most
`prompts_per_step * (1 + max_staleness)` of them are in flight, so none is ever older than `max_staleness` steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from moe_replay.errors import AlignmentError, EngineUnavailableError
from moe_replay.rollout.types import SamplingParams
from moe_replay.train.advantages import has_signal, load_advantages
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt, PromptStream
from moe_replay.train.evaluation import Evaluation
from moe_replay.train.groups import GroupSampler, GroupTask, LocalGroups, RunningGroup
from moe_replay.train.replay_mode import asks_for_routes
from moe_replay.train.rewards import Reward
from moe_replay.train.run.completions import Completion
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.tools import ToolSet
from moe_replay.train.trajectories.encoded import EncodedTrajectory
from moe_replay.train.truncation import mask_metrics, sampling_params
from moe_replay.train.types import AnyTrajectory, Group, RolloutBatch, Trajectory
from moe_replay.utils.progress import ProgressCallback

PROBE_TOKENS = 128


class _PendingGroup(NamedTuple):
    """A group in flight, its number, and the stream's state before its prompt was drawn."""

    running: RunningGroup
    stream_state: dict[str, int]
    number: int


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
    ) -> None:
        """Sample with an engine, or with `groups` where that is not this process."""
        self.engine = engine
        self._config = config
        self._stream = stream
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_length = max_length
        self._advantages = load_advantages(config.algorithm.baseline)
        self._groups = groups or LocalGroups(config, engine, tokenizer, rewards, max_length, tools)
        self._pending: deque[_PendingGroup] = deque()
        self._collected: _Collected | None = None
        self._next_group = 0
        self._timeouts_before = 0
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
        if self._pending:
            return {**self._pending[0].stream_state, "group": self._pending[0].number}
        return {**self._stream.state, "group": self._next_group}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a saved `state`."""
        self._stream.restore(state)
        self._next_group = int(state["group"])

    def close(self) -> None:
        """Cancel the groups in flight."""
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

    def begin(self) -> None:
        """Begin to sample the batch of the next step, if that has not begun; `next` returns it."""
        self._begun()

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

    def _begun(self) -> _Collected:
        if self._collected is None:
            before = self.state
            ahead = 1 + self._config.rollout.max_staleness
            self._submit(self._config.rollout.prompts_per_step * ahead - len(self._pending))
            refills = self._config.algorithm.max_refills if self._config.algorithm.dynamic_sampling else 0
            self._collected = _Collected(before, refills)
        return self._collected

    def next(self, version: int, progress: ProgressCallback | None = None) -> RolloutBatch:
        """Return the rollout batch of the next step; `version` is that of the weights that will be trained on it."""
        batch = self.next_unless(None, version, progress)
        assert batch is not None
        return batch

    def next_unless(
        self, give_up: Callable[[], bool] | None, version: int, progress: ProgressCallback | None = None
    ) -> RolloutBatch | None:
        """Return the same, or None as soon as `give_up` says so; the next call continues with the same groups."""
        collected = self._begun()
        try:
            if not self._collect(collected, give_up, progress):
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
        self, collected: _Collected, give_up: Callable[[], bool] | None, progress: ProgressCallback | None
    ) -> bool:
        """Add the groups of a step in order; return False if that was given up."""
        wanted = self._config.rollout.prompts_per_step
        while len(collected.kept) < wanted:
            if not self._pending and collected.refills == 0:
                break
            if not self._pending:
                collected.refills -= 1
                self._submit(wanted - len(collected.kept))
            if not self._groups.wait(self._pending[0].running.group, give_up):
                return False
            group = self._pending.popleft().running.group.result()
            useful = bool(has_signal(group.rewards[None])[0])
            counts = useful or not self._config.algorithm.dynamic_sampling
            (collected.kept if counts else collected.without_signal).append(group)
            if progress is not None:
                progress(len(collected.kept) * self._params.n, wanted * self._params.n)
        return True

    def _batch(self, groups: Sequence[Group], dropped: int, version: int) -> RolloutBatch:
        rewards = np.stack([group.rewards for group in groups])
        advantages = self._advantages(rewards)
        trajectories = [
            trajectory.with_advantage(float(advantage))
            for group, group_advantages in zip(groups, advantages, strict=True)
            for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True)
        ]
        scored = rewards[~np.isnan(rewards)]
        lengths = np.array([int(t.sampled.sum()) for t in trajectories])
        staleness = np.array([version - int(t.versions[t.sampled].min(initial=version)) for t in trajectories])
        self._check_staleness(staleness)
        metrics = {
            "reward/mean": float(scored.mean()) if scored.size else float("nan"),
            "reward/std": float(scored.std()) if scored.size else float("nan"),
            "reward/unscored": float(np.isnan(rewards).mean()),
            "reward/timeouts": float(self._timeouts()),
            "completion/length_mean": float(lengths.mean()),
            "completion/length_max": float(lengths.max()),
            "completion/length_min": float(lengths.min()),
            "completion/truncated": float(np.mean([t.truncated for t in trajectories])),
            "completion/groups_without_signal": float(np.mean(~has_signal(rewards))),
            "completion/groups_dropped": float(dropped),
            "completion/staleness_mean": float(staleness.mean()),
            "completion/staleness_max": float(staleness.max()),
            "data/epoch": self._epochs(),
        }
        for reward in self._rewards:
            scores = np.concatenate([group.scores[reward.name] for group in groups])
            if not np.isnan(scores).all():
                metrics[f"reward/{reward.name}"] = float(np.nanmean(scores))
        metrics |= mask_metrics(trajectories)
        return RolloutBatch(trajectories, metrics, self._completions(groups, trajectories))

    def _completions(self, groups: Sequence[Group], trajectories: Sequence[AnyTrajectory]) -> list[Completion]:
        if not self._config.log.completions:
            return []
        scores = [
            {name: float(values[sample]) for name, values in group.scores.items()}
            for group in groups
            for sample in range(len(group.trajectories))
        ]
        counts = [sample for group in groups for sample in range(len(group.trajectories))]
        return [
            completion_of(trajectory, sample, given, self._tokenizer)
            for trajectory, sample, given in zip(trajectories, counts, scores, strict=True)
        ]

    def _timeouts(self) -> int:
        """Return the samples since the last batch whose reward took too long, or ended its process."""
        before, self._timeouts_before = self._timeouts_before, self._groups.timeouts
        return self._timeouts_before - before

    def _check_staleness(self, staleness: np.ndarray) -> None:
        """Raise if a trajectory was sampled by weights older than `max_staleness` steps, or by later ones."""
        limit = self._config.rollout.max_staleness
        outside = np.flatnonzero((staleness < 0) | (staleness > limit))
        if outside.size:
            raise AlignmentError(
                "a sequence was sampled by weights of another step than it is trained on",
                sample=int(outside[0]),
                expected=f"weights at most {limit} steps old (rollout.max_staleness)",
                found=f"{staleness[outside[0]]} steps",
                remedy="The engine missed a weight update, or something else updates it",
            )

    # ---- sampling -----------------------------------------------------------------------------------------------

    def _submit(self, count: int) -> None:
        """Draw `count` prompts and start sampling their groups."""
        if count <= 0:
            return
        drawn = []
        for _ in range(count):
            state = self._stream.state
            (prompt,) = self._stream.draw(1)
            drawn.append((prompt, state, self._next_group))
            self._next_group += 1
        tasks = [GroupTask(prompt=prompt, number=number, params=self._seeded(number)) for prompt, _, number in drawn]
        started = self._groups.submit(tasks, together=self._config.rollout.max_staleness == 0)
        for (_, state, number), running in zip(drawn, started, strict=True):
            self._pending.append(_PendingGroup(running, state, number))

    def finish_running(self) -> None:
        """Wait until all groups in flight are sampled, so that each comes from one version of the weights."""
        for pending in self._pending:
            self._groups.result(pending.running.sampled)

    def _seeded(self, group: int) -> SamplingParams:
        """Return parameters whose seed depends only on the run and the group; the group's samples still differ."""
        if not self._config.rollout.reproducible:
            return self._params
        seed = int(np.random.SeedSequence([self._config.seed, group]).generate_state(1)[0] >> 1)
        return replace(self._params, seed=seed)

    # ---- evaluation ---------------------------------------------------------------------------------------------

    def evaluation(self, prompts: Sequence[Prompt], temperature: float) -> Evaluation:
        """Return an evaluation on these prompts: one sequence each, played with the environment if there is one.

        The engine routes natively: nothing is replayed.
        """
        seed = self._config.seed if self._config.rollout.reproducible else None
        params = replace(self._params, n=1, temperature=temperature, seed=seed, sampling_mask=False, routes=False)
        tasks = [GroupTask(prompt=prompt, number=-1, params=params, is_kept=False) for prompt in prompts]
        return Evaluation(self._groups, tasks, self._rewards)


def completion_of(trajectory: AnyTrajectory, sample: int, scores: Mapping[str, float], tokenizer: Any) -> Completion:
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


def texts_of(trajectory: AnyTrajectory, tokenizer: Any) -> tuple[str, str]:
    """Return the texts of prompt and completion; those of an encoded trajectory came with it."""
    if isinstance(trajectory, EncodedTrajectory):
        assert trajectory.texts is not None, "a driver sends the texts where completions are logged"
        return trajectory.texts
    assert isinstance(trajectory, Trajectory)
    start = int(trajectory.sampled.argmax())
    before, after = trajectory.token_ids[:start], trajectory.token_ids[start:]
    return (
        tokenizer.decode(before, skip_special_tokens=False),
        tokenizer.decode(after, skip_special_tokens=False),
    )
