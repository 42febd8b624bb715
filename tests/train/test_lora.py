"""LoRA on FSDP2: what is adapted, what the engine gets of it, and the adapter by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import moe_replay as mr
from moe_replay.megatron.weights.checkpoint import write_folder
from moe_replay.train.backends import fsdp_loading, lora
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.lora import LoraError, targets_of
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.lora_adapter import write_adapter
from moe_replay.weights.model_folder import read_config
from tests.models import random_ids, tiny_qwen3_moe

pytest.importorskip("peft")
pytest.importorskip("transformers", "5")

CPU = torch.device("cpu")
PROJECTIONS = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w2", "w3")}
PROJECTIONS["deepseek_v3"] = PROJECTIONS["qwen3_moe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Qwen3-MoE with a dense layer; a Mixtral, whose experts have other names; a DeepSeek with shared experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2}
    deepseek = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16}
    deepseek |= {"q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    deepseek |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 16}
    models = {
        "qwen3_moe": tiny_qwen3_moe(num_hidden_layers=2),
        "mixtral": MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)),
        "deepseek_v3": DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **deepseek)),
    }
    made = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, model in models.items():
        model.save_pretrained(made[name])
    return made


def backend(folder: Path, targets: tuple[str, ...]) -> FsdpBackend:
    """A policy with adapters that are not zero."""
    torch.manual_seed(1)
    model = {"path": str(folder), "dtype": "float32", "lora_rank": 4, "lora_target_modules": targets}
    policy = FsdpBackend(TrainConfig(model=model, data={"path": "x.jsonl"}), str(folder), CPU)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.to_local().normal_(0, 0.1)
    return policy


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=random_ids(2, 12)).logits


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("targets", ["experts", "everything"])
def test_merged_weights_and_the_adapter_are_what_the_policy_computes(
    family: str, targets: str, folders: dict[str, Path], tmp_path: Path, group: None
) -> None:
    from peft import PeftModel

    base = folders[family]
    policy = backend(base, PROJECTIONS[family] if targets == "experts" else ("all-linear", "router"))
    assert policy.model.config._attn_implementation == "blocks", "as without adapters"
    expected = logits_of(policy.model)
    with lora.adapters_off(policy.model):
        assert torch.equal(logits_of(policy.model), logits_of(plain(base)))
    assert (logits_of(plain(base)) - expected).abs().max() > 1e-3

    merged = tmp_path / "merged"
    write_folder(policy.weight_source(), merged, base)
    assert load_file(merged / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    torch.testing.assert_close(logits_of(plain(merged)), expected, rtol=1e-4, atol=1e-5)

    adapter = policy.adapter()
    assert adapter is not None
    write_adapter(adapter, tmp_path / "adapter", str(base))
    loaded = PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-4, atol=1e-5)
    by_peft = loaded.merge_and_unload().state_dict()
    for name, tensor in plain(merged).state_dict().items():
        torch.testing.assert_close(by_peft[name], tensor, rtol=1e-6, atol=1e-7)
    policy.close()


def plain(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_every_expert_and_router_has_names_of_its_own(folders: dict[str, Path], group: None) -> None:
    policy = backend(folders["qwen3_moe"], ("all-linear", "gate"))
    adapter = policy.adapter()
    assert adapter is not None
    shapes = {name.removeprefix("base_model.model.model.layers."): tuple(t.shape) for name, t in adapter.tensors}
    experts = {f"1.mlp.experts.{n}.{p}" for n in range(8) for p in ("gate_proj", "up_proj", "down_proj")}
    dense = {f"0.mlp.{p}" for p in ("gate_proj", "up_proj", "down_proj")}
    attention = {f"{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"}
    modules = experts | dense | attention | {"1.mlp.gate"}
    assert shapes.keys() == {f"{module}.lora_{part}.weight" for module in modules for part in "AB"}
    assert shapes["1.mlp.experts.7.up_proj.lora_B.weight"] == (16, 4)
    assert shapes["1.mlp.experts.7.down_proj.lora_A.weight"] == (4, 16)
    policy.close()


def test_routes_of_an_adapted_router_are_recorded_and_replayed(folders: dict[str, Path], group: None) -> None:
    policy = backend(folders["qwen3_moe"], ("all-linear", "router"))
    ids = random_ids(2, 12)
    with torch.no_grad():
        with policy.replay.record() as recording:
            policy.model(input_ids=ids)
        routes = recording.batch()
        with lora.adapters_off(policy.model), policy.replay.record() as without:
            policy.model(input_ids=ids)
        assert not torch.equal(
            routes.routed_experts, without.batch().routed_experts
        )  # the adapter of the router takes part
    policy.model.train()
    expected = gradients_under_replay(policy, ids, routes)
    assert {name for name in expected if ".mlp.gate." in name} == {
        f"model.layers.1.mlp.gate.lora_{part}.default.weight" for part in "AB"
    }
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = gradients_under_replay(policy, ids, routes)
    for name, gradient in expected.items():
        torch.testing.assert_close(recomputed[name], gradient)
    policy.close()


def gradients_under_replay(policy: FsdpBackend, ids: torch.Tensor, routes: mr.RouteBatch) -> dict[str, torch.Tensor]:
    with policy.replay.replay(routes, observe=True) as replaying:
        logits = policy.model(input_ids=ids).logits
    assert torch.equal(replaying.native().routed_experts, routes.routed_experts)
    logits.square().mean().backward()
    found = {n: p.grad.full_tensor() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    assert all(".lora_" in name for name in found)
    return found


def test_targets_that_are_not_there_are_refused_before_weights_are_read(folders: dict[str, Path]) -> None:
    settings = read_config(folders["qwen3_moe"])
    for name in ("qkv_proj", "lm_head", "embed_tokens"):
        with pytest.raises(LoraError, match=r"no layer of this model has this name.*k_proj.*router.*all-linear"):
            targets_of(settings, ModelConfig(lora_rank=4, lora_target_modules=("q_proj", name)))
    with pytest.raises(LoraError, match="gate_proj and up_proj of an expert are one tensor"):
        targets_of(settings, ModelConfig(lora_rank=4, lora_target_modules=("gate_proj", "down_proj")))
    targets_of(settings, ModelConfig(lora_rank=4, lora_target_modules=("down_proj",)))


@pytest.mark.skipif(not fsdp_loading.can_mix_dtypes(), reason="FSDP2 of this torch has one type in a layer")
def test_frozen_weights_are_kept_in_the_type_they_are_computed_in(
    folders: dict[str, Path], group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what float32 copies of them give, which are rounded in every pass."""
    folder = folders["qwen3_moe"]
    model = {"path": str(folder), "dtype": "bfloat16", "lora_rank": 4, "lora_target_modules": ("all-linear",)}
    config = TrainConfig(model=model, data={"path": "x.jsonl"})
    results = []
    for is_narrow in (False, True):
        monkeypatch.setattr(fsdp_loading, "can_mix_dtypes", lambda narrow=is_narrow: narrow)
        torch.manual_seed(1)
        policy = FsdpBackend(config, str(folder), CPU)
        types = {(one.requires_grad, one.dtype) for one in policy.model.parameters()}
        assert types == {(True, torch.float32), (False, torch.bfloat16 if is_narrow else torch.float32)}
        logits = policy.model(input_ids=random_ids(2, 12)).logits
        logits.float().log_softmax(-1)[..., 7].sum().backward()
        gradients = {name: one.grad.full_tensor() for name, one in policy.model.named_parameters() if one.requires_grad}
        results.append({"logits": logits.detach()} | gradients)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
