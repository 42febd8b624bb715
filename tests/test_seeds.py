"""docs/lab/seeds.md is whole and true to the repository: 106 lines; every file, test and key that it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("pydantic", reason="keys of the configuration are looked up")

from moe_replay.train.config.keys import all_fields, sections

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "lab" / "seeds.md"


class Line(NamedTuple):
    number: int
    what: str
    state: str
    where: str


def lines() -> list[Line]:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [Line(int(number), what, state, where) for number, what, state, where in rows]


def test_every_line_is_there_once_and_in_order() -> None:
    assert [line.number for line in lines()] == list(range(1, 107))


def test_every_line_has_an_answer_or_a_reason() -> None:
    for line in lines():
        assert line.state in ("yes", "partly", "no"), line
        words = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)", "", line.where).split()
        assert line.state == "yes" or len(words) >= 3, f"no reason: {line}"
        assert line.state != "yes" or "`" in line.where or "](" in line.where, f"nothing is named: {line}"


def test_every_file_and_test_that_is_named_exists() -> None:
    for line in lines():
        for path, test in re.findall(r"`((?:src|tests|recipes|benchmarks|docs)/[\w./-]+)(?:::(\w+))?`", line.where):
            assert (ROOT / path).exists(), f"{line.number}: {path}"
            if test:
                assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (
                    f"{line.number}: {test}"
                )


def test_every_key_that_is_named_exists() -> None:
    keys, names = all_fields(), [name for name, _ in sections() if name]
    for line in lines():
        for key in re.findall(rf"`((?:{'|'.join(names)})\.[a-z_]+)`", line.where):
            assert key in keys, f"{line.number}: {key}"
