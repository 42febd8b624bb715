"""Routers that choose by `topk`: the router's own code runs, and only its question "which experts?" is answered.

While a ticket is in force, the `topk` over the experts inside the router's forward returns the replayed ids and the
scores gathered at them. All that follows (softmax, renormalisation, scaling) is the model's own code on the current
scores, so one mechanism serves every gate formula and the gradient of each.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.choice import Choice
from moe_replay.replay.passes import Slot, Switch
from moe_replay.replay.site import RouterSite


class Answers(Protocol):
    """What a `topk` inside an interceptor is sent to."""

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of `func(*args, **kwargs)`, or another in its place."""
        ...


class TopKInterceptor(TorchFunctionMode):
    """Sends every `topk` of one router call to its answer. Keeps no state: the compiler cannot read it off a mode."""

    def __init__(self, answer: Answers) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is torch.Tensor.topk:
            return self.answer.topk(func, args, kwargs)
        return func(*args, **kwargs)


class Answer:
    """Answers the top-k questions of one router call."""

    def __init__(self, site: RouterSite, slot: Slot) -> None:
        self.site = site
        self.slot = slot
        self.choice = Choice(site, slot)
        self.asked: list[tuple[int, int]] = []

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The replayed experts (or their groups) where the router asks for experts (or groups)."""
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        columns = scores.shape[-1]
        if k == self.site.top_k and columns == self.site.num_experts:
            return self._experts(func, args, kwargs, scores)
        # Scores inside each group (..., groups, experts of a group) may have as many columns as there are groups.
        if k == self.site.groups_kept and columns == self.site.num_groups and not self._inside_groups(scores):
            return self._groups(func, args, kwargs, scores)
        self.asked.append((k, columns))
        return func(*args, **kwargs)

    def _inside_groups(self, scores: torch.Tensor) -> bool:
        size = self.site.num_experts // self.site.num_groups
        return scores.dim() > 2 and scores.shape[-2:] == (self.site.num_groups, size)

    def _experts(self, func: Any, args: Any, kwargs: Any, scores: torch.Tensor) -> Any:
        # A router with one group asks twice: the last answer is the route.
        experts = self.choice.among(scores, lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))

    def _groups(self, func: Any, args: Any, kwargs: Any, scores: torch.Tensor) -> Any:
        """Let the groups of the replayed experts through: some families read the gate off the masked scores."""
        slot = self.slot
        # As many columns in every mode; a group named twice is masked in once all the same.
        width = max(self.site.top_k, self.site.groups_kept)
        groups = own = _widened(_own_choice(func, args, kwargs), width)
        if slot.target is not None:
            groups = _widened(self.choice.target(scores) // (self.site.num_experts // self.site.num_groups), width)
            if slot.valid is not None:
                groups = torch.where(slot.valid.view(*scores.shape[:-1], 1), groups, own)
        return torch.return_types.topk((scores.gather(-1, groups), groups))


class TopKPort:
    """Stands in for the forward of one router instance.

    Its methods are bound, so that `copy.deepcopy` of an attached model yields a model with ports, switch and
    controller of its own.
    """

    answer: type[Answer] = Answer

    def __init__(self, site: RouterSite, switch: Switch) -> None:
        self.site = site
        self.switch = switch
        self.native_forward = site.module.forward
        site.module.forward = self.forward

    @staticmethod
    def is_on(module: nn.Module) -> bool:
        """Whether a router has a port already."""
        return isinstance(getattr(module.forward, "__self__", None), TopKPort)

    def remove(self) -> None:
        """Give the router its own forward back."""
        del self.site.module.forward
        if self.site.module.forward != self.native_forward:  # an expert-parallel plan had put one on this instance
            self.site.module.forward = self.native_forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's forward, under the ticket in force."""
        ticket = self.switch.ticket
        if ticket is None:
            return self.native_forward(*args, **kwargs)
        slot = ticket.claim(self.site.layer)
        answer = self.answer(self.site, slot)
        with TopKInterceptor(answer):
            result = self.native_forward(*args, **kwargs)
        if answer.choice.experts is None:
            raise UnsupportedRouterError(
                f"the router {self.site} made no top-k choice that could be recorded or replayed",
                layer=self.site.layer,
                expected=f"topk(k={self.site.top_k}) over {self.site.num_experts} columns",
                found=f"topk calls {answer.asked}" if answer.asked else "no topk call",
                remedy="See docs/routers.md for how to describe a router",
            )
        if slot.observe and self.site.num_groups:
            answer.choice.native = self._chosen_natively(args, kwargs)
        answer.choice.keep()
        return result

    def _chosen_natively(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A second run, for routers whose scores show the replayed groups alone once those were let through."""
        answer = self.answer(self.site, Slot(self.site.layer))
        with torch.no_grad(), TopKInterceptor(answer):
            self.native_forward(*args, **kwargs)
        return answer.choice.experts


def _own_choice(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return func(*args, **kwargs).indices


def _widened(indices: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - indices.shape[-1]
    if not missing:
        return indices
    return torch.cat([indices, indices[..., :1].expand(*indices.shape[:-1], missing)], dim=-1)
