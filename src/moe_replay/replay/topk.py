"""Routers that choose by `topk`: the router's own code runs, and only the result of its `topk` is replaced.

During a pass, the `topk` over the experts inside the router's forward returns the replayed ids and the scores gathered
at them. Everything after that (softmax, renormalisation, scaling) is the model's own code on the current scores, so one
mechanism serves every gate formula and its gradient. Where gate weights are replayed too, these scores are the recorded
ones; a router that chooses by other scores than its gates (a bias for balance) gathers the latter itself, by the ids
that it was given, and that result is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_replay.errors import AlignmentError, UnsupportedRouterError
from moe_replay.replay.active import ActivePass, RouterHook
from moe_replay.replay.passes import LayerRoutes
from moe_replay.replay.policy import within_margin
from moe_replay.replay.site import RouterSite

UNSEEN_GATES = {"InklingTopkRouter": "its gate weights also depend on its scores of shared experts"}
"""Routers that read scores for their gate weights in other ways than at the experts that they were given, and which."""


def narrow(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return ids in their storage dtype: uint8, or int16 above 256 experts (torch supports few uint16 operations)."""
    return ids.detach().to(torch.uint8 if num_experts <= 256 else torch.int16)


class Choice:
    """The experts that a router takes in one pass: its native choice, the replayed ones, or a mix by rows.

    routed_experts         (..., K) experts taken; None until the router has chosen
    native_routed_experts  (..., K) native choice, where it was computed
    fully_replayed         whether every row was replayed
    gates                  (..., K) scores that gate weights are made of, where they are kept
    """

    def __init__(self, site: RouterSite, routes: LayerRoutes) -> None:
        self.site = site
        self.routes = routes
        self.routed_experts: torch.Tensor | None = None
        self.native_routed_experts: torch.Tensor | None = None
        self.fully_replayed = False
        self.gates: torch.Tensor | None = None

    # In every mode the ids are computed outside autograd and the caller gathers the scores at them, so that a forward
    # and its recomputation save the same tensors: checkpointing compares them.

    def select(
        self,
        scores: torch.Tensor,
        native_choice: Callable[[], torch.Tensor],
        log_weights: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Return the experts (..., K) int64 to take for scores (..., E).

        native_choice   computes the router's own
        log_weights     computes (..., E) the logarithm of routing weights, where a policy needs them
        """
        routes = self.routes
        # A compiled graph always takes the masked branch: it must not recompile when a batch becomes fully covered.
        some_rows = routes.valid if torch.compiler.is_compiling() or not routes.all_valid else None
        has_margin = routes.margin < math.inf
        self.fully_replayed = routes.routed_experts is not None and some_rows is None and not has_margin
        weights = _outside_autograd(log_weights) if routes.reads_weights else None
        if routes.routed_experts is None:
            self.native_routed_experts = routed_experts = _outside_autograd(native_choice)
        elif some_rows is not None or has_margin:
            self.native_routed_experts = _outside_autograd(native_choice)
            routed_experts = self.replayed(scores)
            if has_margin:
                assert weights is not None
                routed_experts = self._within_margin(weights, routed_experts, self.native_routed_experts)
            if some_rows is not None:
                replayed_rows = some_rows.view(*scores.shape[:-1], 1)
                routed_experts = torch.where(replayed_rows, routed_experts, self.native_routed_experts)
        else:
            self.native_routed_experts = _outside_autograd(native_choice) if routes.observe else None
            routed_experts = self.replayed(scores)
        self.routed_experts = routed_experts
        if weights is not None:
            self._compare(weights.view(-1, self.site.num_experts), routed_experts.view(-1, self.site.top_k))
        return routed_experts

    def _compare(self, weights: torch.Tensor, routed_experts: torch.Tensor) -> None:
        """Keep the weights (R, E) of the experts taken (R, K), or compare those of earlier ones."""
        routes = self.routes
        if routes.keep_weights:
            routes.taken_weights = weights.gather(-1, routed_experts)
        if routes.since is not None:
            earlier, log_weights = routes.since
            if len(earlier) != len(weights):
                raise AlignmentError(
                    f"the router {self.site} sees another number of rows than the forward that it is compared with",
                    layer=self.site.layer,
                    expected=f"{len(earlier)} rows",
                    found=f"{len(weights)} rows",
                )
            routes.shift = (weights.gather(-1, earlier.long()) - log_weights).abs().mean(-1)

    def replayed(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the experts to replay (..., K) int64, for scores (..., E)."""
        routed_experts = self.routes.routed_experts
        assert routed_experts is not None
        rows = scores.shape[:-1].numel()
        if routed_experts.shape[0] != rows:
            raise AlignmentError(
                f"the router {self.site} sees another number of rows than the routes have",
                layer=self.site.layer,
                expected=f"{routed_experts.shape[0]} rows",
                found=f"{rows} rows",
                remedy="The layout of the batch must be the one this rank's model sees: padding, packing, "
                "context and sequence parallel",
            )
        return routed_experts.long().view(*scores.shape[:-1], self.site.top_k)

    def _within_margin(self, weights: torch.Tensor, recorded: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
        taken = within_margin(weights, recorded, native, self.routes.margin)
        counts = torch.stack([taken.differs, taken.replaced]).sum(-1, dtype=torch.uint8).view(2, -1)
        self.routes.choices = counts
        return taken.routed_experts

    def gate_scores(self, current: torch.Tensor) -> torch.Tensor:
        """Return the scores (..., K) that gate weights are made of: current ones, or where it is so replayed ones."""
        routes, gates = self.routes, current
        if routes.gates is not None:
            assert routes.gated_rows is not None
            # Current scores stay in the graph, so that every router has a gradient: zero where gates are replayed.
            rows = routes.gated_rows.view(*current.shape[:-1], 1)
            gates = torch.where(rows, routes.gates.view_as(current).to(current.dtype), current)
        if routes.keep_gates:
            self.gates = gates.detach().clone()  # routers divide them in place
        return gates

    def store(self) -> None:
        """Store the experts taken, for recordings and for recomputation."""
        assert self.routed_experts is not None
        if self.gates is not None:
            self.routes.taken_gates = self.gates.reshape(-1, self.site.top_k)
        if self.fully_replayed:
            self.routes.taken_routed_experts = self.routes.routed_experts
        else:
            self.routes.taken_routed_experts = self._narrowed(self.routed_experts)
        if self.routes.observe:
            assert self.native_routed_experts is not None
            self.routes.native_routed_experts = self._narrowed(self.native_routed_experts)

    def _narrowed(self, ids: torch.Tensor) -> torch.Tensor:
        return narrow(ids, self.site.num_experts).view(-1, self.site.top_k)


def _outside_autograd(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return compute()


def log_of(weights: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of routing weights in at least float32, finite where a weight is zero."""
    weights = weights if weights.dtype == torch.float64 else weights.float()
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()


Native = Callable[[], Any]
"""The call that an interceptor has seen, as the router makes it."""


class TopKHandler:
    """Handles the calls that an interceptor sees; each method returns the result of the call, or a replacement."""

    def topk(self, native: Native, scores: torch.Tensor, k: int) -> Any:
        return native()

    def gather(self, native: Native, index: torch.Tensor) -> Any:
        return native()

    def weights(self, native: Native) -> Any:
        """Handle a call that makes routing weights of logits."""
        return native()


class TopKInterceptor(TorchFunctionMode):
    """Sends every `topk` and `gather` of one router call to its handler.

    Keeps no state: the compiler cannot read it off a mode.
    """

    def __init__(self, handler: TopKHandler) -> None:
        super().__init__()
        self.handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is torch.Tensor.topk:
            scores = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            return self.handler.topk(partial(func, *args, **kwargs), scores, k)
        if func is torch.gather or func is torch.Tensor.gather:
            index = args[2] if len(args) > 2 else kwargs["index"]
            return self.handler.gather(partial(func, *args, **kwargs), index)
        return func(*args, **kwargs)


_MAKES_WEIGHTS = frozenset(
    function
    for name in ("softmax", "sigmoid", "softplus")
    for module in (torch, torch.Tensor, torch.nn.functional)
    if (function := getattr(module, name, None)) is not None
)


class WeightsInterceptor(TopKInterceptor):
    """Also sends what makes routing weights of logits, for policies that need them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKES_WEIGHTS:
            return self.handler.weights(partial(func, *args, **(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs)


class RouterCall(TopKHandler):
    """Handles the `topk` calls of one call of a router."""

    def __init__(self, site: RouterSite, routes: LayerRoutes) -> None:
        self.site = site
        self.routes = routes
        self.choice = Choice(site, routes)
        self.other_calls: list[tuple[int, int]] = []
        self._weights: torch.Tensor | None = None  # of all experts, as the router has computed them before its choice

    def topk(self, native: Native, scores: torch.Tensor, k: int) -> Any:
        """Return the replayed experts where the router chooses experts, and their groups where it chooses groups."""
        columns = scores.shape[-1]
        if k == self.site.top_k and columns == self.site.num_experts:
            return self._experts(native, scores)
        # Scores inside each group (..., groups, experts of a group) may have as many columns as there are groups.
        if k == self.site.groups_kept and columns == self.site.num_groups and not self._inside_groups(scores):
            return self._groups(native, scores)
        self.other_calls.append((k, columns))
        return native()

    def _inside_groups(self, scores: torch.Tensor) -> bool:
        size = self.site.num_experts // self.site.num_groups
        return scores.dim() > 2 and scores.shape[-2:] == (self.site.num_groups, size)

    def _experts(self, native: Native, scores: torch.Tensor) -> Any:
        # A router with one group calls topk twice: the last result is the route.
        routed_experts = self.choice.select(scores, lambda: native().indices, lambda: self._log_weights(scores))
        return torch.return_types.topk((self.choice.gate_scores(scores.gather(-1, routed_experts)), routed_experts))

    def weights(self, native: Native) -> Any:
        """Keep the routing weights of all experts; those of shared experts come last (inkling)."""
        result = native()
        if self.choice.routed_experts is None and result.shape[-1] >= self.site.num_experts:
            self._weights = result.detach()[..., : self.site.num_experts]
        return result

    def _log_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (..., E) the logarithm of routing weights; a router that has made none yet chooses by logits."""
        return log_of(scores.softmax(-1) if self._weights is None else self._weights.reshape(scores.shape))

    def gather(self, native: Native, index: torch.Tensor) -> Any:
        """Return the scores that gates are made of where the router reads them at the experts that it was given."""
        result = native()
        is_gate = self.choice.routed_experts is not None and index is self.choice.routed_experts
        return self.choice.gate_scores(result) if is_gate else result

    def _groups(self, native: Native, scores: torch.Tensor) -> Any:
        """Keep the groups of the replayed experts unmasked: some families read the gate off the masked scores."""
        routes = self.routes
        # The same number of columns in every mode; naming a group twice unmasks it once.
        width = max(self.site.top_k, self.site.groups_kept)
        groups = native_groups = _widened(_outside_autograd(lambda: native().indices), width)
        if routes.routed_experts is not None:
            groups = _widened(self.choice.replayed(scores) // (self.site.num_experts // self.site.num_groups), width)
            if routes.valid is not None:
                groups = torch.where(routes.valid.view(*scores.shape[:-1], 1), groups, native_groups)
        return torch.return_types.topk((scores.gather(-1, groups), groups))


class TopKHook(RouterHook):
    """Replaces the forward of one router instance."""

    call_type: type[RouterCall] = RouterCall

    def __init__(self, site: RouterSite, active: ActivePass) -> None:
        self.native_forward = site.module.forward
        names = [cls.__name__ for cls in type(site.module).__mro__]  # FSDP2 derives a class from the router's own
        super().__init__(site, active, next((UNSEEN_GATES[name] for name in names if name in UNSEEN_GATES), None))

    @staticmethod
    def is_installed(module: nn.Module) -> bool:
        return isinstance(getattr(module.forward, "__self__", None), TopKHook)

    def install(self) -> None:
        if not self.is_installed(self.site.module):
            self.site.module.forward = self.forward

    def remove(self) -> None:
        if self.site.module.__dict__.get("forward") != self.forward:
            return
        del self.site.module.forward
        if self.site.module.forward != self.native_forward:  # an expert-parallel plan had put one on this instance
            self.site.module.forward = self.native_forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.active.eager_routers and torch.compiler.is_compiling():
            return self.active.run_eagerly(self._route, args, kwargs)
        return self._route(args, kwargs)

    def _route(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        forward_pass = self.active.for_router()
        if forward_pass is None:
            self.put_plan(None)
            return self.native_forward(*args, **kwargs)
        routes = forward_pass.claim(self.site.layer)
        self.put_plan(routes.plan)
        call = self.call_type(self.site, routes)
        with WeightsInterceptor(call) if routes.reads_weights else TopKInterceptor(call):
            result = self.native_forward(*args, **kwargs)
        if call.choice.routed_experts is None:
            raise UnsupportedRouterError(
                f"the router {self.site} made no top-k choice that could be recorded or replayed",
                layer=self.site.layer,
                expected=f"topk(k={self.site.top_k}) over {self.site.num_experts} columns",
                found=f"topk calls {call.other_calls}" if call.other_calls else "no topk call",
                remedy="See docs/routers.md for how to describe a router",
            )
        if routes.observe and self.site.num_groups:
            self.put_plan(None)  # a router may be a block with experts inside
            call.choice.native_routed_experts = self._native_choice(args, kwargs)
            self.put_plan(routes.plan)
        call.choice.store()
        return result

    def _native_choice(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run the router again: its first run saw the scores of the replayed groups alone."""
        call = self.call_type(self.site, LayerRoutes(self.site.layer))
        with torch.no_grad(), TopKInterceptor(call):
            self.native_forward(*args, **kwargs)
        return call.choice.routed_experts


def _widened(indices: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - indices.shape[-1]
    if not missing:
        return indices
    return torch.cat([indices, indices[..., :1].expand(*indices.shape[:-1], missing)], dim=-1)
