"""The attribution report on a real model: what replay repairs, what it cannot, and what fails by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import moe_replay as mr
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import Sample, SamplingParams
from moe_replay.tools.attribution import attribute, attribute_traces
from moe_replay.verification.attribution import (
    AGAIN,
    HISTOGRAM_EDGES,
    NATIVE,
    R2,
    R3,
    Attribution,
    AttributionError,
)
from moe_replay.verification.thresholds import Thresholds, failures, inexact
from tests.engines.tiny import VOCABULARY, tiny_model
from tests.models import perturb_routers

TEMPERATURE = 0.9
LENGTHS = (3, 14, 8, 11, 5, 9)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def samples(model: nn.Module) -> list[Sample]:
    """Six samples of 32 tokens after prompts of several lengths."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(1, VOCABULARY, length).tolist() for length in LENGTHS]
    engine = TransformersEngine(model, max_length=64)
    groups = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=TEMPERATURE, seed=0))
    engine.close()
    return [sample for group in groups for sample in group]


@pytest.fixture(scope="module")
def healthy(model: nn.Module, samples: list[Sample]) -> Attribution:
    return attribute(model, samples, temperature=TEMPERATURE, tokens_per_micro_batch=100, labels={"model": "tiny"})


def other_routers(model: nn.Module) -> nn.Module:
    """The same model with routers that choose otherwise."""
    other = tiny_model("qwen3_moe")
    other.load_state_dict(model.state_dict())
    replay = mr.attach(other)
    perturb_routers(replay, scale=0.02)
    replay.detach()
    return other


# ---- the same weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_the_same_model_agrees_with_itself(model: nn.Module, samples: list[Sample], packed: bool) -> None:
    found = attribute(model, samples, temperature=TEMPERATURE, tokens_per_micro_batch=100, packed=packed)
    assert list(found.passes) == [NATIVE, AGAIN, R2, R3]
    assert (found.samples, found.tokens, found.scored) == (6, sum(LENGTHS) + 6 * 32, 6 * 32)
    for scores in found.passes.values():
        assert scores.mismatch["k3_kl"] < 1e-10
        assert scores.mismatch["logprob_abs_diff/max"] < 1e-4
        assert scores.extreme == {2: 0, 5: 0, 10: 0}
        assert sum(scores.histogram) == found.scored
    assert found.routing.overall == 1.0
    assert found.routing.differing == (found.tokens - found.samples, 0, 0, 0)  # nobody routed the last tokens
    assert found.alignment.status == "aligned"
    assert failures(found) == []


def test_replay_of_the_own_record_changes_nothing_at_all(healthy: Attribution) -> None:
    assert healthy.passes[NATIVE].own == {}
    assert healthy.passes[R2].own["logprob_abs_diff/max"] == 0.0
    assert healthy.passes[AGAIN].own["logprob_abs_diff/max"] == 0.0
    assert healthy.routing.noise == (1.0, 1.0, 1.0)


def test_another_temperature_shows_in_every_number(model: nn.Module, samples: list[Sample]) -> None:
    found = attribute(model, samples, temperature=0.2)
    assert [failure.partition(" is ")[0] for failure in failures(found)] == ["k3 KL with R3", "F(2) with R3"]
    rollout, scored = np.array(found.scatter[R3]).T
    difference = scored - rollout
    scores = found.passes[R3]
    assert scores.extreme == {limit: (np.abs(difference) > np.log(limit)).sum() for limit in (2, 5, 10)}
    assert scores.extreme[2] > scores.extreme[5] > 0
    assert scores.mismatch["frac_ratio_gt2"] == scores.extreme[2] / found.scored
    assert scores.mismatch["k1_kl"] == pytest.approx(-difference.mean(), rel=1e-4)
    assert scores.mismatch["logprob_abs_diff/mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert scores.histogram[1:-1] == tuple(np.histogram(difference, HISTOGRAM_EDGES)[0])
    assert sum(scores.histogram) == found.scored == len(difference)


def test_a_training_model_is_scored_without_dropout_and_left_as_it_was(samples: list[Sample]) -> None:
    training = tiny_model("qwen3_moe").train()
    for layer in training.model.layers:
        layer.self_attn.attention_dropout = 0.5
    found = attribute(training, samples[:1], temperature=TEMPERATURE)
    assert found.passes[AGAIN].mismatch["k3_kl"] < 1e-10
    assert all(module.training for module in training.modules())
    mr.attach(training).detach()  # nothing is attached any more


# ---- what replay repairs ---------------------------------------------------------------------------------------------


def test_other_routers_are_repaired_by_r3_alone(model: nn.Module, samples: list[Sample]) -> None:
    """Gate weights still come from the trainer's own routers, so what is left is small and not zero."""
    found = attribute(other_routers(model), samples, temperature=TEMPERATURE)
    routing = found.routing
    assert 0.8 < routing.overall < 0.97
    assert found.passes[NATIVE].mismatch["k3_kl"] > 100 * found.passes[R3].mismatch["k3_kl"] > 0
    assert routing.noise == (1.0, 1.0, 1.0)
    assert found.passes[R2].mismatch == found.passes[NATIVE].mismatch
    assert found.passes[R2].own["logprob_abs_diff/max"] == 0.0
    assert found.passes[R3].own["logprob_abs_diff/max"] > 0
    # a router after others that already differ sees other inputs: by itself it agrees more
    assert routing.router_alone[-1] > routing.agreement[-1]
    assert routing.router_alone[0] == routing.agreement[0]


def test_r2_removes_what_differs_between_native_passes(model: nn.Module, samples: list[Sample]) -> None:
    """Routers that see a little noise choose otherwise in each native pass; the replay of a record does not."""
    noisy = tiny_model("qwen3_moe")
    noisy.load_state_dict(model.state_dict())
    replay, generator = mr.attach(noisy), torch.Generator().manual_seed(0)

    def add_noise(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return (hidden + 0.02 * hidden.std() * torch.randn(hidden.shape, generator=generator), *others)

    for site in replay.sites.values():
        site.module.register_forward_pre_hook(add_noise)
    found = attribute(noisy, samples, replay=replay, temperature=TEMPERATURE)
    assert max(found.routing.noise) < 1.0
    again, with_r2 = found.passes[AGAIN].own, found.passes[R2].own
    assert again["k3_kl"] > 20 * with_r2["k3_kl"] > 0


def test_numbers_of_routing_are_those_of_the_routes(model: nn.Module, samples: list[Sample]) -> None:
    other = other_routers(model)
    found = attribute(other, samples, temperature=TEMPERATURE, tokens_per_micro_batch=64).routing
    replay, differing = mr.attach(other), []
    for sample in samples:
        ids = torch.from_numpy(sample.trace.token_ids[None].astype(np.int64))
        with torch.no_grad(), replay.record() as recording:
            other(input_ids=ids)
        chosen = recording.traces(mr.TokenLayout.padded([ids.shape[1]]), [ids[0].tolist()])[0].routed_experts
        differing.append((np.sort(chosen) != np.sort(sample.trace.routed_experts)).any(-1)[:-1])  # (T - 1, L)
    replay.detach()
    every = np.concatenate(differing)
    assert found.compared == (len(every),) * 3
    np.testing.assert_allclose(found.agreement, 1 - every.mean(0))
    assert found.differing == tuple(np.bincount(every.sum(1), minlength=4).tolist())
    assert found.overall == pytest.approx(1 - every.mean())
    assert found.differing_tokens == pytest.approx(every.any(1).mean())
    assert found.routers_per_token == pytest.approx(every.sum(1).mean())
    first, last = found.position_edges[1:3]
    inside = np.concatenate([part[first:last] for part in differing])
    np.testing.assert_allclose([row[1] for row in found.by_position], 1 - inside.mean(0))
    assert found.position_edges[-1] == max(LENGTHS) + 32


# ---- what fails ------------------------------------------------------------------------------------------------------


def one_token_late(sample: Sample) -> Sample:
    trace = sample.trace
    experts = np.concatenate([trace.routed_experts[:1], trace.routed_experts[:-1]])
    late = mr.RouteTrace(trace.token_ids, experts, trace.layers, trace.valid, num_experts=trace.num_experts)
    return replace(sample, trace=late)


def test_misaligned_routes_fail_by_name(model: nn.Module, samples: list[Sample]) -> None:
    late = [one_token_late(sample) for sample in samples]
    found = attribute(model, late, temperature=TEMPERATURE)
    assert (found.alignment.status, found.alignment.token_shift) == ("misaligned", 1)
    assert failures(found)[0] == f"misaligned: {found.alignment.detail}"
    assert "one token late" in found.alignment.detail
    assert found.passes[R3].mismatch["k3_kl"] > 1e-3 > found.passes[NATIVE].mismatch["k3_kl"]
    alone = attribute_traces(model, [sample.trace for sample in late])
    assert alone.alignment == found.alignment


def test_routes_of_another_model_are_refused(model: nn.Module, samples: list[Sample]) -> None:
    trace = samples[0].trace
    moved = mr.RouteTrace(trace.token_ids, trace.routed_experts, (0, 1, 2), trace.valid, num_experts=trace.num_experts)
    with pytest.raises(mr.AlignmentError, match=r"layers \[1, 2, 3\].*layers \[0, 1, 2\]"):
        attribute_traces(model, [moved])
    with pytest.raises(mr.errors.TraceError, match=r"layers \[1, 2, 3\].*layers \[0, 1, 2\]"):
        attribute(model, [replace(samples[0], trace=moved)])
    mr.attach(model).detach()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Thresholds(max_k3=-1.0), "k3 KL with R3"),
        (Thresholds(max_frac_ratio_gt2=-1.0), "F(2) with R3"),
        (Thresholds(min_agreement=1.1), "native agreement is 1, less than 1.1"),
        (Thresholds(max_r2=-1.0), None),  # but the noise of native passes, 0 here, is always allowed
    ],
)
def test_thresholds(healthy: Attribution, limits: Thresholds, text: str | None) -> None:
    found = failures(healthy, limits)
    assert len(found) == (text is not None)
    if text:
        assert found[0].startswith(text)


def test_what_is_not_a_number_fails(healthy: Attribution) -> None:
    scores = replace(healthy.passes[R3], mismatch=healthy.passes[R3].mismatch | {"k3_kl": math.nan})
    broken = replace(healthy, passes=healthy.passes | {R3: scores})
    assert failures(broken) == ["k3 KL with R3 is nan, more than 0.01"]
    assert failures(Attribution.from_json(broken.to_json())) == failures(broken)


def test_replay_that_does_not_hold_fails(healthy: Attribution) -> None:
    scores = replace(healthy.passes[R2], own=healthy.passes[R2].own | {"logprob_abs_diff/mean": 0.01})
    broken = replace(healthy, passes=healthy.passes | {R2: scores})
    assert failures(broken) == ["replaying a recording changes log-probs by 0.01 on average, more than 0.0001"]


def test_nothing_to_compare_is_refused(model: nn.Module, samples: list[Sample]) -> None:
    with pytest.raises(AttributionError, match="no sampled tokens"):
        attribute(model, [])
    with pytest.raises(AttributionError, match="no traces"):
        attribute_traces(model, [])
    with pytest.raises(AttributionError, match="greedy"):
        attribute(model, samples, temperature=0.0)


# ---- bit for bit -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(model: nn.Module, samples: list[Sample]) -> list[Sample]:
    """The samples as an engine with the trainer's kernels returns them: each alone in its micro-batch."""
    equal = []
    for sample in samples:
        ids = torch.from_numpy(sample.trace.token_ids[None].astype(np.int64))
        with torch.no_grad():
            logprobs = (model.eval()(input_ids=ids).logits[0].float() / TEMPERATURE).log_softmax(-1)
        own = logprobs[len(sample.prompt_ids) - 1 : -1].gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0]
        equal.append(replace(sample, logprobs=own.numpy()))
    return equal


def exactly(model: nn.Module, samples: list[Sample]) -> Attribution:
    return attribute(model, samples, temperature=TEMPERATURE, tokens_per_micro_batch=1)


def test_the_same_kernels_are_equal_bit_for_bit(model: nn.Module, exact: list[Sample]) -> None:
    found = exactly(model, exact)
    assert found.differences is not None
    assert (found.differences.routes, found.differences.logprobs) == (0, 0)
    assert inexact(found) == []


def test_the_first_log_prob_that_differs_is_named(model: nn.Module, exact: list[Sample]) -> None:
    off = [sample.logprobs.copy() for sample in exact]
    off[2][[5, 9]] = np.nextafter(off[2][[5, 9]], np.float32(0))
    off[4][0] = np.nextafter(off[4][0], np.float32(-9))
    found = exactly(model, [replace(sample, logprobs=part) for sample, part in zip(exact, off, strict=True)])
    where = f"first in sample 2, token {LENGTHS[2] + 5}"
    assert inexact(found) == [f"log-probs differ at 3 of {6 * 32} sampled tokens, {where}"]
    assert failures(found) == []  # one unit in the last place is no mismatch
    assert inexact(Attribution.from_json(found.to_json())) == inexact(found)


def test_the_first_route_that_differs_is_named(model: nn.Module, exact: list[Sample]) -> None:
    """Layer by layer: a later layer of an earlier sample comes after."""
    spoilt = list(exact)
    for number, slot, token in ((1, 2, 7), (3, 1, 20), (3, 1, 12)):
        trace = spoilt[number].trace
        experts, top_k = trace.routed_experts.copy(), trace.top_k
        others = [expert for expert in range(trace.num_experts or 0) if expert not in experts[token, slot]]
        experts[token, slot] = others[:top_k]
        changed = mr.RouteTrace(trace.token_ids, experts, trace.layers, trace.valid, num_experts=trace.num_experts)
        spoilt[number] = replace(spoilt[number], trace=changed)
    (line,) = inexact(exactly(model, spoilt))
    pairs = 3 * (sum(LENGTHS) + 6 * 31)
    assert line == f"routes differ at 3 of {pairs} tokens and layers, first in layer 2: sample 3, token 12"
    alone = attribute_traces(model, [sample.trace for sample in spoilt], tokens_per_micro_batch=1)
    assert inexact(alone) == [line]


def test_nothing_recorded_and_files_of_older_releases_are_not_equal(model: nn.Module, exact: list[Sample]) -> None:
    trace = exact[0].trace
    bare = mr.RouteTrace.uncovered(trace.token_ids, trace.layers, trace.top_k, num_experts=trace.num_experts)
    assert inexact(exactly(model, [replace(exact[0], trace=bare)])) == ["no routes to compare bit for bit"]
    assert "not compared" in inexact(replace(exactly(model, exact[:1]), differences=None))[0]


# ---- traces alone, and what is written -------------------------------------------------------------------------------


def test_traces_alone(model: nn.Module, samples: list[Sample], healthy: Attribution) -> None:
    found = attribute_traces(model, [sample.trace for sample in samples], tokens_per_micro_batch=100, packed=False)
    assert (found.passes, found.scatter, found.scored) == ({}, {}, 0)
    assert found.alignment == healthy.alignment
    assert found.routing.agreement == healthy.routing.agreement
    assert all(math.isnan(rate) for rate in (*found.routing.noise, *found.routing.router_alone))
    assert failures(found) == []
    text = str(found)
    assert "aligned" in text
    assert "k3" not in text


def test_json_round_trip(healthy: Attribution) -> None:
    again = Attribution.from_json(healthy.to_json())
    assert again == healthy
    assert str(again) == str(healthy)
    assert len(again.scatter[NATIVE]) == len(again.scatter[R3]) == healthy.scored


def test_json_of_unknown_numbers(model: nn.Module, samples: list[Sample]) -> None:
    found = attribute_traces(model, [samples[0].trace])
    again = Attribution.from_json(found.to_json())
    assert math.isnan(again.routing.noise[0])
    assert again.to_json() == found.to_json()
    assert again.alignment.layer_shift is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}', '{"format": 1, "samples": 3}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(AttributionError):
        Attribution.from_json(text)


def test_damaged_json_is_refused(healthy: Attribution) -> None:
    with pytest.raises(AttributionError):
        Attribution.from_json(healthy.to_json().replace('"2": ', '"two": '))


def test_the_table_has_a_column_for_each_pass(healthy: Attribution) -> None:
    lines = str(healthy).splitlines()
    assert lines[0] == "model tiny"
    head = next(line for line in lines if line.startswith("against the rollout"))
    assert head.split()[-5:] == ["native", "native", "again", "R2", "R3"]
    own = lines[next(i for i, line in enumerate(lines) if line.startswith("against the first native pass")) + 3]
    assert own.split()[-4:-1] == ["-", "0", "0"]
