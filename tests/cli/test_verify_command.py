"""`moe-replay verify`: the status says whether a stack passes, the JSON says why."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import moe_replay as mr
from moe_replay.cli.main import main
from moe_replay.cli.verify import stdout_on_stderr
from moe_replay.engines.base import StartRequest
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError
from moe_replay.records import Sample, SamplingParams
from moe_replay.verification.attribution import Attribution
from tests.engines.tiny import VOCABULARY, tiny_model

pytest.importorskip("tyro", reason="the command line needs tyro")
pytest.importorskip("pydantic", reason="engines are opened by the trainer's configuration")

SMALL = ("--engine", "transformers", "--samples", "4", "--max-tokens", "24", "--device", "cpu")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def samples(model: nn.Module) -> list[Sample]:
    prompts = np.random.default_rng(0).integers(1, VOCABULARY, (4, 9)).tolist()
    engine = TransformersEngine(model, max_length=64)
    groups = engine.generate(prompts, SamplingParams(max_tokens=24, seed=0))
    engine.close()
    return [sample for group in groups for sample in group]


def file_of(path: Path, traces: list[mr.RouteTrace]) -> str:
    with mr.TraceWriter(path) as writer:
        for trace in traces:
            writer.append(trace)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    main(["verify", *words, "--json"])
    return json.loads(capsys.readouterr().out)


def status(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    return ended.value.code


# ---- an engine -------------------------------------------------------------------------------------------------------


def test_random_prompts_on_the_same_weights_pass(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", folder, *SMALL)
    assert (found["passed"], found["failures"]) == (True, [])
    assert (found["samples"], found["scored"]) == (4, 4 * 24)  # nothing ends before it is as long as it may be
    assert found["passes"]["R3"]["mismatch"]["k3_kl"] < 1e-10
    assert found["routing"]["agreement"] == [1.0, 1.0, 1.0]
    assert found["alignment"]["status"] == "aligned"
    assert found["labels"]["engine"].startswith("Transformers ")


def test_a_trainer_in_8_bits_is_measured(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", folder, *SMALL, "--base-dtype", "fp8", "--max-k3", "1")
    assert found["labels"]["trainer"].endswith("weights rounded to fp8")
    assert 1e-8 < found["passes"]["R3"]["mismatch"]["k3_kl"] < found["passes"]["native"]["mismatch"]["k3_kl"]
    assert min(found["routing"]["agreement"]) < 1


@pytest.mark.parametrize(("words", "eager"), [((), True), (("--engine-options", "enforce_eager", "False"), False)])
def test_vllm_starts_quickly_unless_told_otherwise(
    words: tuple[str, ...], eager: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[StartRequest] = []

    def start(name: str, request: StartRequest, *, key: str) -> None:
        started.append(request)
        raise EngineError("not in this test")

    monkeypatch.setattr("moe_replay.cli.verify.start_sampler", start)
    assert status("--model", folder, *SMALL, "--engine", "vllm", *words) != 0
    assert started[0].options["enforce_eager"] is eager


def test_the_gate_passes_and_names_a_fault(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "--model", folder, *SMALL, "--gate")["passed"]
    assert status("--model", folder, *SMALL, "--gate", "--engine", "tests.tools.late_engine:start") == 1
    assert "FAILED: likely fault: routes that are not those of these tokens and layers, layer shift" in (
        capsys.readouterr().out
    )


def test_the_table_and_what_fails(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--model", folder, *SMALL, "--min-agreement", "1.01", "--max-k3", "-1", "--no-packed") == 1
    printed = capsys.readouterr()
    assert "FAILED: native agreement is 1, less than 1.01" in printed.out
    assert "FAILED: k3 KL with R3" in printed.out
    assert "F(2)" in printed.out
    assert "sampling 4 prompts" in printed.err


@pytest.mark.slow
def test_files_are_written(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the page has figures")
    target = tmp_path / "report"
    main(["verify", "--model", folder, *SMALL, "--output", str(target)])
    assert str(Attribution.from_json((target / "attribution.json").read_text())) in capsys.readouterr().out
    assert "with replay" in (target / "attribution.html").read_text()


def test_without_matplotlib_there_is_no_page(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    main(["verify", "--model", folder, *SMALL, "--output", str(tmp_path)])
    assert "no attribution.html" in capsys.readouterr().err
    assert (tmp_path / "attribution.json").exists()


def test_prompts_of_a_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer prompts than samples: each is continued several times."""
    from moe_replay.demo.model import build_tokenizer

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(Path(folder, name).read_bytes())
    build_tokenizer().save_pretrained(tmp_path)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "1+2="}\n{"prompt": "3+4+5="}\n')
    words = ("--model", str(tmp_path), *SMALL, "--prompts", str(data), "--samples", "3")
    found = told(capsys, *words)
    assert found["samples"] == 3
    assert found["tokens"] - found["scored"] == 7 + 7 + 9  # with the three tokens of a user turn


def test_stdout_is_for_the_result_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_on_stderr():
        os.write(1, b"an engine's process speaks")
    os.write(1, b"the result")
    assert tuple(capfd.readouterr()) == ("the result", "an engine's process speaks")


# ---- traces of somebody else -----------------------------------------------------------------------------------------


def test_traces_pass(folder: str, samples: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path / "good.mrt", [sample.trace for sample in samples])
    found = told(capsys, "--model", folder, "--traces", file)
    assert (found["passed"], found["passes"], found["scored"]) == (True, {}, 0)
    assert found["routing"]["agreement"] == [1.0, 1.0, 1.0]


def test_exact_traces_pass_and_one_route_fails_with_its_place(
    folder: str, samples: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [sample.trace for sample in samples]
    main(["verify", "--model", folder, "--traces", file_of(tmp_path / "good.mrt", traces), "--exact"])
    one = traces[2]
    experts = one.routed_experts.copy()
    experts[4, 1] = [expert for expert in range(one.num_experts or 0) if expert not in experts[4, 1]][: one.top_k]
    traces[2] = mr.RouteTrace(one.token_ids, experts, one.layers, one.valid, num_experts=one.num_experts)
    file = file_of(tmp_path / "bad.mrt", traces)
    main(["verify", "--model", folder, "--traces", file])
    capsys.readouterr()
    assert status("--model", folder, "--traces", file, "--exact") == 1
    assert "FAILED: routes differ at 1 of 384 tokens and layers, first in layer 2: sample 2, token 4" in (
        capsys.readouterr().out
    )


def test_misaligned_traces_fail_by_name(
    folder: str, samples: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rolled = [
        mr.RouteTrace(t.token_ids, np.roll(t.routed_experts, 1, axis=1), t.layers, t.valid, num_experts=t.num_experts)
        for t in (sample.trace for sample in samples)
    ]
    assert status("--model", folder, "--traces", file_of(tmp_path / "bad.mrt", rolled)) == 1
    assert "FAILED: misaligned: routes are one layer late" in capsys.readouterr().out


def test_traces_of_another_model_end_with_an_error(
    folder: str, samples: list[Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = samples[0].trace
    other = mr.RouteTrace(trace.token_ids, trace.routed_experts, (0, 1, 2), trace.valid, num_experts=trace.num_experts)
    assert status("--model", folder, "--traces", file_of(tmp_path / "other.mrt", [other])) == 1
    assert "layers [1, 2, 3]" in capsys.readouterr().err


# ---- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--engine", "rollout_server"), "needs --url"),
        (("--engine", "transformers", "--url", "http://127.0.0.1:8000"), "leave --url out"),
        (("--traces", "x.mrt", "--prompts", "y.jsonl"), "leave --url and --prompts out"),
        (("--temperature", "0"), "greedy"),
        (("--samples", "0"), "at least 1"),
        (("--output", "/dev/null"), "--output cannot be written"),
    ],
)
def test_options_that_make_no_sense(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--model", "nowhere", *words) == 2
    assert text in capsys.readouterr().err


def test_unknown_options_are_wrong_use_too() -> None:
    assert status("--modle", "x") == 2


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_too_large_is_warned_about(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_replay.cli.verify import VerifyCommand
    from moe_replay.tools import memory_check

    assert VerifyCommand(device="cpu")._trainer_dtype == "float32"
    assert VerifyCommand(device="cpu", dtype="bfloat16")._trainer_dtype == "bfloat16"
    VerifyCommand(device="cpu")._trainer(folder)
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setattr(memory_check, "weights_memory", lambda model, dtype, device: (122 * 2**30, 80 * 2**30))
    VerifyCommand(device="cpu")._trainer(folder)
    assert "needs 122.0 GiB on cpu, but only 80.0 GiB are free" in capsys.readouterr().err
