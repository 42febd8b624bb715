"""Reward functions, with TRL's signature: keyword arguments in, one float per sample out, or None for "not scored".

    def reward(prompts, completions, **columns) -> list[float | None]

`columns` holds every other column of the data set, one value per sample. The function may be a coroutine function.
Importing this module does not import torch: processes that only score samples start quickly.
"""

from __future__ import annotations

import logging
import math
import os
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

from moe_replay.errors import ExitStatus, MoeReplayError, needs_extra
from moe_replay.train.config.registries import REWARDS
from moe_replay.utils.misc import printable, text_of
from moe_replay.utils.plugins import (
    PluginError,
    awaited,
    call_user_code,
    check_required,
    import_path,
    is_path,
    requires,
    resolve,
)
from moe_replay.utils.signals import time_limit

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
    endless = PluginError(
        f"reward {name!r} cannot be loaded: the import of its module did not end within {timeout_s:g} s",
        remedy="Do long work in the first call, or raise reward.timeout_s",
    )
    with time_limit(timeout_s, endless):
        if style == "verl" and is_path(path):
            function = from_verl(import_path(path, kind="verl reward", key="reward.functions"))
            return Reward(name, function, weight, timeout_s)
        forms = "'module:name', 'verl:module:name'"
        function = resolve(name, REWARDS, kind="reward", key="reward.functions", forms=forms)
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


COMPARISON_S = 5.0
"""CPU seconds in which an answer is read and compared, where this can be interrupted: in the main thread."""


@requires("math_verify")
def math_equality(
    prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any
) -> list[float | None]:
    """Return 1 where the answer is mathematically equal to `solution`, else 0; None if `solution` has no answer.

    An answer that is not shown to be equal within `COMPARISON_S` is not equal.
    """

    return _compared(completions, solution, lambda truth: _parsed(truth) or _parsed(f"${truth}$"), _parsed, unread=None)


@requires("math_verify")
def accuracy(
    prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any
) -> list[float | None]:
    """Return 1 where the answer is equal to `solution`, else 0, read as by ms-swift: in `<answer>`, else boxed.

    Without an `<answer>` only `\\boxed{}` and LaTeX that is announced as the answer count. An answer that is not shown
    to be equal within `COMPARISON_S` is not equal.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    normalization = NormalizationConfig(
        nits=False,
        malformed_operators=False,
        basic_latex=True,
        boxed=True,  # type: ignore[arg-type]  as ms-swift has it
        units=True,
    )
    latex = LatexExtractionConfig(
        normalization_config=normalization, boxed_match_priority=0, try_extract_without_anchor=False
    )

    def read(text: str) -> list[Any]:
        tagged = _ANSWER.search(text)
        return _parsed(tagged[1].strip() if tagged else text, extraction_mode="first_match")

    def read_completion(text: str) -> list[Any]:
        has_tag = _ANSWER.search(text) is not None
        return read(text) if has_tag else _parsed(text, extraction_config=[latex], extraction_mode="first_match")

    return _compared(completions, solution, read, read_completion, unread=0.0)


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _parsed(text: str, **options: Any) -> list[Any]:
    """Return what math-verify reads. Its own timeouts are of wall time: scores would depend on what else runs."""
    return _math_verify()[0](text, parsing_timeout=None, **options)


def _compared(
    completions: Sequence[Any],
    solution: Sequence[str],
    read_truth: Callable[[str], list[Any]],
    read_answer: Callable[[str], list[Any]],
    unread: float | None,
) -> list[float | None]:
    """Return 1 or 0 for each completion; `unread` where nothing can be read from the solution."""
    verify = _math_verify()[1]
    scores: list[float | None] = []
    for completion, truth in zip(completions, solution, strict=True):
        gold: list[Any] = []
        try:
            with _cpu_limit(COMPARISON_S):
                gold = read_truth(str(truth))
                equal = bool(gold) and verify(gold, read_answer(text_of(completion)), timeout_seconds=None)
        except _CpuLimitReached:
            equal = False
        scores.append(float(equal) if gold else unread)
    return scores


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
    with needs_extra("comparing mathematics needs math-verify", "train"):
        from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    return parse, verify


_THINK_THEN_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*(?!\s)(?:(?!</?think>).)+", re.DOTALL)


def think_format(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 where the completion is `<think> ... </think>` followed by an answer, 0 elsewhere."""
    return [float(bool(_THINK_THEN_ANSWER.fullmatch(text_of(completion)))) for completion in completions]


_THINK_THEN_TAGGED = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def think_answer_format(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 where the completion is `<think> ... </think> <answer> ... </answer>`, as in ms-swift, 0 elsewhere."""
    return [float(bool(_THINK_THEN_TAGGED.fullmatch(text_of(completion)))) for completion in completions]


def prepare(reward: Reward) -> None:
    """Import what the first call of a built-in reward would import, so that no sample waits for it."""
    if reward.name in ("accuracy", "math_verify"):
        reward.function(["1"], ["$1$"], ["1"])


def call(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> Any:
    """Return what a reward function returns, or what it is awaited for."""
    return awaited(reward.function(prompts=list(prompts), completions=list(completions), **columns))


def call_details(completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return the part of an error message that is about the arguments of a call."""
    return {
        "found": f"{len(completions)} completions and columns {sorted(columns)}",
        "remedy": "Return None for samples that cannot be scored",
    }


def _score(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> np.ndarray:
    with _keeping_descriptors(f"reward {reward.name!r}"):
        values = call_user_code(
            lambda: call(reward, prompts, completions, columns),
            reward.timeout_s * max(1, len(completions)),
            f"reward {reward.name!r}",
            RewardError,
            too_long="Give up earlier in the function, or raise reward.timeout_s",
            **call_details(completions, columns),
        )
    scores = checked(reward, values, len(completions))
    return np.array([np.nan if value is None else value for value in scores], np.float64)


@contextmanager
def _keeping_descriptors(name: str) -> Iterator[None]:
    """Raise if a function has closed file descriptors of this process, such as those of the event loop."""
    sentinel = os.open(os.devnull, os.O_RDONLY)
    try:
        yield
    finally:
        try:
            os.close(sentinel)
        except OSError as error:
            raise RewardError(
                f"{name} has closed file descriptors that it had not opened",
                remedy="Close what the function opens only",
            ) from error


def checked(reward: Reward, values: Any, count: int) -> list[float | None]:
    """Return the values of a reward function as floats; raise unless they are one finite number or None per sample."""
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != count:
        raise RewardError(
            f"reward {reward.name!r} must return one value per completion",
            expected=f"a list of {count}",
            found=f"{type(values).__name__} of {len(values)}" if hasattr(values, "__len__") else type(values).__name__,
        )
    return [None if value is None else _as_float(reward, value, sample) for sample, value in enumerate(values)]


def _as_float(reward: Reward, value: Any, sample: int) -> float:
    if not isinstance(value, (int, float, np.number, np.bool_)) or isinstance(value, np.complexfloating):
        raise RewardError(
            f"reward {reward.name!r} returned something other than a number",
            sample=sample,
            found=printable(value, repr),
        )
    try:
        score = float(value)
    except OverflowError:  # 10**400
        score = math.inf
    if not math.isfinite(score):
        raise RewardError(
            f"reward {reward.name!r} returned a number that is not finite",
            sample=sample,
            expected="a finite number that fits into 64 bits, or None for a sample that cannot be scored",
            found=value if isinstance(value, float) else printable(value)[:100],
        )
    return score
