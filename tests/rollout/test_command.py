"""`moe-replay rollout`, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_replay.errors import EngineError
from moe_replay.rollout.types import SamplingParams
from moe_replay.rollout.vllm_server import VllmServer
from tests.rollout.tiny import assert_sampled_from, tiny_model

pytest.importorskip("tyro", reason="the command line needs tyro")
pytest.importorskip("uvicorn", reason="the server's own dependencies come with vLLM")


@pytest.mark.engine
def test_a_server_makes_up_its_token_and_prints_it(tmp_path: Path, port: int) -> None:
    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "moe_replay.cli.main", "rollout", "--model", str(tmp_path), "--port", str(port)]
    command += ["--engine", "transformers", "--dtype", "float32", "--weight-version", "5", "--max-length", "32"]
    environment = {name: value for name, value in os.environ.items() if name != "MOE_REPLAY_TOKEN"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            token = server.stdout.readline().removeprefix("token: ").strip()
            assert len(token) >= 32
            with VllmServer(f"http://127.0.0.1:{port}", token=token) as client:
                while not client.healthy():
                    assert server.poll() is None, "the server did not start"
                    time.sleep(0.1)
                ((sample,),) = client.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
            assert (sample.weight_version, len(sample.trace)) == (5, 32)
            assert_sampled_from(model, sample)
            with (
                VllmServer(f"http://127.0.0.1:{port}", token="another") as stranger,
                pytest.raises(EngineError, match="401"),
            ):
                stranger.generate([[1]], SamplingParams())
        finally:
            server.terminate()


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


def refuse() -> None:
    raise EngineError("no model today")
