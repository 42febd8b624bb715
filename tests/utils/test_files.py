"""Files that are complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_replay.utils import files
from moe_replay.utils.files import write_whole


def test_two_processes_may_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run and `moe-replay report --follow` do with the report at the end of a run."""
    path, flush, own_pid = tmp_path / "report.html", files.flush, os.getpid()

    def other_process_writes(written: Path) -> None:
        flush(written)
        if os.getpid() == own_pid:
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", lambda: own_pid + 1)
                write_whole(path, "the other's")

    monkeypatch.setattr(files, "flush", other_process_writes)
    write_whole(path, "whole")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
