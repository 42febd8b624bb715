"""Counts and order of replayed rows for Megatron-Core's dispatchers: no collective, no sort and no wait in a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_replay.replay.adapters.megatron_settings import balancing_kinds
from moe_replay.replay.controller import RouterReplay
from moe_replay.replay.site import PlanSlot
from moe_replay.routes.plan import DispatchPlan


class KnownRows(NamedTuple):
    """The rows of one layer for the experts of this rank: (tensor ranks, expert ranks, experts), on device and host.

    sent    rows to each expert rank
    order   (T * K,) int64: where the rows of this rank, ordered by expert, are in a map (experts, T)
    """

    on_device: Tensor
    on_host: Tensor
    sent: Tensor
    order: Tensor


class KnownOrder(TorchFunctionMode):
    """Answers what finds the true elements of a map (experts, T): `masked_select`, since 0.17 `argsort`.

    The first waits for the device, the second sorts the whole map.
    """

    def __init__(self, order: Tensor, size: int) -> None:
        super().__init__()
        self._order, self._size = order, size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.masked_select, torch.masked_select) and args[1].numel() == self._size:
            return args[0].reshape(-1).index_select(0, self._order)
        if func in (torch.Tensor.argsort, torch.argsort) and args[0].numel() == self._size:
            return self._order
        return func(*args, **(kwargs or {}))


class PlannedDispatch:
    """Methods of one dispatcher that go by the plan, if there is one; the same in Megatron-Core 0.16 to 0.19."""

    def __init__(self, dispatcher: Any, slot: PlanSlot) -> None:
        self._dispatcher, self._slot = dispatcher, slot
        self._preprocess, self._dispatch_preprocess = dispatcher.preprocess, dispatcher.dispatch_preprocess
        dispatcher.preprocess, dispatcher.dispatch_preprocess = self.preprocess, self.dispatch_preprocess
        if dispatcher.ep_size == dispatcher.tp_size == 1:
            dispatcher.num_local_experts = 1  # else it cuts all rows by expert, and joins them in the same order

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Return rows and gate weights in the order of experts."""
        plan = self._slot.plan
        if plan is None or self._dispatcher.config.moe_permute_fusion:
            return self._dispatch_preprocess(hidden_states, routing_map, probs)
        with KnownOrder(plan.exchange.order, routing_map.numel()):
            return self._dispatch_preprocess(hidden_states, routing_map, probs)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Set the sizes of all exchanges for a map (rows, experts); return the rows of each expert of this rank."""
        dispatcher, config = self._dispatcher, self._dispatcher.config
        plan = self._slot.take(torch.Size((len(routing_map), config.moe_router_topk)))
        if plan is None:
            return self._preprocess(routing_map)
        counts: KnownRows = plan.exchange
        dispatcher.cuda_sync_point = "no_sync"  # its own method sets it again
        dispatcher.num_out_tokens = len(routing_map) * config.moe_router_topk
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            of_ranks = counts.on_host.sum(2)
            dispatcher.input_splits = counts.sent.numpy()
            dispatcher.output_splits, dispatcher.output_splits_tp = (
                of_ranks[dispatcher.tp_rank].numpy(),
                of_ranks.sum(1).numpy(),
            )
        if dispatcher.num_local_experts > 1:
            of_experts = counts.on_device if config.moe_permute_fusion else counts.on_host
            dispatcher.num_global_tokens_per_local_expert = of_experts.reshape(-1, dispatcher.num_local_experts)
        return counts.on_host.sum((0, 1))


def plan_rows(
    dispatcher: Any, device: torch.device, plan: DispatchPlan | None, layers: Sequence[int]
) -> DispatchPlan | None:
    """Return the plan for dispatchers of these layers; None, on all ranks, if one of them has no plan.

    The counts of all layers of a micro-batch are gathered in one collective. All ranks of the group call it.
    """
    if not layers:  # a pipeline chunk without routers
        return None
    held = torch.full((len(layers), dispatcher.num_experts), -1, dtype=torch.int64, device=device)
    if plan is not None:
        held = plan.offsets.long().diff(dim=1, prepend=plan.offsets.new_zeros(len(layers), 1).long())
    gathered = held.new_empty(dispatcher.ep_size * dispatcher.tp_size * held.shape[0], held.shape[1])
    torch.distributed.all_gather_into_tensor(gathered, held.contiguous(), group=dispatcher.tp_ep_group)
    local = slice(dispatcher.local_expert_indices[0], dispatcher.local_expert_indices[-1] + 1)
    by_rank = gathered.view(dispatcher.ep_size, dispatcher.tp_size, *held.shape)
    here = by_rank.permute(2, 1, 0, 3)[..., local].contiguous()
    sent = held.view(len(layers), dispatcher.ep_size, -1).sum(2)
    on_host, sent = torch.cat([here.flatten(), sent.flatten()]).cpu().split([here.numel(), sent.numel()])
    on_host, sent = on_host.view(here.shape), sent.view(len(layers), -1)
    if plan is None or bool((on_host < 0).any()):
        return None
    order = places_of(plan)
    exchanges = {layer: KnownRows(here[i], on_host[i], sent[i], order[i]) for i, layer in enumerate(layers)}
    no_order = {"pair": plan.pair[:, :0].clone(), "row": plan.row.new_zeros(1, 1).expand_as(plan.row)}
    return replace(plan, exchanges=exchanges, **no_order)


def places_of(plan: DispatchPlan) -> Tensor:
    """Return (L, T * K) int64: for the rows of each layer, ordered by expert, expert * T + token."""
    routes = plan.routes
    experts = torch.stack([routes.layer(layer)[0].reshape(-1) for layer in plan.layers]).long()
    pair = plan.pair.long()
    return experts.gather(1, pair) * routes.num_rows + pair // routes.top_k


def give_plans(models: Sequence[nn.Module], replay: RouterReplay, device: torch.device) -> list[PlanSlot]:
    """Have dispatchers go by replayed routes; return the slots of those that do.

    All-to-all dispatchers that drop and pad nothing.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    slots: list[PlanSlot] = []
    dispatchers = []
    for site in replay.sites.values():
        modules = chain.from_iterable(model.modules() for model in models)
        block: Any = next((module for module in modules if getattr(module, "router", None) is site.module), None)
        dispatcher: Any = getattr(block, "token_dispatcher", None)
        config: Any = getattr(dispatcher, "config", None)
        if (
            type(dispatcher) is MoEAlltoAllTokenDispatcher
            and config.moe_expert_capacity_factor is None
            and not config.moe_pad_expert_input_to_capacity
            and not config.moe_router_padding_for_quantization
            and config.cuda_graph_impl == "none"
        ):
            slots.append(PlanSlot(site.layer, site.num_experts))
            PlannedDispatch(dispatcher, slots[-1])
            dispatchers.append(dispatcher)
    if slots:
        replay.give_plans(slots, partial(plan_rows, dispatchers[0], device))
    return slots


def counts_every_row(config: Any) -> bool:
    """Return whether something is computed of all rows together, also of those on which no token depends.

    Losses of routers, updates of their bias, scales of quantized tensors.
    """
    has_losses = balancing_kinds(config) != {"none"} or config.moe_z_loss_coeff
    updates_bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(has_losses or updates_bias or config.fp8 or getattr(config, "fp4", None))
