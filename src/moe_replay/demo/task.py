"""The demo task: "4+7+2=" is answered by "(4+7=11+2=13)13", or without intermediate steps by an estimate such as "12".

Problems, reward and environment. Imports neither torch nor Transformers: reward processes import this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from moe_replay.utils.misc import text_of

CHARACTERS = "0123456789+=()"
HELD_OUT_EVERY = 8
MAX_ESTIMATE_ERROR = 3


class Problem(NamedTuple):
    """Digits from 1 to 9 to be added."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def solution(self) -> str:
        """The sum; the reward checks nothing else."""
        return str(sum(self.terms))

    @property
    def worked(self) -> str:
        """The answer after one addition at a time, which a small model can learn."""
        first, *others = self.terms
        totals = list(accumulate(self.terms))[1:]
        steps = "".join(f"+{term}={total}" for term, total in zip(others, totals, strict=True))
        return f"({first}{steps}){self.solution}"

    def estimate(self, random: Random) -> str:
        """Return an answer near the sum without intermediate steps: correct one time in seven."""
        return str(max(0, sum(self.terms) + random.randint(-MAX_ESTIMATE_ERROR, MAX_ESTIMATE_ERROR)))

    @property
    def is_held_out(self) -> bool:
        """Whether it is reserved for evaluation; depends on the digits alone, so that no two splits share a problem."""
        return sum(position * term for position, term in enumerate(self.terms, 1)) % HELD_OUT_EVERY == 0

    def row(self) -> dict[str, str]:
        return {"prompt": self.prompt, "solution": self.solution}


def problems(random: Random, terms: tuple[int, int], *, held_out: bool) -> Iterator[Problem]:
    """Yield problems of `terms[0]` to `terms[1]` digits without end; only held-out ones, or none of them."""
    while True:
        problem = Problem(tuple(random.randint(1, 9) for _ in range(random.randint(*terms))))
        if problem.is_held_out == held_out:
            yield problem


def rows(count: int, seed: int, terms: tuple[int, int], *, held_out: bool) -> list[dict[str, str]]:
    """Return `count` distinct problems as dataset rows, deterministic for a seed."""
    distinct: dict[Problem, None] = {}
    for problem in problems(Random(seed), terms, held_out=held_out):
        distinct[problem] = None
        if len(distinct) == count:
            break
    return [problem.row() for problem in distinct]


def exact(prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """Reward 1 if the completion ends with the solution, else 0."""
    return [float(_last_number(text_of(text)) == str(truth)) for text, truth in zip(completions, solution, strict=True)]


def _last_number(text: str) -> str | None:
    match = re.search(r"(\d+)\s*$", text)
    return match[1] if match else None


async def second_try(episode: Any) -> None:
    """An environment that repeats the problem until the sum is correct or no turn is left.

    The observation is the problem itself, since the model knows no other characters.
    """
    row = {"prompts": [episode.prompt.content], "solution": [episode.prompt.columns["solution"]]}
    while episode.can_continue and not exact(completions=[episode.completion], **row)[0]:
        episode.observe(str(episode.prompt.content))
        await episode.generate()
