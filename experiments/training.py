"""Does replay change training? Part B of `plan.md`: kinds of samples x trained weights x replay, five seeds each.

    python -m experiments.training --device cuda --together 12 --minutes 9

Arms of a seed see the same prompts in the same order, so they are compared in pairs. The criteria stand in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.arms import Arm
from experiments.results import FOLDER, Result
from experiments.scales import GPU, TINY
from experiments.study import Study, main, with_seeds

SEEDS = (0, 1, 2, 3, 4)
STEPS = 100
OUTCOME = "eval/reward"
MARGIN_OF_NO_DIFFERENCE = 0.03
SAMPLES: dict[str, dict[str, Any]] = {
    "staleness 4": {"staleness": 4},
    "FP8 rollout": {"rollout": "fp8"},
    "fresh": {},
    "staleness 1": {"staleness": 1},
    "staleness 16": {"staleness": 16},
}
WEIGHTS: dict[str, dict[str, Any]] = {"all": {}, "LoRA, frozen routers": {"lora": True}}
REPLAYS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "R3": {"mode": "r3"},
    "R2": {"mode": "r2"},
    "R2 with gate weights": {"mode": "r2", "policy": "ids+gates"},
    "R3 within a margin": {"mode": "r3", "policy": "margin"},
}
REGISTERED = ("off", "R3", "R2")
"""Replays of the plan as it was registered; the others are exploratory and run last."""
FIRST = (
    ("staleness 4", "all"),
    ("FP8 rollout", "all"),
    ("fresh", "LoRA, frozen routers"),
    ("FP8 rollout", "LoRA, frozen routers"),
)
CONDITIONS = tuple(dict.fromkeys([*FIRST, *((samples, weights) for samples in SAMPLES for weights in WEIGHTS)]))
"""Kinds of samples and trained weights, in the order of the plan."""


def arm_of(replay: str, samples: str, weights: str, seed: int = 0) -> Arm:
    return Arm(**REPLAYS[replay], **SAMPLES[samples], **WEIGHTS[weights], seed=seed)


def all_arms() -> Iterator[Arm]:
    """Yield all arms in the order in which they run: all seeds of one arm before the next."""
    for replays in (REGISTERED, [name for name in REPLAYS if name not in REGISTERED]):
        for condition in CONDITIONS:
            for replay in replays:
                yield from with_seeds([arm_of(replay, *condition)], SEEDS)


# ---- comparison of pairs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences of two arms in pairs of a seed: mean, 95 % interval and p by Student's t; NaN without two pairs."""

    pairs: int
    mean: float
    low: float
    high: float
    p: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Comparison:
        """Compare the pairs with these differences."""
        values = np.array([value for value in differences if not math.isnan(value)])
        count = len(values)
        if count < 2:
            mean = float(values[0]) if count else math.nan
            return cls(pairs=count, mean=mean, low=math.nan, high=math.nan, p=math.nan)
        mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count)
        reach = t_quantile(count - 1) * error
        p = two_sided_p(mean / error, count - 1) if error else float(mean == 0)
        return cls(pairs=count, mean=mean, low=mean - reach, high=mean + reach, p=p)

    @property
    def verdict(self) -> str:
        """By the table of the plan, uncorrected."""
        if math.isnan(self.low):
            return "too few pairs"
        if self.low > 0 or self.high < 0:
            return "helps" if self.low > 0 else "harms"
        inside = self.low >= -MARGIN_OF_NO_DIFFERENCE and self.high <= MARGIN_OF_NO_DIFFERENCE
        return "no difference that matters" if inside else "undecided"

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        interval = "" if math.isnan(self.low) else f" ({self.low:+.3f} to {self.high:+.3f})"
        return f"{self.mean:+.3f}{interval}"


def two_sided_p(t: float, degrees: int) -> float:
    """Return the chance of a larger |t| under Student's distribution, by its integral."""
    # x = sqrt(n) tan(a) makes the density a power of a cosine on a finite interval.
    angles = np.linspace(math.atan(abs(t) / math.sqrt(degrees)), math.pi / 2, 20_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    return float(min(1.0, 2 * scale * np.trapezoid(np.cos(angles) ** (degrees - 1), angles)))


def t_quantile(degrees: int, chance: float = 0.05) -> float:
    """Return the |t| that is exceeded with this chance."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees) > chance else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method; NaN stays NaN and does not count."""
    order = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    corrected, highest = [math.nan] * len(ps), 0.0
    for rank, (p, place) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[place] = highest
    return corrected


def fisher(first: tuple[int, int], second: tuple[int, int]) -> float:
    """Return Fisher's exact p, two-sided, of two counts (how many of how many)."""
    (a, n), (b, m) = first, second
    both = a + b

    def chance(of_first: int) -> float:
        return math.comb(n, of_first) * math.comb(m, both - of_first) / math.comb(n + m, both)

    seen = chance(a)
    possible = (chance(of_first) for of_first in range(max(0, both - m), min(n, both) + 1))
    return min(1.0, sum(one for one in possible if one <= seen * (1 + 1e-9)))


# ---- table and figure ------------------------------------------------------------------------------------------------


def compared(runs: Iterable[Result], condition: tuple[str, str], replay: str, other: str) -> Comparison:
    """Compare held-out accuracy at the last evaluation: replay - other."""
    by_arm = {result.arm: result for result in runs}
    pairs = [
        (by_arm.get(arm_of(replay, *condition, seed)), by_arm.get(arm_of(other, *condition, seed))) for seed in SEEDS
    ]
    return Comparison.of([last(one) - last(two) for one, two in pairs if one and two])


def last(result: Result) -> float:
    """Return the last evaluation of a run; one that ended early counts with the value it had reached."""
    values = result.metrics.get(OUTCOME, np.array([]))
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else math.nan


def collapses(runs: Iterable[Result], condition: tuple[str, str], replay: str) -> tuple[int, int]:
    """Return how many runs of an arm have collapsed, and how many there are."""
    of_arm = [result for result in runs if replace(result.arm, seed=0) == arm_of(replay, *condition)]
    return sum(result.collapsed_at() is not None for result in of_arm), len(of_arm)


def _table(runs: Sequence[Result]) -> list[list[str]]:
    rows = [
        ["samples", "weights trained", "pairs", "R3 - off", "verdict", "p, by Holm", "R2 - off", "R3 - R2"],
    ]
    rows[0] += [f"{name} - off" for name in REPLAYS if name not in REGISTERED]
    rows[0] += ["collapsed: off, R3, R2", "Fisher's p, R3 and off"]
    primary = [compared(runs, condition, "R3", "off") for condition in CONDITIONS]
    corrected = holm([comparison.p for comparison in primary])
    for condition, comparison, p in zip(CONDITIONS, primary, corrected, strict=True):
        ended = {name: collapses(runs, condition, name) for name in REGISTERED}
        if not any(count for _, count in ended.values()):
            continue
        exploratory = [str(compared(runs, condition, name, "off")) for name in REPLAYS if name not in REGISTERED]
        rows.append(
            [
                *condition,
                str(comparison.pairs),
                str(comparison),
                comparison.verdict,
                "-" if math.isnan(p) else f"{p:.2g}",
                str(compared(runs, condition, "R2", "off")),
                str(compared(runs, condition, "R3", "R2")),
                *exploratory,
                ", ".join(f"{down} of {count}" for down, count in ended.values()),
                f"{fisher(ended['R3'], ended['off']):.2g}",
            ]
        )
    return rows


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    axes = figure.subplots()
    shown = [(condition, compared(runs, condition, "R3", "off")) for condition in reversed(CONDITIONS)]
    shown = [(condition, comparison) for condition, comparison in shown if comparison.pairs]
    for place, (_, comparison) in enumerate(shown):
        axes.plot([comparison.low, comparison.high], [place, place], color="#22668c")
        axes.plot([comparison.mean], [place], "o", color="#22668c")
    axes.axvspan(-MARGIN_OF_NO_DIFFERENCE, MARGIN_OF_NO_DIFFERENCE, color="#9a9a9a", alpha=0.2, linewidth=0)
    axes.axvline(0, color="#9a9a9a", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [", ".join(condition) for condition, _ in shown], fontsize=8)
    axes.set_xlabel("held-out accuracy, R3 - off, in pairs of a seed; 95 % interval")


STUDY = Study(
    name="training",
    question="Does replay change training, by kind of samples and of trained weights?",
    arms=tuple(all_arms()),
    draw=_draw,
    table=_table,
    scales={"cuda": replace(GPU, rl_steps=STEPS, eval_prompts=512, eval_every=20), "cpu": TINY},
    folder=FOLDER / "training",
)

if __name__ == "__main__":
    main(STUDY)
