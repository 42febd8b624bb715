from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.train.config.sections import LogConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.run_folder import Run
from moe_replay.train.output.sinks import (
    JsonLines,
    Metrics,
    MetricsError,
    SinkContext,
    SinkError,
    Sinks,
    cut_lines,
    load_sink,
    read_lines,
)
from moe_replay.train.output.trackers import TensorBoard


def logged(path: Path, *steps: int, after: int = 0) -> None:
    sink = JsonLines(SinkContext(path.parent, last_step=after))
    for step in steps:
        sink.log(step, {"reward/mean": step / 2})
    sink.close()


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_one_line_a_step_that_can_be_read_at_once(tmp_path: Path) -> None:
    sink = JsonLines(SinkContext(tmp_path))
    sink.log(1, {"reward/mean": np.float32(0.5), "version": 3, "routing/aligned": True})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before the sink is closed
    found = json.loads(line)
    assert found.pop("time") > 1e9
    assert found == {"step": 1, "reward/mean": 0.5, "version": 3, "routing/aligned": 1}
    sink.close()


@settings(max_examples=25)
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name not in ("step", "time")), st.floats()))
def test_every_number_comes_back_or_is_null(tmp_path_factory: pytest.TempPathFactory, metrics: dict) -> None:
    path = tmp_path_factory.mktemp("any") / "metrics.jsonl"
    sink = JsonLines(SinkContext(path.parent))
    sink.log(1, metrics)
    sink.close()
    (line,) = read_lines(path)
    assert "NaN" not in path.read_text() or any("NaN" in name for name in metrics)
    assert {name: line[name] for name in metrics} == {
        name: value if math.isfinite(value) else None for name, value in metrics.items()
    }


def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logged(path, 1, 2, 3, 4, 5)
    logged(path, 4, 5, 6, after=3)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    logged(path, after=0)
    assert steps_in(path) == []


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logged(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    assert steps_in(path) == [1, 2]
    logged(path, 3, after=2)
    assert steps_in(path) == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2"):
        cut_lines(path, after=1)
    assert path.read_text().count("\n") == 3


def test_cut_keeps_numbers_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(SinkContext(path.parent))
    sink.log(1, {"a": 0.1 + 0.2, "b": 1e-300, "c": math.nan})
    sink.close()
    before = path.read_text()
    cut_lines(path, after=1)
    assert path.read_text() == before


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogConfig(**{package: True})
    monkeypatch.setattr("moe_replay.utils.plugins.find_spec", lambda name: None)
    for opening in (lambda: load_sink(package), lambda: Sinks(log.enabled_sinks, SinkContext(tmp_path))):
        with pytest.raises(MissingExtraError, match=rf"log.{package}.*moe-replay\[{package}\]"):
            opening()


def test_nothing_is_needed_for_json_alone(tmp_path: Path) -> None:
    Sinks(LogConfig().enabled_sinks, SinkContext(tmp_path)).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, steps in ((0, (1, 2, 3)), (1, (2,))):
        sink = TensorBoard(SinkContext(tmp_path, last_step=after))
        for step in steps:
            sink.log(step, {"reward/mean": step + after / 10})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert found == [(1, 1.0), (2, 2.1)]


class Tracking:
    """What MLflow's client is asked for, with the answers of an empty server."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.status: dict[str, str] = {}
        self.batches: list[list[tuple]] = []

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        self.status[f"{experiment}-{run_name}"] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}-{run_name}"))

    def update_run(self, run: str, status: str) -> None:
        assert run in self.status
        self.status[run] = status

    def log_batch(self, run: str, metrics: list) -> None:
        assert self.status[run] == "RUNNING"
        self.batches.append(metrics)

    def set_terminated(self, run: str) -> None:
        self.status[run] = "FINISHED"


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Tracking()
    monkeypatch.setattr("moe_replay.utils.plugins.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda: server))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *parts: parts))
    for after in (0, 1):
        sink = Sinks(LogConfig(mlflow=True).enabled_sinks, SinkContext(tmp_path, "name", after, "p"))
        sink.log(after + 1, {"reward/mean": np.float32(0.5) + after, **{f"m/{number}": 1 for number in range(1200)}})
        sink.close()
    assert server.status == {"e0-name": "FINISHED"}
    assert [len(batch) for batch in server.batches] == [1000, 201, 1000, 201]
    first, again = server.batches[0][0], server.batches[2][0]
    assert (first[0], first[1], first[3]) == ("reward/mean", 0.5, 1)
    assert (again[1], again[3]) == (1.5, 2)


@pytest.mark.slow
def test_weights_and_biases_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: what would be sent is in a file, which holds names and values as text."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for after in (0, 1):
        sink = Sinks(LogConfig(wandb=True).enabled_sinks, SinkContext(tmp_path, "name", after, "p"))
        sink.log(after + 1, {"reward/mean": 0.5125 + after, "loss/total": math.nan})
        sink.close()
        ids.append((tmp_path / "wandb-id.txt").read_text())
    assert ids[0] == ids[1]

    def written() -> bytes:
        files = sorted(tmp_path.glob(f"wandb/offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
        return b"".join(path.read_bytes() for path in files)

    ends = time.monotonic() + 120
    while b"1.5125" not in written() and time.monotonic() < ends:  # a process of W&B writes it, also after the end
        time.sleep(0.1)
    for text in (b"reward/mean", b"0.5125", b"1.5125", b"loss/total"):
        assert text in written()


# ---- sinks of a user -------------------------------------------------------------------------------------------------


class Remembering:
    """A sink outside of the registry, which remembers in a file what it was told."""

    def __init__(self, context: SinkContext) -> None:
        self._file = (context.folder / "remembered.txt").open("a")
        self._file.write(f"{context.name} after {context.last_step}\n")

    def log(self, step: int, metrics: Metrics) -> None:
        if math.isnan(metrics["loss"]):
            raise RuntimeError("no route to host")
        self._file.write(f"{step} {metrics['loss']}\n")

    def close(self) -> None:
        self._file.write("closed\n")
        self._file.close()


class Demanding(Remembering):
    requires = ("a_package_that_nobody_has",)


HERE = "tests.train.test_sinks"


def test_a_run_logs_to_the_sinks_that_its_configuration_names(tmp_path: Path) -> None:
    config = TrainConfig(output=tmp_path, name="mine", log={"sinks": [f"{HERE}:Remembering", "jsonl"]})
    with Run.open(config) as run:
        run.begin(after=3)
        run.log(4, {"loss": 0.5})
    assert (tmp_path / "remembered.txt").read_text() == "mine after 3\n4 0.5\nclosed\n"
    assert steps_in(tmp_path / "metrics.jsonl") == [4]


def test_what_a_sink_raises_names_the_sink_and_closes_it(tmp_path: Path) -> None:
    name = f"{HERE}:Remembering"
    with (
        pytest.raises(SinkError, match=rf"metric sink '{name}' raised RuntimeError: no route to host.*step 7"),
        Run.open(TrainConfig(output=tmp_path, log={"sinks": [name]})) as run,
    ):
        run.begin(after=0)
        run.log(7, {"loss": math.nan})
    assert (tmp_path / "remembered.txt").read_text().endswith("closed\n")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{HERE}:Demanding", "needs the package a_package_that_nobody_has"),
        (f"{HERE}:Absent", "cannot be loaded"),
        ("jsnl", r"Did you mean 'jsonl'\?"),
    ],
)
def test_a_sink_that_cannot_be_had_is_refused_before_the_folder_is_made(tmp_path: Path, name: str, told: str) -> None:
    config = TrainConfig(output=tmp_path / "run")
    config = config.model_copy(update={"log": config.log.model_copy(update={"sinks": (name,)})})
    with pytest.raises(MoeReplayError, match=told):
        Run.open(config)
    assert not (tmp_path / "run").exists()
