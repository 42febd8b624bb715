"""Reward functions, with TRL's signature: keyword arguments in, one float per sample out, or None for "not scored".

    def reward(prompts, completions, **columns) -> list[float | None]

`columns` holds every other column of the data set, one value per sample.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.utils.exit_status import ExitStatus
from moe_replay.utils.messages import text_of
from moe_replay.utils.plugins import call_user_code, import_path, is_path, resolve

RewardFunction = Callable[..., Sequence[float | None]]


class RewardError(MoeReplayError):
    """A reward function that raised, took too long, or returned something other than one number per sample."""

    exit_status = ExitStatus.FAILED


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, its name in metrics and errors, its weight in the total, and the seconds of a call at most."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float = math.inf


def load_reward(name: str, weight: float = 1.0, timeout_s: float = math.inf) -> Reward:
    """Return the reward that `reward.functions` names: one of REWARDS, `module:name`, or `verl:module:name`.

    The last is a verl `compute_score`.
    """
    style, _, path = name.partition(":")
    if style == "verl" and is_path(path):
        return Reward(name, from_verl(import_path(path, kind="verl reward", key="reward.functions")), weight, timeout_s)
    function = resolve(name, REWARDS, kind="reward", key="reward.functions", forms="'module:name', 'verl:module:name'")
    return Reward(name, function, weight, timeout_s)


def score(
    rewards: Sequence[Reward], prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return (samples,) float64 by name of the reward, NaN where it does not score a sample."""
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


def accuracy(
    prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any
) -> list[float | None]:
    """Return 1 where the answer is mathematically equal to `solution`, else 0; None if `solution` has no answer."""
    parse, verify = _math_verify()

    # Without its own timeouts, which use signals and so work in the main thread only.
    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]  None is documented, but not annotated

    answers: list[float | None] = []
    for completion, truth in zip(completions, solution, strict=True):
        gold = read(str(truth)) or read(f"${truth}$")
        if not gold:
            answers.append(None)
            continue
        answers.append(float(verify(gold, read(text_of(completion)), timeout_seconds=None)))
    return answers


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


def _score(
    reward: Reward, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
) -> np.ndarray:
    values = call_user_code(
        lambda: reward.function(prompts=list(prompts), completions=list(completions), **columns),
        reward.timeout_s,
        f"reward {reward.name!r}",
        RewardError,
        found=f"{len(completions)} completions and columns {sorted(columns)}",
        remedy="Return None for samples that cannot be scored",
        too_long="Give up earlier in the function, or raise reward.timeout_s",
    )
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != len(completions):
        raise RewardError(
            f"reward {reward.name!r} must return one value per completion",
            expected=f"a list of {len(completions)}",
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
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)
