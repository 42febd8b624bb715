"""`RouterReplay`: record the routes that a model takes, and make it take recorded ones.

    replay = attach(model)
    with replay.record() as recording:          # R2: routes of the old-log-prob pass
        model(input_ids)
    with replay.replay(recording.batch()):      # later, with other weights: the same experts
        loss = model(input_ids).logits.mean()
    loss.backward()                             # recomputed layers use the routes of their forward

One controller serves one model (or one rank's list of pipeline chunks) in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from moe_replay.errors import AlignmentError, ReplayStateError, UnsupportedRouterError
from moe_replay.replay.active import ActivePass, RouterHook, register_hooks
from moe_replay.replay.passes import FedTokens, ForwardPass, LayerRoutes
from moe_replay.replay.policy import IDS, ReplayPolicy, RoutingWeights
from moe_replay.replay.site import (
    Chunk,
    PlanSlot,
    RouterSite,
    boundary_modules,
    entry_modules,
    recomputes,
)
from moe_replay.replay.topk import TopKHook
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import RowOrder, TokenLayout
from moe_replay.routes.plan import DispatchPlan
from moe_replay.routes.router_families import ROUTER_FAMILIES, RouterFamily, RouterRule
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.plugins import resolve

if TYPE_CHECKING:
    from moe_replay.replay.adapters.megatron import AuxLoss

FinishPlan = Callable[[DispatchPlan | None, tuple[int, ...]], DispatchPlan | None]
"""Takes the plan of a micro-batch, or None; returns what the experts are given. All ranks call it."""


def attach(
    model: nn.Module | Sequence[nn.Module],
    routers: Sequence[RouterRule] | RouterFamily | str = (),
    topology: MoeTopology | None = None,
    *,
    aux_loss: AuxLoss = "native",
    recompute_only: bool = False,
) -> RouterReplay:
    """Find the routers of a model and return their controller. Outside its contexts the model computes as before.

    model     a Transformers model, a Megatron-Core model, or the list of Megatron-Core pipeline chunks of this rank
    routers   describe a model unknown to this release: rules for its routers, a `RouterFamily`, the model type of a
              known family that it is like, or a "module:name" that holds rules or a family (docs/routers.md)
    topology  the layers that route, where the rules alone do not say
    aux_loss  Megatron-Core: which tokens per expert the load-balancing losses count under replay: those of the
              router's own choice, or the replayed ones (docs/megatron.md)
    recompute_only  for activation checkpointing without contexts: every forward in training mode with gradients keeps
              its experts until its backward, whose recomputation takes them again. Other forwards are native and keep
              nothing
    """
    from moe_replay.replay.adapters import megatron, transformers

    models = [model] if isinstance(model, nn.Module) else list(model)
    if megatron.is_megatron(models):
        return RouterReplay(*megatron.find_chunks(models, topology, aux_loss), recompute_only=recompute_only)
    if len(models) != 1:
        raise UnsupportedRouterError(
            "a list of modules that are not Megatron-Core chunks",
            expected="one model, or the list of this rank's Megatron-Core pipeline chunks",
            found=[type(module).__name__ for module in models],
        )
    family = _family(routers)
    declared = topology or transformers.topology_of(models[0], family if isinstance(family, RouterFamily) else None)
    rules = family.routers if isinstance(family, RouterFamily) else family
    sites = transformers.find_routers(models[0], rules, declared)
    chunk = Chunk(entry_modules(models[0], sites), tuple(sites), boundary_modules(models[0], sites))
    return RouterReplay([chunk], declared, TopKHook, RowOrder("batch"), recompute_only=recompute_only)


class RouterReplay:
    """The controller of the routers of one model, or of one rank's pipeline chunks.

    topology      the routers of the whole model, also those of other pipeline stages
    sites         the routers that it controls, by decoder layer
    native_sites  routers that always route natively, e.g. those of multi-token prediction
    plans_rows    whether rows are planned for experts that take plans (`give_plans`)
    takes_plans   whether any experts do
    takes_stand_ins   whether rows that have a stand-in replay it (`RouteBatch.from_traces`); false where something is
                      computed of all rows together, such as a load-balancing loss
    replayed_passes, planned_passes   passes under `replay` so far, and those of them whose rows were planned
    """

    plans_rows = True
    takes_stand_ins = True
    replayed_passes = 0
    planned_passes = 0

    def __init__(
        self,
        chunks: Sequence[Chunk],
        topology: MoeTopology,
        hook: type[RouterHook],
        rows: RowOrder,
        native_sites: Sequence[RouterSite] = (),
        *,
        recompute_only: bool = False,
    ) -> None:
        if recompute_only and native_sites:
            raise UnsupportedRouterError(
                "recompute_only does not cover routers of multi-token prediction",
                layer=native_sites[0].layer,
                expected="a model whose routers are all replayed",
                found=", ".join(map(str, native_sites)),
                remedy="Leave the layers of multi-token prediction out of recomputation and use record() contexts",
            )
        sites = [site for chunk in chunks for site in chunk.sites]
        for site in sites:
            if hook.is_installed(site.module):
                raise ReplayStateError(
                    f"the router {site} is attached already",
                    layer=site.layer,
                    remedy="Keep the controller that attach() returned, or call its detach() first",
                )
        self.topology = topology
        self.sites = {site.layer: site for site in sorted(sites, key=lambda site: site.layer)}
        self.native_sites = tuple(native_sites)
        self._slots: dict[int, PlanSlot] = {}
        self._finish_plan: FinishPlan | None = None
        self._chunks = list(chunks)
        self._rows = rows
        self._active = ActivePass(recompute_only=recompute_only)
        self._router_hooks = [hook(site, self._active) for site in sites]
        self._module_hooks = [handle for chunk in chunks for handle in register_hooks(chunk, self._active)]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose routers this controller controls."""
        return tuple(self.sites)

    @property
    def takes_plans(self) -> bool:
        return bool(self._slots)

    def layers_of(self, chunk: nn.Module) -> tuple[int, ...]:
        """Return the decoder layers of the routers in this pipeline chunk, wrapped or not."""
        inside = {id(module) for module in chunk.modules()}
        by_chunk = [part.layers for part in self._chunks if inside & set(map(id, part.entry_modules))]
        if not by_chunk:
            raise ReplayStateError(
                "a module that this controller is not attached to",
                found=type(chunk).__name__,
                remedy="Pass the chunk that was given to attach(), or a wrapper of it",
            )
        return tuple(sorted(layer for layers in by_chunk for layer in layers))

    def keep_routers_eager(self) -> None:
        """Run routers outside compiled code, for layers that are compiled one by one.

        A router in a graph makes it the graph of one layer, and of recording or replaying. Without it, all layers share
        their graphs in all passes, recomputations included.
        """
        self._active.eager_routers = True

    def give_plans(self, slots: Sequence[PlanSlot], finish: FinishPlan | None = None) -> None:
        """Have routers put the plan of what they replay into the slots of the experts behind them.

        finish   called in every `replay` with its plan, or None, and the layers of its batch that take one; returns the
                 plan to use: ranks may have to agree
        """
        self._slots = {slot.layer: slot for slot in slots}
        self._finish_plan = finish
        self._active.slots = tuple(slots)
        sites = [site for chunk in self._chunks for site in chunk.sites]
        for site, hook in zip(sites, self._router_hooks, strict=True):
            hook.slot = self._slots.get(site.layer)

    @contextmanager
    def any_plan(self, rows: int) -> Iterator[None]:
        """Give experts a plan for `rows` rows, whatever routers choose: for code that is compiled before a replay.

        What they compute is of no use.
        """
        routes = {
            layer: torch.arange(self.sites[layer].top_k, device=self._device()).expand(rows, -1)
            for layer in self._slots
        }
        plan = self.plan_rows(RouteBatch.recorded(routes, self.topology)) if routes and self.plans_rows else None
        bound = [(hook, hook.slot) for hook in self._router_hooks]
        for hook, slot in bound:
            hook.slot = None
            if slot is not None:
                slot.put(plan)
        try:
            yield
        finally:
            for hook, slot in bound:
                hook.slot = slot
                if slot is not None:
                    slot.put(None)

    def detach(self) -> None:
        """Remove all hooks from the model. Backwards of earlier forwards still recompute with their routes."""
        self._active.detach([*self._router_hooks, *self._active.detached_hooks])
        for handle in self._module_hooks:
            handle.remove()
        self._router_hooks, self._module_hooks = [], []

    # ---- record and replay ------------------------------------------------------------------------------------

    @contextmanager
    def record(
        self,
        *,
        every_pass: bool = False,
        fed_ids: torch.Tensor | None = None,
        gates: bool = False,
        weights: bool = False,
        since: RoutingWeights | None = None,
    ) -> Iterator[Recording]:
        """Record which experts the routers take in the forward inside this context.

        One forward, so that its backward may recompute layers with the same routes. `every_pass` allows many, for
        token-by-token generation: `recording.passes()` then returns one batch for each forward. `fed_ids` are the
        token ids of a pipeline stage that is fed none. `gates` also records what gate weights are made of, for
        `replay(batch, policy=ReplayPolicy(gates=True))`: 4 bytes for each choice of experts in float32.

        weights   also record routing weights of the experts taken: `recording.routing_weights()`
        since     routing weights of an earlier forward over the same rows, for `recording.router_shift()`
        """
        if gates:
            self._check_gates()
        layer_routes = {
            layer: LayerRoutes(layer, keep_gates=gates, keep_weights=weights, since=_of_layer(since, layer))
            for layer in self.layers
        }
        chunks = [chunk.layers for chunk in self._chunks]
        forward_pass = ForwardPass("record", layer_routes, chunks, repeats=every_pass, given_ids=fed_ids)
        with self._opened(forward_pass):
            yield Recording(self.topology, self._rows, forward_pass)

    @contextmanager
    def replay(
        self,
        batch: RouteBatch,
        *,
        fed_ids: torch.Tensor | None = None,
        observe: bool = False,
        unverified: bool = False,
        allow_unknown_tokens: bool = False,
        deferred: bool = False,
        plan: DispatchPlan | None = None,
        policy: ReplayPolicy = IDS,
        weights: bool = False,
        since: RoutingWeights | None = None,
    ) -> Iterator[Replaying]:
        """Make the routers take the experts of `batch` in the one forward inside this context.

        The token ids that the model is fed are compared with those that the routes were recorded for; a model that is
        fed embeddings, and a later pipeline stage, have none, so pass `fed_ids`. `observe` also records what the
        routers would have chosen. With several pipeline chunks the batch may be for all of them or for some; each
        runs at most once, and at least one must run.

        unverified            do without the comparison of token ids, e.g. for routes that were recorded without any
        allow_unknown_tokens  accept tokens that no trace has, where the layout of the batch has padding: they are
                              routed natively, and `Replaying.unknown_tokens` counts them
        deferred              raise about token ids when the context closes, not before the first layer: then the host
                              does not wait for the device, and the backward must come after the context
        plan                  of the rows of this batch, made before by `plan_rows`; None: it is made here
        policy                how much of the batch is taken; the default takes the experts
        weights, since        as for `record`
        """
        chunks = self._check(batch, policy)
        # A router need not choose for rows that have a stand-in. It must where a margin decides about every row, and
        # where padding may be tokens.
        takes_stand_ins = self.takes_stand_ins and not policy.has_margin and not allow_unknown_tokens
        if plan is not None:
            if policy.has_margin:
                raise ReplayStateError(
                    "a dispatch plan was given for a replay within a margin",
                    found=f"margin {policy.margin:g}",
                    remedy="Leave the plan out: which experts are taken is known only when routers have run",
                )
            plan.check(batch.with_stand_ins() if takes_stand_ins else batch, self._planned_experts(batch))
        if not unverified:
            batch.check_verifiable()
        needed = tuple(layer for layer in self.layers if any(layer in chunk for chunk in chunks))
        if batch.layers != needed:
            batch = batch.select_layers(needed)
        if batch.routed_experts.device.type == "cpu":  # a batch that is on a device already stays there
            device = self._device()
            batch = batch.pin_memory() if device.type == "cuda" else batch
            batch = batch.to(device, non_blocking=True)
        replayed = batch.with_stand_ins() if takes_stand_ins else batch
        plan = self._plan(replayed, plan, policy)
        self.replayed_passes += 1
        self.planned_passes += plan is not None
        layer_routes = {}
        for layer in needed:
            routed_experts, valid, all_valid = replayed.layer(layer)
            layer_routes[layer] = LayerRoutes(
                layer,
                routed_experts,
                valid,
                all_valid=all_valid,
                observe=observe,
                plan=plan if layer in self._slots else None,
                gates=batch.layer_gates(layer) if policy.gates else None,
                gated_rows=valid if policy.gates else None,
                margin=policy.margin,
                keep_weights=weights,
                since=_of_layer(since, layer),
            )
        forward_pass = ForwardPass(
            "replay",
            layer_routes,
            chunks,
            batch=None if unverified else batch,
            given_ids=fed_ids,
            allow_unknown=allow_unknown_tokens,
            deferred=deferred,
        )
        with self._opened(forward_pass):
            yield Replaying(self.topology, self._rows, forward_pass, None if replayed is batch else batch)
        forward_pass.check_fed()

    def plan_rows(self, batch: RouteBatch) -> DispatchPlan | None:
        """Return the order of rows in all layers whose experts take plans; None where a row of the batch has no route.

        For several passes over one batch, on the device of the model: `replay(batch, plan=...)`. None too where
        rows have stand-ins (`RouteBatch.from_traces`) that this model does not take.
        """
        return DispatchPlan.of(batch.with_stand_ins() if self.takes_stand_ins else batch, self._planned_experts(batch))

    def _planned_experts(self, batch: RouteBatch) -> dict[int, int]:
        return {layer: slot.num_experts for layer, slot in self._slots.items() if layer in batch.layers}

    def _plan(self, batch: RouteBatch, plan: DispatchPlan | None, policy: ReplayPolicy) -> DispatchPlan | None:
        if not self._slots or not self.plans_rows:
            return None
        if plan is not None:
            plan = plan.to(batch.routed_experts.device)
        elif not policy.has_margin:
            plan = DispatchPlan.of(batch, self._planned_experts(batch))
        return plan if self._finish_plan is None else self._finish_plan(plan, tuple(self._planned_experts(batch)))

    @contextmanager
    def _opened(self, forward_pass: ForwardPass) -> Iterator[None]:
        self._active.open(forward_pass, recomputes=any(map(recomputes, self._chunks)))
        try:
            yield
        finally:
            self._active.close()
        forward_pass.copy_compiled()
        forward_pass.check_used()

    def _check_gates(self) -> None:
        """Raise if a router makes gate weights of scores that its hook does not see."""
        for hook in self._router_hooks:
            if hook.gates_problem is not None:
                raise UnsupportedRouterError(
                    f"the gate weights of a router cannot be replayed: {hook.gates_problem}",
                    remedy="Replay the experts alone, or train this model with FSDP2",
                )

    def _check_margin(self) -> None:
        """Raise if the router's own choice is not that of the best scores."""
        limited = next((site for site in self.sites.values() if site.num_groups), None)
        if limited is not None:
            raise UnsupportedRouterError(
                f"the router {limited} cannot be replayed within a margin: it keeps {limited.groups_kept} of "
                f"{limited.num_groups} groups of experts first, so that its choice is not the best of all scores",
                layer=limited.layer,
                remedy="Replay all recorded experts",
            )

    def _check(self, batch: RouteBatch, policy: ReplayPolicy) -> list[tuple[int, ...]]:
        """Raise unless the batch fits this model; return the layers of each chunk that it has routes for."""
        if batch.source_layers != self.topology.layers:
            raise AlignmentError(
                "the routes were recorded for other decoder layers than this model has",
                expected=f"layers {list(self.topology.layers)}",
                found=f"layers {list(batch.source_layers)}",
                remedy="Layers are named by decoder index, dense ones counted; a layer the engine cannot capture is "
                "declared with trace.with_uncaptured_layers([...])",
            )
        if policy.gates:
            self._check_gates()
            if batch.gates is None and batch.layers:
                raise AlignmentError(
                    "the routes have no gate weights to replay",
                    expected="routes of record(gates=True)",
                    found="experts alone, as engines and traces have them",
                    remedy="Record them in the trainer, or replay the experts alone",
                )
        if policy.has_margin:
            self._check_margin()
        if batch.row_order is not None and batch.fed_token_ids is not None:
            self._rows.check(batch.row_order, batch.fed_token_ids.shape)
        served = [chunk for chunk in self._chunks if not chunk.layers or set(chunk.layers) & set(batch.layers)]
        for chunk in served or self._chunks:
            for site in chunk.sites:
                batch.check((site.layer,), site.num_experts, site.top_k)
        return [chunk.layers for chunk in served]

    def _device(self) -> torch.device:
        modules = [*(site.module for site in self.sites.values()), *(chunk.entry_modules[0] for chunk in self._chunks)]
        return next((parameter.device for module in modules for parameter in module.parameters()), torch.device("cpu"))


def _family(routers: Sequence[RouterRule] | RouterFamily | str) -> Sequence[RouterRule] | RouterFamily:
    """Return the family or the rules that `attach` was given, by value or as "module:name"."""
    family = (
        resolve(routers, ROUTER_FAMILIES, kind="router family", key="routers") if isinstance(routers, str) else routers
    )
    rules = family.routers if isinstance(family, RouterFamily) else family
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, RouterRule) for rule in rules):
        raise UnsupportedRouterError(
            "the description of the routers has the wrong type",
            expected="a RouterFamily or a list of RouterRule",
            found=type(family).__name__,
            remedy="See docs/routers.md for an example",
        )
    return family


# ---- results of record() and replay() --------------------------------------------------------------------------------


def _of_layer(since: RoutingWeights | None, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if since is None:
        return None
    if layer not in since.log_weights:
        raise AlignmentError(
            "the routing weights to compare with lack a layer",
            layer=layer,
            found=f"layers {list(since.log_weights)}",
            remedy="Pass what routing_weights() returned for a forward of the same model",
        )
    return since.routed_experts[layer], since.log_weights[layer]


class _Forward:
    """Choices of the routers in the forward of a context."""

    def __init__(self, topology: MoeTopology, rows: RowOrder, forward_pass: ForwardPass) -> None:
        self._topology = topology
        self._rows = rows
        self._pass = forward_pass

    def _run(self) -> dict[int, LayerRoutes]:
        return {layer: self._pass.layer_routes[layer] for layer in self._pass.layers_run()}

    def routing_weights(self) -> RoutingWeights:
        """Return the routing weights of the experts taken; needs a context with `weights=True`."""
        run = self._run()
        return RoutingWeights(
            {layer: taken for layer, routes in run.items() if (taken := routes.taken_routed_experts) is not None},
            {layer: kept for layer, routes in run.items() if (kept := routes.taken_weights) is not None},
        )

    def router_shift(self) -> torch.Tensor:
        """Return (R,) how far routers have moved since `since`, for each row.

        The mean over layers and the experts taken then of the distance between logarithms of routing weights.
        """
        shifts = [routes.shift for routes in self._run().values()]
        measured = [shift for shift in shifts if shift is not None]
        if not measured or len(measured) < len(shifts):
            raise ReplayStateError("nothing was compared", remedy="Open the context with since=routing_weights()")
        return torch.stack(measured).mean(0)


class Recording(_Forward):
    """The routes recorded inside `record()`."""

    def batch(self) -> RouteBatch:
        """Return the routes as they were taken, on the device, ready to be replayed on this rank. Nothing is moved."""
        layer_routes = self._run()
        if any(routes.earlier for routes in layer_routes.values()):
            raise ReplayStateError(
                "the recording spans several forwards", expected="one", remedy="Use recording.passes()"
            )
        gates = {layer: routes.taken_gates for layer, routes in layer_routes.items()}
        return self._batch(
            {layer: (routes.taken_routed_experts, routes.tokens) for layer, routes in layer_routes.items()},
            {layer: scores for layer, scores in gates.items() if scores is not None},
        )

    def passes(self) -> list[RouteBatch]:
        """Return one batch for each forward that ran inside `record(every_pass=True)`, in order."""
        by_layer = {
            layer: [*routes.earlier, (routes.taken_routed_experts, routes.tokens)]
            for layer, routes in self._run().items()
        }
        counts = {len(forwards) for forwards in by_layer.values()}
        if len(counts) != 1:
            raise ReplayStateError("routers ran unequally often", found={k: len(v) for k, v in by_layer.items()})
        return [self._batch({layer: v[i] for layer, v in by_layer.items()}) for i in range(counts.pop())]

    def traces(
        self,
        layout: TokenLayout,
        token_ids: Sequence[Sequence[int]],
        weight_version: int = 0,
        *,
        unverified: bool = False,
    ) -> list[RouteTrace]:
        """Return one trace for each sequence of the micro-batch; tokens of other ranks are uncovered.

        Layout and ids are compared with what the model was fed, unless `unverified`.
        """
        batch, topology = self.batch(), self._topology
        if not batch.layers:  # a pipeline stage without routers has routes for no token
            return [
                RouteTrace.uncovered(
                    ids, topology.layers, topology.top_k, weight_version, num_experts=topology.num_experts
                )
                for ids in token_ids
            ]
        return batch.to_traces(token_ids, layout, weight_version, unverified=unverified)

    def _batch(
        self,
        by_layer: dict[int, tuple[torch.Tensor | None, FedTokens | None]],
        gates: dict[int, torch.Tensor] | None = None,
    ) -> RouteBatch:
        routed_experts = {layer: experts for layer, (experts, _) in by_layer.items() if experts is not None}
        if len(routed_experts) < len(by_layer):
            missing = [str(layer) for layer in by_layer if layer not in routed_experts]
            raise ReplayStateError("nothing was recorded", layer=", ".join(missing))
        fed = [tokens for _, tokens in by_layer.values()] if by_layer else [self._pass.tokens]
        tokens = self._pass.given or next((tokens for tokens in fed if tokens is not None), None)
        ids = None if tokens is None else tokens.ids
        return RouteBatch.recorded(routed_experts, self._topology, ids, self._rows, gates)


class Replaying(_Forward):
    """The value of a `replay()` context.

    lacking   the batch, if rows of it have taken stand-ins
    """

    def __init__(
        self, topology: MoeTopology, rows: RowOrder, forward_pass: ForwardPass, lacking: RouteBatch | None = None
    ) -> None:
        super().__init__(topology, rows, forward_pass)
        self._lacking = lacking

    def native(self) -> RouteBatch:
        """Return what the routers would have chosen; needs `replay(batch, observe=True)` and the forward done.

        Rows that took a stand-in have no choice of a router's own: they are not valid.
        """
        observed = {layer: routes.native_routed_experts for layer, routes in self._run().items()}
        routed_experts = {layer: experts for layer, experts in observed.items() if experts is not None}
        if len(routed_experts) < len(observed):
            raise ReplayStateError(
                "native choices were not observed", remedy="Open replay(batch, observe=True) and run the forward first"
            )
        tokens = self._pass.given or self._pass.tokens
        ids = None if tokens is None else tokens.ids
        native = RouteBatch.recorded(routed_experts, self._topology, ids, self._rows)
        if self._lacking is None or not native.layers:  # a pipeline chunk may have no routers
            return native
        lacking = self._lacking.select_layers(native.layers)
        return replace(native, valid=lacking.valid, all_valid=lacking.all_valid)

    def choices(self) -> dict[int, torch.Tensor]:
        """Return what a margin has decided, by decoder layer: (2, R) uint8, for the choices of each row.

        Recorded experts that the router would not have taken, and those of them that were taken. Zero in rows without
        a route.
        """
        return {
            layer: routes.choices * routes.valid if routes.valid is not None else routes.choices
            for layer, routes in self._run().items()
            if routes.choices is not None
        }

    @property
    def unknown_tokens(self) -> int:
        """Tokens that the model was fed and that no trace has: they were routed natively (`allow_unknown_tokens`)."""
        return next((tokens.unknown for tokens in self._pass.fed()), 0)
