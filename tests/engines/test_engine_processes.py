"""Engines that a trainer starts in processes of their own: shares of devices, their start, and their end."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn", reason="the server's own dependencies come with vLLM")

from moe_replay.engines.base import StartRequest
from moe_replay.engines.server.engine_processes import EngineProcesses, connect_local, device_shares
from moe_replay.errors import EngineOptionError, EngineUnavailableError
from moe_replay.records import SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.engines.forked_engines import forked_engines
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.faults.forked import fork_python
from tests.faults.processes import wait_for_line

__all__ = ["forked_engines"]  # a fixture
TOKEN = "open sesame"


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    monkeypatch.setattr("moe_replay.utils.device.accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_engines_share_the_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8)
    assert device_shares(2, {"tensor_parallel_size": 4}) == ["0,1,2,3", "4,5,6,7"]
    assert device_shares(2, {"tensor_parallel_size": 2, "data_parallel_size": 2}) == ["0,1,2,3", "4,5,6,7"]
    assert device_shares(8, {}) == [str(number) for number in range(8)]
    with_gpus(monkeypatch, 4, "7,5,3,1")
    assert device_shares(2, {"tensor_parallel_size": 2}) == ["7,5", "3,1"]


@pytest.mark.parametrize(("engines", "size"), [(2, 2), (3, 2), (16, 1), (1, 16)])
def test_shares_that_are_not_even_are_refused(monkeypatch: pytest.MonkeyPatch, engines: int, size: int) -> None:
    with_gpus(monkeypatch, 8)
    with pytest.raises(EngineOptionError, match=f"{engines} engines of {size} GPUs each"):
        device_shares(engines, {"tensor_parallel_size": size})


def test_npus_are_shared_by_their_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.utils.device.accelerator", lambda: "npu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert device_shares(2, {"tensor_parallel_size": 2}) == ["0,1", "2,3"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,2")
    assert device_shares(2, {}) == ["3", "2"]


def test_without_gpus_there_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_replay.utils.device.accelerator", lambda: None)
    assert device_shares(2, {"tensor_parallel_size": 4}) == [None, None]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.engine
@pytest.mark.whole_runs
def test_two_engines_are_one_and_end_with_the_trainer(tmp_path: Path) -> None:
    old, new = tiny_model("olmoe"), tiny_model("olmoe", seed=1)
    old.save_pretrained(tmp_path)
    started = EngineProcesses("transformers", StartRequest(model=str(tmp_path), dtype="float32"), 2, token=TOKEN)
    try:
        assert len(set(started.ports)) == 2
        engine = connect_local([f"http://127.0.0.1:{port}" for port in started.ports], TOKEN, None)
        engine.update_weights(checkpoint_tensors(new), version=1, weights_id="a")
        groups = engine.generate([[1, 2, 3], [4], [5, 6]], SamplingParams(n=2, max_tokens=4))
        for sample in (sample for group in groups for sample in group):
            assert sample.weight_version == 1
            assert_sampled_from(new, sample)
        engine.close()
    finally:
        started.close()
    assert not any(map(is_alive, started.pids))


@pytest.mark.engine
@pytest.mark.usefixtures("forked_engines")
def test_an_engine_that_does_not_start_is_told_and_the_others_end(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="did not start"):
        EngineProcesses("transformers", StartRequest(model=str(tmp_path / "nothing")), 2, token=TOKEN)


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="the system ends children with their parent on Linux")
@pytest.mark.whole_runs
def test_a_trainer_that_is_killed_leaves_no_engine(tmp_path: Path) -> None:
    tiny_model("olmoe").save_pretrained(tmp_path)
    program = (
        "import time\n"
        "from moe_replay.engines.base import StartRequest\n"
        "from moe_replay.engines.server.engine_processes import EngineProcesses\n"
        f"started = EngineProcesses('transformers', StartRequest(model={str(tmp_path)!r}), 1, token='t')\n"
        "print('\\nengine', *started.pids, flush=True)\n"
        "time.sleep(100000)\n"
    )
    with fork_python(program) as trainer:
        engine = int(wait_for_line(trainer.stdout, "engine ").split()[1])
        descriptor = os.pidfd_open(engine)
        trainer.kill()
    assert select.select([descriptor], [], [], 120)[0], "the engine lives on"
    os.close(descriptor)
