"""docs/metrics.md names every metric that a run logs, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from moe_replay.train.learn.balance import LOAD, LOAD_BY_TOKENS, LOAD_LIMIT
from moe_replay.train.learn.learner import DROPPED, PLANNED, SHIFT_FLOORED, SHIFT_WEIGHT
from moe_replay.train.loop import train
from moe_replay.train.output.sinks import read_lines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
FUNCTION = "tests.train.runs:closeness"


def first_cells() -> list[str]:
    """What stands in backquotes at the beginning of the rows of the page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)


def documented() -> list[re.Pattern[str]]:
    """A pattern for each key of the page; `<pair>` stands for each of the pairs that it lists."""
    cells = first_cells()
    keys = [cell for cell in cells if "/" in cell]
    pairs = [cell for cell in cells if "/" not in cell]
    spelled = dict.fromkeys(key.replace("<pair>", pair) for key, pair in product(keys, pairs))
    return [
        re.compile(re.escape(key).replace("<function>", re.escape(FUNCTION)).replace("layer_NNN", r"layer_\d{3}"))
        for key in spelled
    ]


@pytest.fixture
def logged(config: Callable[..., Any], demo_files: Any) -> set[str]:
    """The names of the step after a checkpoint, in which everything is measured that can be."""
    made = config(
        steps=2,
        checkpoint={"every": 1},
        data={"eval_path": str(demo_files.eval)},
        rollout={"top_p": 0.9, "environment": "tests.train.test_rewriting:condensing", "max_turns": 2, "max_tokens": 4},
        replay={"mode": "r3", "score_native_every": 1},
        algorithm={"beta": 0.1, "updates_per_rollout": 1},
        eval={"every": 1, "prompts": 2},
    )
    _, line = read_lines(train(made) / "metrics.jsonl")
    of_several_ranks = {LOAD, LOAD_BY_TOKENS, LOAD_LIMIT}  # what `ExpertBalance` logs: test_balance.py
    of_a_gpu = {PLANNED}  # where experts take plans: test_dispatch_plans.py
    of_policies = {"routing/differing_choices", "routing/replaced_choices", DROPPED, SHIFT_WEIGHT, SHIFT_FLOORED}
    return line.keys() - {"step", "time"} | of_several_ranks | of_a_gpu | of_policies  # these: test_policies.py


def test_the_page_has_every_metric_of_a_run_and_no_other(logged: set[str]) -> None:
    patterns = documented()
    assert sorted(name for name in logged if not any(one.fullmatch(name) for one in patterns)) == []
    assert [one.pattern for one in patterns if not any(map(one.fullmatch, logged))] == []


def test_no_metric_is_on_the_page_twice() -> None:
    cells = first_cells()
    assert len(cells) > 40
    assert sorted({cell for cell in cells if cells.count(cell) > 1}) == []
