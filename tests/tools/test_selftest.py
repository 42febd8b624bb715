"""`moe-replay selftest` on CPU: an item that passes, and planted faults, each of which names its item."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from moe_replay.cli.main import main
from moe_replay.cli.selftest import PROGRAM
from moe_replay.tools import selftest
from moe_replay.utils.processes import descendants

pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")
pytest.importorskip("pydantic")
pytest.importorskip("tyro")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ONE_RANK = selftest.Item("one-rank", "FSDP2 on one rank", backend={"kind": "fsdp"})


def run(*words: str) -> None:
    main(["selftest", "--device", "cpu", *words])


def test_two_ranks_with_divided_experts_pass(capsys: pytest.CaptureFixture[str]) -> None:
    run("--only", "fsdp-ep2", "--engine", "transformers", "--timeout-s", "600")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PASS  fsdp-ep2")
    assert "routes agree in 1.000, 2 updates, weights by http" in lines[0]
    assert lines[1] == "1 passed"


def test_a_planted_fault_fails_its_item_and_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Routes of another layer: the run of the item ends with the trainer's own diagnosis, which is shown."""
    monkeypatch.setattr(selftest, "ITEMS", (ONE_RANK, ONE_RANK._replace(name="other", packages=("no_such_package",))))
    with pytest.raises(SystemExit) as ended:
        run("--engine", "tests.tools.late_engine:start", "--timeout-s", "600")
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  one-rank")
    assert "not those of the tokens they are used for" in lines[0]
    assert any(line.startswith("      | ") for line in lines), "the last lines of the run"
    assert lines[-2:] == [
        "SKIP  other         FSDP2 on one rank: no_such_package is not installed",
        "1 failed, 1 skipped",
    ]


def test_an_item_that_does_not_end_fails(tmp_path: Path) -> None:
    result = selftest.run_item(ONE_RANK, selftest.Machine("cpu", (), "transformers", 0.01, tmp_path, PROGRAM))
    assert result.status == "FAIL"
    assert "has not ended after 0 s" in result.text


def test_processes_that_hang_say_where_they_stand(tmp_path: Path) -> None:
    """One that waits for another one below it."""
    child = f"import pathlib, time; pathlib.Path({str(tmp_path / 'ready')!r}).touch(); time.sleep(3600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    environment = selftest.Machine("cpu", (), "transformers", 0.0, tmp_path, PROGRAM).environment(())
    with (
        (tmp_path / "log").open("ab") as output,
        selftest._started([sys.executable, "-c", parent], environment, output) as process,
    ):
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        below = descendants(process.pid)
        selftest._dump_stacks(process)
    assert len(below) == 1
    stacks = (tmp_path / "log").read_text()
    assert stacks.count("Fatal Python error: ") == 2  # the lines of two processes may be mixed
    assert "subprocess.py" in stacks


@pytest.mark.parametrize(
    ("step", "log", "text"),
    [
        ({"routing/agreement": 0.4}, "", "other experts than the engine's.*found 0.4"),
        ({"loss/grad_norm": 0.0}, "", "a step changed nothing"),
        ({}, "weights reach the engine by http (ipc has failed: no)", "another transport.*expected ipc, found http"),
        (None, "", "ended early"),
    ],
)
def test_a_run_that_ends_well_and_measured_something_wrong_fails(
    tmp_path: Path, step: dict[str, float] | None, log: str, text: str
) -> None:
    item = next(item for item in selftest.ITEMS if item.name == "fsdp-ep2")
    (tmp_path / item.name).mkdir()
    good = {"routing/agreement": 0.99, "loss/grad_norm": 0.1}
    steps = [{"step": number} | good | (step or {}) for number in (1, 2)][: 1 if step is None else 2]
    (tmp_path / item.name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    machine = selftest.Machine("cpu", (), "vllm", 60.0, tmp_path, PROGRAM)
    with pytest.raises(selftest.ItemError) as failure:
        selftest._judged(item, machine, log or "weights reach the engine by ipc (as configured)")
    assert re.search(text, str(failure.value)), failure.value


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_less_than_two_gpus_and_unknown_items_are_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["selftest", "--gpus", "2"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        run("--only", "nothing")
    assert ended.value.code == 2
