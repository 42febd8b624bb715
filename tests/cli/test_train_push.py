"""A complete run with `checkpoint.push_to_hub` pushes its newest export; an interrupted one does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")
pytest.importorskip("tyro", reason="the command line needs tyro")

from moe_replay.cli.main import main
from moe_replay.demo import RECIPE
from moe_replay.train.config.file import ConfigError, load_config
from tests.report.folders import write_run


@pytest.mark.parametrize("stopped_after", [None, 2])
def test_a_complete_run_is_pushed_with_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped_after: int | None
) -> None:
    run = write_run(tmp_path / "run", [{"step": 2, "reward/mean": 0.5}])
    export = run / "checkpoints/step-00000002/hf"
    export.mkdir(parents=True)
    pushed: list[tuple[Path, str, bool]] = []

    def train(config: Any, write_report: Any, interruption: Any, **_: Any) -> Path:
        write_report(run)
        interruption.stopped_after = stopped_after
        return run

    def push(folder: Path, repository: str, *, private: bool) -> str:
        assert (folder / "README.md").is_file()
        pushed.append((folder, repository, private))
        return "https://hub/me/model"

    monkeypatch.setattr("moe_replay.train.loop.train", train)
    monkeypatch.setattr("moe_replay.report.run_report.write_run_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("moe_replay.report.model_card.push_folder", push)
    command = ["train", str(RECIPE), "--checkpoint.push_to_hub", "me/model", "--checkpoint.export"]
    if stopped_after is not None:
        with pytest.raises(SystemExit):
            main(command)
        assert pushed == []
        return
    main(command)
    assert pushed == [(export, "me/model", True)]
    assert "pushed: https://hub/me/model" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["a/b", "--checkpoint.export", "false"], ["a/b/c"], ["has space"]], ids=" ".join)
def test_a_push_that_cannot_be_is_refused_before_training(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.push_to_hub"):
        load_config(RECIPE, ["--checkpoint.push_to_hub", *wrong])
