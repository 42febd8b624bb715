"""Parts of the Megatron-Core backend that need no ranks: log-probs, and what a config becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

from moe_replay.errors import LayoutError
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.train.backends import megatron_build, megatron_logprobs
from moe_replay.train.config.train_config import TrainConfig
from tests.megatron.weights.models import save_checkpoint, tiny


class OneRank:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


# ---- log-probs ------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.sampled_from([0.6, 1.0, 1.7]), st.integers(0, 99))
def test_logprobs_entropy_and_gradient_are_those_of_log_softmax(scored: int, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (8 * torch.randn(13, 11, generator=generator)).requires_grad_()
    places = torch.randperm(13, generator=generator)[:scored]
    targets = torch.randint(11, (scored,), generator=generator)
    weights = torch.randn(scored, generator=generator)

    whole = (logits[places] / temperature).log_softmax(-1)
    wanted = whole.gather(-1, targets[:, None])[:, 0]
    (gradient,) = torch.autograd.grad((wanted * weights).sum(), logits)
    found, entropy = megatron_logprobs._VocabularyParallel.apply(logits, places, targets, temperature, OneRank())
    (found_gradient,) = torch.autograd.grad((found * weights).sum(), logits)

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(40, 7, requires_grad=True)
    places, targets = torch.arange(0, 40, 2), torch.randint(7, (20,))

    def scores() -> list[torch.Tensor]:
        made = megatron_logprobs._VocabularyParallel.apply(logits, places, targets, 1.0, OneRank())
        return [*made, *torch.autograd.grad(made[0].square().sum(), logits)]

    at_once = scores()
    monkeypatch.setattr(megatron_logprobs, "ROWS_PER_SLICE", 3)
    assert all(map(torch.equal, scores(), at_once))


def test_logits_in_half_precision_are_read_in_float32() -> None:
    logits = torch.randn(5, 9, dtype=torch.bfloat16, requires_grad=True)
    places, targets = torch.arange(5), torch.arange(5)
    found, _ = megatron_logprobs._VocabularyParallel.apply(logits, places, targets, 1.0, OneRank())
    wanted = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


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
        "from moe_replay.megatron.weights.qwen3_moe import QWEN3_MOE, settings\n"
        "OWN = replace(QWEN3_MOE, settings=lambda hf: settings(hf) | {'layernorm_epsilon': 0.25})\n"
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


def test_a_dispatcher_that_needs_equal_micro_batches_is_refused(folder: Path) -> None:
    with pytest.raises(LayoutError, match="allgather dispatcher needs as many tokens on every rank"):
        recipe(folder, expert_parallel=2, megatron={"moe_token_dispatcher_type": "allgather"})
    assert recipe(folder, megatron={"moe_token_dispatcher_type": "allgather"}).moe_token_dispatcher_type == "allgather"
