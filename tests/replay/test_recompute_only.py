"""`attach(model, recompute_only=True)`: no context, and the recomputation takes the experts of the forward."""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import moe_replay as mr
from moe_replay.errors import ReplayStateError
from moe_replay.replay.passes import ForwardPass
from tests.models import assert_same_gradients, gradients, loss, random_ids, tiny_qwen3_moe
from tests.replay.checkpointing import CHECKPOINTS, unwrapped


def tiny_biased(**overrides: Any) -> nn.Module:
    """A DeepSeek-V3 in training mode: a bias is part of the choice of experts and of nothing else."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "use_cache": False,
    }
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(settings | overrides))).train()
    for layer in model.model.layers[1:]:
        nn.init.normal_(layer.mlp.gate.weight)
    return model


def move_biases(model: nn.Module) -> None:
    """As balancing does after a forward; a backward that is still to come then chooses others."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.add_(torch.linspace(-1, 1, len(bias)))


def reset_biases(model: nn.Module) -> None:
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.zero_()


def step(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of one forward, with the routers' biases moved before its backward."""
    reset_biases(model)
    one = loss(model(ids))
    move_biases(model)
    one.backward()
    return unwrapped(gradients(model))


def passes_alive() -> int:
    gc.collect()
    return sum(isinstance(one, ForwardPass) for one in gc.get_objects())


@pytest.mark.parametrize("make", CHECKPOINTS)
def test_gradients_are_those_without_checkpointing(make: str) -> None:
    """Exactly; without it the recomputation takes other experts, and nothing says so."""
    ids = random_ids(2, 7)
    model = tiny_biased(experts_implementation="batched_mm")  # its tensors have one shape, whatever is chosen
    expected = step(model, ids)
    CHECKPOINTS[make](model)
    native = step(model, ids)
    assert any(not torch.allclose(native[name], expected[name], rtol=0.1) for name in expected)

    replay = mr.attach(model, recompute_only=True)
    assert_same_gradients(step(model, ids), expected)

    replay.detach()
    assert_same_gradients(step(model, ids), native)
    assert not any("forward" in vars(module) for module in model.modules() if type(module).__name__.endswith("Router"))


def test_the_error_of_checkpointing_is_gone() -> None:
    """Experts in a loop have tensors of other shapes where others are chosen: non-reentrant checkpoints notice."""
    ids = random_ids(2, 7)
    model = tiny_biased(experts_implementation="eager")
    expected = step(model, ids)
    CHECKPOINTS["transformers"](model)
    with pytest.raises(CheckpointError):
        step(model, ids)
    gradients(model)
    mr.attach(model, recompute_only=True)
    assert_same_gradients(step(model, ids), expected)


@pytest.mark.parametrize("make", ["transformers", "transformers-reentrant"])
def test_micro_batches_in_any_order_beside_evaluation(make: str) -> None:
    inputs = [random_ids(2, 5 + i, seed=i) for i in range(3)]
    model = tiny_biased()
    expected = [step(model, ids) for ids in inputs]
    CHECKPOINTS[make](model)
    mr.attach(model, recompute_only=True)
    for order in itertools.permutations(range(3)):
        reset_biases(model)
        losses = [loss(model(ids)) for ids in inputs]
        move_biases(model)
        for i in order:
            with torch.no_grad():
                model(inputs[0])
            losses[i].backward()
            assert_same_gradients(unwrapped(gradients(model)), expected[i])


def test_a_noisy_router_takes_its_first_experts_again() -> None:
    """Gate weights come from the scores of the recomputation; the experts do not."""
    ids = random_ids(2, 16)
    model = tiny_qwen3_moe().train()
    CHECKPOINTS["transformers-reentrant"](model)
    generator = torch.Generator().manual_seed(0)
    taken: dict[int, list[torch.Tensor]] = {}
    for number, layer in enumerate(model.model.layers[1:]):
        gate = layer.mlp.gate
        gate.register_forward_pre_hook(
            lambda _, args: (args[0] + 0.3 * torch.randn(args[0].shape, generator=generator), *args[1:])
        )
        gate.register_forward_hook(lambda *call, number=number: taken.setdefault(number, []).append(call[2][2]))

    def equal() -> list[bool]:
        taken.clear()
        loss(model(ids)).backward()
        assert [len(choices) for choices in taken.values()] == [2, 2, 2]
        return [torch.equal(*choices) for choices in taken.values()]

    assert equal() == [False] * 3
    replay = mr.attach(model, recompute_only=True)
    assert equal() == [True] * 3
    replay.detach()
    assert equal() == [False] * 3


def test_nothing_is_kept() -> None:
    """Neither after a backward, nor of a forward without gradients or in evaluation, nor of one that failed."""
    ids = random_ids(2, 7)
    model = tiny_biased()
    CHECKPOINTS["transformers"](model)
    before = passes_alive()
    replay = mr.attach(model, recompute_only=True)
    for _ in range(3):
        output = model(ids)
        assert passes_alive() == before + 1
        loss(output).backward()
        del output
        assert passes_alive() == before
    with torch.no_grad():
        kept = model(ids)
    model.eval()
    kept = model(ids)
    assert kept.logits.requires_grad
    assert passes_alive() == before
    model.train()
    with pytest.raises(IndexError):
        model(ids + 97)
    assert replay._active.opened is None
    assert passes_alive() == before
    step(model, ids)


def test_contexts_still_work() -> None:
    ids = random_ids(2, 7)
    model = tiny_biased()
    replay = mr.attach(model, recompute_only=True)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    move_biases(model)
    with replay.replay(recording.batch(), observe=True) as replaying:
        model(ids)
    assert not torch.equal(replaying.native().routed_experts, recording.batch().routed_experts)


def test_a_copy_has_it_too() -> None:
    ids = random_ids(2, 7)
    model = tiny_biased()
    expected = step(model, ids)
    CHECKPOINTS["transformers"](model)
    mr.attach(model, recompute_only=True)
    assert_same_gradients(step(copy.deepcopy(model), ids), expected)


def test_a_forward_of_the_decoder_alone() -> None:
    """The head runs outside, as in losses that are computed in pieces."""
    ids = random_ids(2, 7)
    model = tiny_biased()

    def hidden_step() -> dict[str, torch.Tensor]:
        reset_biases(model)
        one = model.lm_head(model.model(ids).last_hidden_state).pow(2).mean()
        move_biases(model)
        one.backward()
        return gradients(model)

    expected = hidden_step()
    CHECKPOINTS["transformers"](model)
    mr.attach(model, recompute_only=True)
    assert_same_gradients(hidden_step(), expected)


def test_a_checkpoint_around_the_whole_model() -> None:
    """Non-reentrant ones are covered; a reentrant one hides that the forward has gradients, and is refused."""
    ids = random_ids(2, 7)
    model = tiny_biased()
    expected = step(model, ids)
    mr.attach(model, recompute_only=True)

    def whole(use_reentrant: bool) -> None:
        reset_biases(model)
        embeddings = model.get_input_embeddings()(ids)
        output = checkpoint(lambda given: model(inputs_embeds=given).logits, embeddings, use_reentrant=use_reentrant)
        move_biases(model)
        output.float().pow(2).mean().backward()

    whole(use_reentrant=False)
    assert_same_gradients(gradients(model), expected)
    with pytest.raises(ReplayStateError, match="cannot be traced to a forward"):
        whole(use_reentrant=True)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    ids = random_ids(2, 7)
    model = tiny_biased(experts_implementation="batched_mm")
    expected = step(model, ids)
    CHECKPOINTS["transformers"](model)
    replay = mr.attach(model, recompute_only=True)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        reset_biases(model)
        one = loss(compiled(ids))
        move_biases(model)
        one.backward()
        found = gradients(model)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)
        assert replay._active.opened is None
