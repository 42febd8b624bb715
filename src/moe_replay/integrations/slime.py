"""A guard for slime's own replay of rollout routes, by its three hooks for Megatron:

--custom-megatron-init-path moe_replay.integrations.slime.init
--custom-megatron-before-log-prob-hook-path moe_replay.integrations.slime.before_log_prob
--custom-megatron-before-train-step-hook-path moe_replay.integrations.slime.before_train_step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_replay.integrations.queue_guard import OneMicroBatch, QueueGuard, before_log_prob, before_train_step, install

__all__ = ["before_log_prob", "before_train_step", "init"]


def init(args: Any) -> None:
    """Guard the packing of routes in this process; for --custom-megatron-init-path."""
    install(SlimeGuard, args)


class SlimeGuard(QueueGuard):
    """The guard of a rank of slime."""

    trainer = "slime"
    actor = "slime.backends.megatron_utils.actor"
    function = "prepare_routed_experts_for_routing_replay"
    parameters = (
        "rollout_routed_experts",
        "tokens",
        "num_experts",
        "data_pad_size_multiplier",
        "sequence_parallel",
        "allgather_cp",
    )

    def queue_type(self) -> type:
        from slime.utils.routing_replay import RoutingReplay

        return RoutingReplay

    def run(self, rollout_routed_experts: Sequence[Tensor], tokens: Sequence[Tensor], **settings: Any) -> Tensor:
        if not any(replay.top_indices_list for replay in self.queue.all_routing_replays):
            self.expected.clear()  # of the rollout before
        packed = self.packing(rollout_routed_experts, tokens, **settings)
        self.check_packed(rollout_routed_experts, tokens, packed)
        return packed

    def pack_tokens(self, iterator: OneMicroBatch, keys: list[str]) -> dict[str, Any]:
        from slime.backends.megatron_utils.data import get_batch

        return get_batch(iterator, keys, self.args.data_pad_size_multiplier, self.args.allgather_cp)
