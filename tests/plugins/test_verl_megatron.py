"""The guard in the Megatron engine of the installed verl, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_replay as mr

pytest.importorskip("verl", reason="runs in the environment of `make test-plugins`")
pytest.importorskip("megatron.core")

from moe_replay.integrations.hosts import HostError
from tests.distributed.harness import run_ranks
from tests.plugins import verl_cpu, verl_megatron_cpu
from tests.plugins.verl_cpu import Rollout
from tests.plugins.verl_megatron_cpu import batch, forward, make_engine, update

pytestmark = pytest.mark.skipif(version("verl").startswith("0.8"), reason="the guard begins with verl 0.9.0")

CAN_FIX = not version("verl").startswith("0.9.0")
GUARDS = ["check", "fix"] if CAN_FIX else ["check"]
only_where_fixed = pytest.mark.skipif(not CAN_FIX, reason="this verl cannot leave its own replay off")

FAULTS = {
    "token_late": "one token late",
    "layer_late": "one layer late from layer 2 on",
    "dense_layer_routed": "routes in a layer that has no router",
    "zero_rows": "left rows of the capture unwritten",
    "all_zero": "all-zero capture",
}


@pytest.fixture(scope="module")
def model() -> Any:
    verl_cpu.open_process_group()
    verl_megatron_cpu.open_megatron()
    return verl_megatron_cpu.model_and_config()


@pytest.fixture(scope="module")
def rollout(model) -> Rollout:
    return verl_megatron_cpu.with_routes_of(model[0], Rollout(), noise=0.5)


@pytest.fixture(params=GUARDS)
def engine_of(model, request, monkeypatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.setenv("MOE_REPLAY_GUARD", request.param)
    engines: list[Any] = []

    def made(mode: str) -> Any:
        engines.append(make_engine(*model, mode))
        return engines[-1]

    yield made
    for engine in engines:
        if engine._guard is not None and engine._guard.controller is not None:
            engine._guard.controller.detach()


@pytest.fixture
def engine(engine_of) -> Any:
    return engine_of("R3")


def test_healthy_routes_pass_and_are_reported(engine, rollout) -> None:
    forward(engine, batch(rollout, rollout.routed_experts))
    metrics = update(engine, batch(rollout, rollout.routed_experts))["metrics"]
    assert metrics["moe_replay/aligned"] == [1]
    assert 0.1 < metrics["moe_replay/agreement"][0] < 0.9
    assert metrics["moe_replay/covered"][0] > 0.9


@only_where_fixed
def test_both_replay_the_same(model, rollout, monkeypatch) -> None:
    gradients = {}
    for guard in ("check", "fix"):
        monkeypatch.setenv("MOE_REPLAY_GUARD", guard)
        made = make_engine(*model)
        update(made, batch(rollout, rollout.routed_experts))
        gradients[guard] = {name: p.grad.clone() for name, p in model[0].named_parameters() if p.grad is not None}
        if made._guard.controller is not None:
            made._guard.controller.detach()
    assert gradients["check"].keys() == gradients["fix"].keys()
    for name, gradient in gradients["check"].items():
        torch.testing.assert_close(gradients["fix"][name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_batch_stops_the_run_by_name(engine, rollout, fault) -> None:
    with pytest.raises(mr.MoeReplayError, match=FAULTS[fault]):
        update(engine, batch(rollout, getattr(verl_cpu, fault)(rollout)))


@pytest.mark.parametrize(
    ("mode", "run", "remedy"),
    [
        ("R3", forward, "enable_rollout_routing_replay=True"),
        ("R3", update, "enable_rollout_routing_replay=True"),
        ("R2", update, "bypass_mode=False"),
    ],
)
def test_a_batch_without_routes_is_refused(engine_of, rollout, mode, run, remedy) -> None:
    with pytest.raises(HostError, match=rf"mode is {mode}, and the batch has no routes.*{remedy}"):
        run(engine_of(mode), batch(rollout, None))


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_the_actor_without_its_adapters_routes_natively(engine_of, rollout, mode) -> None:
    from verl.utils import tensordict_utils

    engine = engine_of(mode)
    engine.peft_cls = SimpleNamespace(disable_adapter=lambda module: nullcontext())
    routes = rollout.routed_experts if mode == "R3" else None

    def score(**settings: Any) -> dict[str, Any]:
        data = batch(rollout, routes)
        tensordict_utils.assign_non_tensor(data, **settings)
        return forward(engine, data)["model_output"]

    native = score(enable_routing_replay=False)["log_probs"].values()
    for _ in range(2):  # before the first pass that replays or records, and after it
        with engine.disable_adapter():
            reference = score()
        assert "routed_experts" not in reference
        torch.testing.assert_close(reference["log_probs"].values(), native, atol=0, rtol=0)
        actor = score()
        assert ("routed_experts" in actor) == (mode == "R2")
        assert torch.equal(actor["log_probs"].values(), native) == (mode == "R2")


@only_where_fixed
def test_fix_replays_where_verl_pads_to_a_length(model, rollout, monkeypatch) -> None:
    monkeypatch.setenv("MOE_REPLAY_GUARD", "fix")
    found = []
    for bucket in (None, 64):
        made = make_engine(*model)
        made.engine_config.pad_to_length, made.engine_config.pad_to_length_bucket = bucket is not None, bucket
        log_probs = forward(made, batch(rollout, rollout.routed_experts))["model_output"]["log_probs"].unbind()
        made._guard.controller.detach()
        found.append(torch.cat([sample[:-1] for sample in log_probs]))  # the last token predicts padding
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_swapped_samples_stop_the_run(engine, model) -> None:
    equal = verl_megatron_cpu.with_routes_of(model[0], Rollout(equal=True), noise=0.5)
    with pytest.raises(mr.AlignmentError, match=r"another sample|other tokens|other sequences|better than chance"):
        for _ in range(8):
            update(engine, batch(equal, verl_cpu.samples_swapped(equal)))


@pytest.fixture
def checking(model, monkeypatch) -> Any:
    monkeypatch.setenv("MOE_REPLAY_GUARD", "check")
    return make_engine(*model)


def test_a_row_that_verl_packs_late_stops_the_run(checking, rollout, monkeypatch, capsys) -> None:
    from verl.utils.megatron import router_replay_utils

    packing = router_replay_utils.preprocess_thd_engine

    def late(values: torch.Tensor, **settings: Any) -> tuple:
        packed, *rest = packing(values, **settings)
        return (packed.roll(1, 1) if values.dim() == 4 else packed, *rest)

    monkeypatch.setattr(router_replay_utils, "preprocess_thd_engine", late)
    with pytest.raises(mr.AlignmentError, match="routes of other tokens or layers"):
        update(checking, batch(rollout, rollout.routed_experts))
    assert "moe-replay stops this run: verl replays routes of other tokens" in capsys.readouterr().err


def test_a_layer_that_verl_confuses_stops_the_run(checking, rollout, monkeypatch) -> None:
    from verl.workers.engine.megatron import transformer_impl

    set_data = transformer_impl.set_router_replay_data

    def next_layer(routed_experts: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        rows = [torch.cat([part[:, 1:], part[:, -1:]], 1) for part in routed_experts.unbind()]
        set_data(torch.nested.as_nested_tensor(rows, layout=torch.jagged), *args, **kwargs)

    monkeypatch.setattr(transformer_impl, "set_router_replay_data", next_layer)
    with pytest.raises(mr.AlignmentError, match=r"other tokens or layers.*wrong rows by layer"):
        update(checking, batch(rollout, rollout.routed_experts))


def test_padded_micro_batches_are_transposed_by_verl_and_fixed_by_us(model, monkeypatch) -> None:
    """verl 0.9.0 and 0.9.1 with use_remove_padding=False: rows of routes are batch-major, those of routers are not."""
    equal = verl_megatron_cpu.with_routes_of(model[0], Rollout(equal=True))
    monkeypatch.setenv("MOE_REPLAY_GUARD", "check")
    with pytest.raises(mr.AlignmentError, match="routes of other tokens or layers"):
        update(make_engine(*model, padded=True), batch(equal, equal.routed_experts))
    if not CAN_FIX:
        return
    monkeypatch.setenv("MOE_REPLAY_GUARD", "fix")
    fixed = make_engine(*model, padded=True)
    metrics = update(fixed, batch(equal, equal.routed_experts))["metrics"]
    fixed._guard.controller.detach()
    assert metrics["moe_replay/aligned"] == [1]
    assert metrics["moe_replay/agreement"][0] > 0.99


@pytest.mark.skipif(CAN_FIX, reason="verl 0.9.0 only")
def test_fix_is_refused_where_verl_cannot_leave_its_replay_off(model, rollout, monkeypatch) -> None:
    monkeypatch.setenv("MOE_REPLAY_GUARD", "fix")
    with pytest.raises(HostError, match="cannot leave its own replay off"):
        update(make_engine(*model), batch(rollout, rollout.routed_experts))


# ---- two pipeline stages ---------------------------------------------------------------------------------------------


def on_stage(guard: str) -> list[Any]:
    import os

    os.environ["MOE_REPLAY_GUARD"] = guard
    verl_megatron_cpu.open_megatron()
    model, config = verl_megatron_cpu.model_and_config(stages=2)
    engine = make_engine(model, config, "R2")
    rollout = Rollout()
    output = forward(engine, batch(rollout, None))
    lengths = rollout.mask.sum(1).tolist()
    rows = torch.zeros(sum(lengths), LAYERS_THAT_ROUTE, verl_cpu.TOP_K, dtype=torch.int32)
    if dist.get_rank() == 1:
        rows = output["model_output"]["routed_experts"].values().int().contiguous()
    dist.broadcast(rows, 1)  # as verl's driver hands them out
    data = batch(rollout, None)
    data["routed_experts"] = torch.nested.as_nested_tensor(list(rows.split(lengths)), layout=torch.jagged)
    done = update(engine, data)
    metrics = {name: v[0] for name, v in done["metrics"].items() if name.startswith("moe_replay/")} if done else {}
    return [rows.shape[1], metrics, list(engine._guard.controller.layers) if engine._guard.controller else []]


LAYERS_THAT_ROUTE = verl_megatron_cpu.LAYERS - 1


@pytest.mark.distributed
@pytest.mark.parametrize("guard", GUARDS)
def test_two_pipeline_stages_record_and_replay(guard) -> None:
    first, last = run_ranks(2, on_stage, guard)
    assert first[0] == last[0] == LAYERS_THAT_ROUTE
    assert first[1] == {}  # only the last stage is heard
    assert last[1]["moe_replay/agreement"] == last[1]["moe_replay/aligned"] == 1
    assert [*first[2], *last[2]] == ([1, 2, 3, 4, 5] if guard == "fix" else [])
