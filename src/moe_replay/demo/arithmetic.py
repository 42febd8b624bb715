"""Sums of digits: "4+7+2=" is answered by "(4+7=11+2=13)13", or without the working by an estimate such as "12"."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import NamedTuple

CHARACTERS = "0123456789+=()"
HELD_OUT_EVERY = 8
FARTHEST_ESTIMATE = 3


class Problem(NamedTuple):
    """Digits from 1 to 9 to be added."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The prompt."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def solution(self) -> str:
        """The sum, which is all that the reward looks at."""
        return str(sum(self.terms))

    @property
    def worked(self) -> str:
        """The answer after one addition at a time, which a small model can learn."""
        first, *others = self.terms
        totals = list(accumulate(self.terms))[1:]
        steps = "".join(f"+{term}={total}" for term, total in zip(others, totals, strict=True))
        return f"({first}{steps}){self.solution}"

    def estimate(self, random: Random) -> str:
        """An answer without any working, near the sum: right one time in seven."""
        return str(max(0, sum(self.terms) + random.randint(-FARTHEST_ESTIMATE, FARTHEST_ESTIMATE)))

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept for evaluation: decided by the digits, so that no two parts of the data share one."""
        return sum(place * term for place, term in enumerate(self.terms, 1)) % HELD_OUT_EVERY == 0

    def row(self) -> dict[str, str]:
        """Return the problem as a row of a data set."""
        return {"prompt": self.prompt, "solution": self.solution}


def problems(random: Random, terms: tuple[int, int], *, held_out: bool) -> Iterator[Problem]:
    """Yield problems without end, of `terms[0]` to `terms[1]` digits; held-out ones only, or none of them."""
    while True:
        problem = Problem(tuple(random.randint(1, 9) for _ in range(random.randint(*terms))))
        if problem.is_held_out == held_out:
            yield problem


def rows(count: int, seed: int, terms: tuple[int, int], *, held_out: bool) -> list[dict[str, str]]:
    """Return `count` different problems as rows of a data set, the same ones for the same seed."""
    different: dict[Problem, None] = {}
    for problem in problems(Random(seed), terms, held_out=held_out):
        different[problem] = None
        if len(different) == count:
            break
    return [problem.row() for problem in different]
