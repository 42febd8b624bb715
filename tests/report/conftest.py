"""Pages with everything on them, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_replay.report.compare import write_comparison
from moe_replay.report.run_report import write_run_report
from tests.report.folders import attribution, write_full_run


@pytest.fixture(scope="session")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run in which everything was measured."""
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    folder = write_full_run(tmp_path_factory.mktemp("runs") / "a-run-with-a-rather-long-name-for-a-folder")
    (folder / "attribution.json").write_text(attribution().to_json())
    return write_run_report(folder)


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs side by side."""
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    runs = tmp_path_factory.mktemp("runs")
    folders = [write_full_run(runs / "first-of-two", 3), write_full_run(runs / "second", 3, mode="off", seed=1)]
    return write_comparison(folders, runs / "out" / "both.html")
