"""Configs that train the embedded default for a few steps, and what such a run has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import tiny_config


@pytest.fixture
def config(demo_files: Any, tmp_path: Path) -> Callable[..., Any]:
    """A run of a few steps; sections are overridden key by key."""

    def make(output: str = "run", **overrides: Any) -> Any:
        return tiny_config(demo_files.model, demo_files.train, tmp_path / output, **overrides)

    return make


@pytest.fixture
def metrics_of() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of a run's metrics, without what is different each time: the clock."""

    def read(folder: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if not name.startswith("time")} for line in lines]

    return read


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """The process group of one rank on a CPU, for all tests of a file."""
    import torch

    from moe_replay.train.setup import launch

    with launch.process_group(torch.device("cpu")):
        yield
