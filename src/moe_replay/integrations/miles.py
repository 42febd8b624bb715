"""A guard for miles' own replay of rollout routes on Megatron, by the same three hooks as slime's:

    --custom-megatron-init-path moe_replay.integrations.miles.init
    --custom-megatron-before-log-prob-hook-path moe_replay.integrations.miles.before_log_prob
    --custom-megatron-before-train-step-hook-path moe_replay.integrations.miles.before_train_step

miles packs inside the function that fills its queues, and hands what it has packed to another one, which is seen here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_replay.integrations.queue_guard import OneMicroBatch, QueueGuard, before_log_prob, before_train_step, install

__all__ = ["before_log_prob", "before_train_step", "init"]

ROUTES = "rollout_routed_experts"


def init(args: Any) -> None:
    """Guard the filling of queues in this process; for --custom-megatron-init-path."""
    install(MilesGuard, args)


class MilesGuard(QueueGuard):
    """The guard of a rank of miles."""

    trainer = "miles"
    actor = "miles.backends.megatron_utils.actor"
    function = "fill_replay_data"
    parameters = (
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

    def queue_type(self) -> type:
        from miles.utils.replay_base import Replay

        return Replay

    def run(self, **kwargs: Any) -> None:
        if kwargs["data_key"] != ROUTES:  # of sparse attention
            self.packing(**kwargs)
            return
        iterator, register = kwargs["data_iterator"][0], kwargs["register_replay_list_func"]
        iterator.reset()
        batches = [
            iterator.get_next([ROUTES, "tokens", "max_seq_lens"]) for _ in range(sum(kwargs["num_microbatches"]))
        ]
        packed: list[Tensor] = []

        def register_and_keep(replay_list: list[Any], replay_data: Tensor, **settings: Any) -> None:
            packed.append(replay_data)
            register(replay_list, replay_data, **settings)

        self.expected.clear()
        self.packing(**kwargs | {"register_replay_list_func": register_and_keep})
        for batch, routes in zip(batches, packed, strict=True):
            self.check_packed(batch[ROUTES], batch["tokens"], routes, max_seq_lens=batch["max_seq_lens"])

    def pack_tokens(self, iterator: OneMicroBatch, keys: list[str]) -> dict[str, Any]:
        from miles.backends.training_utils.data import get_batch

        args = self.args
        return get_batch(iterator, keys, args.data_pad_size_multiplier, args.qkv_format, allgather_cp=args.allgather_cp)
