"""Benchmarks of a whole step and of whole runs: they run on a CPU; a loss of 5 % against a baseline is an error."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

ROOT = Path(__file__).resolve().parents[1]
RATES = {"score_tokens_per_second": 300.0, "update_tokens_per_second": 100.0, "step_tokens_per_second": 90.0}
BASELINE: dict[str, Any] = {
    "device": "a GPU",
    "torch": "2",
    "work": "some",
    "results": {
        "ours r3": RATES | {"peak_gib": 50.0, "step_seconds": 1.0},
        "plain": RATES | {"step_seconds": 1.0},
        "trl": {"step_tokens_per_second": 60.0, "step_seconds": 1.5},
    },
}


@pytest.mark.whole_runs
def test_every_variant_runs_on_a_cpu(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/whole_step.py"), "--tiny", "--repeats", "1"]
    command += ["--write", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    units = ("seconds", "tokens_per_second")
    has_megatron = importlib.util.find_spec("megatron") is not None
    assert has_megatron == ("megatron r3" in found)
    for variant in found.keys() - {"trl"}:
        assert found[variant].keys() == {f"{part}_{unit}" for part in ("score", "update", "step") for unit in units}
        assert found[variant]["score_seconds"] > 0
    assert "trl" not in found or found["trl"].keys() == {f"step_{unit}" for unit in units}
    assert "ours r3 / plain, step: " in done.stdout


@pytest.mark.whole_runs
def test_adapters_of_experts_are_compared_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/expert_adapters.py"), "--repeats", "1", "--kernels", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for variant in ("grouped", "peft"):
        assert f"| ms (calls) | {variant}, update |" in done.stdout
    assert "peft / grouped, update: " in done.stdout


@pytest.mark.whole_runs
def test_turns_show_the_kernels_in_which_replay_differs(tmp_path: Path) -> None:
    """Under R3 no router of an update has to choose, in its forward or in its recomputation."""
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/whole_step.py"), "--tiny", "--turns", "1", "--kernels", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    _, scored, updated = done.stdout.split("| ms (calls) |")
    updated, turns = updated.split("| | score | update |")
    assert "| score, R3 | native |" in f"|{scored}"
    (topk,) = [line.split("|")[2:4] for line in updated.splitlines() if line.startswith("| aten::topk |")]
    assert "(0)" in topk[0]
    assert "(0)" not in topk[1]
    assert [line.split("|")[1].strip() for line in turns.splitlines()[2:]] == ["r3, plans", "r3, no plans", "native"]


@pytest.mark.whole_runs
def test_whole_runs_are_compared_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    command = [sys.executable, str(ROOT / "benchmarks/whole_run.py"), "--steps", "2", "--variants", "ours r3", "trl"]
    done = subprocess.run(
        [*command, "--write", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: len(steps) for name, steps in found.items()} == {"ours r3": 2, "trl": 2}
    assert all(step["tokens"] > 0 < step["seconds"] for steps in found.values() for step in steps)
    assert "ours r3 / trl: " in done.stdout


@pytest.fixture
def compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, Any]], tuple[Any, str]]:
    """Exit status of the comparison of results with the baseline, and what it printed."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(found: dict[str, Any]) -> tuple[Any, str]:
        for name, content in (("found", found), ("baseline", BASELINE)):
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        files = ["--found", str(tmp_path / "found.json"), "--compare", str(tmp_path / "baseline.json")]
        monkeypatch.setattr(sys, "argv", ["whole_step.py", *files])
        try:
            importlib.import_module("whole_step").main()
        except SystemExit as ended:
            return ended.code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("variant", "key", "factor", "told"),
    [
        ("ours r3", "step_tokens_per_second", 0.96, None),
        ("ours r3", "update_tokens_per_second", 0.94, "LOSS ours r3, update_tokens_per_second: 94, 6.0% below"),
        ("ours r3", "peak_gib", 1.06, "LOSS ours r3, peak_gib: 53, 6.0% above the baseline of 50"),
        ("ours r3", "peak_gib", 0.5, None),
        ("trl", "step_tokens_per_second", 1.07, "LOSS ours r3 / trl, step: 1.402, 6.5% below the baseline of 1.5"),
        ("plain", "score_tokens_per_second", 0.5, None),
    ],
)
def test_a_loss_of_five_percent_fails(
    compared: Callable[..., tuple[Any, str]], variant: str, key: str, factor: float, told: str | None
) -> None:
    found = copy.deepcopy(BASELINE)
    found["results"][variant][key] *= factor
    status, printed = compared(found)
    assert status == (0 if told is None else 1)
    assert (told or "ours r3 / plain, step: ") in printed


@pytest.mark.parametrize("key", ["device", "work"])
def test_a_baseline_of_something_else_is_refused(compared: Callable[..., tuple[Any, str]], key: str) -> None:
    status, _ = compared(BASELINE | {key: "another"})
    assert status == f"the baseline is of another {key}: {BASELINE[key]}, not another"


def test_a_variant_that_is_missing_is_a_loss(compared: Callable[..., tuple[Any, str]]) -> None:
    results = {name: result for name, result in BASELINE["results"].items() if name != "ours r3"}
    status, printed = compared(BASELINE | {"results": results})
    assert (status, "LOSS ours r3: not measured" in printed) == (1, True)


@pytest.mark.whole_runs
def test_shared_prompts_are_compared_on_a_cpu() -> None:
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/shared_prompts.py"), "--tiny", "--repeats", "1", "--groups", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if " + " in line and "x" in line]
    computed = {(row[0], row[1]): row[2] for row in rows if row[0][0].isdigit()}
    shares = {"64 + 16": "0.30x", "16 + 64": "0.82x"}
    assert computed == {(shape, same): share for shape, share in shares.items() for same in ("samples", "budget")}
    assert all(abs(float(row[-1].removesuffix("x")) - 1) < 1e-5 for row in rows if row[0][0].isdigit())
