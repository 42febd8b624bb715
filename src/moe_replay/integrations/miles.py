"""A guard for miles' own replay of rollout routes on Megatron, by the same three hooks as slime's:

    --custom-megatron-init-path moe_replay.integrations.miles.init
    --custom-megatron-before-log-prob-hook-path moe_replay.integrations.miles.before_log_prob
    --custom-megatron-before-train-step-hook-path moe_replay.integrations.miles.before_train_step

miles packs inside the function that fills its queues, and hands what it has packed to another one, which is seen here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
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

ACTOR = "miles.backends.megatron_utils.actor"
FILLING = "fill_replay_data"
PARAMETERS = (
    "args",
    "models",
    "data_iterator",
    "num_microbatches",
    "rollout_data",
    "data_key",
    "replay_list",
    "register_replay_list_func",
    "if_sp_region",
    "indices_are_token_positions",
)
ROUTES = "rollout_routed_experts"


def init(args: Any) -> None:
    """Guard the filling of queues in this process; for --custom-megatron-init-path."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return  # without it the trainer replays what it has recorded itself, in its own order
    actor = sys.modules.get(ACTOR)
    filling = None if actor is None else vars(actor).get(FILLING)
    found = None if filling is None else tuple(inspect.signature(filling).parameters)
    if actor is None or filling is None or found != PARAMETERS:
        raise HostError(
            f"this miles fills its queues in another way: no {ACTOR}.{FILLING} as it was in August 2026",
            expected=f"({', '.join(PARAMETERS)})",
            found="none" if found is None else f"({', '.join(found)})",
            remedy="Leave the hooks of moe-replay out, or use that miles",
        )
    from miles.utils.replay_base import Replay

    guard = MilesGuard("miles", args, Replay, ReplaySettings.read({"mode": "R3"}), filling=filling)
    vars(actor)[FILLING] = guard.fill
    vars(args)[GUARD] = guard


@dataclass(slots=True)
class MilesGuard(QueueGuard):
    """The guard of a rank of miles."""

    filling: Callable[..., None] = field(kw_only=True)

    def fill(self, **given: Any) -> None:
        """Fill the queues as miles does; raise unless what it packs are the routes of the packed tokens."""
        if given["data_key"] != ROUTES:  # of sparse attention
            self.filling(**given)
            return
        iterator, register = given["data_iterator"][0], given["register_replay_list_func"]
        iterator.reset()
        batches = [iterator.get_next([ROUTES, "tokens", "max_seq_lens"]) for _ in range(sum(given["num_microbatches"]))]
        packed: list[Tensor] = []

        def seen(replay_list: list[Any], replay_data: Tensor, **settings: Any) -> None:
            packed.append(replay_data)
            register(replay_list, replay_data, **settings)

        self.expected.clear()
        self.filling(**given | {"register_replay_list_func": seen})
        for batch, routes in zip(batches, packed, strict=True):
            self.check_packed(batch[ROUTES], batch["tokens"], routes, self._index(batch))

    def _index(self, batch: dict[str, Any]) -> Tensor:
        """(R,) index of the token in each row of this rank, -1 in padding, by miles' own packing of tokens."""
        from miles.backends.training_utils.data import get_batch

        args, numbered = self.args, indexed(batch["tokens"]) | {"max_seq_lens": batch["max_seq_lens"]}
        packed = get_batch(
            OneMicroBatch(numbered),
            list(numbered),
            args.data_pad_size_multiplier,
            args.qkv_format,
            allgather_cp=args.allgather_cp,
        )
        index = packed["tokens"].T.flatten().cpu() - 1  # Megatron flattens (B, S) token by token
        return of_this_rank(index) if args.sequence_parallel else index
