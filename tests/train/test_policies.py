"""Runs with each replay policy, on both backends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from pydantic import ValidationError

import moe_replay as mr
from moe_replay.records import Trajectory
from moe_replay.train.learn.batches import make_micro_batch, target_rows
from moe_replay.train.learn.learner import Learner
from moe_replay.train.learn.losses import LossInputs, LossSettings, clipped_surrogate, load_loss
from moe_replay.train.loop import train
from moe_replay.verification.metrics import MetricAccumulator
from tests.train.trajectories import LAYERS, NUM_EXPERTS, random_trajectory

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
PASSES = {"updates_per_rollout": 1, "num_iterations": 3}
IN_BFLOAT16 = {"dtype": "bfloat16", "probe_tolerance": 1.0}
BACKENDS = ["fsdp", "megatron"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "megatron":
        moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)  # left by an earlier backward
    return {"kind": request.param}


def refused(config: Config, **settings: Any) -> str:
    with pytest.raises(ValidationError) as error:
        config(**settings)
    return str(error.value)


# ---- ids+gates ------------------------------------------------------------------------------------------------------


def test_recorded_gates_are_replayed_in_every_pass(config: Config, metrics_of: Metrics, backend: dict) -> None:
    """The first update has the ratio 1, which the run checks; later ones differ from those with current gates."""
    lines = {}
    for policy in ("ids", "ids+gates"):
        replay = {"mode": "r2", "policy": policy, "score_native_every": 0}
        settings = {"model": {"gradient_checkpointing": True}, "backend": backend, "algorithm": PASSES}
        (lines[policy],) = metrics_of(train(config(policy, steps=1, replay=replay, **settings)))
    ids, gates = lines["ids"], lines["ids+gates"]
    assert ids["mismatch/rollout_vs_old/k3_kl"] == gates["mismatch/rollout_vs_old/k3_kl"]
    assert 0 < gates["mismatch/old_vs_train/k3_kl"] != ids["mismatch/old_vs_train/k3_kl"]
    assert gates["loss/skipped"] == 0


@pytest.mark.parametrize("mode", ["off", "r3", "auto"])
def test_gates_that_no_engine_reports_are_refused(config: Config, mode: str) -> None:
    text = refused(config, replay={"mode": mode, "policy": "ids+gates"})
    assert f"replay.policy: ids+gates needs replay.mode = r2, found {mode}: engines report no gate weights" in text


# ---- margin ---------------------------------------------------------------------------------------------------------


def test_a_margin_is_between_no_replay_and_all_of_it(config: Config, metrics_of: Metrics, backend: dict) -> None:
    lines = {}
    for margin in (0.0, 0.2, 100.0):
        replay = {"mode": "r3", "policy": "margin", "margin": margin, "score_native_every": 0}
        settings = {"rollout": IN_BFLOAT16, "backend": backend, "algorithm": PASSES}
        (lines[margin],) = metrics_of(train(config(f"{margin}", steps=1, replay=replay, **settings)))
    none, some, every = (line["routing/replaced_choices"] for line in lines.values())
    assert none == 0 < some
    assert all(0 < line["routing/differing_choices"] < 0.5 for line in lines.values())
    assert every == lines[100.0]["routing/differing_choices"]
    assert some < lines[0.2]["routing/differing_choices"]


@pytest.mark.parametrize(
    ("replay", "text"),
    [
        ({"mode": "auto", "policy": "margin", "margin": 0.1}, "margin needs replay.mode = r2 or r3, found auto"),
        ({"mode": "r3", "policy": "margin"}, "replay.margin: policy = margin needs it"),
        ({"mode": "r3", "margin": 0.1}, "no other policy has one"),
    ],
)
def test_a_margin_that_cannot_be_used_is_refused(config: Config, replay: dict[str, Any], text: str) -> None:
    assert text in refused(config, replay=replay)


# ---- drop -----------------------------------------------------------------------------------------------------------


def with_holes(row: int) -> Trajectory:
    """A trajectory with an observation in its middle, some of whose tokens have no route in any layer, or in one."""
    made = random_trajectory(row, prompt=4, completion=8, observed=3)
    valid = made.trace.valid.copy()
    valid[[5, 8, 10]] = False
    valid[6, 1] = False
    trace = mr.RouteTrace(made.token_ids, made.trace.routed_experts, made.trace.layers, valid, num_experts=NUM_EXPERTS)
    return dataclasses.replace(made, trace=trace)


def test_tokens_without_a_route_leave_the_loss(config: Config) -> None:
    """The gradient of every other token stays as it is, in float64; that of a dropped one is zero."""
    trajectories = [with_holes(0), random_trajectory(1, prompt=3, completion=5)]
    layout = mr.TokenLayout.packed([len(one) for one in trajectories])
    batch = make_micro_batch(trajectories, [0.25, 0.5], layout, torch.device("cpu"))
    dropped = []
    for one in trajectories:
        for token in range(1, len(one)):
            if one.sampled[token]:
                dropped.append(not one.trace.valid[token - 1].any())
    assert 0 < sum(dropped) < len(dropped)

    def gradient(weights: Tensor) -> Tensor:
        logprobs = torch.linspace(-2, -0.1, len(dropped), dtype=torch.float64, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() + 0.05,
            rollout_logprobs=logprobs.detach(),
            advantages=batch.advantages.double(),
            weights=weights.double(),
            sequence=batch.sequence,
            num_sequences=2,
        )
        clipped_surrogate(inputs, LossSettings()).loss.backward()
        assert logprobs.grad is not None
        return logprobs.grad

    whole = gradient(batch.loss_weights)
    topology = mr.MoeTopology(4, tuple(mr.routes.MoeLayer(layer, NUM_EXPERTS, 2) for layer in LAYERS))
    metrics = MetricAccumulator(topology, torch.device("cpu"), means=["routing/dropped_tokens"])
    backend: Any = SimpleNamespace(device=torch.device("cpu"))
    learner = Learner(config(replay={"mode": "r3", "policy": "drop"}), backend)
    learner._drop_unrouted(batch, metrics)
    assert torch.equal(gradient(batch.loss_weights), whole.masked_fill(torch.tensor(dropped), 0.0))
    assert metrics.reduce().metrics["routing/dropped_tokens"] == sum(dropped) / len(dropped)


def test_nothing_is_dropped_where_every_token_has_a_route(config: Config, metrics_of: Metrics, backend: dict) -> None:
    lines = {}
    for policy in ("ids", "drop"):
        replay = {"mode": "r3", "policy": policy, "score_native_every": 0}
        (lines[policy],) = metrics_of(train(config(policy, steps=1, replay=replay, backend=backend)))
    assert lines["drop"].pop("routing/dropped_tokens") == 0
    assert lines["drop"] == lines["ids"]


def test_what_cannot_drop_is_refused(config: Config) -> None:
    assert "drop needs replay.mode = r3, found r2" in refused(config, replay={"mode": "r2", "policy": "drop"})
    stages = {"kind": "megatron", "pipeline_parallel": 2}
    assert "set backend.pipeline_parallel = 1" in refused(
        config, replay={"mode": "r3", "policy": "drop"}, backend=stages
    )


# ---- shift ----------------------------------------------------------------------------------------------------------


def written_loss(inputs: LossInputs, loss: str, level: str) -> Tensor:
    """RSPO on our losses, token by token: ratios times gamma, then mean over the sequence, then clip."""
    assert inputs.trust is not None
    logs = [
        logprob - old + math.log(trust)
        for logprob, old, trust in zip(inputs.logprobs, inputs.old_logprobs, inputs.trust.tolist(), strict=True)
    ]
    total = torch.zeros((), dtype=torch.float64)
    for i, sequence in enumerate(inputs.sequence.tolist()):
        own = [one for one, s in zip(logs, inputs.sequence.tolist(), strict=True) if s == sequence]
        ratio = (logs[i] if level == "token" else sum(own) / len(own)).exp()
        advantage, weight = inputs.advantages[i], inputs.weights[i]
        if loss == "cispo":
            value = -ratio.detach().clamp(0.8, 1.2) * advantage * inputs.logprobs[i]
        elif loss == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            value = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        else:
            value = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total + weight * value
    return total


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["ppo_clip", "sapo", "cispo"])
def test_the_gradient_is_that_of_scaled_ratios(loss: str, level: str) -> None:
    generator = torch.Generator().manual_seed(2)
    numbers = [torch.rand(9, generator=generator, dtype=torch.float64) for _ in range(4)]
    gradients = []
    settings = LossSettings(importance_sampling_level=level)  # type: ignore[arg-type]
    for compute in (lambda inputs: load_loss(loss)(inputs, settings).loss, lambda i: written_loss(i, loss, level)):
        logprobs = (-numbers[0]).requires_grad_()
        trust = (0.3 + 0.7 * numbers[3]).requires_grad_()
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=-numbers[0] + 0.6 * numbers[1] - 0.3,
            rollout_logprobs=-numbers[0],
            advantages=numbers[2] - 0.5,
            weights=torch.full((9,), 1 / 9, dtype=torch.float64),
            sequence=torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]),
            num_sequences=3,
            trust=trust,
        )
        compute(inputs).backward()
        gradients.append(logprobs.grad)
        assert trust.grad is None
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", ["batch", "sequence"])
def test_the_row_that_predicts_a_token(order: str) -> None:
    trajectories = [random_trajectory(0, prompt=4, completion=8, observed=3), random_trajectory(1, 3, 5)]
    layout = mr.TokenLayout.padded([len(one) for one in trajectories])
    layout = layout if order == "batch" else layout.sequence_major()
    batch = make_micro_batch(trajectories, [0.25, 0.5], layout, torch.device("cpu"))
    ids = np.concatenate([one.token_ids for one in trajectories])
    tokens = layout.rows[target_rows(batch).numpy()]
    assert ids[tokens + 1].tolist() == batch.target_ids.tolist()


@pytest.mark.parametrize("mode", ["off", pytest.param("r2", marks=pytest.mark.thorough), "r3"])
def test_ratios_are_scaled_in_later_updates(config: Config, metrics_of: Metrics, backend: dict, mode: str) -> None:
    lines = {}
    for policy, floor in (("ids", 0.1), ("shift", 1.0), ("shift", 0.1)):
        replay = {"mode": mode, "policy": policy, "shift_floor": floor, "score_native_every": 0}
        settings = {"backend": backend, "algorithm": PASSES, "batch": {"packed": mode == "off"}}
        (lines[policy, floor],) = metrics_of(train(config(f"{policy}{floor}", steps=1, replay=replay, **settings)))
    without, floored, scaled = lines.values()
    assert 0.5 < scaled["routing/shift_weight"] < 1
    assert scaled["routing/shift_floored"] == 0
    assert floored.pop("routing/shift_floored") > 0.9
    assert floored.pop("routing/shift_weight") < 1
    assert floored == without
    assert scaled["loss/total"] != without["loss/total"]
    assert scaled["mismatch/rollout_vs_old/k3_kl"] == without["mismatch/rollout_vs_old/k3_kl"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replay": {"mode": "auto"}}, "shift needs replay.mode = off or r2 or r3, found auto"),
        ({"backend": {"kind": "megatron", "tensor_parallel": 2}}, "the routers of all layers and tokens"),
        ({"backend": {"context_parallel": 2}}, "the routers of all layers and tokens"),
        ({"algorithm": {"updates_per_rollout": 1}}, "shift compares later updates"),
        ({"algorithm": {"old_logprobs": "rollout"}}, "shift compares later updates"),
        ({"algorithm": {"loss": "tests.train.test_losses:pg"}}, "shift scales importance ratios of our own losses"),
    ],
)
def test_a_shift_that_cannot_be_measured_is_refused(config: Config, settings: dict[str, Any], text: str) -> None:
    replay = {"mode": "r3", "policy": "shift"} | settings.get("replay", {})
    assert text in refused(config, **(settings | {"replay": replay}))
