"""Experts through grouped GEMMs whose backward gathers in place of adding up, registered with Transformers by name.

The grouped experts of Transformers copy the hidden state of a token once for each of its experts and index the results
back. Autograd turns both into sums over repeated indices: sorts or atomic additions of tensors that are K times the
hidden states. Which row goes where is known, so both directions are gathers here, and each is one kernel once compiled.
The sums have a fixed order: the results are deterministic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_replay.replay.controller import RouterReplay
from moe_replay.replay.site import PlanSlot
from moe_replay.routes.plan import Dispatch, LayerPlan, order_rows
from moe_replay.train.backends.expert_adapters import with_adapter
from moe_replay.train.backends.fp8_weights import grouped_linear

logger = logging.getLogger(__name__)

NAME = "moe_replay"
REPLACED = "grouped_mm"
"""The implementation of Transformers that this one stands in for."""


def use_experts(model: Any, device: torch.device, *, log: bool, has_adapters: bool = False) -> None:
    """Have a Transformers model use this module's experts where it would use the grouped ones.

    On a GPU, and wherever its experts may have adapters (`expert_adapters.move_adapters`).
    """
    if (device.type != "cuda" and not has_adapters) or not can_replace(model):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    model.set_experts_implementation(NAME)
    if log:
        logger.info("experts: grouped GEMMs, with gathers in both directions")


def can_replace(model: Any) -> bool:
    """Return whether the experts of a model are the grouped ones of a Transformers release that is known."""
    return has_interface() and getattr(model.config, "_experts_implementation", None) == REPLACED


def has_interface() -> bool:
    """Return whether this release of Transformers has the parts of its experts interface that are used here."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear  # noqa: F401
    except ImportError:
        return False
    return True


# One operator, so that a compiled kernel reads its results and does not divide for every element that it gathers.
@torch.library.custom_op("moe_replay::dispatch", mutates_args=())
def _dispatch(routed_experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Dispatch` for the experts (T, K) of each token."""
    top_k = routed_experts.shape[1]
    pair, row, offsets = (field[0] for field in order_rows(routed_experts.reshape(1, -1), num_experts))
    return pair, pair // top_k, row.view(-1, top_k), offsets


@_dispatch.register_fake
def _(routed_experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = routed_experts.new_empty(routed_experts.numel(), dtype=torch.int32)
    row = routed_experts.new_empty(routed_experts.shape, dtype=torch.int32)
    return pairs, torch.empty_like(pairs), row, routed_experts.new_empty(num_experts, dtype=torch.int32)


# Of torch's own kernel: the one that the compiler makes takes twice as long.
@torch.library.custom_op("moe_replay::take_rows", mutates_args=())
def _take_rows(hidden: Tensor, token: Tensor) -> Tensor:
    return hidden.index_select(0, token)


@_take_rows.register_fake
def _(hidden: Tensor, token: Tensor) -> Tensor:
    return hidden.new_empty(token.shape[0], hidden.shape[1])


def dispatch(routed_experts: Tensor, num_experts: int) -> Dispatch:
    """Return the order of rows for the experts (T, K) of each token."""
    return Dispatch(*_dispatch(routed_experts, num_experts))


def _sum_of_choices(rows: Tensor, row: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum over the K rows of each token, weighted or not: (T * K, H), (T, K) -> (T, H).

    One addend after the other: compiled, that is one kernel that reads every row once. A reduction over K is slower.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = None
    for choice in range(row.shape[1]):
        part = rows[row[:, choice]].to(dtype)
        part = part if weights is None else part * weights[:, choice, None].to(dtype)
        total = part if total is None else total + part
    assert total is not None, "a token without experts"
    return total.to(rows.dtype)


class _ToRows(Function):
    """Hidden states (T, H) -> the rows (T * K, H) of a dispatch."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return _take_rows(hidden, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_choices(gradients[0], *ctx.saved_tensors), None, None


class _ToTokens(Function):
    """Rows (T * K, H) of a dispatch and gate weights (T, K) -> sums (T, H) over the experts of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, pair: Tensor, token: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, pair, token, row)
        return _sum_of_choices(rows, row, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, pair, token, row = ctx.saved_tensors
        gradient = gradients[0][token]
        to_rows = (gradient * weights.reshape(-1)[pair][:, None]).to(rows.dtype)
        to_weights = (gradient * rows).sum(-1, dtype=torch.promote_types(rows.dtype, torch.float32))[row]
        return to_rows, to_weights.to(weights.dtype), None, None, None


def grouped_experts(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return what the experts of one layer make of hidden states (T, H), given experts and gate weights (T, K)."""
    module: Any = self
    if getattr(module, "_is_expert_parallel", False):
        raise RuntimeError("experts that are sharded over ranks need the experts of Transformers (grouped_mm)")
    plan = planned(module, top_k_index)
    order = dispatch(top_k_index, module.num_experts) if plan is None else plan.order
    expert_of_row = top_k_index.reshape(-1)[order.pair] if module.has_bias else None

    def project(rows: Tensor, name: str) -> Tensor:
        bias = None if expert_of_row is None else getattr(module, f"{name}_bias")[expert_of_row]
        projected = grouped_linear(rows, module, name, order.offsets, bias)
        return with_adapter(projected, module, name, rows, order.offsets)

    rows = through_experts(module, _ToRows.apply(hidden, order.token, order.row), project)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return _ToTokens.apply(rows, top_k_weights, order.pair, order.token, order.row)


def through_experts(module: Any, rows: Tensor, project: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return rows after both projections of their experts; `project` multiplies them by a parameter of the module."""
    if module.has_gate:
        rows = module._apply_gate(project(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(project(rows, "up_proj"))
    return project(rows, "down_proj")


# ---- rows that are planned before the forward ------------------------------------------------------------------------


def planned(module: Any, top_k_index: Tensor) -> LayerPlan | None:
    """Return the plan of the pass that runs, for the experts of one layer; None: there is none."""
    slot: PlanSlot | None = getattr(module, "plan_slot", None)
    return None if slot is None else slot.take(top_k_index.shape)


def plan_slots(model: nn.Module, replay: RouterReplay, run: Callable[[], Any]) -> list[PlanSlot]:
    """Give the experts of each layer a slot for plans where they are called with what its router has chosen.

    run   one forward of some tokens, in which that is seen; some families change ids between router and experts
    """
    pairs = dict(_experts_of_routers(model, replay))
    called: dict[int, list[Tensor]] = {layer: [] for layer in pairs}

    def hook(layer: int) -> Any:
        def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            called[layer].append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

        return note

    handles = [module.register_forward_pre_hook(hook(layer), with_kwargs=True) for layer, module in pairs.items()]
    try:
        with torch.no_grad(), replay.record() as recording:
            run()
    finally:
        for handle in handles:
            handle.remove()
    chosen = recording.batch()
    slots = []
    for layer, module in pairs.items():
        ids = chosen.layer(layer)[0].long()
        if len(called[layer]) == 1 and torch.equal(called[layer][0].reshape(ids.shape).long(), ids):
            slots.append(PlanSlot(layer, module.num_experts))
            module.plan_slot = slots[-1]
    return slots


def named_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the experts of each layer whose forward is chosen by name (`use_experts_implementation`)."""
    for name, module in model.named_modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate") and hasattr(module, "num_experts"):
            yield name, module


def _experts_of_routers(model: nn.Module, replay: RouterReplay) -> Iterator[tuple[int, Any]]:
    """Yield (layer, experts) where a router and experts with its numbers are alone in the nearest common module."""
    experts: dict[int, list[Any]] = {}
    for name, module in named_experts(model):
        outer = name
        while outer:
            outer = outer.rpartition(".")[0]
            near = [site for site in replay.sites.values() if site.name == outer or site.name.startswith(f"{outer}.")]
            if near or not outer:
                break
        if len(near) == 1 and near[0].num_experts == module.num_experts:
            experts.setdefault(near[0].layer, []).append(module)
    yield from ((layer, modules[0]) for layer, modules in sorted(experts.items()) if len(modules) == 1)
