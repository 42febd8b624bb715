"""Log-probs through the LM head by slices: the values of whole logits, without ever holding them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", minversion="5.0")

import moe_replay as mr
from moe_replay.records import MicroBatch
from moe_replay.sampling_mask import LogitMask, SamplingMask
from moe_replay.train.backends.base import Scores
from moe_replay.train.backends.compilation import CompiledLayers, graphs_compiled
from moe_replay.train.backends.logprobs import EAGER, Head, HeadMath, HeadScores, head_logprobs
from moe_replay.train.learn.batches import make_micro_batch
from tests.models import tiny_qwen3_moe
from tests.train.trajectories import random_mask, random_trajectory

VOCABULARY, CHUNK = 512, 40


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.sampled_from([0.6, 1.0, 1.7]), st.booleans(), st.integers(1, 13), st.integers(0, 99))
def test_logprobs_entropy_and_gradients_are_those_of_log_softmax(
    scored: int, temperature: float, has_bias: bool, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        (3 * torch.randn(*shape, generator=generator)).requires_grad_() for shape in ((scored, 5), (11, 5), (11,))
    )
    inputs = [hidden, weight, bias] if has_bias else [hidden, weight]
    targets = torch.randint(11, (scored,), generator=generator)
    weights = torch.randn(scored, generator=generator)

    whole = (nn.functional.linear(*inputs) / temperature).log_softmax(-1)
    wanted = whole.gather(-1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad((wanted * weights).sum(), inputs)
    found, entropy = head_logprobs(hidden, Head(*inputs[1:]), targets, temperature=temperature, chunk=chunk)
    found_gradients = torch.autograd.grad((found * weights).sum(), inputs)

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.sampled_from([0.6, 1.0, 1.7]), st.integers(1, 13), st.integers(0, 99))
def test_masked_logits_do_not_count(scored: int, temperature: float, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        (3 * torch.randn(*shape, generator=generator)).requires_grad_() for shape in ((scored, 5), (11, 5))
    )
    targets = torch.randint(11, (scored,), generator=generator)
    weights = torch.randn(scored, generator=generator)
    kept = torch.rand(scored, 11, generator=generator) < torch.tensor([0.0, 0.3, 1.0]).repeat(4)[:scored, None]
    kept[torch.arange(scored), targets] = True
    mask = SamplingMask(11, kept.sum(1).numpy(), kept.nonzero()[:, 1].numpy())

    whole = (hidden @ weight.T / temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    wanted = whole.gather(-1, targets[:, None])[:, 0]
    gradients = torch.autograd.grad((wanted * weights).sum(), [hidden, weight])
    found, entropy = head_logprobs(
        *(hidden, Head(weight), targets),
        temperature=temperature,
        chunk=chunk,
        mask=LogitMask.of(mask, torch.device("cpu")),
    )
    found_gradients = torch.autograd.grad((found * weights).sum(), [hidden, weight])

    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, torch.special.entr(whole.exp()).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_kernels_compute_the_same(masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((9, 5), (11, 5)))
    targets = torch.randint(11, (9,), generator=generator)
    kept = torch.rand(9, 11, generator=generator) < 0.5
    kept[torch.arange(9), targets] = True
    mask = SamplingMask(11, kept.sum(1).numpy(), kept.nonzero()[:, 1].numpy()) if masked else None
    layers = CompiledLayers("aot_eager")
    torch._dynamo.reset()  # graphs of earlier tests count towards the limit, beyond which functions run eagerly

    def outcome(math: HeadMath) -> list[Tensor]:
        found, entropy = head_logprobs(
            *(hidden, Head(weight), targets),
            temperature=0.7,
            chunk=4,
            mask=None if mask is None else LogitMask.of(mask, torch.device("cpu")),
            math=math,
        )
        return [found, entropy, *torch.autograd.grad(found.sum(), [hidden, weight])]

    before = graphs_compiled()
    found = outcome(HeadMath(*map(layers.function, EAGER)))
    assert (layers.failure, graphs_compiled() > before) == (None, True)
    torch.testing.assert_close(found, outcome(EAGER))


@pytest.mark.parametrize("vocabulary", [10, 12])
def test_a_mask_of_another_vocabulary_is_refused(vocabulary: int) -> None:
    mask = LogitMask.of(SamplingMask.whole(2, vocabulary), torch.device("cpu"))
    with pytest.raises(mr.errors.AlignmentError, match=rf"another vocabulary.*11 tokens, found {vocabulary} tokens"):
        head_logprobs(
            *(torch.zeros(2, 5), Head(torch.zeros(11, 5)), torch.zeros(2, dtype=torch.int64)),
            temperature=1.0,
            chunk=4,
            mask=mask,
        )


def test_logits_in_half_precision_are_read_in_float32() -> None:
    hidden, weight = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((9, 6), (7, 6)))
    targets = torch.arange(9) % 7
    found, _ = head_logprobs(hidden, Head(weight), targets, temperature=1.0, chunk=4)
    logits = torch.cat([rows @ weight.T for rows in hidden.split(4)])
    torch.testing.assert_close(found, logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    gradients = torch.autograd.grad(found.sum(), [hidden, weight])
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    whole = (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None]).sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(whole, [hidden, weight]), rtol=0.03, atol=0.03)


# ---- a model --------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor over the vocabulary that is made."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() for tensor in tensors if VOCABULARY in tensor.shape]
        self.numel = max([self.numel, *sizes])
        return result


def micro_batch(packed: bool, masked: bool = False, vocabulary: int = VOCABULARY) -> MicroBatch:
    trajectories: list[Any] = [random_trajectory(row, 3, 60 + row, observed=row) for row in range(3)]
    if masked:
        trajectories = [replace(one, sampling_mask=random_mask(one, vocabulary, one.row)) for one in trajectories]
    lengths = [len(one) for one in trajectories]
    layout = mr.TokenLayout.packed(lengths) if packed else mr.TokenLayout.padded(lengths)
    return make_micro_batch(trajectories, [1.0] * 3, layout, torch.device("cpu"))


def plain_model(tied: bool = False) -> Any:
    return tiny_qwen3_moe(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, tie_word_embeddings=tied)


def whole_scores(model: nn.Module, batch: MicroBatch, temperature: float) -> Scores:
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    targets = logits.flatten(0, 1)[batch.target_positions].float() / temperature
    if batch.trajectories[0].sampling_mask is not None:
        targets = targets.masked_fill(~supports(batch, targets.shape[1]), -torch.inf)
    logprobs = targets.log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return Scores(logprobs.gather(-1, batch.target_ids[:, None])[:, 0], entropy)


def supports(batch: MicroBatch, vocabulary: int) -> Tensor:
    """(N, V) bool: the supports of all sampled tokens, sequence by sequence."""
    kept = torch.zeros(0, vocabulary, dtype=torch.bool)
    for one in batch.trajectories:
        mask = one.sampling_mask
        assert mask is not None
        for token in one.sampled.nonzero()[0].tolist():
            ids = mask.token_ids[mask.offsets[token] : mask.offsets[token + 1]].astype("int64")
            row = torch.full((1, vocabulary), not len(ids))
            row[0, torch.from_numpy(ids)] = True
            kept = torch.cat([kept, row])
    return kept


def gradients_of(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("tied", "masked"), [(True, False), (False, False), (False, True)])
def test_a_model_scored_by_slices_gives_the_values_and_gradients_of_whole_logits(
    packed: bool, tied: bool, masked: bool
) -> None:
    model, batch = plain_model(tied), micro_batch(packed, masked)
    scores = HeadScores(model, CHUNK)
    assert scores._head is not None
    found, wanted = scores(batch, 0.7), whole_scores(model, batch, 0.7)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    one, other = gradients_of(model, found.logprobs), gradients_of(model, wanted.logprobs)
    assert one.keys() == other.keys()
    assert "lm_head.weight" in one or tied
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_scoring_and_training_give_the_same_log_probs_bit_for_bit() -> None:
    model, batch = plain_model(), micro_batch(packed=True)
    scores = HeadScores(model, CHUNK)
    with torch.no_grad():
        old = scores(batch, 0.7).logprobs
    assert torch.equal(scores(batch, 0.7, entropy=False).logprobs, old)


def test_no_pass_holds_more_than_one_slice_of_logits() -> None:
    model, batch = plain_model(), micro_batch(packed=True)
    scores = HeadScores(model, CHUNK)
    assert batch.target_ids.numel() > 4 * CHUNK
    with Largest() as largest:
        with torch.no_grad():
            scores(batch, 0.7)
        gradients_of(model, scores(batch, 0.7).logprobs)
    assert largest.numel == CHUNK * VOCABULARY
    with Largest() as of_whole_logits:
        gradients_of(model, whole_scores(model, batch, 0.7).logprobs)
    assert of_whole_logits.numel >= batch.input_ids.numel() * VOCABULARY


def scaled_logits() -> Any:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    config = GraniteMoeConfig(
        **{"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
        logits_scaling=3.0,
    )
    torch.manual_seed(0)
    return GraniteMoeForCausalLM(config).eval()


def zero_padding_row() -> Any:
    """Returns a scaled model whose logits of token 0 are all zero, as padding makes them in a fresh model."""
    model = scaled_logits()
    torch.nn.init.zeros_(model.get_input_embeddings().weight[0].detach())
    with torch.no_grad():
        assert not model(torch.zeros(1, 2, dtype=torch.int64)).logits.any()
    return model


def adapted_head() -> Any:
    peft = pytest.importorskip("peft")
    model = plain_model()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    return model


@pytest.mark.parametrize("make", [scaled_logits, zero_padding_row, adapted_head])
def test_other_heads_are_scored_from_whole_logits_and_the_log_says_so(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with caplog.at_level(logging.WARNING):
        scores = HeadScores(model, CHUNK)
    assert "batch.logit_chunk has no effect" in caplog.text
    assert scores._head is None
    for masked in (False, True):
        batch = micro_batch(packed=True, masked=masked, vocabulary=model.config.vocab_size)
        torch.testing.assert_close(scores(batch, 0.7), whole_scores(model, batch, 0.7), rtol=1e-5, atol=1e-5)


def test_the_head_is_itself_again_after_a_pass_even_one_that_failed() -> None:
    model, batch = plain_model(), micro_batch(packed=True)
    before = model(batch.input_ids).logits
    scores = HeadScores(model, CHUNK)
    scores(batch, 1.0)
    batch.target_ids = batch.target_ids[:-1]
    with pytest.raises(RuntimeError):
        scores(batch, 1.0)
    assert torch.equal(model(batch.input_ids).logits, before)
