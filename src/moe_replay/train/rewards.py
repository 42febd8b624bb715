"""Reward functions, with TRL's signature: keyword arguments in, one float per sample out, or None for "not scored".

    def reward(prompts, completions, **columns) -> list[float | None]

`columns` holds every other column of the data set, one value per sample. The function may be a coroutine function.
Importing this module does not import torch: processes that only score samples start quickly.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import numpy as np

from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.utils.messages import text_of
from moe_replay.utils.plugins import call_user_code, check_required, import_path, is_path, requires, resolve

RewardFunction = Callable[..., Sequence[float | None]]


class RewardError(MoeReplayError):
    """A reward function that raised, took too long, or returned something other than one number per sample."""

    exit_status = ExitStatus.FAILED


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function.

    name        in metrics and errors
    weight      in the total
    timeout_s   seconds at most for each sample of a call
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = math.inf

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of REWARDS."""
        return self.name in REWARDS

    @property
    def scores_each_alone(self) -> bool:
        """Whether the score of a sample does not depend on the others of its group."""
        return self.is_built_in or self.name.startswith("verl:")


def load_reward(name: str, weight: float = 1.0, timeout_s: float = math.inf) -> Reward:
    """Return the reward that `reward.functions` names: one of REWARDS, `module:name`, or `verl:module:name`.

    The last is a verl `compute_score`.
    """
    style, _, path = name.partition(":")
    if style == "verl" and is_path(path):
        return Reward(name, from_verl(import_path(path, kind="verl reward", key="reward.functions")), weight, timeout_s)
    function = resolve(name, REWARDS, kind="reward", key="reward.functions", forms="'module:name', 'verl:module:name'")
    check_required(function, f"the reward {name!r}", "train" if name in REWARDS else "")
    return Reward(name, function, weight, timeout_s)


def score(
    rewards: Sequence[Reward], prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return (samples,) float64 by name of the reward, NaN where it does not score a sample.

    The functions run in threads of this process.
    """
    return {reward.name: _score(reward, prompts, completions, columns) for reward in rewards}


def total(rewards: Sequence[Reward], scores: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return (samples,) the weighted sum of the scores, NaN where no reward scored the sample."""
    table = np.stack([scores[reward.name] * reward.weight for reward in rewards])
    unscored = np.isnan(table).all(axis=0)
    return np.where(unscored, np.nan, np.nansum(table, axis=0))


def from_verl(compute_score: Callable[..., float | Mapping[str, Any]]) -> RewardFunction:
    """Return verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` as a reward function."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | None]:
        def column(name: str) -> Sequence[Any]:
            return columns.get(name) or [None] * len(completions)

        truths = columns.get("ground_truth") or [(model or {}).get("ground_truth") for model in column("reward_model")]
        results = [
            compute_score(data_source=source, solution_str=text_of(completion), ground_truth=truth, extra_info=extra)
            for source, completion, truth, extra in zip(
                column("data_source"), completions, truths, column("extra_info"), strict=True
            )
        ]
        return [result["score"] if isinstance(result, Mapping) else result for result in results]

    return reward


ACCURACY_S = 5.0
"""CPU seconds in which `accuracy` reads and compares an answer, where it can be interrupted: in the main thread."""


@requires("math_verify")
def accuracy(
    prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any
) -> list[float | None]:
    """Return 1 where the answer is mathematically equal to `solution`, else 0; None if `solution` has no answer.

    An answer that is not shown to be equal within `ACCURACY_S` is not equal.
    """
    parse, verify = _math_verify()

    # Without math-verify's own timeouts: those are of wall time, so that scores would depend on what else runs.
    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]  None is documented, but not annotated

    answers: list[float | None] = []
    for completion, truth in zip(completions, solution, strict=True):
        gold: list[Any] = []
        try:
            with _cpu_limit(ACCURACY_S):
                gold = read(str(truth)) or read(f"${truth}$")
                equal = bool(gold) and verify(gold, read(text_of(completion)), timeout_seconds=None)
        except _CpuLimitReached:
            equal = False
        answers.append(float(equal) if gold else None)
    return answers


class _CpuLimitReached(BaseException):
    """Raised by the timer of `_cpu_limit`; libraries do not catch it."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `_CpuLimitReached` when the block has used so much CPU time; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _CpuLimitReached

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `parse` and `verify` of math-verify, without their warning about disabled timeouts."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError(
            "the reward 'accuracy' needs math-verify", remedy="pip install 'moe-replay[train]'"
        ) from error

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    return parse, verify


_THINK_THEN_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+", re.DOTALL)


def think_format(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 where the completion is `<think> ... </think>` followed by an answer, 0 elsewhere."""
    return [float(bool(_THINK_THEN_ANSWER.fullmatch(text_of(completion)))) for completion in completions]


REWARDS: Mapping[str, RewardFunction | str] = {"accuracy": accuracy, "format": think_format}
"""Reward functions by name; `reward.functions` takes these, `module:name` and `verl:module:name`."""


def prepare(reward: Reward) -> None:
    """Import what the first call of a built-in reward would import, so that no sample waits for it."""
    if reward.name == "accuracy":
        accuracy(["1"], ["$1$"], ["1"])


def call(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> Any:
    """Return what a reward function returns, or what it is awaited for."""
    result = reward.function(prompts=list(prompts), completions=list(completions), **columns)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def call_details(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return what an error says of the arguments of a call."""
    return {
        "found": f"{len(completions)} completions and columns {sorted(columns)}",
        "remedy": "Return None for samples that cannot be scored",
    }


def _score(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> np.ndarray:
    values = call_user_code(
        lambda: call(reward, prompts, completions, columns),
        reward.timeout_s * max(1, len(completions)),
        f"reward {reward.name!r}",
        RewardError,
        too_long="Give up earlier in the function, or raise reward.timeout_s",
        **call_details(completions, columns),
    )
    found = checked(reward, values, len(completions))
    return np.array([np.nan if value is None else value for value in found], np.float64)


def checked(reward: Reward, values: Any, count: int) -> list[float | None]:
    """Return the values of a reward function as floats; raise unless they are one finite number or None per sample."""
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != count:
        raise RewardError(
            f"reward {reward.name!r} must return one value per completion",
            expected=f"a list of {count}",
            found=f"{type(values).__name__} of {len(values)}" if hasattr(values, "__len__") else type(values).__name__,
        )
    for sample, value in enumerate(values):
        if value is not None and not isinstance(value, (int, float, np.number, np.bool_)):
            raise RewardError(
                f"reward {reward.name!r} returned something other than a number", sample=sample, found=repr(value)
            )
        if value is not None and not math.isfinite(value):
            raise RewardError(
                f"reward {reward.name!r} returned a number that is not finite",
                sample=sample,
                expected="a finite number, or None for a sample that cannot be scored",
                found=value,
            )
    return [None if value is None else float(value) for value in values]
