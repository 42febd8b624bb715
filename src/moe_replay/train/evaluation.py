"""`Evaluation`: mean rewards of one sequence per prompt, sampled and scored as the groups of a step are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moe_replay.errors import EngineUnavailableError
from moe_replay.train.groups import GroupSampler, GroupTask, RunningGroup
from moe_replay.train.rewards import Reward, total


class Evaluation:
    """Tasks of one sample each, in flight from the first question for their metrics on."""

    def __init__(self, groups: GroupSampler, tasks: Sequence[GroupTask], rewards: Sequence[Reward]) -> None:
        self._groups = groups
        self._tasks = tasks
        self._rewards = rewards
        self._running: list[RunningGroup] = []

    @property
    def has_begun(self) -> bool:
        """Whether its sequences are being sampled."""
        return bool(self._running)

    def metrics_unless(self, give_up: Callable[[], bool] | None) -> dict[str, float] | None:
        """Return the metrics, or None as soon as `give_up` says so; the next call waits for the same sequences."""
        if not self._tasks:
            return {}
        self._running = self._running or self._groups.submit(self._tasks, together=True)
        try:
            for one in self._running:
                if not self._groups.wait(one.group, give_up):
                    return None
            by_prompt = [one.group.result().scores for one in self._running]
        except EngineUnavailableError:  # all of them can be sampled again, by an engine that is available again
            self.withdraw()
            raise
        scores = {name: np.concatenate([one[name] for one in by_prompt]) for name in by_prompt[0]}
        metrics = {"eval/reward": float(np.nanmean(total(self._rewards, scores)))}
        return metrics | {f"eval/{name}": float(np.nanmean(values)) for name, values in scores.items()}

    def withdraw(self) -> None:
        """Cancel the sequences in flight."""
        for one in self._running:
            one.group.cancel()
        self._running = []
