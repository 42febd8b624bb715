"""What vLLM makes of our options for online quantisation; nothing is started or computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_replay.errors import EngineName
from moe_replay.train.config.sections import RolloutConfig
from tests.engines.tiny import tiny_model

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_model("mixtral").config.save_pretrained(made)
    return made


def arguments(folder: Path, **options: Any) -> Any:
    from moe_replay.engines.vllm.arguments import engine_arguments

    return engine_arguments(EngineName("vLLM", "0"), str(folder), "kv_slot", options)


@pytest.mark.parametrize(
    ("wanted", "made"), [("fp8", "fp8_per_tensor"), ("fp8_per_tensor",) * 2, ("fp8_per_block",) * 2]
)
def test_routers_are_not_quantised(folder: Path, wanted: str, made: str) -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    found = arguments(folder, quantization=wanted)
    assert found.quantization == made
    config = OnlineQuantizationConfig(found.quantization_config)

    def is_quantised(kind: type, name: str) -> bool:
        layer = kind.__new__(kind)  # vLLM looks at its type and name only
        return config.resolve_quant_method_cls(layer, f"model.layers.1.{name}") is not None

    assert not any(
        is_quantised(ReplicatedLinear, router) for router in ("mlp.gate", "block_sparse_moe.gate", "mlp.router")
    )
    assert is_quantised(QKVParallelLinear, "self_attn.qkv_proj")
    assert is_quantised(RoutedExperts, "mlp.experts")
    assert is_quantised(ReplicatedLinear, "mlp.gate_proj")  # of a dense layer: no router


def test_the_callers_own_choice_stays(folder: Path, tmp_path: Path) -> None:
    own = {"ignore": ["lm_head"]}
    assert arguments(folder, quantization="fp8_per_block", quantization_config=own).quantization_config.ignore == [
        "lm_head"
    ]
    assert arguments(folder).quantization_config is None
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert arguments(tmp_path, quantization="fp8").quantization == "fp8"  # as the checkpoint is


def test_the_probe_of_a_quantised_engine_may_be_further_off() -> None:
    assert RolloutConfig().weights_tolerance == 0.05
    assert RolloutConfig(options={"quantization": "fp8"}).weights_tolerance == 0.2
    assert RolloutConfig(options={"quantization": "fp8"}, probe_tolerance=0.01).weights_tolerance == 0.01
