"""The guard by miles' three hooks, with miles' own packing, iterator and queues, on a CPU.

miles is not on the package index: put a checkout (github.com/radixark/miles; 31f1ca96 of August 2026 was run) on the
path. Its actor stands in by name, with miles' own function; what would be pinned for a GPU is not. Megatron as miles
changes it is not there: its queues are put on the routers here, as that does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("miles.utils.replay_base", reason="needs a checkout of miles on the path")
pytest.importorskip("megatron.core")

from moe_replay.errors import AlignmentError, MoeReplayError
from moe_replay.integrations import miles as hooks
from moe_replay.integrations.hosts import HostError
from moe_replay.integrations.queue_guard import GUARD
from tests.plugins.absent import import_without

LAYERS, EXPERTS, TOP_K = 4, 8, 2
FREQUENCY = [0, 1, 1, 1]
LENGTHS = (5, 7, 9, 6)
ABSENT = ("sglang", "sglang_router", "ray", "megatron.training", "megatron.bridge", "polars")


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


def rollout() -> dict[str, Any]:
    torch.manual_seed(0)
    chosen = [torch.rand(n - 1, LAYERS, EXPERTS).topk(TOP_K, dim=-1).indices.int() for n in LENGTHS]
    for routes in chosen:
        routes[:, 0] = 0
    return {
        "tokens": [torch.randint(1, 90, (length,)) for length in LENGTHS],
        "rollout_routed_experts": chosen,
        "max_seq_lens": [12] * len(LENGTHS),
    }


class Run:
    """One rank of miles' trainer, as far as routes go: two micro-batches of two samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.transformer_config import TransformerConfig

        from moe_replay.megatron import cpu

        self.data = import_without("miles.backends.training_utils.data", ABSENT)
        from miles.backends.training_utils import parallel, replay_data
        from miles.utils import replay_base
        from miles.utils.ft_utils.process_group_utils import GroupInfo

        alone = GroupInfo(0, 1, None)
        groups = dict.fromkeys(("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp"), alone)
        parallel.set_parallel_state(parallel.ParallelState(**groups))
        unpinned = torch.empty_like
        monkeypatch.setattr(
            torch, "empty_like", lambda *given, pin_memory=False, **options: unpinned(*given, **options)
        )
        self.actor = ModuleType(hooks.ACTOR)
        vars(self.actor)[hooks.FILLING] = replay_data.fill_replay_data
        monkeypatch.setitem(sys.modules, hooks.ACTOR, self.actor)
        model_parallel_cuda_manual_seed(0)
        sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32}
        experts = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_layer_freq": FREQUENCY}
        config = TransformerConfig(**cpu.SETTINGS, **sizes, **experts, add_bias_linear=False)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        self.model = GPTModel(config, spec, vocab_size=96, max_sequence_length=64)
        self.manager = replay_base.RoutingReplayManager()
        self.manager.enabled = True
        for module in self.model.modules():
            if isinstance(module, TopKRouter):
                self.manager.register_to_module(module, "routing_replay")
        self.args = SimpleNamespace(
            use_rollout_routing_replay=True,
            num_layers=LAYERS,
            num_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_layer_freq=FREQUENCY,
            data_pad_size_multiplier=8,
            sequence_parallel=False,
            allgather_cp=False,
            qkv_format="thd",
        )

    def fill(self, given: dict[str, Any]) -> None:
        from miles.backends.megatron_utils.replay_utils import register_replay_list_moe

        vars(self.actor)[hooks.FILLING](
            args=self.args,
            models=[SimpleNamespace(module=self.model)],
            data_iterator=[self.data.DataIterator(given, micro_batch_size=2)],
            num_microbatches=[2],
            rollout_data=given,
            data_key="rollout_routed_experts",
            replay_list=self.manager.replays,
            register_replay_list_func=register_replay_list_moe,
            if_sp_region=True,
            indices_are_token_positions=False,
        )

    def step(self) -> None:
        hooks.before_log_prob(self.args, [self.model], "")
        hooks.before_train_step(self.args, 0, 0, [self.model], None, None)


@pytest.fixture
def run(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_healthy_rollout_passes_and_so_does_the_next(run: Run) -> None:
    hooks.init(run.args)
    for _ in range(2):
        run.fill(rollout())
        assert len(vars(run.args)[GUARD].expected) == 2
        run.step()
        run.manager.clear_all()


def test_padded_routes_that_are_batch_first_stop_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """miles flattens (B, S) sample by sample where Megatron-Core flattens token by token."""
    run.args.qkv_format = "bshd"
    hooks.init(run.args)
    with pytest.raises(AlignmentError, match="miles replays routes of other tokens or layers, micro-batch 0"):
        run.fill(rollout())
    assert "moe-replay stops this run: miles replays routes" in capsys.readouterr().err


def test_rows_that_are_packed_late_stop_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles.backends.training_utils import replay_data

    cut = replay_data.slice_with_cp

    @functools.wraps(cut)
    def late(rows: torch.Tensor, *given: Any) -> torch.Tensor:
        return cut(rows, *given).roll(1, 0)

    monkeypatch.setattr(replay_data, "slice_with_cp", late)
    hooks.init(run.args)
    with pytest.raises(AlignmentError, match="miles replays routes of other tokens or layers, micro-batch 0"):
        run.fill(rollout())


def test_a_router_with_the_routes_of_another_layer_stops_the_run(run: Run) -> None:
    hooks.init(run.args)
    run.fill(rollout())
    (_, first), (_, second), *_ = vars(run.args)[GUARD].routers([run.model])
    first.top_indices_list, second.top_indices_list = second.top_indices_list, first.top_indices_list
    with pytest.raises(AlignmentError, match=r"routes of other tokens or layers.*layer 1"):
        run.step()


def test_a_lost_micro_batch_and_zero_routes_stop_the_run(run: Run) -> None:
    hooks.init(run.args)
    run.fill(rollout())
    run.manager.replays[0].top_indices_list.pop()
    with pytest.raises(AlignmentError, match="another number of micro-batches"):
        run.step()
    zero = rollout()
    zero["rollout_routed_experts"][1] *= 0
    with pytest.raises(MoeReplayError, match="zero"):
        run.fill(zero)


def test_another_filling_is_refused_and_runs_without_replay_are_left_alone(run: Run) -> None:
    vars(run.actor)[hooks.FILLING] = lambda routes: routes
    with pytest.raises(HostError, match="fills its queues in another way"):
        hooks.init(run.args)
    run.args.use_rollout_routing_replay = False
    hooks.init(run.args)
    assert GUARD not in vars(run.args)
