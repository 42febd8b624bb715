"""A guard for slime's own replay of rollout routes, by its three hooks for Megatron:

    --custom-megatron-init-path moe_replay.integrations.slime.init
    --custom-megatron-before-log-prob-hook-path moe_replay.integrations.slime.before_log_prob
    --custom-megatron-before-train-step-hook-path moe_replay.integrations.slime.before_train_step

slime packs the routes of a rollout by one function and its tokens by another, and queues what each router will be
given. Here an index of the tokens is sent through slime's own packing of tokens; the packed routes must be those of
these tokens, and before each pass the queue of each router must be that of its layer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.integrations.hosts import HostError, ReplaySettings
from moe_replay.interop.conventions import from_slime
from moe_replay.routes.topology import MoeLayer, MoeTopology

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
GUARD = "moe_replay_guard"
"""Attribute of slime's arguments, which every hook gets."""


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
    guard = SlimeGuard(args, packing, ReplaySettings.read({"mode": "R3"}))
    vars(actor)[PACKING] = guard.pack
    vars(args)[GUARD] = guard


def before_log_prob(args: Any, model: Sequence[Any], store_prefix: str) -> None:
    """Check what the routers will be given; for --custom-megatron-before-log-prob-hook-path."""
    guard = vars(args).get(GUARD)
    if guard is not None and not store_prefix:  # reference and teacher route natively
        guard.check_queues(model)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Check what the routers will be given; for --custom-megatron-before-train-step-hook-path."""
    guard = vars(args).get(GUARD)
    if guard is not None and step_id == 0:  # the queues hold all steps of a rollout
        guard.check_queues(model)


@dataclass(slots=True)
class SlimeGuard:
    """What the routers of this rank are to be given, one entry a micro-batch: (R, layers, K), and which rows count."""

    args: Any
    packing: Callable[..., Tensor]
    settings: ReplaySettings
    expected: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pack(self, rollout_routed_experts: Sequence[Tensor], tokens: Sequence[Tensor], **settings: Any) -> Tensor:
        """Pack the routes of a micro-batch as slime does; raise unless they are those of the packed tokens."""
        from slime.utils.routing_replay import RoutingReplay

        if not any(replay.top_indices_list for replay in RoutingReplay.all_routing_replays):
            self.expected.clear()  # of the rollout before
        packed = self.packing(rollout_routed_experts, tokens, **settings)
        topology = self._topology()
        for sample, (routes, ids) in enumerate(zip(rollout_routed_experts, tokens, strict=True)):
            from_slime(routes, ids, topology, sample=sample)  # all zero, routes in dense layers, ids out of range
        index = self._packed_index(tokens, **settings)
        ends = torch.tensor([len(ids) for ids in tokens]).cumsum(0) - 1  # the last token of a sample has no route
        covered = (index >= 0) & ~torch.isin(index, ends)
        rows = torch.cat([torch.cat([routes, routes[:1] * 0]) for routes in rollout_routed_experts]).cpu()
        wanted = rows[index.clamp_min(0)]
        with self._stopping():
            self._compare(packed.cpu(), wanted, covered, f"micro-batch {len(self.expected)}", topology.layers)
        self.expected.append((wanted, covered))
        return packed

    def check_queues(self, model: Sequence[Any]) -> None:
        """Raise unless the queue of each router has the routes of its layer, for every micro-batch."""
        with self._stopping():
            for layer, replay in _routers(model):
                queue = replay.top_indices_list
                if len(queue) != len(self.expected):
                    raise AlignmentError(
                        "a router of slime has routes of another number of micro-batches",
                        layer=layer,
                        expected=len(self.expected),
                        found=len(queue),
                    )
                for number, (given, (wanted, covered)) in enumerate(zip(queue, self.expected, strict=True)):
                    one = slice(layer, layer + 1)
                    self._compare(given.cpu()[:, None], wanted[:, one], covered, f"micro-batch {number}", (layer,))

    def _compare(self, given: Tensor, wanted: Tensor, covered: Tensor, where: str, layers: Sequence[int]) -> None:
        """Compare routes (R, layers, K); a single layer is given under its own number."""
        if given.shape != wanted.shape:
            raise AlignmentError(
                f"slime packs routes and tokens into different rows, {where}",
                expected=tuple(wanted.shape),
                found=tuple(given.shape),
            )
        wrong = (given != wanted).any(-1) & covered[:, None]
        slices = [0] if given.shape[1] == 1 else list(layers)
        if not bool(wrong[:, slices].any()):
            return
        row, place = wrong[:, slices].nonzero()[0].tolist()
        raise AlignmentError(
            f"slime replays routes of other tokens or layers, {where}, row {row}",
            layer=layers[place],
            expected=sorted(wanted[row, slices[place]].tolist()),
            found=f"{sorted(given[row, slices[place]].tolist())}; {int(wrong[:, slices].any(1).sum())} of "
            f"{int(covered.sum())} rows are wrong",
        )

    def _packed_index(self, tokens: Sequence[Tensor], **settings: Any) -> Tensor:
        """(R,) index of the token in each row of this rank, -1 in padding, by slime's own packing of tokens."""
        from megatron.core import mpu
        from slime.backends.megatron_utils.data import get_batch

        numbers = torch.arange(1, sum(len(ids) for ids in tokens) + 1, device=tokens[0].device)
        lengths = [len(ids) for ids in tokens]
        batch = {
            "tokens": list(numbers.split(lengths)),
            "total_lengths": lengths,
            "response_lengths": [1] * len(lengths),
            "loss_masks": [numbers.new_ones(1) for _ in lengths],
        }
        packed = get_batch(_One(batch), list(batch), settings["data_pad_size_multiplier"], settings["allgather_cp"])
        index = packed["tokens"][0].cpu() - 1
        if settings["sequence_parallel"]:
            index = index.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        return index

    def _topology(self) -> MoeTopology:
        args = self.args
        pattern = args.moe_layer_freq
        routes = [bool(pattern[i]) if isinstance(pattern, list) else i % pattern == 0 for i in range(args.num_layers)]
        layers = [MoeLayer(i, args.num_experts, args.moe_router_topk) for i in range(args.num_layers) if routes[i]]
        return MoeTopology(args.num_layers, tuple(layers))

    def _stopping(self) -> _Stopping:
        return _Stopping(warns=self.settings.on_misalignment == "warn")


class _One:
    """slime's iterator, over one micro-batch."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self._batch = batch

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        return {key: self._batch.get(key) for key in keys}


@dataclass(slots=True)
class _Stopping:
    """Prints why a run stops, since other ranks may wait in a collective; or warns instead of stopping."""

    warns: bool

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, AlignmentError):
            return False
        print(f"moe-replay {'warns' if self.warns else 'stops this run'}: {error}", file=sys.stderr, flush=True)
        return self.warns


def _routers(model: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (decoder layer, slime's replay object) of every router of this rank."""
    for chunk in model:
        for module in chunk.modules():
            if "routing_replay" in vars(module):
                yield module.layer_number - 1, module.routing_replay
