"""`QueueGuard`: queues of routes that a Megatron trainer fills before its passes, compared with those of the tokens.

slime and miles pack the routes of a rollout by one function and its tokens by another, and queue what each router will
be given. Here an index of the tokens is sent through the trainer's own packing of tokens; the packed routes must be
those of these tokens, and before each pass the queue of each router must be that of its layer.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.integrations.hosts import HostError, ReplaySettings, printed_before_raised
from moe_replay.interop.conventions import from_slime
from moe_replay.routes.topology import MoeLayer, MoeTopology

GUARD = "moe_replay_guard"
"""Attribute of the trainer's arguments, which every hook gets."""


def install(guard: type[QueueGuard], args: Any) -> None:
    """Put a guard in the place of the function of a trainer that packs routes."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return  # without it the trainer replays what it has recorded itself, in its own order
    actor = sys.modules.get(guard.actor)
    packing = None if actor is None else vars(actor).get(guard.function)
    actual = None if packing is None else tuple(inspect.signature(packing).parameters)
    if actor is None or packing is None or actual != guard.parameters:
        raise HostError(
            f"this {guard.trainer} packs routes in another way: "
            f"no {guard.actor}.{guard.function} as it was in August 2026",
            expected=f"({', '.join(guard.parameters)})",
            found="none" if actual is None else f"({', '.join(actual)})",
            remedy=f"Leave the hooks of moe-replay out, or use that {guard.trainer}",
        )
    instance = guard(args, packing)
    vars(actor)[guard.function] = instance.run
    vars(args)[GUARD] = instance


class QueueGuard(ABC):
    """Guard of a trainer's packing: the expected routes of each micro-batch (R, layers, K), and which rows count.

    trainer      its name, in errors
    actor        its module that has the function whose place the guard takes
    function     which packs the routes of a rollout
    parameters   that we call it with
    """

    trainer: ClassVar[str]
    actor: ClassVar[str]
    function: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]

    def __init__(self, args: Any, packing: Callable[..., Any]) -> None:
        self.args = args
        self.packing = packing
        self.queue = self.queue_type()
        self.warns = ReplaySettings.read({"mode": "R3"}).on_misalignment == "warn"
        self.expected: list[tuple[Tensor, Tensor]] = []

    @abstractmethod
    def queue_type(self) -> type:
        """Return the type of the object on a router that has its queue."""

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Pack the routes as the trainer does; raise unless they are those of the packed tokens."""

    @abstractmethod
    def pack_tokens(self, iterator: OneMicroBatch, keys: list[str]) -> dict[str, Any]:
        """Return a micro-batch that the trainer has packed for this rank, with its "tokens"."""

    def check_packed(self, routes: Sequence[Tensor], ids: Sequence[Tensor], packed: Tensor, **further: Any) -> None:
        """Raise unless the packed routes (R, layers, K) of a micro-batch are those of its tokens.

        routes    of each sample (T-1, layers, K)
        further   what the trainer's packing of tokens needs of a micro-batch
        """
        topology, index = self._topology(), self._index(ids, further)
        for sample, (rows, tokens) in enumerate(zip(routes, ids, strict=True)):
            from_slime(rows, tokens, topology, sample=sample)  # all zero, routes in dense layers, ids out of range
        ends = torch.tensor([len(tokens) for tokens in ids]).cumsum(0) - 1  # the last token of a sample has no route
        covered = (index >= 0) & ~torch.isin(index, ends)
        with_last = torch.cat([torch.cat([rows, rows[:1] * 0]) for rows in routes]).cpu()
        expected = with_last[index.clamp_min(0)]
        with printed_before_raised(warns=self.warns):
            self._compare(packed.cpu(), expected, covered, f"micro-batch {len(self.expected)}", topology.layers)
        self.expected.append((expected, covered))

    def check_queues(self, model: Sequence[Any]) -> None:
        """Raise unless the queue of each router has the routes of its layer, for every micro-batch."""
        with printed_before_raised(warns=self.warns):
            for layer, replay in self.routers(model):
                queue = replay.top_indices_list
                if len(queue) != len(self.expected):
                    raise AlignmentError(
                        f"a router of {self.trainer} has routes of another number of micro-batches",
                        layer=layer,
                        expected=len(self.expected),
                        found=len(queue),
                    )
                for number, (queued, (expected, covered)) in enumerate(zip(queue, self.expected, strict=True)):
                    own_layer = slice(layer, layer + 1)
                    self._compare(
                        queued.cpu()[:, None], expected[:, own_layer], covered, f"micro-batch {number}", (layer,)
                    )

    def routers(self, model: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (decoder layer, the object with its queue) of every router of this rank."""
        for chunk in model:
            for module in chunk.modules():
                for value in vars(module).values():
                    if isinstance(value, self.queue):
                        yield module.layer_number - 1, value

    def _compare(self, packed: Tensor, expected: Tensor, covered: Tensor, where: str, layers: Sequence[int]) -> None:
        """Compare routes (R, layers, K); a single layer is given under its own number."""
        if packed.shape != expected.shape:
            raise AlignmentError(
                f"{self.trainer} packs routes and tokens into different rows, {where}",
                expected=tuple(expected.shape),
                found=tuple(packed.shape),
            )
        wrong_rows = (packed != expected).any(-1) & covered[:, None]
        slices = [0] if packed.shape[1] == 1 else list(layers)
        if not bool(wrong_rows[:, slices].any()):
            return
        row, place = wrong_rows[:, slices].nonzero()[0].tolist()
        raise AlignmentError(
            f"{self.trainer} replays routes of other tokens or layers, {where}, row {row}",
            layer=layers[place],
            expected=sorted(expected[row, slices[place]].tolist()),
            found=f"{sorted(packed[row, slices[place]].tolist())}; {int(wrong_rows[:, slices].any(1).sum())} of "
            f"{int(covered.sum())} rows are wrong",
        )

    def _index(self, ids: Sequence[Tensor], further: dict[str, Any]) -> Tensor:
        """(R,) index of the token that a router sees in each row, -1 in padding: the index is packed as tokens are."""
        lengths = [len(tokens) for tokens in ids]
        numbers = torch.arange(1, sum(lengths) + 1, device=ids[0].device)  # 0 is padding
        batch = {
            "tokens": list(numbers.split(lengths)),
            "total_lengths": lengths,
            "response_lengths": [1] * len(lengths),
            "loss_masks": [numbers.new_ones(1) for _ in lengths],
            **further,
        }
        packed = self.pack_tokens(OneMicroBatch(batch), list(batch))
        index = packed["tokens"].T.flatten().cpu() - 1  # Megatron flattens (B, S) token by token
        if not self.args.sequence_parallel:
            return index
        from megatron.core import mpu

        return index.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]

    def _topology(self) -> MoeTopology:
        args = self.args
        pattern = args.moe_layer_freq
        routes = [bool(pattern[i]) if isinstance(pattern, list) else i % pattern == 0 for i in range(args.num_layers)]
        layers = [MoeLayer(i, args.num_experts, args.moe_router_topk) for i in range(args.num_layers) if routes[i]]
        return MoeTopology(args.num_layers, tuple(layers))


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


class OneMicroBatch:
    """The trainer's iterator, over one micro-batch."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.rollout_data = self._batch = batch

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the fields of the micro-batch; None for those it does not have."""
        return {key: self._batch.get(key) for key in keys}
