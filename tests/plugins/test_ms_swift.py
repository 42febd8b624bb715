"""The guard in the Megatron GRPO trainer of the installed ms-swift, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moe_replay as mr

pytest.importorskip("swift", reason="runs in the environment of `make test-plugins`")
pytest.importorskip("megatron.core")

from moe_replay.integrations.hosts import HostError
from moe_replay.train.rollout.advantages import std_normalized, turn_factors
from tests.distributed.harness import run_ranks
from tests.plugins import ms_swift_cpu, verl_cpu, verl_megatron_cpu
from tests.plugins.ms_swift_cpu import collated, make_trainer, on_ray, samples_of, scored, step, update, worker_on_ray
from tests.plugins.verl_cpu import Rollout

FAULTS = {
    "token_late": "one token late",
    "layer_late": "one layer late from layer 2 on",
    "dense_layer_routed": "routes in a layer that has no router",
    "zero_rows": "left rows of the capture unwritten",
    "all_zero": "all-zero capture",
}


@pytest.fixture(scope="module")
def model() -> Any:
    ms_swift_cpu.on_cpu()
    return ms_swift_cpu.model_of_six_layers()


@pytest.fixture(scope="module")
def rollout(model) -> Rollout:
    return verl_megatron_cpu.with_routes_of(model, Rollout(), noise=0.5)


@pytest.fixture(scope="module")
def own(model) -> Rollout:
    """Routes of the trained model itself."""
    return verl_megatron_cpu.with_routes_of(model, Rollout())


@pytest.fixture(autouse=True)
def _no_guard_is_left() -> Iterator[None]:
    yield
    ms_swift_cpu.forget_guard()


@pytest.fixture(params=["check", "fix"])
def guard(request, monkeypatch) -> str:
    monkeypatch.setenv("MOE_REPLAY_GUARD", request.param)
    return request.param


def test_healthy_routes_pass_and_are_reported(guard, model, rollout) -> None:
    trainer = make_trainer(model)
    metrics = step(trainer, samples_of(rollout, rollout.routed_experts))
    assert metrics["moe_replay/aligned"] == 1
    assert 0.1 < metrics["moe_replay/agreement"] < 0.9
    assert metrics["moe_replay/covered"] > 0.9
    assert metrics["moe_replay/k3"] > 0
    assert metrics["moe_replay/k3_native"] not in (0, metrics["moe_replay/k3_paired"])
    assert metrics["moe_replay/k3_paired"] > 0
    assert trainer.updates == [1]


def test_an_evaluation_leaves_the_native_comparison_to_the_update(guard, model, rollout) -> None:
    """ms-swift scores the samples of an evaluation too."""
    samples = samples_of(rollout, rollout.routed_experts)
    alone = step(make_trainer(model), samples)
    trainer = make_trainer(model)
    scored(trainer, samples[::-1])
    assert trainer.moe_replay_native is None
    assert step(trainer, samples) == alone
    assert "moe_replay/k3_paired" in alone
    assert trainer.moe_replay_native is None


def test_both_replay_the_same(model, rollout, monkeypatch) -> None:
    gradients, old = {}, {}
    for setting in ("check", "fix"):
        monkeypatch.setenv("MOE_REPLAY_GUARD", setting)
        trainer = make_trainer(model)
        batches = scored(trainer, samples_of(rollout, rollout.routed_experts))
        old[setting] = [batch["grpo_batch"].old_per_token_logps for batch in batches]
        update(trainer, batches)
        gradients[setting] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients["check"].keys() == gradients["fix"].keys()
    for batch, (checked, fixed) in zip(batches, zip(old["check"], old["fix"], strict=True), strict=True):
        mask = batch["grpo_batch"].completion_mask
        torch.testing.assert_close(fixed[mask], checked[mask], atol=1e-6, rtol=1e-4)
    for name, gradient in gradients["check"].items():
        torch.testing.assert_close(gradients["fix"][name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_rollout_stops_the_run_by_name(guard, model, rollout, fault) -> None:
    trainer = make_trainer(model)
    with pytest.raises(mr.MoeReplayError, match=FAULTS[fault]):
        update(trainer, scored(trainer, samples_of(rollout, getattr(verl_cpu, fault)(rollout))))
    assert trainer.updates == []  # before the optimizer


def test_swapped_samples_stop_the_run(guard, model) -> None:
    equal = verl_megatron_cpu.with_routes_of(model, Rollout(equal=True), noise=0.5)
    trainer = make_trainer(model)
    with pytest.raises(mr.AlignmentError, match=r"another sample|other tokens|other sequences|better than chance"):
        for _ in range(8):
            update(trainer, scored(trainer, samples_of(equal, verl_cpu.samples_swapped(equal))))


def test_r2_records_in_the_old_log_prob_pass_and_replays_in_updates(guard, model, rollout) -> None:
    trainer = make_trainer(model, mode="R2")
    batches = scored(trainer, samples_of(rollout, None))
    with verl_megatron_cpu.perturbed_routers(model, 0.5):
        metrics = update(trainer, batches)
    assert metrics["moe_replay/aligned"] == metrics["moe_replay/covered"] == 1
    assert 0.1 < metrics["moe_replay/agreement"] < 0.9


@pytest.mark.parametrize("padded", [False, True])
def test_r2_of_padded_and_packed_micro_batches_passes(guard, model, rollout, padded) -> None:
    trainer = make_trainer(model, mode="R2", padded=padded)
    assert update(trainer, scored(trainer, samples_of(rollout, None)))["moe_replay/agreement"] == 1


def test_routes_that_ms_swift_confuses_between_the_passes_stop_the_run(model, rollout, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MOE_REPLAY_GUARD", "check")
    for mode, routes in (("R2", None), ("R3", rollout.routed_experts)):
        trainer = make_trainer(model, mode=mode)
        batches = scored(trainer, samples_of(rollout, routes))
        batches[1]["routed_experts"] = batches[1]["routed_experts"].roll(1, 1)
        with pytest.raises(mr.AlignmentError, match=r"other tokens or layers.*wrong rows by layer"):
            update(trainer, batches)
        assert "moe-replay stops this run: ms-swift replays routes of other tokens" in capsys.readouterr().err


def test_padded_micro_batches_are_transposed_by_ms_swift_and_fixed_by_us(model, own, monkeypatch) -> None:
    """padding_free=false: rows of routes are batch-major, those of routers are not."""
    monkeypatch.setenv("MOE_REPLAY_GUARD", "check")
    trainer = make_trainer(model, padded=True)
    with pytest.raises(mr.AlignmentError, match="routes of other tokens or layers"):
        scored(trainer, samples_of(own, own.routed_experts))
    monkeypatch.setenv("MOE_REPLAY_GUARD", "fix")
    trainer = make_trainer(model, padded=True)
    metrics = update(trainer, scored(trainer, samples_of(own, own.routed_experts)))
    assert metrics["moe_replay/aligned"] == 1
    assert metrics["moe_replay/agreement"] > 0.99


def test_layers_of_updates_on_ray_are_confused_by_ms_swift_and_fixed_by_us(model, own, monkeypatch) -> None:
    """With a dense layer, routers of MoE layers are given the rows of the layers before them."""
    monkeypatch.setenv("MOE_REPLAY_GUARD", "check")
    trainer = on_ray(make_trainer(model))
    with pytest.raises(mr.AlignmentError, match="routes of other tokens or layers"):
        update(trainer, collated(trainer, samples_of(own, own.routed_experts)))
    monkeypatch.setenv("MOE_REPLAY_GUARD", "fix")
    trainer = on_ray(make_trainer(model))
    metrics = update(trainer, collated(trainer, samples_of(own, own.routed_experts)))
    assert metrics["moe_replay/aligned"] == 1
    assert metrics["moe_replay/agreement"] > 0.99


@pytest.mark.parametrize("which", ["reference", "without_adapters", "teacher"])
def test_reference_and_teacher_route_natively_on_ray(guard, model, rollout, which, monkeypatch) -> None:
    """ms-swift sets the action of all routers of a worker for these passes too."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    instances = list(RouterReplay.global_router_replay_instances)
    monkeypatch.setattr(RouterReplay, "global_router_replay_instances", instances)
    other = model if which == "without_adapters" else verl_megatron_cpu.model_and_config()[0]
    trainer = make_trainer(model)
    batches = collated(trainer, samples_of(rollout, rollout.routed_experts))
    worker = worker_on_ray(trainer, **{"reference": {"ref": other}, "teacher": {"teacher": other}}.get(which, {}))
    kind = "teacher" if which == "teacher" else "ref"
    key, compute = f"{kind}_per_token_logps", getattr(worker, f"compute_{kind}_logps")
    trainer.enable_routing_replay = False
    native = worker._compute_logps_micro_batches([dict(data) for data in batches], other, key)
    trainer.enable_routing_replay = True
    forwards: list[Any] = []
    with model.register_forward_hook(lambda *_: forwards.append(1)):
        policy = worker.compute_logps([dict(data) for data in batches])
    assert len(forwards) == len(batches)  # none for a comparison
    found = compute([dict(data) for data in batches])
    assert all(torch.equal(ours[key], theirs[key]) for ours, theirs in zip(found, native, strict=True))
    assert not torch.equal(policy[0]["per_token_logps"], found[0][key])


def test_r2_of_more_than_256_experts_replays_what_it_recorded_or_stops(guard, model, monkeypatch) -> None:
    """Releases before 4.5.3 keep their ids in 8 bits, and replay other experts."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    monkeypatch.setattr(RouterReplay, "global_router_replay_instances", [])
    trainer = make_trainer(ms_swift_cpu.model_of_six_layers(experts=288), mode="R2")
    batches = scored(trainer, samples_of(Rollout(), None))
    if guard == "check" and ms_swift_cpu.keeps_ids_in_8_bits():
        with pytest.raises(mr.AlignmentError, match="ms-swift replays routes of other tokens or layers"):
            update(trainer, batches)
    else:
        assert update(trainer, batches)["moe_replay/agreement"] == 1


def test_virtual_stages_are_refused(model, rollout) -> None:
    trainer = make_trainer(model)
    trainer.unwrapped_models = [model, model]
    with pytest.raises(HostError, match="first virtual stage of a rank only"):
        scored(trainer, samples_of(rollout, rollout.routed_experts))


def test_a_fault_may_warn_instead(model, rollout, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MOE_REPLAY_ON_MISALIGNMENT", "warn")
    trainer = make_trainer(model)
    metrics = update(trainer, scored(trainer, samples_of(rollout, verl_cpu.token_late(rollout))))
    assert metrics["moe_replay/aligned"] == 0
    assert "one token late" in caplog.text
    assert trainer.updates == [1]


# ---- two pipeline stages ---------------------------------------------------------------------------------------------


def on_stage(setting: str, shifted: bool) -> list[Any]:
    os.environ["MOE_REPLAY_GUARD"] = setting
    ms_swift_cpu.on_cpu()
    from moe_replay.integrations.ms_swift_megatron import guards

    trainer = make_trainer(ms_swift_cpu.model_of_six_layers(stages=2), mode="R2")
    batches = scored(trainer, samples_of(Rollout(), None))
    if shifted and dist.get_rank() == 1:
        for batch in batches:
            batch["routed_experts"] = batch["routed_experts"].roll(1, 2)
    metrics = update(trainer, batches)
    return [metrics, list(guards.current.controller.layers) if guards.current.controller else []]


@pytest.mark.distributed
@pytest.mark.parametrize("setting", ["check", "fix"])
def test_two_pipeline_stages_record_and_replay(setting) -> None:
    first, last = run_ranks(2, on_stage, setting, False)
    assert first[0] == last[0]  # reduced over all ranks
    assert last[0]["moe_replay/agreement"] == last[0]["moe_replay/aligned"] == last[0]["moe_replay/covered"] == 1
    assert [*first[1], *last[1]] == ([1, 2, 3, 4, 5] if setting == "fix" else [])


@pytest.mark.distributed
def test_a_wrong_slice_of_a_later_stage_stops_the_run() -> None:
    with pytest.raises(Exception, match="ms-swift replays routes of other tokens or layers"):
        run_ranks(2, on_stage, "check", True)


# ---- loading ---------------------------------------------------------------------------------------------------------


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    variables = os.environ | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=300)


ALONE = """
import sys, torch
import moe_replay.integrations.ms_swift
names = ("swift", "megatron", "vllm", "transformer_engine", "mcore_bridge")
print([name for name in names if name in sys.modules], torch.cuda.is_initialized())
"""


def test_advantages_of_turns_that_are_samples_are_ours() -> None:
    """`algorithm.advantage_turns = "episode"` is what ms-swift does with several outputs of one request."""
    from swift.rl_core.advantage import compute_advantages_dynamic

    rewards, samples = [1.0, 0.0, 0.25], [2, 1, 3]
    requests = [f"request {number}" for number, count in enumerate(samples) for _ in range(count)]
    theirs, _ = compute_advantages_dynamic(
        torch.tensor([[reward] for reward, count in zip(rewards, samples, strict=True) for _ in range(count)]),
        *(torch.ones(1), ["prompt"] * len(requests), requests),
    )
    (of_episodes,) = std_normalized(np.array([rewards]))
    ours = [
        advantage * factor
        for advantage, count in zip(of_episodes, samples, strict=True)
        for factor in turn_factors(count, "episode", 1.0)
    ]
    assert theirs.tolist() == pytest.approx(ours, abs=1e-6)


def test_nothing_is_imported_before_ms_swift_does_it() -> None:
    done = in_a_process(ALONE)
    assert done.stdout.splitlines()[-1] == "[] False", done.stderr


OTHER_VERSION = """
from importlib import metadata
metadata.version = lambda name: "9.9.9"
import moe_replay.integrations.ms_swift
"""


def test_another_version_is_refused_when_the_module_is_imported() -> None:
    assert "expected ms-swift 4.5.0, 4.5.1, 4.5.2, 4.5.3, 4.6.0, found 9.9.9" in in_a_process(OTHER_VERSION).stderr
    assert in_a_process(OTHER_VERSION, MOE_REPLAY_ALLOW_VERSION="9.9.9").returncode == 0


def test_another_signature_is_refused(model, monkeypatch) -> None:
    from swift.megatron.trainers import grpo_trainer

    from moe_replay.integrations import ms_swift_megatron

    name = "MegatronGRPOTrainer.forward_step"
    monkeypatch.setitem(ms_swift_megatron.PARAMETERS, name, ("self", "batch"))
    with pytest.raises(HostError, match=r"forward_step of ms-swift .*expected \(self, batch\), found \(self, data_it"):
        ms_swift_megatron.install(grpo_trainer)
