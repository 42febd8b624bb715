"""A guard for slime's own replay of rollout routes, by its three hooks for Megatron:

--custom-megatron-init-path moe_replay.integrations.slime.init
--custom-megatron-before-log-prob-hook-path moe_replay.integrations.slime.before_log_prob
--custom-megatron-before-train-step-hook-path moe_replay.integrations.slime.before_train_step
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_replay.integrations.hosts import HostError, ReplaySettings
from moe_replay.integrations.queue_guard import (
    GUARD,
    OneMicroBatch,
    QueueGuard,
    before_log_prob,
    before_train_step,
    indexed,
    of_this_rank,
)

__all__ = ["before_log_prob", "before_train_step", "init"]

ACTOR = "slime.backends.megatron_utils.actor"
PACKING = "prepare_routed_experts_for_routing_replay"
PARAMETERS = (
    "rollout_routed_experts",
    "tokens",
    "num_experts",
    "data_pad_size_multiplier",
    "sequence_parallel",
    "allgather_cp",
)


def init(args: Any) -> None:
    """Guard the packing of routes in this process; for --custom-megatron-init-path."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return  # without it the trainer replays what it has recorded itself, in its own order
    actor = sys.modules.get(ACTOR)
    packing = None if actor is None else vars(actor).get(PACKING)
    found = None if packing is None else tuple(inspect.signature(packing).parameters)
    if actor is None or packing is None or found != PARAMETERS:
        raise HostError(
            f"this slime packs routes in another way: no {ACTOR}.{PACKING} as it was in August 2026",
            expected=f"({', '.join(PARAMETERS)})",
            found="none" if found is None else f"({', '.join(found)})",
            remedy="Leave the hooks of moe-replay out, or use that slime",
        )
    from slime.utils.routing_replay import RoutingReplay

    guard = SlimeGuard("slime", args, RoutingReplay, ReplaySettings.read({"mode": "R3"}), packing=packing)
    vars(actor)[PACKING] = guard.pack
    vars(args)[GUARD] = guard


@dataclass(slots=True)
class SlimeGuard(QueueGuard):
    """The guard of a rank of slime."""

    packing: Callable[..., Tensor] = field(kw_only=True)

    def pack(self, rollout_routed_experts: Sequence[Tensor], tokens: Sequence[Tensor], **settings: Any) -> Tensor:
        """Pack the routes of a micro-batch as slime does; raise unless they are those of the packed tokens."""
        if not any(replay.top_indices_list for replay in self.queue.all_routing_replays):
            self.expected.clear()  # of the rollout before
        packed = self.packing(rollout_routed_experts, tokens, **settings)
        self.check_packed(rollout_routed_experts, tokens, packed, _index(tokens, **settings))
        return packed


def _index(tokens: Sequence[Tensor], **settings: Any) -> Tensor:
    """(R,) index of the token in each row of this rank, -1 in padding, by slime's own packing of tokens."""
    from slime.backends.megatron_utils.data import get_batch

    batch = indexed(tokens)
    packed = get_batch(
        OneMicroBatch(batch), list(batch), settings["data_pad_size_multiplier"], settings["allgather_cp"]
    )
    index = packed["tokens"][0].cpu() - 1
    return of_this_rank(index) if settings["sequence_parallel"] else index
