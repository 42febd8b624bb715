"""Completions that a run keeps: parquet files, the table on the console, the page of the report."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")
pytest.importorskip("rich")

from moe_replay.errors import MissingExtraError
from moe_replay.train.loop import train
from moe_replay.train.output import completions
from moe_replay.train.output.completions import (
    Completion,
    CompletionsError,
    best_and_worst,
    completion_steps,
    read_completions,
    write_completions,
)
from moe_replay.train.output.console import ConsoleProgress

Config = Callable[..., Any]
ONE = Completion(
    row=3,
    group=1,
    sample=0,
    prompt="1+1=",
    completion="2<eos>",
    reward=1.0,
    advantage=0.5,
    scores={"accuracy": 1.0, "format": math.nan},
    tokens=2,
    finish_reason="stop",
    weight_version=4,
)


def with_rewards(*rewards: float) -> list[Completion]:
    return [replace(ONE, sample=sample, reward=reward) for sample, reward in enumerate(rewards)]


# ---- a run ----------------------------------------------------------------------------------------------------------


def digits(prompts: list, completions: list[str], **_: Any) -> list[float | None]:
    return [None if not text else sum(char.isdigit() for char in text) / len(text) for text in completions]


def test_a_run_keeps_what_it_has_sampled(config: Config, metrics_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from pyarrow import parquet

    functions = ["tests.train.runs:closeness", "tests.train.test_completions:digits"]
    made = config(
        steps=2,
        rollout={"environment": "tests.train.test_loop:calculator", "max_turns": 2, "max_tokens": 4},
        reward={"functions": functions, "weights": [1.0, 0.5]},
        log={"completions": True, "num_completions_to_print": 2},
    )
    folder = train(made)
    lines = metrics_of(folder)
    found = {step: parquet.read_table(path).to_pylist() for step, path in completion_steps(folder).items()}
    assert list(found) == [1, 2]
    for line in lines:
        rows = found[line["step"]]
        assert len(rows) == 16
        assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 4
        assert {row["step"] for row in rows} == {line["step"]}
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(line["reward/mean"])
        for row in rows:
            parts = [row[f"reward/{name}"] for name in functions]
            assert row["reward"] == pytest.approx(parts[0] + 0.5 * (parts[1] or 0.0))
            assert row["prompt"].rstrip().endswith("=")
            assert "12" in row["completion"]  # what the environment has said
            assert row["tokens"] <= 8
            assert row["weight_version"] == line["step"] - 1
        for group in {row["group"] for row in rows}:
            advantages = [row["advantage"] for row in rows if row["group"] == group]
            assert sum(advantages) == pytest.approx(0, abs=1e-6)
    shown = capsys.readouterr().out
    best = max(row["reward"] for row in found[2])
    assert f"{best:.3f}" in shown
    assert "advantage" in shown


def test_nothing_is_kept_unless_asked_for(config: Config) -> None:
    folder = train(config(steps=1))
    assert not (folder / completions.FOLDER).exists()


def test_without_pyarrow_the_run_does_not_start(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"log\.completions needs pyarrow.*moe-replay\[train\]"):
        train(config(log={"completions": True}))


def test_texts_of_steps_that_are_done_again_are_removed(config: Config, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (1, 2, 30):
        write_completions(tmp_path / "run", step, [ONE])
    folder = train(config(steps=1, resume=True, log={"completions": True, "num_completions_to_print": 0}))
    assert list(completion_steps(folder)) == [1]
    assert len(read_completions(completion_steps(folder)[1])) == 16


# ---- files ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    given = [ONE, replace(ONE, sample=1, reward=math.nan, prompt="a\nb\x1b[31m \N{SNOWMAN}")]
    found = read_completions(write_completions(tmp_path, 7, given))
    assert repr(found) == repr(given)  # NaN equals nothing
    assert [path.name for path in (tmp_path / "completions").iterdir()] == ["step-00000007.parquet"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_completions(tmp_path, 7, [ONE])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CompletionsError, match=r"step-00000007\.parquet is not a file of completions, or damaged"):
        read_completions(path)


@pytest.mark.parametrize(
    ("rewards", "count", "expected"),
    [
        ((0.1, 0.9, 0.5, 0.3), 2, [0.9, 0.1]),
        ((0.1, 0.9, 0.5, 0.3), 3, [0.9, 0.5, 0.1]),
        ((0.1, 0.9), 4, [0.9, 0.1]),
        ((0.1, math.nan, 0.5, 0.3), 2, [0.5, 0.1]),
        ((0.1, 0.9), 0, []),
        ((math.nan, 0.2, math.nan), 2, [0.2, math.nan]),
    ],
)
def test_the_best_and_the_worst_are_chosen(rewards: tuple[float, ...], count: int, expected: list[float]) -> None:
    found = [one.reward for one in best_and_worst(with_rewards(*rewards), count)]
    assert found == pytest.approx(expected, nan_ok=True)


# ---- the console ----------------------------------------------------------------------------------------------------


def test_the_table_shows_texts_as_they_are() -> None:
    file = io.StringIO()
    long = replace(ONE, prompt="x" * 1000 + "the end", completion="[bold]2[/bold] \x1b[31m" + "y" * 5000)
    with ConsoleProgress(3, file) as progress:
        progress.completions([ONE, long])
        progress.completions([])
    text = file.getvalue()
    assert "1+1=" in text
    assert "end" in text
    assert "[bold]" in text  # markup is text here
    assert "\\x1b" in text
    assert "\x1b" not in text
    assert text.count("y") < 1000
    assert "+0.500" in text
    assert "2 (stop)" in text
