"""`moe-replay rollout`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from moe_replay.engines.server.client import RolloutClient
from moe_replay.errors import EngineError
from moe_replay.records import SamplingParams
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.faults.forked import fork_command
from tests.faults.processes import wait_for_line

pytest.importorskip("tyro", reason="the command line needs tyro")
pytest.importorskip("uvicorn", reason="the server's own dependencies come with vLLM")


@pytest.mark.engine
def test_a_server_makes_up_its_token_and_prints_it(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path)
    words = ["rollout", "--model", str(tmp_path), "--port", str(port), "--engine", "transformers"]
    words += ["--dtype", "float32", "--weight-version", "5", "--max-length", "32"]
    monkeypatch.delenv("MOE_REPLAY_TOKEN", raising=False)
    with fork_command(*words) as server:
        try:
            token = wait_for_line(server.stdout, "token: ").removeprefix("token: ").strip()
            assert len(token) >= 32
            with RolloutClient(f"http://127.0.0.1:{port}", token=token) as client:
                while not client.healthy():
                    assert server.poll() is None, "the server did not start"
                    time.sleep(0.1)
                ((sample,),) = client.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
            assert (sample.weight_version, len(sample.trace)) == (5, 32)
            assert_sampled_from(model, sample)
            with (
                RolloutClient(f"http://127.0.0.1:{port}", token="another") as stranger,
                pytest.raises(EngineError, match="401"),
            ):
                stranger.generate([[1]], SamplingParams())
        finally:
            server.send_signal(signal.SIGTERM)


def test_options_of_vllm_are_passed_on() -> None:
    import tyro

    from moe_replay.cli.rollout import RolloutCommand

    arguments = ["--model", "m", "--engine-options", "tensor_parallel_size", "2", "enforce_eager", "True"]
    arguments += ["load_format", "dummy"]
    command = tyro.cli(RolloutCommand, args=arguments)
    assert command.engine_options == {"tensor_parallel_size": 2, "enforce_eager": True, "load_format": "dummy"}
    assert command.host == "127.0.0.1"


def test_an_error_ends_with_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_replay.cli.main import main

    monkeypatch.setattr("moe_replay.cli.rollout.RolloutCommand._start", lambda self: refuse())
    monkeypatch.setenv("MOE_REPLAY_TOKEN", "t")
    with pytest.raises(SystemExit, match="error: no model today"):
        main(["rollout", "--model", "m"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--port", "-1"], "--port is out of range"),
        (["--max-length", "0"], "--max-length is out of range"),
        (["--max-requests", "-3"], "--max-requests is out of range"),
        (["--weight-version", "-1"], "--weight-version is out of range"),
        (["--lora-rank", "-8"], "--lora-rank is out of range"),
        (["--limits.max-samples", "0"], "--limits.max-samples is out of range"),
        (["--limits.header-s", "nan"], "--limits.header-s is out of range"),
        (["--limits.body-s", "-1"], "--limits.body-s is out of range"),
        (["--limits.update-s", "inf"], "--limits.update-s is out of range"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(words: list[str], problem: str) -> None:
    from moe_replay.cli.main import main

    with pytest.raises(SystemExit, match=problem):
        main(["rollout", "--model", "m", *words])


@pytest.mark.parametrize(
    ("token", "host", "problem"),
    [
        ("  ", "127.0.0.1", "blank"),
        ("a\nb" * 10, "127.0.0.1", "control characters"),
        ("\x7f" + "x" * 40, "0.0.0.0", "control characters"),
        ("x" * 15, "0.0.0.0", "too short"),
        ("x" * 15, "::", "too short"),
        ("x" * 15, "node-3", "too short"),
    ],
)
def test_tokens_that_protect_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, token: str, host: str, problem: str
) -> None:
    from moe_replay.cli.main import main

    monkeypatch.setenv("MOE_REPLAY_TOKEN", token)
    with pytest.raises(SystemExit, match=problem) as caught:
        main(["rollout", "--model", "m", "--host", host])
    assert token.strip() not in str(caught.value) or not token.strip()


def refuse() -> None:
    raise EngineError("no model today")
