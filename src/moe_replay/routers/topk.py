"""Routers that choose by `topk`: the router's own code runs, and only its question "which experts?" is answered.

While a ticket is in force, the `topk` over the experts inside the router's forward returns the replayed ids and the
scores gathered at them. All that follows (softmax, renormalisation, scaling) is the model's own code on the current
scores, so one mechanism serves every gate formula and the gradient of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moe_replay.errors import AlignmentError, UnsupportedRouterError
from moe_replay.routers.base import RouterSite
from moe_replay.tickets import Slot, Switch


def narrow(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids in the dtype they rest in: uint8, or int16 above 256 experts (torch computes with few uint16)."""
    return ids.detach().to(torch.uint8 if num_experts <= 256 else torch.int16)


class TopKPort:
    """Stands in for the forward of one router instance.

    Its methods are bound, so that `copy.deepcopy` of an attached model yields a model with ports, switch and
    controller of its own.
    """

    def __init__(self, site: RouterSite, switch: Switch) -> None:
        self.site = site
        self.switch = switch
        self.native_forward = site.module.forward
        site.module.forward = self.forward

    def remove(self) -> None:
        """Give the router its own forward back."""
        del self.site.module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward, under the ticket in force."""
        ticket = self.switch.ticket
        if ticket is None:
            return self.native_forward(*args, **kwargs)
        slot = ticket.claim(self.site.layer)
        answer = _Answer(self.site, slot)
        with _Interceptor(answer):
            result = self.native_forward(*args, **kwargs)
        if answer.chosen is None:
            raise UnsupportedRouterError(
                f"the router {self.site} made no top-k choice that could be recorded or replayed",
                layer=self.site.layer,
                expected=f"topk(k={self.site.top_k}) over {self.site.num_experts} columns",
                found=f"topk calls {answer.asked}" if answer.asked else "no topk call",
                remedy="See docs/routers.md for how to describe a router",
            )
        slot.chosen = slot.target if answer.obeyed else self._narrowed(answer.chosen)
        if slot.observe:
            slot.native = self._narrowed(answer.native)
        return result

    def _narrowed(self, ids: torch.Tensor) -> torch.Tensor:
        return narrow(ids, self.site.num_experts).view(-1, self.site.top_k)


class _Interceptor(TorchFunctionMode):
    """Sends every `topk` of one router call to its answer. Keeps no state: the compiler cannot read it off a mode."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is torch.Tensor.topk:
            return self.answer.topk(func, args, kwargs)
        return func(*args, **kwargs)


class _Answer:
    """Answers the top-k questions of one router call."""

    def __init__(self, site: RouterSite, slot: Slot) -> None:
        self.site = site
        self.slot = slot
        self.chosen: Any = None
        self.native: Any = None
        self.obeyed = False  # the target was taken as it is, on every row
        self.asked: list[tuple[int, int]] = []

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The replayed experts (or their groups) where the router asks for experts (or groups)."""
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        columns = scores.shape[-1]
        if k == self.site.top_k and columns == self.site.num_experts:
            return self._experts(func, args, kwargs, scores)
        if k == self.site.groups_kept and columns == self.site.num_groups:
            return self._groups(func, args, kwargs, scores)
        self.asked.append((k, columns))
        return func(*args, **kwargs)

    # In every mode the ids are found outside autograd and the scores gathered at them, so that a forward and its
    # recomputation save the same tensors: checkpointing compares them.

    def _experts(self, func: Any, args: Any, kwargs: Any, scores: torch.Tensor) -> Any:
        slot = self.slot
        # A compiled graph always takes the masked way, so that it never recompiles when a batch becomes fully covered.
        masked = slot.valid is not None and (torch.compiler.is_compiling() or not slot.all_valid)
        if slot.target is None or masked or slot.observe:
            self.native = _own_choice(func, args, kwargs)
        if slot.target is None:
            experts = self.native
        else:
            experts = self._target(scores)
            if masked:
                experts = torch.where(slot.valid.view(*scores.shape[:-1], 1), experts, self.native)
            self.obeyed = not masked
        self.chosen = experts  # a router with one group asks twice: the last answer is the route
        return torch.return_types.topk((scores.gather(-1, experts), experts))

    def _groups(self, func: Any, args: Any, kwargs: Any, scores: torch.Tensor) -> Any:
        """Let the groups of the replayed experts through: some families read the gate off the masked scores."""
        slot = self.slot
        # As many columns in every mode; a group named twice is masked in once all the same.
        width = max(self.site.top_k, self.site.groups_kept)
        groups = own = _widened(_own_choice(func, args, kwargs), width)
        if slot.target is not None:
            groups = _widened(self._target(scores) // (self.site.num_experts // self.site.num_groups), width)
            if slot.valid is not None:
                groups = torch.where(slot.valid.view(*scores.shape[:-1], 1), groups, own)
        return torch.return_types.topk((scores.gather(-1, groups), groups))

    def _target(self, scores: torch.Tensor) -> torch.Tensor:
        target = self.slot.target
        assert target is not None
        rows = scores.shape[:-1].numel()
        if target.shape[0] != rows:
            raise AlignmentError(
                f"the router {self.site} sees another number of rows than the routes have",
                layer=self.site.layer,
                expected=f"{target.shape[0]} rows",
                found=f"{rows} rows",
                remedy="The layout of the batch must be the one this rank's model sees: padding, packing, "
                "context and sequence parallel",
            )
        return target.long().view(*scores.shape[:-1], self.site.top_k)


def _own_choice(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return func(*args, **kwargs).indices


def _widened(indices: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - indices.shape[-1]
    if not missing:
        return indices
    return torch.cat([indices, indices[..., :1].expand(*indices.shape[:-1], missing)], dim=-1)
