"""Losses: number for number those of TRL, and independent of how tokens are divided."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.train.learn.losses import (
    Correction,
    LossError,
    LossInputs,
    LossOutput,
    LossSettings,
    clipped_surrogate,
    correction_weights,
    importance_ratio,
    load_loss,
    metric_names,
    token_weights,
)
from moe_replay.utils.plugins import PluginError
from moe_replay.verification.metrics import k3

MAX_TOKENS = 12


class Batch:
    """Random completions, both as padded rows and as one row of tokens."""

    def __init__(self, seed: int, sequences: int = 6) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, MAX_TOKENS + 1, (sequences,), generator=generator)
        self.mask = (torch.arange(MAX_TOKENS)[None] < self.lengths[:, None]).double()
        self.padded = {
            name: torch.randn((sequences, MAX_TOKENS), generator=generator, dtype=torch.float64).mul(0.4) - 1
            for name in ("new", "old", "rollout", "reference")
        }
        self.advantages = torch.randn(sequences, generator=generator, dtype=torch.float64)
        self.sequence = torch.arange(sequences).repeat_interleave(self.lengths)

    def flat(self, name: str) -> torch.Tensor:
        return self.padded[name][self.mask.bool()]


def trl_loss(batch: Batch, loss_type: str, level: str, beta: float, correction: str, clip: tuple[float, float]):
    """TRL's own `_compute_loss` on given log-probs; everything around it is what it reads of its trainer."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs TRL")
    new = batch.padded["new"].clone().requires_grad_()
    ratio = None
    if correction != "off":
        difference = (batch.padded["old"] - batch.padded["rollout"]) * batch.mask
        if correction == "sequence_mask":
            difference = difference.sum(-1, keepdim=True)
        ratio = difference.exp()
        if correction == "token_truncate":
            ratio = ratio.clamp(max=2.0)
        else:
            ratio = ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        use_vllm=correction != "off",
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda t, reduction: t, gather=lambda t: t),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(len(batch.lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(batch.lengths), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(new, dtype=torch.long),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.padded["old"],
        "ref_per_token_logps": batch.padded["reference"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), gradient[batch.mask.bool()]


def our_loss(batch: Batch, aggregation, level, beta, correction, clip, tokens=slice(None), loss="ppo_clip", **more):
    weights = torch.from_numpy(token_weights(batch.lengths.numpy(), aggregation, MAX_TOKENS))
    new = batch.flat("new").clone().requires_grad_()
    inputs = LossInputs(
        logprobs=new[tokens],
        old_logprobs=batch.flat("old")[tokens],
        rollout_logprobs=batch.flat("rollout")[tokens],
        ref_logprobs=batch.flat("reference")[tokens],
        advantages=batch.advantages[batch.sequence][tokens],
        weights=weights[batch.sequence][tokens],
        sequence=batch.sequence[tokens],
        num_sequences=len(batch.lengths),
    )
    settings = LossSettings(
        importance_sampling_level=level,
        clip_low=clip[0],
        clip_high=clip[1],
        beta=beta,
        rollout_correction=correction,
        rollout_correction_low=0.5,
        **more,
    )
    found = load_loss(loss)(inputs, settings)
    (gradient,) = torch.autograd.grad(found.loss, new)
    return found.loss.detach(), gradient


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["off", "token_truncate", "token_mask", "sequence_mask"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [("grpo", "seq_mean_token_mean"), ("dr_grpo", "seq_mean_token_sum_norm"), ("dapo", "token_mean")],
)
def test_equal_to_trl(loss_type, aggregation, level, beta, correction):
    for seed in range(3):
        batch = Batch(seed)
        arguments = (level, beta, correction, (0.2, 0.28))
        expected, expected_gradient = trl_loss(batch, loss_type, *arguments)
        found, gradient = our_loss(batch, aggregation, *arguments)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


TAUS = (1.3, 2.1)


def by_the_papers(batch: Batch, loss: str, level: str, clip: tuple[float, float], delta: float) -> tuple[float, Any]:
    """The loss, a mean over tokens, and its gradient in Python's own floats, one token after the other."""
    new, old = batch.flat("new").tolist(), batch.flat("old").tolist()
    sequence, advantages = batch.sequence.tolist(), batch.advantages.tolist()
    count, gradient, total = len(new), [0.0] * len(new), 0.0
    for token, of in enumerate(sequence):
        tokens = [token] if level == "token" else [index for index, other in enumerate(sequence) if other == of]
        ratio = math.exp(sum(new[index] - old[index] for index in tokens) / len(tokens))
        advantage = advantages[of]
        slope = 0.0  # of the token's loss by the log of its ratio
        if loss == "ppo_clip":
            clipped = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            kept = min(ratio, delta)
            total -= min(kept * advantage, clipped * advantage)
            if kept == ratio and ratio * advantage <= clipped * advantage:
                slope = -ratio * advantage
        elif loss == "sapo":
            tau = TAUS[0] if advantage > 0 else TAUS[1]
            gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
            total -= 4 / tau * gate * advantage
            slope = -4 * gate * (1 - gate) * ratio * advantage
        else:
            weight = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            total -= weight * advantage * new[token]
            gradient[token] -= weight * advantage / count
        for index in tokens:
            gradient[index] += slope / len(tokens) / count
    return total / count, gradient


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss", "delta"), [("ppo_clip", math.inf), ("ppo_clip", 1.4), ("sapo", 2.0), ("cispo", 2.0)])
def test_losses_and_gradients_are_those_of_the_papers(loss, level, delta) -> None:
    clip, more = (0.2, 0.28), {"delta": delta, "tau_pos": TAUS[0], "tau_neg": TAUS[1]}
    for seed in range(4):
        batch = Batch(seed)
        expected, gradient = by_the_papers(batch, loss, level, clip, delta)
        found, found_gradient = our_loss(batch, "token_mean", level, 0.0, "off", clip, loss=loss, **more)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(found_gradient, torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-14)


def test_two_sided_clipping_bounds_negative_advantages() -> None:
    """The loss of verl's dual clip: for a negative advantage at most delta times it."""
    batch = Batch(0)
    batch.padded["new"] = batch.padded["old"] + 2.0  # ratios of 7.4
    batch.advantages = -batch.advantages.abs()
    free, gradient = our_loss(batch, "token_mean", "token", 0.0, "off", (0.2, 0.2))
    bounded, none = our_loss(batch, "token_mean", "token", 0.0, "off", (0.2, 0.2), delta=3.0)
    assert bounded.item() == pytest.approx(free.item() * 3.0 / math.exp(2.0))
    assert gradient.abs().max() > 0
    assert none.abs().max() == 0


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    aggregation=st.sampled_from(["seq_mean_token_mean", "seq_mean_token_sum_norm", "token_mean"]),
    level=st.sampled_from(["token", "sequence"]),
    cuts=st.sets(st.integers(1, 5), max_size=4),
)
def test_micro_batches_add_up(seed, aggregation, level, cuts):
    """However whole sequences are divided over micro-batches, losses and gradients add up to those of the whole."""
    batch = Batch(seed)
    arguments = (aggregation, level, 0.04, "token_mask", (0.2, 0.2))
    expected, expected_gradient = our_loss(batch, *arguments)
    ends = np.cumsum(batch.lengths.numpy())
    bounds = [0, *(int(ends[cut - 1]) for cut in sorted(cuts)), int(ends[-1])]
    parts = [our_loss(batch, *arguments, tokens=slice(a, b)) for a, b in pairwise(bounds)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sum(gradient for _, gradient in parts), expected_gradient, rtol=1e-10, atol=1e-12)


def by_hand(old: torch.Tensor, rollout: torch.Tensor, sequence: torch.Tensor, advantages: torch.Tensor) -> LossInputs:
    """Tokens of which the policy says what the old policy said."""
    return LossInputs(
        logprobs=old.clone().requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        weights=torch.ones_like(old),
        sequence=sequence,
        num_sequences=int(sequence.max()) + 1,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_ratio_is_exactly_one(level) -> None:
    batch = Batch(0)
    inputs = by_hand(batch.flat("new"), batch.flat("new"), batch.sequence, batch.advantages[batch.sequence])
    settings = LossSettings(importance_sampling_level=level)
    assert torch.equal(importance_ratio(inputs, settings), torch.ones_like(inputs.logprobs))
    found = clipped_surrogate(inputs, settings)
    assert found.token_metrics.keys() == {"clip_low", "clip_high", "correction"}
    assert not found.token_metrics["clip_low"].any()
    assert not found.token_metrics["clip_high"].any()


def test_correction_weights_by_hand():
    rollout = torch.log(torch.tensor([0.5, 0.9, 4.0, 1.0]))  # ratios 2, 1.11, 0.25, 1
    inputs = by_hand(torch.zeros(4), rollout, torch.tensor([0, 0, 1, 1]), torch.ones(4))

    def weights(correction: Correction, low: float, high: float) -> torch.Tensor:
        settings = LossSettings(rollout_correction=correction, rollout_correction_low=low, rollout_correction_high=high)
        return correction_weights(inputs, settings)

    close = torch.testing.assert_close
    close(weights("token_truncate", 0.0, 1.5), torch.tensor([1.5, 1 / 0.9, 0.25, 1]))
    close(weights("token_mask", 0.5, 1.5), torch.tensor([0, 1 / 0.9, 0, 1]))
    close(weights("sequence_mask", 0.1, 2.0), torch.tensor([0, 0, 0.25, 0.25]))
    close(weights("off", 0.0, 0.0), torch.ones(4))


def test_k3_is_zero_only_where_equal():
    one = torch.tensor([-1.0, -2.0, -3.0])
    assert torch.equal(k3(one - one), torch.zeros(3))
    assert (k3(torch.full((3,), 0.1)) > 0).all()
    assert (k3(torch.full((3,), -0.1)) > 0).all()


# ---- losses of the user's own ---------------------------------------------------------------------------------------


def reinforce(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """REINFORCE, with the log-prob of each token as a metric."""
    return LossOutput(
        -(inputs.logprobs * inputs.advantages * inputs.weights).sum(), {"logprob": inputs.logprobs.detach()}
    )


def unsummed(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs * inputs.weights, {})


def one_number(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs.sum(), {"spread": inputs.logprobs.std()})


def detached(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs.sum().item(), {})  # type: ignore[arg-type]


def averaged(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs.sum(), {"spread": inputs.logprobs.std().item()})  # type: ignore[dict-item]


def without_metrics(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs.sum(), None)  # type: ignore[arg-type]


def shadowing(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    return LossOutput(inputs.logprobs.sum(), {"entropy": inputs.logprobs.detach()})


def broken(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    raise KeyError("temperature")


def test_every_rank_knows_the_metrics_of_a_loss_without_tokens() -> None:
    device = torch.device("cpu")
    assert metric_names(load_loss("ppo_clip"), LossSettings(), device) == ("clip_low", "clip_high", "correction")
    with_reference = metric_names(load_loss("ppo_clip"), LossSettings(beta=0.1), device)
    assert with_reference == ("clip_low", "clip_high", "correction", "reference_kl")
    assert metric_names(load_loss("tests.train.test_losses:reinforce"), LossSettings(), device) == ("logprob",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unsummed", r"scalar loss.*found a loss of shape \(4,\)"),
        ("one_number", r"one value per token.*spread of shape \(4,\).*found shape \(\)"),
        ("detached", r"scalar loss.*found a loss of type float"),
        ("averaged", r"one value per token.*spread of shape \(4,\).*found type float"),
        ("without_metrics", "mapping of metrics.*token_metrics of type NoneType"),
        ("shadowing", "name that the trainer uses itself.*found entropy"),
        ("broken", "raised KeyError: 'temperature'"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(name: str, message: str) -> None:
    inputs = by_hand(torch.zeros(4), torch.zeros(4), torch.tensor([0, 0, 1, 1]), torch.ones(4))
    with pytest.raises(LossError, match=message) as caught:
        load_loss(f"tests.train.test_losses:{name}")(inputs, LossSettings())
    assert f"test_losses:{name}" in str(caught.value)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(PluginError, match=r"unknown policy loss 'pp_clip'.*: cispo, ppo_clip, sapo.*'ppo_clip'"):
        load_loss("pp_clip")
