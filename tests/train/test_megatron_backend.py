"""Parts of the Megatron-Core backend that need no ranks: what a config becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

from moe_replay.errors import LayoutError
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.plan import DispatchPlan
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.train.backends import megatron_build
from moe_replay.train.backends.megatron_plans import KnownOrder, counts_every_row, places_of
from moe_replay.train.config.train_config import TrainConfig
from tests.megatron.weights.models import save_checkpoint, tiny

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}

# ---- what a config becomes ------------------------------------------------------------------------------------------


def config_of(folder: Path, **backend: Any) -> TrainConfig:
    model = {"path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": True}
    return TrainConfig.model_validate(
        {"model": model, "data": {"path": "prompts.jsonl"}, "backend": {"kind": "megatron", **backend}}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policy")
    save_checkpoint(tiny("qwen3_moe"), made)
    return made


def recipe(folder: Path, **backend: Any) -> Any:
    with megatron_cpu.enabled():
        return megatron_build.recipe_for(config_of(folder, **backend), str(folder)).config


def test_a_config_becomes_a_transformer_config(folder: Path) -> None:
    made = recipe(folder, tensor_parallel=2, expert_parallel=4, expert_tensor_parallel=1, context_parallel=2)
    sizes = ("tensor_model_parallel", "expert_model_parallel", "expert_tensor_parallel", "context_parallel")
    assert [getattr(made, f"{name}_size") for name in sizes] == [2, 4, 1, 2]
    assert made.bf16
    assert made.params_dtype == torch.bfloat16
    assert made.sequence_parallel
    assert made.recompute_granularity == "full"
    assert not made.variable_seq_lengths


def test_a_weight_family_of_the_users_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("own_weight_family.py").write_text(
        "from dataclasses import replace\n"
        "from moe_replay.megatron.weights.families import QWEN3_MOE, qwen3_moe_settings\n"
        "OWN = replace(QWEN3_MOE, settings=lambda hf: qwen3_moe_settings(hf) | {'layernorm_epsilon': 0.25})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert recipe(folder, weight_family="own_weight_family:OWN").layernorm_epsilon == 0.25
    assert recipe(folder).layernorm_epsilon != 0.25


def test_pipelines_take_micro_batches_of_different_widths(folder: Path) -> None:
    made = recipe(folder, pipeline_parallel=2, virtual_pipeline=2)
    assert made.variable_seq_lengths
    assert not made.batch_p2p_comm, "two interleaved stages would mix up their messages"


def test_settings_of_megatron_have_the_last_word(folder: Path) -> None:
    given = recipe(folder, megatron={"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "aux_loss"})
    assert given.moe_aux_loss_coeff == 0.5
    assert recipe(folder, megatron={"recompute_granularity": "selective"}).recompute_method is None


@pytest.mark.parametrize(
    "settings",
    [
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
        {"moe_z_loss_coeff": 0.1},
        BIAS | {"moe_router_bias_update_rate": 0.1},
    ],
    ids=str,
)
def test_what_counts_every_row_is_known(folder: Path, settings: dict[str, Any]) -> None:
    assert counts_every_row(recipe(folder, megatron=settings))


@pytest.mark.parametrize("settings", [{}, BIAS | {"moe_router_bias_update_rate": 0.0}], ids=str)
def test_nothing_counts_every_row_by_default(folder: Path, settings: dict[str, Any]) -> None:
    assert not counts_every_row(recipe(folder, megatron=settings))


def test_a_plan_finds_the_rows_of_each_expert() -> None:
    """What `masked_select` and `argsort` find in a map, with gradients; they keep to themselves in other shapes."""
    rows, experts, top_k = 13, 8, 3
    topology = MoeTopology(4, (MoeLayer(1, experts, top_k), MoeLayer(3, experts, top_k)))
    chosen = {layer: torch.rand(rows, experts).topk(top_k).indices for layer in (1, 3)}
    plan = DispatchPlan.of(RouteBatch.recorded(chosen, topology), {1: experts, 3: experts})
    assert plan is not None
    for order, of_layer in zip(places_of(plan), chosen.values(), strict=True):
        found = torch.zeros(rows, experts, dtype=torch.bool).scatter(1, of_layer, True).T.contiguous()
        weights, planned_weights = (torch.arange(float(found.numel())).view(found.shape).requires_grad_() for _ in "ab")
        with KnownOrder(order, found.numel()):
            planned = planned_weights.masked_select(found)
            assert torch.equal(found.reshape(-1).argsort(descending=True, stable=True), order)
            assert torch.equal(weights[:2].masked_select(found[:2]), weights[:2][found[:2]])
            assert torch.equal(found[0].argsort(stable=True), found[0].int().sort(stable=True).indices)
        expected = weights.masked_select(found)
        assert torch.equal(planned, expected)
        assert torch.equal(order, found.reshape(-1).argsort(descending=True, stable=True)[: rows * top_k])
        for values in (planned, expected):
            (values * torch.arange(len(values))).sum().backward()
        assert torch.equal(planned_weights.grad, weights.grad)


def test_a_dispatcher_that_needs_equal_micro_batches_is_refused(folder: Path) -> None:
    with pytest.raises(LayoutError, match="allgather dispatcher needs as many tokens on every rank"):
        recipe(folder, expert_parallel=2, megatron={"moe_token_dispatcher_type": "allgather"})
    assert recipe(folder, megatron={"moe_token_dispatcher_type": "allgather"}).moe_token_dispatcher_type == "allgather"


def test_an_attention_kernel_of_transformer_engine_has_no_effect_without_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for settings in ({}, {"attention_backend": "auto"}):
        recipe(folder, megatron=settings)
        assert "attention_backend" not in caplog.text
    assert recipe(folder, megatron={"attention_backend": "flash"}).attention_backend.name == "flash"
    assert "backend.megatron.attention_backend = 'flash' has no effect" in caplog.text
