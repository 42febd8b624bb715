"""Every example runs, by the command in its first lines, and shows what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.bfloat16 import fast_bfloat16
from tests.faults.forked import fork_python
from tests.faults.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def run_here(name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """In this process, where Transformers is imported already."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def run_forked(name: str, size: int, port: int) -> str:
    """In processes of its own with the variables of a launcher: it makes process groups, or other state of one."""
    code = f"import runpy; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(fork_python(code, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(size)
        ]
        outputs = [rank.communicate(LIMIT_S)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * size, outputs
    return "".join(outputs)


def check_agreement(output: str, lines: int) -> None:
    """The first update has the weights of the record: all routes agree. The next ones do not."""
    shares = [float(share) for share in re.findall(r"native routes(?: agree)? ([\d.]+)%", output)]
    assert len(shares) == lines
    assert shares[0] == 100
    assert max(shares[1:2] + shares[lines - 1 :]) < 100


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert [name for name in names if f'"{name}"' not in here] == []


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_the_command_is_in_the_first_lines(name: str) -> None:
    head = "\n".join((EXAMPLES / name).read_text().splitlines()[:8])
    assert re.search(rf"^(python|accelerate launch|torchrun) .*examples/{name}", head, re.MULTILINE)


def test_record_and_replay(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "refused    the model is fed another token" in run_here("record_and_replay.py", capsys, monkeypatch)


def test_notebook_of_a_shifted_route(capsys: pytest.CaptureFixture) -> None:
    """Its code cells, in order; what they find is what the notebook shows as their output."""
    cells = json.loads((EXAMPLES / "shifted_route.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = ""
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            shown += "".join(text for output in cell["outputs"] for text in output["text"])
    printed = capsys.readouterr().out
    names["replay"].detach()
    for found in (
        "aligned\n100.0% of routes recorded",
        "one token late: routes are one token late [layer 1, 2, 3, 4, 5, 6, 7]",
        "one layer late: routes are one layer late in all layers",
        "the model is fed another token than the routes belong to [sample 0, token 0]",
    ):
        assert found in printed
        assert found in shown


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_plain_loop(mode: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    check_agreement(run_here("plain_loop.py", capsys, monkeypatch, mode), 6)


@pytest.mark.distributed
def test_accelerate_loop(port: int) -> None:
    pytest.importorskip("accelerate")
    check_agreement(run_forked("accelerate_loop.py", 2, port), 3)


@pytest.mark.distributed
def test_fsdp2_loop(port: int) -> None:
    check_agreement(run_forked("fsdp2_loop.py", 2, port), 3)


@pytest.mark.slow
def test_megatron_forward_step(port: int) -> None:
    pytest.importorskip("megatron.core")
    check_agreement(run_forked("megatron_forward_step.py", 1, port), 3)


@pytest.mark.slow
def test_anticipatory_routing(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps are native in both runs; the others replay what older weights have chosen."""
    arguments = ["--steps", "6", "--ahead", "2"]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--figure", str(tmp_path / "losses.svg")]
    output = run_here("anticipatory_routing.py", capsys, monkeypatch, *arguments)
    losses = dict(re.findall(r"^(\d steps ahead  step +\d+)  loss ([\d.]+)", output, re.M))
    assert losses["0 steps ahead  step   0"] == losses["2 steps ahead  step   0"]
    (share,) = re.findall(r"step   5 .* native routes agree ([\d.]+)%", output)
    assert 0 < float(share) < 100
    assert (tmp_path / "losses.svg").exists() == (len(arguments) == 6)


@pytest.mark.slow
def test_sft_recompute(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run_here("sft_recompute.py", capsys, monkeypatch, "--steps", "2")
    native, replayed = map(float, re.findall(r"error of the gradient before training ([\d.e-]+)", output))
    assert replayed < native / 10
    assert all(float(share) > 0 for share in re.findall(r"other experts ([\d.]+)%", output))
    assert output.count("loss") == 4


@pytest.mark.slow
@pytest.mark.whole_runs
def test_trl_grpo(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    with fast_bfloat16():
        table = run_here("trl_grpo.py", capsys, monkeypatch).partition("without")[2]
    rows = {
        words.strip(): (float(a), float(b))
        for words, a, b in re.findall(r"^(.+?) +([\d.e-]+) +([\d.e-]+)$", table, re.M)
    }
    without, with_replay = rows["KL, rollout and old-log-prob pass"]
    assert with_replay < without / 3
    assert rows["tokens that took the routes of the rollout"][0] == 0
    assert rows["tokens that took the routes of the rollout"][1] > 0.8
