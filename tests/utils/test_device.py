"""The accelerator by whatever name torch has for it. An NPU is imitated as torch_npu registers itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.utils.device import accelerator, collective_backends, cpu_has_bfloat16, device_type

HERE = accelerator()


def test_what_torch_finds_is_used() -> None:
    assert device_type() == (HERE or "cpu")
    assert device_type("cpu") == "cpu"
    assert collective_backends(torch.device("cpu")) == "gloo"
    assert collective_backends(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


@pytest.mark.skipif(HERE is not None, reason="there is an accelerator")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(MoeReplayError, match="no device of type cuda is available: found cpu as torch sees it"):
        device_type("cuda")


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [("aarch64", "fp asimd asimdhp", False), ("aarch64", "fp asimd bf16 i8mm", True), ("x86_64", "fpu sse2", True)],
)
def test_a_cpu_without_bfloat16_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, features: str, expected: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nFeatures : {features}\n")
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is expected
    assert cpu_has_bfloat16(tmp_path / "no such file")


def test_an_npu_needs_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(MissingExtraError, match="the device npu needs torch_npu"):
        device_type("npu")


@pytest.mark.skipif(HERE is not None, reason="there is an accelerator")
def test_torch_npu_without_an_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(MoeReplayError, match="no device of type npu is available"):
        device_type("npu")


ON_AN_NPU = """
import sys, types
import torch
import torch.distributed as dist

calls = []
npu = types.ModuleType("torch.npu")  # what torch_npu gives to torch
npu.is_available = lambda: True
npu.device_count = lambda: 8
npu.current_device = lambda: 0
npu.set_device = lambda device: calls.append(str(device))
npu.get_rng_state = lambda device: torch.arange(4, dtype=torch.uint8)
npu.set_rng_state = lambda state, device: calls.append(state.tolist())
npu.get_device_properties = lambda number: types.SimpleNamespace(name=f"Ascend {number}", total_memory=64)
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
dist.Backend.register_backend("hccl", lambda *_: None, devices=["npu"])
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: torch.device("npu")
torch.accelerator.device_count = npu.device_count
sys.modules["torch_npu"] = types.ModuleType("torch_npu")

from pathlib import Path
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.launch import choose_device
from moe_replay.train.checkpoint import rng
from moe_replay.tools.doctor import _gpus
from moe_replay.utils.device import collective_backends

config = TrainConfig.model_validate({"backend": {"device": sys.argv[1]}})
device = choose_device(config)
print(device, collective_backends(device), calls)
rng.stage(device)(Path(sys.argv[2]))
rng.load(Path(sys.argv[2]), device)
print(calls[-1], len(_gpus()), _gpus()[7].name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["auto", "npu"])
def test_a_rank_takes_its_own_npu_with_its_backend_and_its_generator(device: str, tmp_path: Any) -> None:
    pytest.importorskip("pydantic")
    pytest.importorskip("safetensors")
    environment = os.environ | {"LOCAL_RANK": "3"}
    command = [sys.executable, "-c", ON_AN_NPU, device, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()[-2:]
    assert first == "npu:3 cpu:gloo,npu:hccl ['npu:3']"
    assert second == "[0, 1, 2, 3] 8 Ascend 7"


def test_mindspeed_is_needed_for_megatron_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_replay.train.backends.megatron_build import enable_mindspeed

    monkeypatch.setitem(sys.modules, "mindspeed", None)
    with pytest.raises(MissingExtraError, match="Megatron-Core on an NPU needs MindSpeed"):
        enable_mindspeed({})


def test_mindspeed_patches_for_the_sizes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_replay.train.backends.megatron_build import enable_mindspeed

    adaptor: Any = ModuleType("mindspeed.megatron_adaptor")
    given: list[dict[str, Any]] = []
    adaptor.repatch = given.append
    monkeypatch.setitem(sys.modules, "mindspeed", ModuleType("mindspeed"))
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", adaptor)
    enable_mindspeed({"context_parallel_size": 2, "expert_tensor_parallel_size": None})
    assert given == [{"context_parallel_size": 2}]


def test_cuda_is_named_only_where_nothing_else_will_do() -> None:
    source = Path(__file__).resolve().parents[2] / "src" / "moe_replay"
    named = {str(path.relative_to(source)) for path in source.rglob("*.py") if "torch.cuda." in path.read_text()}
    allowed = {
        "utils/device.py",  # the name of a GPU, for its peak rate
        "train/backends/offload.py",  # its runtime pins memory that is there already
        # weights reach engines by CUDA IPC and NCCL, where torch has CUDA and nothing else
        *(f"weights/{name}.py" for name in ("sender", "staging", "transfer")),
        "train/backends/shared_base.py",  # memory of an engine, opened in the same way
        "engines/vllm_serve/weights.py",
        "engines/sglang/weights.py",
    }
    assert {name for name in named if name != "megatron/cpu.py"} == allowed
