"""vLLM's share of a GPU beside a trainer, and the cause of a start that fails. No vLLM and no GPU are needed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_replay.engines.base import StartRequest
from moe_replay.engines.vllm import arguments as vllm_arguments
from moe_replay.engines.vllm import console as vllm_console
from moe_replay.engines.vllm.arguments import GIB, gpu_memory_fraction, not_started, split_gpu_memory
from moe_replay.errors import EngineError


def test_an_engine_that_sleeps_gets_what_is_free() -> None:
    share, left = split_gpu_memory(60 * GIB, 80 * GIB, allocated=15 * GIB, sleeps=True)
    assert (share, left) == (0.73, GIB)
    assert share * 80 <= 59
    assert split_gpu_memory(79 * GIB, 80 * GIB, allocated=0, sleeps=False)[0] == 0.92


def test_an_engine_that_stays_awake_leaves_room_for_gradients_and_optimizer() -> None:
    share, left = split_gpu_memory(70 * GIB, 80 * GIB, allocated=8 * GIB, sleeps=False)
    assert left == (1 + 24 + 8) * GIB
    assert share == 0.46
    with pytest.raises(EngineError, match=r"not enough GPU memory.*30.0 GiB free.*will need 69.0.*rollout\.sleep"):
        split_gpu_memory(30 * GIB, 80 * GIB, allocated=20 * GIB, sleeps=False)


def test_the_share_is_computed_where_the_process_uses_the_gpu_and_nobody_has_set_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = SimpleNamespace(
        is_initialized=lambda: used, mem_get_info=lambda: (60 * GIB, 80 * GIB), memory_allocated=lambda: 15 * GIB
    )
    monkeypatch.setattr(vllm_arguments, "accelerator", lambda: "cuda")
    monkeypatch.setattr(vllm_arguments, "device_module", lambda device: gpu)
    used = True
    assert gpu_memory_fraction(StartRequest(model="model", sleep=True)) == 0.73
    assert "using 0.73 of GPU memory: 60.0 of 80.0 GiB are free" in capsys.readouterr().err
    for option in ("gpu_memory_utilization", "kv_cache_memory_bytes"):
        assert gpu_memory_fraction(StartRequest(model="model", sleep=True, options={option: 1})) is None
    used = False
    assert gpu_memory_fraction(StartRequest(model="model", sleep=True)) is None
    monkeypatch.setattr(vllm_arguments, "accelerator", lambda: None)
    assert gpu_memory_fraction(StartRequest(model="model", sleep=True)) is None
    assert capsys.readouterr().err == ""


def test_the_first_error_of_vllms_processes_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_REPLAY_ENGINE_FAILURE", "")  # put back after the test
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    file = vllm_console.failure_file(tmp_path)
    assert vllm_console.noted_failure(file) is None
    vllm_console.note_failures()
    vllm_console.note_failures()
    assert len(log.handlers) == 1
    log.warning("something else")
    for cause in ("less than desired GPU memory utilization (0.92)", "Engine core initialization failed"):
        try:
            raise ValueError(cause)
        except ValueError:
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    told = str(not_started("vLLM 0.30.0", vllm_console.noted_failure(file) or ""))
    assert told.startswith("vLLM 0.30.0 did not start with routes. Set rollout.options.gpu_memory_utilization lower")
    assert told.endswith("less than desired GPU memory utilization (0.92)")
    assert str(not_started("vLLM", "no such model")) == "vLLM did not start with routes. no such model"
