"""Chunks of a transfer in a worker of vLLM: which go through vLLM's loaders, that quantize what they load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_replay.engines.vllm import weights as vllm_transfer
from moe_replay.engines.vllm.weights import TransferLoader
from moe_replay.weights.messages import TransferSettings

SETTINGS = TransferSettings(
    kind="ipc", host="127.0.0.1", port=1, token="t", first=0, workers=1, timeout_s=1
).model_dump_json()
CHUNKS = {
    "first": [("gate.weight", torch.ones(2, 2)), ("up.weight", torch.ones(2, 2, dtype=torch.bfloat16))],
    "second": [("down.weight", torch.zeros(3, dtype=torch.bfloat16))],
}


class Receiver:
    """Chunks by the text of their messages, in one buffer that the next overwrites."""

    def __init__(self, *_: Any) -> None:
        self.buffer: list[Tensor] = []

    def receive(self, message: str) -> list[tuple[str, Tensor]]:
        self.buffer = [tensor.clone() for _, tensor in CHUNKS[message]]
        return [(name, own) for (name, _), own in zip(CHUNKS[message], self.buffer, strict=True)]

    def acknowledge(self) -> None:
        for tensor in self.buffer:
            tensor.fill_(-1)

    def close(self) -> None: ...


class Worker:
    """What vLLM's loaders were given."""

    rank = 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=0, world_size=1))

    def __init__(self, device: str, quantization: str | None) -> None:
        config = SimpleNamespace(quantization=quantization)
        self.model_runner = SimpleNamespace(device=torch.device(device), model_config=config)
        self.loaded: dict[str, Tensor] = {}

    def replay_load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.loaded |= tensors


@pytest.mark.parametrize(("device", "quantization"), [("cuda", "fp8_per_tensor"), ("cuda", "mxfp8"), ("cpu", None)])
def test_every_update_goes_through_vllm_s_loaders_where_it_keeps_other_forms(
    device: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_transfer, "WeightReceiver", Receiver)
    worker = Worker(device, quantization)
    loader = TransferLoader(worker)
    for _ in range(3):
        worker.loaded = {}
        loader.join(SETTINGS)
        assert not loader.by_plan, "vLLM begins a reload, and quantizes what it loads"
        for message in CHUNKS:
            loader.receive(message)
        loader.leave(complete=True)
        expected = {name: tensor for chunk in CHUNKS.values() for name, tensor in chunk}
        assert worker.loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert worker.loaded[name].dtype == tensor.dtype, "routers in float32 stay so"
            assert torch.equal(worker.loaded[name], tensor), "not the buffer, which is overwritten"


def test_on_a_gpu_without_quantization_the_first_update_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transfer, "WeightReceiver", Receiver)
    loader = TransferLoader(Worker("cuda", None))
    loader.join(SETTINGS)
    assert loader._recorder is not None
