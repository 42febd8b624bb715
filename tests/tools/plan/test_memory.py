"""The memory of a run by plan's arithmetic: what the parts are, and that both recipes of Qwen3-30B fit 80 GB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

from moe_replay.errors import LayoutError
from moe_replay.tools.model_config import model_config
from moe_replay.tools.plan.memory import GIB, MemoryPlan, plan_memory
from moe_replay.tools.plan.sizes import ModelSizes
from moe_replay.train.config.file import load_config

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
QWEN3_30B: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048},
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    **{"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
CARD_GIB = 79.6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3-30b")
    (made / "config.json").write_text(json.dumps(QWEN3_30B))
    return made


@pytest.fixture(scope="module")
def sizes(folder: Path) -> ModelSizes:
    return ModelSizes.of(model_config(folder))


def plan(sizes: ModelSizes, recipe: str, *overrides: str) -> MemoryPlan:
    config = load_config(RECIPES / f"qwen3-30b-a3b-{recipe}.toml", overrides)
    return plan_memory(config, sizes, gpus=8, gpu_gib=CARD_GIB)


def test_parameters_are_counted_by_kind(sizes: ModelSizes) -> None:
    assert sizes.total == 30_532_122_624, "as the model's page says: 30.5 billion"
    assert sizes.experts == 48 * 128 * 3 * 2048 * 768
    assert sizes.embedding == 151936 * 2048
    assert not sizes.tied


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("qwen3-30b-*.toml")))
def test_the_recipes_fit_eight_cards_of_80_gb(sizes: ModelSizes, recipe: str) -> None:
    """Or as many as the recipe itself asks for."""
    config = load_config(RECIPES / f"{recipe}.toml")
    gpus = config.cluster.ranks if config.cluster.kind == "ray" else 8
    found = plan_memory(config, sizes, gpus=gpus, gpu_gib=CARD_GIB)
    assert found.fits, str(found)
    assert "DOES NOT FIT" not in str(found)


@pytest.mark.parametrize("recipe", ["fsdp", "megatron"])
def test_without_offload_they_do_not(sizes: ModelSizes, recipe: str) -> None:
    found = plan(sizes, recipe, "--backend.offload", "false")
    assert not found.fits
    assert "forward, backward" in str(found).split("DOES NOT FIT")[0]
    assert not found.host


def test_bytes_of_the_trainer(sizes: ModelSizes) -> None:
    parameters = sizes.total
    found = plan(sizes, "fsdp").phases["optimizer step"]
    assert found["weights"] + found["gradients"] + found["optimizer state"] == pytest.approx(16 * parameters / 8)
    one_step = plan(sizes, "megatron").phases["optimizer step"]
    held = one_step["weights"] + one_step["gradients"] + one_step["optimizer state"]
    assert 18 * parameters / 8 < held < 18.5 * parameters / 8, "embeddings are on some stages only, experts on one rank"


def test_logits_follow_the_chunk_and_activations_the_micro_batch(sizes: ModelSizes) -> None:
    base = plan(sizes, "fsdp").phases["forward, backward"]
    whole = plan(sizes, "fsdp", "--batch.logit_chunk", "16384").phases["forward, backward"]
    assert whole["logits"] > base["logits"] + 15360 * 151936 * 14 - 1
    longer = plan(sizes, "fsdp", "--batch.tokens_per_micro_batch", "32768").phases["forward, backward"]
    assert longer["activations"] == pytest.approx(2 * base["activations"])
    every_layer = plan(sizes, "fsdp", "--model.gradient_checkpointing", "false").phases["forward, backward"]
    assert every_layer["activations"] > 10 * base["activations"]


def test_the_engine_on_the_same_cards(sizes: ModelSizes) -> None:
    found = plan(sizes, "megatron")
    assert found.phases["sample"]["engine"] == pytest.approx(0.8 * CARD_GIB * GIB)
    assert set(found.phases["sample"]) == {"engine", "context"}, "the trainer is in host memory"
    assert found.phases["sync of weights"]["engine's weights"] == pytest.approx(2 * sizes.total / 8)
    assert found.host > 14 * sizes.total
    kept = plan(sizes, "megatron", "--rollout.sleep_level", "1")
    assert kept.host - found.host == pytest.approx(2 * sizes.total)
    replicas = plan(sizes, "megatron", "--rollout.options", "tensor_parallel_size", "2", "data_parallel_size", "4")
    share = 2 * (sizes.experts / 8 + (sizes.total - sizes.experts) / 2)
    assert replicas.phases["sync of weights"]["engine's weights"] == pytest.approx(share)
    options = ["--rollout.options", "tensor_parallel_size", "1", "gpu_memory_utilization", "0.5"]
    with pytest.raises(LayoutError, match="do not fit into its share"):
        plan(sizes, "megatron", *options)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moe_replay.cli.plan import PlanCommand

    recipe = str(RECIPES / "qwen3-30b-a3b-megatron.toml")
    PlanCommand(model=str(folder), recipe=recipe)()
    assert "optimizer step" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        PlanCommand(model=str(folder), recipe=recipe, gpu_gib=40.0)()
    assert ended.value.code == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_engines_of_a_cluster_have_gpus_of_their_own(sizes: ModelSizes) -> None:
    apart = plan(sizes, "ray").phases["forward, backward"]
    shared = plan(
        sizes,
        "ray",
        "--cluster.placement",
        "colocated",
        "--rollout.max_staleness",
        "0",
        "--algorithm.correction",
        "off",
    ).phases["forward, backward"]
    assert not apart.get("engine")
    assert shared["engine"] > sizes.total
