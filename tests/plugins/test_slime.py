"""The guard by slime's three hooks, with slime's own packing and queues, on a CPU.

slime is not on the package index as a package: put a checkout (github.com/THUDM/slime; 624b824 of August 2026 was run)
on the path. Its rollout engine is not needed and stands in by name; what would be pinned for a GPU is not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("slime.utils.routing_replay", reason="needs a checkout of slime on the path")
pytest.importorskip("megatron.core")

from moe_replay.errors import AlignmentError, MoeReplayError
from moe_replay.integrations import slime as hooks
from moe_replay.integrations.hosts import HostError
from moe_replay.integrations.queue_guard import GUARD
from tests.plugins.absent import import_without

LAYERS, EXPERTS, TOP_K = 4, 8, 2
FREQUENCY = [0, 1, 1, 1]
LENGTHS = ((5, 7), (9,))


ABSENT = ("sglang", "torch_memory_saver", "sglang_router", "ray", "megatron.training", "megatron.bridge")


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


class Data:
    """slime's iterator over micro-batches."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.batches, self.place = batches, 0

    def reset(self) -> None:
        self.place = 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        self.place += 1
        return {key: self.batches[self.place - 1][key] for key in keys}


def routes(length: int) -> torch.Tensor:
    chosen = torch.rand(length - 1, LAYERS, EXPERTS).topk(TOP_K, dim=-1).indices.int()
    chosen[:, 0] = 0
    return chosen


def batches() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [
        {
            "tokens": [torch.randint(1, 90, (length,)) for length in lengths],
            "rollout_routed_experts": [routes(length) for length in lengths],
        }
        for lengths in LENGTHS
    ]


class Run:
    """One rank of slime's trainer, as far as routes go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.transformer_config import TransformerConfig

        from moe_replay.megatron import cpu

        self.actor = import_without(hooks.ACTOR, ABSENT)
        from slime.backends.megatron_utils import data
        from slime.utils import routing_replay

        monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
        monkeypatch.setattr(data, "accelerator", SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu"))
        unpinned = torch.empty_like
        monkeypatch.setattr(
            torch, "empty_like", lambda *given, pin_memory=False, **options: unpinned(*given, **options)
        )
        monkeypatch.setattr(self.actor, hooks.PACKING, vars(self.actor)[hooks.PACKING])
        monkeypatch.setattr(routing_replay.RoutingReplay, "all_routing_replays", [])
        model_parallel_cuda_manual_seed(0)
        sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32}
        experts = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_layer_freq": FREQUENCY}
        config = TransformerConfig(**cpu.SETTINGS, **sizes, **experts, add_bias_linear=False)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        self.model = GPTModel(config, spec, vocab_size=96, max_sequence_length=64)
        for module in self.model.modules():
            if isinstance(module, TopKRouter):
                routing_replay.register_routing_replay(module)  # slime's patch of Megatron calls it in the constructor
        self.args = SimpleNamespace(
            use_rollout_routing_replay=True,
            num_layers=LAYERS,
            num_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_layer_freq=FREQUENCY,
            data_pad_size_multiplier=8,
            sequence_parallel=False,
            allgather_cp=False,
        )

    def fill(self, given: list[dict[str, Any]]) -> None:
        chunk = SimpleNamespace(module=self.model)
        trainer = SimpleNamespace(args=self.args, model=[chunk])
        rollout = {"rollout_routed_experts": None}
        self.actor.MegatronTrainRayActor.fill_routing_replay(trainer, [Data(given)], [len(given)], rollout)

    def step(self) -> None:
        hooks.before_log_prob(self.args, [self.model], "")
        hooks.before_train_step(self.args, 0, 0, [self.model], None, None)


@pytest.fixture
def run(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_healthy_rollout_passes_and_so_does_the_next(run: Run) -> None:
    from slime.utils.routing_replay import RoutingReplay

    hooks.init(run.args)
    for _ in range(2):
        run.fill(batches())
        assert len(vars(run.args)[GUARD].expected) == len(LENGTHS)
        run.step()
        RoutingReplay.clear_all()
    hooks.before_log_prob(run.args, [run.model], "ref_")  # routes natively


def test_rows_that_are_packed_late_stop_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = vars(run.actor)[hooks.PACKING]

    @functools.wraps(pack)
    def prepare(*given: Any, **settings: Any) -> torch.Tensor:
        return pack(*given, **settings).roll(1, 0)

    monkeypatch.setattr(run.actor, hooks.PACKING, prepare)
    hooks.init(run.args)
    with pytest.raises(AlignmentError, match="slime replays routes of other tokens or layers, micro-batch 0"):
        run.fill(batches())
    assert "moe-replay stops this run: slime replays routes" in capsys.readouterr().err


def test_a_router_with_the_routes_of_another_layer_stops_the_run(run: Run) -> None:
    hooks.init(run.args)
    run.fill(batches())
    (_, first), (_, second), *_ = vars(run.args)[GUARD].routers([run.model])
    first.top_indices_list, second.top_indices_list = second.top_indices_list, first.top_indices_list
    with pytest.raises(AlignmentError, match=r"routes of other tokens or layers.*layer 1"):
        run.step()


def test_a_lost_micro_batch_and_zero_routes_stop_the_run(run: Run) -> None:
    hooks.init(run.args)
    run.fill(batches())
    next(vars(run.args)[GUARD].routers([run.model]))[1].top_indices_list.pop()
    with pytest.raises(AlignmentError, match="another number of micro-batches"):
        run.step()
    zero = batches()
    zero[0]["rollout_routed_experts"][1] *= 0
    with pytest.raises(MoeReplayError, match="zero"):
        run.fill(zero)


def test_another_packing_is_refused_and_runs_without_replay_are_left_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.actor, hooks.PACKING, lambda routes: routes)
    with pytest.raises(HostError, match="packs routes in another way"):
        hooks.init(run.args)
    run.args.use_rollout_routing_replay = False
    hooks.init(run.args)
    assert GUARD not in vars(run.args)
