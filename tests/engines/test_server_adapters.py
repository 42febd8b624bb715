"""Adapters on their way to servers: what arrives, who refuses them, and what is sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_replay.cli.rollout import RolloutCommand
from moe_replay.engines.base import LoraSpec, StartRequest
from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.app import build_app
from moe_replay.engines.server.client import RolloutClient, start
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineAnswerError, EngineError
from moe_replay.records import SamplingParams
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import ModelConfig, RolloutConfig
from moe_replay.train.setup.engines import start_request
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from moe_replay.weights.lora_adapter import Adapter, module_names
from tests.engines.serving import serving
from tests.engines.tiny import assert_sampled_from, reference, tiny_model

pytestmark = pytest.mark.slow

TOKEN = "open sesame"
ROOM = LoraSpec(8, ("k_proj", "q_proj"))
WEIGHT = "model.layers.1.self_attn.q_proj.weight"
PROBE = list(range(1, 30))


class AdaptedEngine(TransformersEngine):
    """Transformers with adapters, which it merges into its base; tensors are kept as they arrived."""

    lora = ROOM

    def __init__(self) -> None:
        super().__init__(deepcopy(base_model()))
        self.arrived: list[dict[str, Tensor]] = []

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        tensors = dict(adapter.tensors)
        self.arrived.append(tensors)
        self.update_weights(
            checkpoint_tensors(merged(tensors, adapter.alpha / adapter.rank)), version, probe, weights_id
        )


@cache
def base_model() -> Any:
    return tiny_model("olmoe")  # once: it seeds torch, and servers are updated side by side


def merged(tensors: dict[str, Tensor], scale: float) -> Any:
    model = deepcopy(base_model())
    down, up = (tensors[name] for name in module_names(WEIGHT))
    with torch.no_grad():
        model.get_parameter(WEIGHT).add_(scale * up @ down)
    return model


def adapter(seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(shape, generator=generator) for shape in ((4, 64), (64, 4)))
    return Adapter(iter(zip(module_names(WEIGHT), (down, up), strict=True)), 4, 8, ("model.fused",))


def policy(seed: int) -> Any:
    return merged(dict(adapter(seed).tensors), 2.0)


def probe(model: Any) -> Probe:
    return Probe(token_ids=PROBE, logprobs=reference(model, np.array(PROBE)).logprobs, tolerance=1e-3)


@contextmanager
def served(engine: Any) -> Iterator[str]:
    with serving(build_app(engine, TOKEN)) as url:
        yield url


def test_servers_are_sent_the_adapter_alone_and_prove_that_they_have_it() -> None:
    first, second = AdaptedEngine(), AdaptedEngine()
    with served(first) as one, served(second) as two:
        request = StartRequest(model="nowhere", urls=(one, two), token=TOKEN, lora=LoraSpec(4, ("q_proj",)))
        pool = start(request)
        assert isinstance(pool, EnginePool)
        engine, model = SyncedEngine(pool), policy(1)
        engine.update_adapter(adapter(1), 1, probe(model))
        assert pool.bytes_sent == 2 * 4 * 64 * 4
        for group in engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=4)):
            assert group[0].weight_version == 1
            assert group[0].weights_id == first.weights_id == second.weights_id
            assert_sampled_from(model, group[0])
        for (arrived,) in (first.arrived, second.arrived):
            assert {name: tensor.tolist() for name, tensor in arrived.items()} == {
                name: tensor.tolist() for name, tensor in adapter(1).tensors
            }

        second.update_weights(checkpoint_tensors(tiny_model("olmoe")), 0)  # as one that has been started again
        assert engine.lacks_weights()
        engine.update_adapter(adapter(1), 1, probe(model))
        assert (len(first.arrived), len(second.arrived)) == (1, 2)
        assert not engine.lacks_weights()

        with pytest.raises(EngineError, match="does not compute with the weights"):
            engine.update_adapter(adapter(2), 2, probe(model))
        with pytest.raises(EngineAnswerError, match="no rollout server is left"):
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        engine.close()


@pytest.mark.parametrize("spec", [LoraSpec(16, ("q_proj",)), LoraSpec(4, ("q_proj", "experts"))], ids=str)
def test_a_server_without_room_for_the_adapter_is_refused_when_it_is_connected_to(spec: LoraSpec) -> None:
    with served(AdaptedEngine()) as url:
        request = StartRequest(model="nowhere", urls=(url,), token=TOKEN, lora=spec)
        with pytest.raises(EngineError, match=r"no room for the adapter.*rank 8 in k_proj, q_proj.*--lora-rank"):
            start(request)


def test_a_server_without_lora_takes_no_adapter() -> None:
    with served(TransformersEngine(tiny_model("olmoe"))) as url:
        with pytest.raises(EngineError, match=r"no room for the adapter.*found no LoRA"):
            start(StartRequest(model="nowhere", urls=(url,), token=TOKEN, lora=ROOM))
        with RolloutClient(url, token=TOKEN) as client, pytest.raises(EngineError, match="takes no adapters"):
            client.update_adapter(adapter(1), 1)


def test_what_an_engine_is_started_with_survives_its_way_to_another_process() -> None:
    request = StartRequest(model="m", urls=("http://a",), lora=ROOM, options={"tensor_parallel_size": 2})
    assert StartRequest.from_fields(json.loads(json.dumps(asdict(request)))) == request
    assert StartRequest.from_fields(asdict(StartRequest(model="m"))) == StartRequest(model="m")


def test_the_command_has_lora_with_vllm_alone() -> None:
    with pytest.raises(EngineError, match="--lora-rank: transformers takes no adapters"):
        RolloutCommand(model="nowhere", engine="transformers", lora_rank=4)._start()


def test_the_trainer_knows_what_room_its_servers_need(tmp_path: Path) -> None:
    """Also where vLLM is not installed, and experts that it could not adapt on this machine."""
    tiny_model("qwen3_moe").config.save_pretrained(tmp_path)
    some = ModelConfig(lora_rank=4, lora_target_modules=("q_proj", "gate_proj", "up_proj", "router"))
    rollout = RolloutConfig(engine="rollout_server", urls=("http://127.0.0.1:1",), lora=True)
    with pytest.raises(ConfigError, match="all projections of an expert, or of none"):
        start_request(rollout, some, str(tmp_path), 16)
    model = some.model_copy(update={"lora_target_modules": (*some.lora_target_modules, "down_proj")})
    assert start_request(rollout.model_copy(update={"lora": False}), model, str(tmp_path), 16).lora is None
    for targets, expected in {
        ("q_proj", "gate_proj", "up_proj", "down_proj"): "experts",
        ("q_proj", "router"): "gate",
        model.lora_target_modules: "experts",
        (*model.lora_target_modules[::-1],): "gate",
    }.items():
        alone = model.model_copy(update={"lora_target_modules": targets})
        spec = start_request(rollout, alone, str(tmp_path), 16).lora
        assert spec is not None
        assert (spec.rank, {expected, "q_proj"} <= {*spec.modules}) == (4, True)
