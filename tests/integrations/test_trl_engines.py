"""TRL samples with an engine of ours: it has the trainer's weights at every step, and its routes are replayed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError
from moe_replay.integrations.trl_generation import merged_weights
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.integrations.trl_tiny import make, model, trained

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

SETTINGS = {"temperature": 0.7, "top_k": 0, "max_steps": 3, "gradient_accumulation_steps": 1, "learning_rate": 1e-2}
WIDE = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "max_position_embeddings": 256}


@contextmanager
def in_process(policy: nn.Module, folder: Path) -> Iterator[Any]:
    yield TransformersEngine(copy.deepcopy(policy))


@contextmanager
def behind_http(policy: nn.Module, folder: Path) -> Iterator[Any]:
    pytest.importorskip("starlette", reason="the server's own dependencies")
    from moe_replay.engines.server.app import build_app
    from moe_replay.engines.server.client import RolloutClient
    from tests.engines.serving import serving

    app = build_app(TransformersEngine(copy.deepcopy(policy)), "open sesame", max_requests=8)
    with serving(app) as url, RolloutClient(url, token="open sesame") as engine:
        yield engine


def check_three_steps(policy: Any, engine: Any, folder: Path) -> None:
    """Train for three steps with an engine of the policy's weights: it had those of each step, and was replayed."""
    logged, _ = trained(make(folder, "r3", policy=policy, engine=engine, **SETTINGS))
    assert engine.weight_version == 2  # the last step sampled with the weights of two updates
    assert len(logged) == 3
    for entry in logged:
        assert entry["routing/agreement"] == 1.0  # float32, and the same weights
        assert 0.8 < entry["routing/replayed_fraction"] < 1
        assert entry["mismatch/rollout_vs_old/logprob_abs_diff/max"] < 1e-3
        # TRL takes the engine for its vLLM, and corrects for the little that it differs
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("start", [in_process, behind_http])
def test_an_engine_samples_with_the_weights_of_the_step(start: Any, tmp_path: Path) -> None:
    policy = model(**WIDE)
    with start(policy, tmp_path) as engine:
        check_three_steps(policy, engine, tmp_path)


@pytest.mark.parametrize("replay", ["off", "r2"])
def test_an_engine_serves_every_mode(replay: str, tmp_path: Path) -> None:
    policy = model()
    engine = TransformersEngine(copy.deepcopy(policy))
    logged, _ = trained(make(tmp_path, replay, policy=policy, engine=engine, **SETTINGS))
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logged)
    assert [entry.get("routing/replayed_fraction") for entry in logged] == [None if replay == "off" else 1.0] * 3


def test_an_engine_is_given_merged_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig

    policy = model()
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    engine = TransformersEngine(copy.deepcopy(policy))
    trainer = make(tmp_path, "r3", policy=policy, engine=engine, peft_config=adapters, **SETTINGS)
    logged, _ = trained(trainer)
    for entry in logged:
        assert entry["routing/agreement"] == 1.0
        assert entry["mismatch/rollout_vs_old/logprob_abs_diff/max"] < 1e-3


def test_merged_adapters_have_the_names_of_the_checkpoint() -> None:
    from peft import LoraConfig, get_peft_model

    policy = model()
    names = [name for name, _ in checkpoint_tensors(policy)]
    before = policy.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone()
    adapters = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = get_peft_model(policy, adapters)
    with merged_weights(wrapped) as weights:
        tensors = {name: tensor.clone() for name, tensor in weights}
    assert list(tensors) == names
    assert not torch.allclose(tensors["model.layers.0.self_attn.q_proj.weight"], before)
    after = wrapped.get_base_model().state_dict()["model.layers.0.self_attn.q_proj.base_layer.weight"]
    torch.testing.assert_close(after, before)


def test_an_engine_with_other_weights_is_found_out(tmp_path: Path) -> None:
    class Deaf(TransformersEngine):
        def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
            super().update_weights(list(checkpoint_tensors(model(seed=1))), version, probe, weights_id)

    with pytest.raises(EngineError, match="does not compute with the weights"):
        make(tmp_path, "r3", engine=Deaf(model()), **SETTINGS).train()


def test_equal_prompts_are_sampled_together(tmp_path: Path) -> None:
    asked: list[tuple[list, int]] = []

    class Listening(TransformersEngine):
        def generate(self, prompts: Any, params: Any) -> Any:
            asked.append(([list(prompt) for prompt in prompts], params.n))
            return super().generate(prompts, params)

    trainer = make(tmp_path, "r3", engine=Listening(model()), **SETTINGS)
    prompts = [[3, 4], [5], [3, 4], [6, 7, 8], [6, 7, 8], [3, 4]]
    ids, completions, logprobs, _ = trainer.vllm_generation.generate(
        prompts, None, 2, contextmanager(lambda: iter([0]))()
    )
    assert asked == [([[5]], 1), ([[6, 7, 8]], 2), ([[3, 4]], 3)]
    assert ids == prompts
    assert [np.shape(values) for values in logprobs] == [(len(tokens), 1) for tokens in completions]
