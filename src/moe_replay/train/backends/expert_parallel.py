"""Expert parallel on FSDP2: each rank holds some experts of every layer, and tokens travel to their experts.

Ranks are a grid (`rank_grid`): `ep` consecutive ranks form a group that has all experts of a layer, and rank r of
the group those with the ids [r E / ep, (r + 1) E / ep). The experts' parameters are DTensors over the whole grid:
sharded by `ep`, and the part of each rank by FSDP2 over the ranks that hold the same experts. Everything else is
sharded over all ranks. Routers see global ids and know nothing of it.

A layer exchanges counts, sends every (token, choice) pair to the rank of its expert, and gets the results back in the
same order. The host waits once per layer, for the counts; where all ranks of the group replay routes that cover every
row, once per micro-batch, for the counts of all layers. Each rank's experts have the gradient of all tokens of its
group, and FSDP2 averages over the other dimension only: their gradients are divided by `ep`, so that every gradient is
the average over all ranks, whatever the shape of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_replay.distributed.collectives import WITHIN
from moe_replay.errors import LayoutError
from moe_replay.replay.adapters.transformers import router_numbers
from moe_replay.replay.controller import RouterReplay
from moe_replay.routes.plan import Dispatch, DispatchPlan
from moe_replay.routes.router_families import load_router_family
from moe_replay.train.backends.expert_adapters import move_adapters, with_adapter
from moe_replay.train.backends.experts import NAME as WHOLE
from moe_replay.train.backends.experts import (
    _ToRows,
    _ToTokens,
    dispatch,
    has_interface,
    named_experts,
    plan_slots,
    planned,
    through_experts,
)
from moe_replay.weights.model_folder import ModelError

NAME = "moe_replay_expert_parallel"


class ExpertShard(NamedTuple):
    """Ranks that share the experts of a layer, and this rank's part.

    group   ranks that have all experts of the layer together
    first   the first expert of this rank
    """

    group: dist.ProcessGroup
    first: int


# ---- which modules ---------------------------------------------------------------------------------------------------


def check_experts_can_be_divided(model: Any, size: int, router_family: str | None = None) -> None:
    """Raise unless every layer with a router has experts that can be divided among `size` ranks."""
    family = str(getattr(model.config, "model_type", type(model).__name__))
    layers = list(named_experts(model))
    rules = load_router_family(router_family)
    routers = router_numbers(dict(model.named_modules()), () if rules is None else rules.routers)
    has_experts = has_interface() and hasattr(model, "set_experts_implementation")
    if not has_experts or not layers or len(layers) != len(routers):
        raise ModelError(
            f"backend.expert_parallel: the experts of {family} cannot be divided among ranks",
            expected="grouped experts by Transformers' experts interface, in every layer with a router",
            found=f"{len(layers)} layers with such experts, {len(routers)} routers",
            remedy='Set backend.expert_parallel = 1, or backend.kind = "megatron"',
        )
    for name, module in layers:
        shared = [key for key, tensor in module.named_parameters() if "." in key or len(tensor) != module.num_experts]
        if shared or getattr(module, "has_post_expert_norm", False):
            raise ModelError(
                f"backend.expert_parallel: experts of {family} share parameters, which no rank would have whole",
                expected="parameters with one row per expert",
                found=f"{name}.{shared[0]}" if shared else f"{name}.post_expert_norm",
            )
        if module.num_experts % size:
            raise LayoutError(
                "backend.expert_parallel does not divide the experts",
                expected=f"a divisor of {module.num_experts}, the experts of {name}",
                found=size,
            )


def is_expert_parallel(module: Any) -> bool:
    return isinstance(getattr(module, "expert_shard", None), ExpertShard)


def is_divided(tensor: Tensor) -> bool:
    """Return whether a parameter, or its gradient, is of experts that are divided among ranks."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2


def divide_experts(model: Any, ranks: DeviceMesh) -> list[nn.Module]:
    """Leave each rank its experts of a model on the `meta` device; return the experts of each layer."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, parallel_experts)
    model.set_experts_implementation(NAME)
    mesh = ranks[WITHIN]
    move_adapters(model)
    experts = []
    for _, module in named_experts(model):
        local = module.num_experts // mesh.size()
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = torch.empty((local, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.expert_shard = ExpertShard(mesh.get_group(), mesh.get_local_rank() * local)
        experts.append(module)
    return experts


# ---- rows of a parameter ---------------------------------------------------------------------------------------------


def rows_of_rank(tensor: DTensor, rank: int) -> range:
    """Return the rows of a sharded tensor that a rank of all ranks holds; rows are cut as `torch.chunk` does."""
    mesh, rows = tensor.device_mesh, tensor.shape[0]
    if mesh.ndim == 1:
        return _chunk(range(rows), mesh.size(), rank)
    fsdp, ep = mesh.shape
    return _chunk(_chunk(range(rows), ep, rank % ep), fsdp, rank // ep)


def _chunk(rows: range, parts: int, index: int) -> range:
    size = -(-len(rows) // parts)
    return rows[size * index : size * (index + 1)]


# ---- forward ---------------------------------------------------------------------------------------------------------


class _Exchange(Function):
    """Exchange of rows among the ranks of a group: (S, H) -> (R, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


class _Reorder(Function):
    """Rows in another order; the backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


class _Averaged(Function):
    """A weight whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, size: int) -> Tensor:
        ctx.size = size
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] / ctx.size, None


def _local(module: Any, name: str) -> Tensor:
    """Return a parameter of this rank's experts."""
    return _Averaged.apply(getattr(module, name).to_local(), module.expert_shard.group.size())


class Travel(NamedTuple):
    """Exchange of the rows of one layer: to the ranks of their experts, and there into the order of the experts.

    sent, received   rows to and from each rank of the group
    by_expert        (R,) which of the R rows that arrive, by rank and then by expert, is the next by expert
    inverse          (R,) where each of them goes
    counts           (E of this rank,) rows of each expert
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor
    inverse: Tensor
    counts: Tensor


class PlannedTravel(NamedTuple):
    """The part of `Travel` that is known before the forward: a few numbers for each expert of each rank.

    blocks   (4, ranks * experts) rows that arrive of each rank for each expert, how far they go, and both by expert
    """

    sent: list[int]
    received: list[int]
    blocks: Tensor
    counts: Tensor

    def travel(self) -> Travel:
        """Return the order of the rows of the layer."""
        rows = sum(self.received)
        place = torch.arange(rows, device=self.blocks.device)
        length, forth, length_by_expert, back = self.blocks
        inverse = place + forth.repeat_interleave(length, output_size=rows)
        by_expert = place + back.repeat_interleave(length_by_expert, output_size=rows)
        return Travel(self.sent, self.received, by_expert, inverse, self.counts)


def plan_travel(
    group: dist.ProcessGroup,
    num_experts: Mapping[int, int],
    device: torch.device,
    plan: DispatchPlan | None,
    layers: Sequence[int],
) -> DispatchPlan | None:
    """Return the plan with what travels; None, on all ranks, if one of them has no plan.

    The counts of all layers of a micro-batch are exchanged in one collective. All ranks of the group call it.
    """
    size = group.size()
    local = [num_experts[layer] // size for layer in layers]
    leaving = torch.full((size, sum(local)), -1, dtype=torch.int64, device=device)
    if plan is not None:
        of_layers = zip(plan.offsets.long(), plan.num_experts, strict=True)
        ends = [offsets[:count] for offsets, count in of_layers]
        parts = [torch.diff(end, prepend=end.new_zeros(1)).view(size, -1) for end in ends]
        leaving = torch.cat(parts, 1)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = torch.stack([leaving, arriving]).cpu().numpy()  # the host waits here
    if plan is None or (received < 0).any():
        return None
    cuts = np.cumsum(local)[:-1]
    travels = [
        (sent_counts.sum(1).tolist(), received_counts.sum(1).tolist(), *_blocks(received_counts))
        for sent_counts, received_counts in zip(np.split(sent, cuts, 1), np.split(received, cuts, 1), strict=True)
    ]
    # One copy to the device for all layers.
    flat = [part.ravel() for *_, blocks, counts in travels for part in (blocks, counts)]
    numbers = torch.from_numpy(np.concatenate(flat))
    pieces = iter(numbers.to(device).split([n for count in local for n in (4 * size * count, count)]))
    exchanges = {
        layer: PlannedTravel(sent_counts, received_counts, next(pieces).view(4, -1), next(pieces))
        for layer, (sent_counts, received_counts, *_) in zip(layers, travels, strict=True)
    }
    return replace(plan, exchanges=exchanges)


def _blocks(arriving: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `blocks` of `PlannedTravel` and counts, for the rows (ranks, experts) that arrive."""
    by_expert = arriving.T
    begin = (np.cumsum(arriving) - arriving.ravel()).reshape(arriving.shape)
    goal = (np.cumsum(by_expert) - by_expert.ravel()).reshape(by_expert.shape)
    forth = goal.T - begin
    return np.stack([arriving.ravel(), forth.ravel(), by_expert.ravel(), -forth.T.ravel()]), arriving.sum(0)


def give_plans(model: Any, replay: RouterReplay, run: Callable[[], Any]) -> bool:
    """Have rows of replayed routes planned for experts of ours; return whether any take plans. See `plan_slots`."""
    name = getattr(model.config, "_experts_implementation", None)
    if name not in (NAME, WHOLE):
        return False
    slots = plan_slots(model, replay, run)
    planner = None
    if name == NAME and slots:
        module: Any = next(module for _, module in named_experts(model))
        device = next(module.parameters()).device
        num_experts = {slot.layer: slot.num_experts for slot in slots}
        planner = partial(plan_travel, module.expert_shard.group, num_experts, device)
    replay.give_plans(slots, planner)
    return bool(slots)


def _travel(order: Dispatch, group: dist.ProcessGroup) -> Travel:
    """Exchange the counts of one layer, and return how its rows travel."""
    leaving = torch.diff(order.offsets, prepend=order.offsets.new_zeros(1)).view(group.size(), -1)
    arriving = torch.empty_like(leaving)  # rows of each rank for each expert of this one
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()  # the host waits here
    experts = torch.arange(leaving.shape[1], device=leaving.device).repeat(len(received))
    expert_of_row = experts.repeat_interleave(arriving.reshape(-1), output_size=sum(received))
    by_expert = torch.sort(expert_of_row, stable=True).indices
    inverse = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=leaving.device))
    return Travel(sent, received, by_expert, inverse, arriving.sum(0))


@torch.compiler.disable
def parallel_experts(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return what the experts of one layer, on all ranks of the group, make of this rank's hidden states (T, H)."""
    module: Any = self
    shard: ExpertShard = module.expert_shard
    plan = planned(module, top_k_index)
    if plan is None:
        order = dispatch(top_k_index, module.num_experts)
        travel = _travel(order, shard.group)
    else:
        order, travel = plan.order, plan.exchange.travel()
    rows = _ToRows.apply(hidden, order.token, order.row)
    rows = _Exchange.apply(rows, travel.sent, travel.received, shard.group)
    rows = _Reorder.apply(rows, travel.by_expert, travel.inverse)
    rows = _computed(module, rows, travel.counts)
    rows = _Reorder.apply(rows, travel.inverse, travel.by_expert)
    rows = _Exchange.apply(rows, travel.received, travel.sent, shard.group)
    return _ToTokens.apply(rows, top_k_weights, order.pair, order.token, order.row)


def _computed(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the rows of this rank's experts, `counts` of each, after their projections."""
    from transformers.integrations.moe import _grouped_linear

    offsets = counts.cumsum(0, dtype=torch.int32)
    expert_of_row = None
    if module.has_bias:
        expert_of_row = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
    experts = slice(module.expert_shard.first, module.expert_shard.first + len(counts))

    def project(rows: Tensor, name: str) -> Tensor:
        bias = None if expert_of_row is None else _local(module, f"{name}_bias")[expert_of_row]
        weight = _local(module, name)
        projected = _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)
        return with_adapter(projected, module, name, rows, offsets, experts)

    return through_experts(module, rows, project)
