"""The environment in docs/environments.md does what the page says of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

from tests.support.documented import documented_environment


class Said:
    """The part of an episode that the environment uses, with turns that are given."""

    def __init__(self, *turns: str, max_turns: int = 4) -> None:
        self._turns = iter(turns)
        self.completion = next(self._turns)
        self.observed: list[str] = []
        self._left = max_turns - 1

    @property
    def can_continue(self) -> bool:
        return self._left > 0

    def observe(self, text: str) -> None:
        self.observed.append(text)

    async def generate(self) -> None:
        self._left -= 1
        self.completion = next(self._turns)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Any]:
    with documented_environment("environments.md", "tools:calculator", tmp_path) as function:
        yield function


def results(episode: Said) -> list[str]:
    return re.findall(r"<result>(.*?)</result>", "".join(episode.observed))


def test_a_call_is_answered_until_there_is_none(environment: Any) -> None:
    episode = Said("<tool>6*7</tool>", "so <tool> 42 / -4 </tool>", "it is -21/2")
    asyncio.run(environment(episode))
    assert results(episode) == ["42", "-21/2"]
    assert episode.completion == "it is -21/2"


def test_no_turn_beyond_the_last_one_is_asked_for(environment: Any) -> None:
    episode = Said("<tool>1/0</tool>", "<tool>1+1</tool>", max_turns=2)
    asyncio.run(environment(episode))
    assert results(episode) == ["division by zero"]
