from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_replay.errors import MissingExtraError
from moe_replay.train.checkpoint.checkpoint import CheckpointError, Checkpoints, TrainerState, fixed_settings
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.run_folder import Run, RunError
from moe_replay.train.output.sinks import read_lines
from tests.distributed.harness import run_ranks
from tests.train.policy import SmallPolicy


def train(config: TrainConfig, upto: int, save_at: tuple[int, ...] = ()) -> tuple[int, list[float]]:
    """What the loop does with a run: step it began after, and its losses."""
    policy = SmallPolicy()
    with Run.open(config) as run:
        checkpoints = Checkpoints(run.checkpoints, settings=fixed_settings(config))
        state = checkpoints.restore(policy)
        began = state.step if state else 0
        run.begin(after=began)
        losses = []
        for step in range(began + 1, upto + 1):
            losses += policy.train(1)
            run.log(step, {"loss/total": losses[-1]})
            if step in save_at:
                checkpoints.save(policy, TrainerState(step=step, version=step, data={}))
    return began, losses


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    _, whole = train(TrainConfig(output=tmp_path / "whole"), upto=6)

    config = TrainConfig(output=tmp_path / "stopped", steps=6)
    train(config, upto=5, save_at=(3,))  # steps 4 and 5 are lost
    began, losses = train(config.model_copy(update={"steps": 10, "optim": config.optim}), upto=6)
    assert began == 3
    assert losses == whole[3:]
    lines = list(read_lines(tmp_path / "stopped" / "metrics.jsonl"))
    assert [(line["step"], line["loss/total"]) for line in lines] == list(enumerate(whole, start=1))


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path / "run", name="here", rollout={"token": "secret"})
    with Run.open(config) as run:
        assert run.folder == tmp_path / "run"
        assert (run.checkpoints, run.traces) == (run.folder / "checkpoints", run.folder / "traces")
        logging.getLogger("moe_replay.train.checkpoint.checkpoint").info("something was done")
    logging.getLogger("moe_replay.train.checkpoint.checkpoint").warning("after the run")
    assert logging.getLogger("moe_replay").handlers == []
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["name"] == "here"
    assert "secret" not in (tmp_path / "run" / "config.toml").read_text()
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "INFO moe_replay.train.checkpoint.checkpoint: something was done" in log
    assert "after the run" not in log


def test_the_error_that_ended_a_run_is_in_its_folder_until_it_resumes(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path)
    with pytest.raises(ValueError, match="routes"), Run.open(config):
        raise ValueError("routes\nare wrong")
    assert (tmp_path / "failure.txt").read_text() == "routes are wrong\n"
    with pytest.raises(KeyboardInterrupt), Run.open(config):
        assert not (tmp_path / "failure.txt").exists()
        raise KeyboardInterrupt
    assert not (tmp_path / "failure.txt").exists()


def test_a_new_run_has_a_folder_of_its_own_and_its_config_leads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Run.open(TrainConfig(name="a")) as first, Run.open(TrainConfig(name="a")) as second:
        folders = [first.folder, second.folder]
    assert len(set(folders)) == 2
    for folder in folders:
        assert folder.parent == tmp_path / "runs"
        assert folder.name[15:].startswith("-a")
    with Run.open(load_config(folders[0] / "config.toml")) as again:
        assert again.folder == folders[0]


def test_one_run_in_a_folder_at_a_time(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path)
    with Run.open(config):
        config_before = (tmp_path / "config.toml").stat().st_mtime_ns
        with pytest.raises(RunError, match=f"another run is writing to .*process {os.getpid()} on"):
            Run.open(config)
        assert (tmp_path / "config.toml").stat().st_mtime_ns == config_before
    Run.open(config).close()


@pytest.mark.slow
def test_the_lock_of_a_killed_run_is_gone(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from moe_replay.train.config.train_config import TrainConfig\n"
        "from moe_replay.train.output.run_folder import Run\n"
        "run = Run.open(TrainConfig(output=Path(sys.argv[1])))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(RunError, match=f"process {other.pid} on"):
            Run.open(TrainConfig(output=tmp_path))
        other.send_signal(signal.SIGKILL)
    Run.open(TrainConfig(output=tmp_path)).close()


def test_a_run_is_not_begun_over_another(tmp_path: Path) -> None:
    fresh = TrainConfig(output=tmp_path, resume=False)
    Run.open(fresh).close()  # nothing was trained
    train(fresh, upto=1)
    with pytest.raises(RunError, match="already contains a run"):
        Run.open(fresh)
    Run.open(TrainConfig(output=tmp_path)).close()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        Run.open(TrainConfig(output=tmp_path / "file" / "run"))


def test_a_sink_that_is_not_installed_is_told_before_anything_is_made(tmp_path: Path) -> None:
    try:
        Run.open(TrainConfig(output=tmp_path / "run", log={"tensorboard": True})).close()
    except MissingExtraError:
        assert not (tmp_path / "run").exists()
    else:
        assert (tmp_path / "run" / "config.toml").exists()


def test_metrics_wait_for_the_beginning(tmp_path: Path) -> None:
    with Run.open(TrainConfig(output=tmp_path)) as run, pytest.raises(RunError, match="begin"):
        run.log(1, {})


def test_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path)
    train(config, upto=1, save_at=(1,))
    may = TrainConfig(output=tmp_path, steps=7, optim={"lr": 1e-3}, checkpoint={"keep": 9}, backend={"device": "cpu"})
    assert train(may, upto=2)[0] == 1
    for changed, name in (
        ({"seed": 3}, "seed 3"),
        ({"model": {"dtype": "float32"}}, "model.dtype float32"),
        ({"data": {"shuffle": False}}, "data.shuffle False"),
        ({"backend": {"kind": "megatron", "tensor_parallel": 2}}, "backend.kind megatron"),
    ):
        with pytest.raises(CheckpointError, match=f"other settings: expected {name}, found"):
            train(TrainConfig(output=tmp_path, **changed), upto=2)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def open_on_rank(parent: str) -> list:
    os.chdir(parent)
    with Run.open(TrainConfig(name="many")) as run:
        run.begin(after=0)
        run.log(1, {"rank": torch.distributed.get_rank()})
        found = [str(run.folder)]
        with pytest.raises(ValueError, match="another run is writing") as refused:
            Run.open(TrainConfig(output=run.folder))
        found.append(type(refused.value).__name__)
    return found


@pytest.mark.distributed
def test_ranks_share_one_folder_and_the_first_writes(tmp_path: Path) -> None:
    first, second = run_ranks(2, open_on_rank, str(tmp_path))
    assert first[0] == second[0]
    assert [first[1], second[1]] == ["RunError", "OtherRankError"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(first[0]).name]
    assert [line["rank"] for line in read_lines(Path(first[0]) / "metrics.jsonl")] == [0]
