"""Damaged run folders and full disks: a run resumes, or says in one sentence why not and what is kept."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_replay.errors import MoeReplayError
from moe_replay.train.checkpoint.checkpoint import Checkpoints, TrainerState, fixed_settings
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.run_folder import Run, RunError
from moe_replay.train.output.sinks import MetricsError, read_lines
from tests.train.policy import SmallPolicy

RESUMES = "resumes"
METRICS = b'{"step": 1, "a": 1.0}\n'
NEWEST = "checkpoints/step-00000002"


def write_run(folder: Path) -> TrainConfig:
    """Two steps, each with a checkpoint."""
    config, policy = TrainConfig(output=folder), SmallPolicy()
    with Run.open(config) as run:
        checkpoints = Checkpoints(run.checkpoints, settings=fixed_settings(config))
        run.begin(after=0)
        for step in (1, 2):
            policy.train(1)
            run.log(step, {"a": float(step)})
            checkpoints.save(policy, TrainerState(step=step, version=step, data={}))
    return config


def resume(config: TrainConfig) -> int:
    """What the loop does at its start; the step that it resumes after."""
    with Run.open(config) as run:
        checkpoints = Checkpoints(run.checkpoints, settings=fixed_settings(config))
        state = checkpoints.restore(SmallPolicy())
        after = 0 if state is None else state.step
        run.begin(after=after)
        run.log(after + 1, {"a": 0.0})
    return after


def content(name: str, text: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(text)


def removed(name: str) -> Callable[[Path], Any]:
    def remove(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def as_folder(name: str) -> Callable[[Path], Any]:
    def replace(folder: Path) -> None:
        removed(name)(folder)
        (folder / name).mkdir()

    return replace


def as_file(name: str) -> Callable[[Path], Any]:
    def replace(folder: Path) -> None:
        removed(name)(folder)
        (folder / name).write_text("a file")

    return replace


def as_link(name: str, target: str) -> Callable[[Path], Any]:
    def replace(folder: Path) -> None:
        removed(name)(folder)
        (folder / name).symlink_to(target)

    return replace


def as_pipe(name: str) -> Callable[[Path], Any]:
    def replace(folder: Path) -> None:
        removed(name)(folder)
        os.mkfifo(folder / name)

    return replace


DAMAGE: dict[str, tuple[Callable[[Path], Any], str | int]] = {
    # what is damaged, and the step that the run resumes after or what it says
    "metrics not UTF-8": (content("metrics.jsonl", METRICS + b"\xff\xfe\n" + METRICS), "line 2 is not JSON"),
    "metrics cut": (content("metrics.jsonl", METRICS + b'{"step": 2, "a'), 2),
    "metrics end in zeros": (content("metrics.jsonl", METRICS + bytes(4096)), 2),
    "metrics with zeros inside": (content("metrics.jsonl", bytes(99) + b"\n" + METRICS), "line 1 is not JSON"),
    "metrics of no object": (content("metrics.jsonl", b"5\n"), "line 1 is not the metrics of a step"),
    "metrics without a step": (content("metrics.jsonl", b"{}\n"), "line 1 is not the metrics of a step"),
    "metrics with a step of text": (content("metrics.jsonl", b'{"step": "x"}\n'), "not the metrics of a step"),
    "metrics nested deeply": (content("metrics.jsonl", b"[" * 100_000 + b"\n"), "line 1 is not JSON"),
    "metrics empty": (content("metrics.jsonl", b""), 2),
    "metrics missing": (removed("metrics.jsonl"), 2),
    "metrics a folder": (as_folder("metrics.jsonl"), "metric sink 'jsonl' raised IsADirectoryError"),
    "config not TOML": (content("config.toml", b"\0\0"), 2),
    "config missing": (removed("config.toml"), 2),
    "config a folder": (as_folder("config.toml"), "run folder cannot be written"),
    "log a folder": (as_folder("log.txt"), "run folder cannot be written"),
    "lock a folder": (as_folder(".lock"), "run folder cannot be written"),
    "checkpoints a file": (as_file("checkpoints"), "checkpoint folder cannot be created"),
    "checkpoints missing": (removed("checkpoints"), 0),
    "newest a file": (as_file(NEWEST), 1),
    "newest empty": (as_folder(NEWEST), 1),
    "newest a broken link": (as_link(NEWEST, "nowhere"), 1),
    "newest a link to itself": (as_link(NEWEST, "step-00000002"), 1),
    "trainer.json missing": (removed(f"{NEWEST}/trainer.json"), 1),
    "trainer.json a folder": (as_folder(f"{NEWEST}/trainer.json"), 1),
    "trainer.json empty": (content(f"{NEWEST}/trainer.json", b""), 1),
    "trainer.json a list": (content(f"{NEWEST}/trainer.json", b"[]"), 1),
    "trainer.json not UTF-8": (content(f"{NEWEST}/trainer.json", b"\xff"), 1),
    "trainer.json nested deeply": (content(f"{NEWEST}/trainer.json", b"[" * 100_000), 1),
    "trainer.json a pipe": (as_pipe(f"{NEWEST}/trainer.json"), 1),
    "manifest missing": (removed(f"{NEWEST}/manifest.json"), 1),
    "manifest empty": (content(f"{NEWEST}/manifest.json", b""), 1),
    "manifest of no files": (content(f"{NEWEST}/manifest.json", b'{"files": {}}'), 1),
    "manifest nested deeply": (content(f"{NEWEST}/manifest.json", b"[" * 100_000), 1),
    "manifest a pipe": (as_pipe(f"{NEWEST}/manifest.json"), 1),
    "generators missing": (removed(f"{NEWEST}/rng"), 1),
    "generators empty": (content(f"{NEWEST}/rng/rank-00000.safetensors", b""), 1),
    "generators of zeros": (content(f"{NEWEST}/rng/rank-00000.safetensors", bytes(9000)), 1),
    "policy missing": (removed(f"{NEWEST}/policy"), 1),
    "policy a file": (as_file(f"{NEWEST}/policy"), 1),
    "policy linked to itself": (as_link(f"{NEWEST}/policy", "policy"), 1),
    "both missing trainer.json": (
        lambda folder: [path.unlink() for path in folder.glob("checkpoints/*/trainer.json")],
        "every checkpoint in .* is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_folder_resumes_or_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    config = write_run(tmp_path / "run")
    damage(tmp_path / "run")
    if isinstance(expected, int):
        assert resume(config) == expected
        assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][-1] == expected + 1
        assert load_config(tmp_path / "run" / "config.toml").output == tmp_path / "run"
        return
    for _ in range(2):  # what is refused is left as it is, and refused again
        with pytest.raises(MoeReplayError, match=expected) as raised:
            resume(config)
        assert "\n" not in str(raised.value)


def test_a_metrics_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(METRICS + b"oops\n")
    with pytest.raises(MetricsError, match=r"line 2 is not JSON.*Delete the line, or move the file away to resume"):
        list(read_lines(tmp_path / "metrics.jsonl"))


# ---- disks that are full ---------------------------------------------------------------------------------------------

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@needs_full
def test_a_log_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").symlink_to(FULL)
    with Run.open(TrainConfig(output=tmp_path / "run")) as run:
        run.begin(after=0)
        for step in range(1, 4):
            logging.getLogger("moe_replay.train").warning("step %d", step)
            run.log(step, {"a": 1.0})
    said = capfd.readouterr().err
    assert said.count("log.txt cannot be written: [Errno 28] No space left on device") == 1
    assert "Traceback" not in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@needs_full
@pytest.mark.parametrize("what", ["metrics", "traces"])
def test_a_full_disk_ends_the_run_with_what_is_kept(demo_files: Any, tmp_path: Path, what: str) -> None:
    from moe_replay.train.run import Job
    from tests.train.runs import tiny_config

    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", log={"traces": 1})
    with Job.open(config) as job:
        batch = job.rollout()
        job.save(1)
        if what == "metrics":
            sink: Any = job._run._sinks._sinks["jsonl"]  # type: ignore[union-attr]
            os.dup2(os.open(FULL, os.O_WRONLY), sink._file.fileno())
        else:
            (tmp_path / "run" / "traces").write_text("a file")
        with pytest.raises(RunError, match=f"the {what} of step 2 could not be written .*step 1 is kept") as raised:
            if what == "metrics":
                job.log(2, {"a": 1.0})
            else:
                job.save_traces(2, batch)
        assert raised.value.exit_status == 3


def test_traces_that_a_killed_run_left_are_replaced(demo_files: Any, tmp_path: Path) -> None:
    from moe_replay.routes.trace_file import TraceFile
    from moe_replay.train.run import Job
    from tests.train.runs import tiny_config

    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", log={"traces": 2})
    with Job.open(config) as job:
        traces = tmp_path / "run" / "traces"
        traces.mkdir()
        (traces / "step-00000001.mrt.partial").write_bytes(b"half")
        job.save_traces(1, job.rollout())
        with TraceFile(traces / "step-00000001.mrt") as file:
            assert len(file) == 2
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text() or "null") is None
