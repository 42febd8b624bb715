"""slime and miles on a CPU: their own packing of routes and tokens, iterators and queues, on a small Megatron model.

Neither is on the package index as a package: put a checkout on the path (github.com/THUDM/slime, 624b824, and
github.com/radixark/miles, 31f1ca96, both of August 2026, were run). Their rollout engines stand in by name; what would
be pinned for a GPU is not. Megatron as they change it is not there: queues are put on the routers here, as that does.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from moe_replay.integrations import miles, slime
from tests.plugins.absent import import_without

LAYERS, EXPERTS, TOP_K = 4, 8, 2
FREQUENCY = [0, 1, 1, 1]
LENGTHS = (5, 7, 9, 6)  # two micro-batches of two samples
ABSENT = ("sglang", "sglang_router", "torch_memory_saver", "ray", "megatron.training", "megatron.bridge", "polars")


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


class Rank(ABC):
    """One rank of a trainer, as far as routes go.

    actor    its module in which the guard takes the place of a function
    packs    its module and function that cut routes into rows
    """

    hooks: ClassVar[ModuleType]
    guard: ClassVar[Any]
    actor: ModuleType
    packs: tuple[ModuleType, str]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.transformer_config import TransformerConfig

        from moe_replay.megatron import cpu

        self.load(monkeypatch)
        unpinned = torch.empty_like
        monkeypatch.setattr(
            torch, "empty_like", lambda *given, pin_memory=False, **options: unpinned(*given, **options)
        )
        model_parallel_cuda_manual_seed(0)
        sizes = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32}
        experts = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_layer_freq": FREQUENCY}
        config = TransformerConfig(**cpu.SETTINGS, **sizes, **experts, add_bias_linear=False)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        self.model = GPTModel(config, spec, vocab_size=96, max_sequence_length=64)
        for module in self.model.modules():
            if isinstance(module, TopKRouter):
                self.add_queue(module)
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

    @abstractmethod
    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Import the trainer."""

    @abstractmethod
    def add_queue(self, router: Any) -> None:
        """Put a queue on a router."""

    @abstractmethod
    def fill(self, given: dict[str, Any]) -> None:
        """Fill the queues with the routes of a rollout."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the queues, as after a step."""

    def step(self) -> None:
        self.hooks.before_log_prob(self.args, [self.model], "")
        self.hooks.before_train_step(self.args, 0, 0, [self.model], None, None)


class SlimeIterator:
    """slime's iterator over micro-batches."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.batches = [{key: values[first : first + 2] for key, values in given.items()} for first in (0, 2)]
        self.place = 0

    def reset(self) -> None:
        self.place = 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        self.place += 1
        return {key: self.batches[self.place - 1][key] for key in keys}


class Slime(Rank):
    hooks, guard = slime, slime.SlimeGuard

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actor = import_without(self.guard.actor, ABSENT)
        self.packs = self.actor, self.guard.function
        from slime.backends.megatron_utils import data
        from slime.utils import routing_replay

        monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
        monkeypatch.setattr(data, "accelerator", SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu"))
        monkeypatch.setattr(self.actor, self.guard.function, vars(self.actor)[self.guard.function])
        monkeypatch.setattr(routing_replay.RoutingReplay, "all_routing_replays", [])

    def add_queue(self, router: Any) -> None:
        from slime.utils.routing_replay import register_routing_replay

        register_routing_replay(router)

    def clear(self) -> None:
        from slime.utils.routing_replay import RoutingReplay

        RoutingReplay.clear_all()

    def fill(self, given: dict[str, Any]) -> None:
        trainer = SimpleNamespace(args=self.args, model=[SimpleNamespace(module=self.model)])
        filled = {"rollout_routed_experts": None}
        self.actor.MegatronTrainRayActor.fill_routing_replay(trainer, [SlimeIterator(given)], [2], filled)


class Miles(Rank):
    hooks, guard = miles, miles.MilesGuard

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = import_without("miles.backends.training_utils.data", ABSENT)
        from miles.backends.training_utils import parallel, replay_data
        from miles.utils import replay_base
        from miles.utils.ft_utils.process_group_utils import GroupInfo

        alone = GroupInfo(0, 1, None)
        groups = dict.fromkeys(("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp"), alone)
        parallel.set_parallel_state(parallel.ParallelState(**groups))
        self.actor = ModuleType(self.guard.actor)  # a stand-in, with miles' own function
        vars(self.actor)[self.guard.function] = replay_data.fill_replay_data
        monkeypatch.setitem(sys.modules, self.guard.actor, self.actor)
        self.packs = replay_data, "slice_with_cp"
        self.manager = replay_base.RoutingReplayManager()
        self.manager.enabled = True

    def add_queue(self, router: Any) -> None:
        self.manager.register_to_module(router, "routing_replay")

    def clear(self) -> None:
        self.manager.clear_all()

    def fill(self, given: dict[str, Any]) -> None:
        from miles.backends.megatron_utils.replay_utils import register_replay_list_moe

        vars(self.actor)[self.guard.function](
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
