"""Completions of a run as text: a section of its report, and a separate page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_replay.errors import MissingExtraError
from moe_replay.report.formatting import format_number
from moe_replay.report.page import Page, TextSample
from moe_replay.train.run.completions import (
    Completion,
    CompletionsError,
    best_and_worst,
    completion_steps,
    printable,
    read_completions,
)

PAGE = "completions.html"
IN_REPORT = 4  # samples of the last step
STEPS_OF_PAGE, SAMPLES_OF_STEP = 16, 16
LONGEST = 2000  # characters of a prompt or completion


def add_completions(page: Page, folder: Path) -> list[str]:
    """Add a few completions of the last step to the report of a run, and write the page of many.

    Returns what cannot be shown, and why; nothing is added where a run has kept no completions.
    """
    steps = completion_steps(folder)
    if not steps:
        return []
    try:
        by_step = {step: read_completions(steps[step]) for step in _spread(list(steps), STEPS_OF_PAGE)}
    except (CompletionsError, MissingExtraError) as error:
        return [f"Completions are not shown: {error}"]
    last = max(by_step)
    page.text_section(
        f"Completions of step {last}",
        f"The best and the worst by reward. More, also of earlier steps, are in {PAGE} next to this page; all are in "
        "completions/*.parquet.",
        _samples(by_step[last], IN_REPORT),
    )
    write_completion_page(folder, by_step)
    return []


def write_completion_page(folder: Path, by_step: dict[int, list[Completion]]) -> Path:
    """Write completions.html: the best and the worst completions of each of these steps."""
    page = Page(f"Completions of {folder.resolve().name}")
    rewards = [one.reward for found in by_step.values() for one in found if not math.isnan(one.reward)]
    mean = f"mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else "none of them scored"
    page.head(f"{len(by_step)} of the steps that completions were kept of · {mean}", [])
    for step, found in by_step.items():
        page.text_section(f"Step {step}", _summary(found), _samples(found, SAMPLES_OF_STEP))
    return page.write(folder / PAGE, folder / "figures")


def _summary(found: Sequence[Completion]) -> str:
    scored = [one.reward for one in found if not math.isnan(one.reward)]
    if not scored:
        return f"{len(found)} completions, none of them scored."
    low, mean, high = map(format_number, (min(scored), sum(scored) / len(scored), max(scored)))
    return f"{len(found)} completions; lowest, mean and highest reward: {low}, {mean}, {high}."


def _samples(found: Sequence[Completion], count: int) -> Iterator[TextSample]:
    for one in best_and_worst(found, count):
        facts = [f"row {one.row}", f"reward {format_number(one.reward)}", f"advantage {format_number(one.advantage)}"]
        if len(one.scores) > 1:
            facts += [f"{name} {format_number(value)}" for name, value in one.scores.items()]
        facts += [f"{one.tokens} tokens", f"ended by {one.finish_reason}"]
        prompt, completion = printable(one.prompt), printable(one.completion)
        yield TextSample(
            " · ".join(facts),
            prompt if len(prompt) <= LONGEST else f"…{prompt[-LONGEST:]}",
            completion if len(completion) <= LONGEST else f"{completion[:LONGEST]}…",
        )


def _spread(steps: list[int], count: int) -> list[int]:
    """Return `count` steps, evenly spaced, the first and the last included."""
    if len(steps) <= count:
        return steps
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
