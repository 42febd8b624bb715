"""The guard by the three hooks of slime and miles, with their own packing and queues, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from moe_replay.errors import AlignmentError, MoeReplayError
from moe_replay.integrations.hosts import HostError
from moe_replay.integrations.queue_guard import GUARD
from tests.plugins.queue_cpu import Miles, Rank, Slime, rollout


def trainer(rank: type[Rank]) -> Any:
    name = rank.guard.trainer
    absent = pytest.mark.skipif(find_spec(name) is None, reason=f"needs a checkout of {name} on the path")
    return pytest.param(rank, id=name, marks=absent)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    from megatron.core import parallel_state

    from moe_replay.megatron import cpu

    with cpu.enabled():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(params=[trainer(Slime), trainer(Miles)])
def run(request: pytest.FixtureRequest, megatron: None, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return request.param(monkeypatch)


def test_a_healthy_rollout_passes_and_so_does_the_next(run: Rank) -> None:
    run.hooks.init(run.args)
    for _ in range(2):
        run.fill(rollout())
        assert len(vars(run.args)[GUARD].expected) == 2
        run.step()
        run.clear()
    run.hooks.before_log_prob(run.args, [run.model], "ref_")  # routes natively


def test_rows_that_are_packed_late_stop_the_run(
    run: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, name = run.packs
    pack = vars(module)[name]

    @functools.wraps(pack)
    def late(*given: Any, **settings: Any) -> torch.Tensor:
        return pack(*given, **settings).roll(1, 0)

    monkeypatch.setattr(module, name, late)
    run.hooks.init(run.args)
    named = f"{run.guard.trainer} replays routes of other tokens or layers"
    with pytest.raises(AlignmentError, match=f"{named}, micro-batch 0"):
        run.fill(rollout())
    assert f"moe-replay stops this run: {named}" in capsys.readouterr().err


@pytest.mark.parametrize("run", [trainer(Miles)], indirect=True)
def test_padded_routes_that_are_batch_first_stop_the_run(run: Rank) -> None:
    """miles flattens (B, S) sample by sample where Megatron-Core flattens token by token."""
    run.args.qkv_format = "bshd"
    run.hooks.init(run.args)
    with pytest.raises(AlignmentError, match="miles replays routes of other tokens or layers, micro-batch 0"):
        run.fill(rollout())


def test_a_router_with_the_routes_of_another_layer_stops_the_run(run: Rank) -> None:
    run.hooks.init(run.args)
    run.fill(rollout())
    (_, first), (_, second), *_ = vars(run.args)[GUARD].routers([run.model])
    first.top_indices_list, second.top_indices_list = second.top_indices_list, first.top_indices_list
    with pytest.raises(AlignmentError, match=r"routes of other tokens or layers.*layer 1"):
        run.step()


def test_a_lost_micro_batch_and_zero_routes_stop_the_run(run: Rank) -> None:
    run.hooks.init(run.args)
    run.fill(rollout())
    next(vars(run.args)[GUARD].routers([run.model]))[1].top_indices_list.pop()
    with pytest.raises(AlignmentError, match="another number of micro-batches"):
        run.step()
    zero = rollout()
    zero["rollout_routed_experts"][1] *= 0
    with pytest.raises(MoeReplayError, match="zero"):
        run.fill(zero)


def test_another_packing_is_refused_and_runs_without_replay_are_left_alone(run: Rank) -> None:
    vars(run.actor)[run.guard.function] = lambda routes: routes
    with pytest.raises(HostError, match=f"this {run.guard.trainer} packs routes in another way"):
        run.hooks.init(run.args)
    run.args.use_rollout_routing_replay = False
    run.hooks.init(run.args)
    assert GUARD not in vars(run.args)
