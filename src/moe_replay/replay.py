"""`RouterReplay`: records the routes a model takes, and makes it take recorded ones.

    replay = attach(model)
    with replay.record() as recording:          # R2: routes of the old-log-prob pass
        model(input_ids)
    with replay.replay(recording.batch()):      # later, with other weights: the same experts
        loss = model(input_ids).logits.mean()
    loss.backward()                             # recomputed layers find their routes by themselves

One controller serves one model (or one rank's list of pipeline chunks) in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_replay.batch import RouteBatch
from moe_replay.errors import AlignmentError, ReplayStateError
from moe_replay.layout import TokenLayout
from moe_replay.routers.base import RouterSite
from moe_replay.routers.topk import TopKPort
from moe_replay.tickets import Slot, Switch, Ticket
from moe_replay.topology import MoeTopology
from moe_replay.trace import RouteTrace

if TYPE_CHECKING:
    from moe_replay.routers.transformers import RouterRule


def attach(
    model: nn.Module, routers: Sequence[RouterRule] = (), topology: MoeTopology | None = None
) -> RouterReplay:
    """Find the routers of a model and put them under a controller. The model computes as before until told otherwise.

    `routers` and `topology` describe what this release does not know of the model (docs/routers.md).
    """
    from moe_replay.routers.transformers import find_routers, topology_of

    known = topology or topology_of(model)
    return RouterReplay(model, find_routers(model, routers, known), known)


class RouterReplay:
    """The controller of one model's routers."""

    def __init__(self, model: nn.Module, sites: Sequence[RouterSite], topology: MoeTopology) -> None:
        for site in sites:
            if isinstance(getattr(site.module.forward, "__self__", None), TopKPort):
                raise ReplayStateError(
                    f"the router {site} is attached already",
                    layer=site.layer,
                    remedy="Keep the controller that attach() returned, or call its detach() first",
                )
        self.topology = topology
        self.sites = {site.layer: site for site in sites}
        self._switch = Switch()
        self._ports = [TopKPort(site, self._switch) for site in sites]
        self._hooks = [
            handle
            for module in _modules_around_the_layers(model, sites)
            for handle in (
                module.register_forward_pre_hook(self._forward_begins, with_kwargs=True),
                module.register_forward_hook(self._forward_ended),
            )
        ]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose routers this controller drives."""
        return tuple(self.sites)

    def detach(self) -> None:
        """Take everything off the model again."""
        for port in self._ports:
            port.remove()
        for handle in self._hooks:
            handle.remove()
        self._ports, self._hooks = [], []

    # ---- the two ways to run a model --------------------------------------------------------------------------

    @contextmanager
    def record(self, *, every_pass: bool = False) -> Iterator[Recording]:
        """Remember which experts the routers take in the forward inside this context.

        One forward, so that its backward may recompute layers with the same routes. `every_pass` lifts that for
        token-by-token generation: then `recording.passes()` has one batch for each forward.
        """
        ticket = Ticket("record", {layer: Slot(layer) for layer in self.layers}, repeats=every_pass)
        with self._opened(ticket):
            yield Recording(self, ticket)

    @contextmanager
    def replay(
        self, batch: RouteBatch, *, fed_ids: torch.Tensor | None = None, observe: bool = False
    ) -> Iterator[Replaying]:
        """Make the routers take the experts of `batch` in the one forward inside this context.

        The token ids that the model is fed are held against those the routes were recorded for; a model that is fed
        embeddings cannot show them, so pass `fed_ids`. `observe` also remembers what the routers would have chosen.
        """
        self._check(batch)
        if batch.experts.device.type == "cpu":  # a batch that is on a device already stays there
            batch = batch.to(self._device())
        slots = {}
        for layer in self.layers:
            experts, valid, all_valid = batch.layer(layer)
            slots[layer] = Slot(layer, experts, valid, all_valid=all_valid, observe=observe)
        ticket = Ticket("replay", slots, batch=batch)
        if fed_ids is not None:
            ticket.was_fed(fed_ids)
            ticket.check_fed()
        with self._opened(ticket):
            yield Replaying(self, ticket)
        ticket.check_fed()

    @contextmanager
    def _opened(self, ticket: Ticket) -> Iterator[None]:
        self._switch.open_ticket(ticket)
        try:
            yield
        finally:
            self._switch.close_ticket()
        unused = ticket.unused_layers()
        if unused:
            raise ReplayStateError(
                f"routers did not run inside this {ticket.purpose}",
                layer=", ".join(map(str, unused)),
                expected=f"one forward through {len(ticket.slots)} routers",
                found=f"{len(ticket.slots) - len(unused)} that ran",
                remedy="Call the attached model itself inside the context, once",
            )

    def _check(self, batch: RouteBatch) -> None:
        if batch.source_layers != self.topology.layers:
            raise AlignmentError(
                "the routes were recorded for other decoder layers than this model has",
                expected=f"layers {list(self.topology.layers)}",
                found=f"layers {list(batch.source_layers)}",
                remedy="Layers are named by decoder index, dense ones counted; a layer the engine cannot capture is "
                "declared with trace.with_uncaptured_layers([...])",
            )
        for site in self.sites.values():
            batch.check((site.layer,), site.num_experts, site.top_k)

    def _device(self) -> torch.device:
        return next(self._ports[0].site.module.parameters()).device

    # ---- hooks on the modules around the decoder layers ---------------------------------------------------------

    def _forward_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling and not self._switch.forward_begins():
            return  # a recomputation inside a backward
        ticket = self._switch.open
        ids = _fed_token_ids(args, kwargs)
        if ticket is None or ids is None or ticket.fed_ids is not None:
            return
        ticket.was_fed(ids)
        if not compiling:  # a compiled forward is checked when it has ended
            ticket.check_fed()

    def _forward_ended(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Mark the outputs, so that a backward that reaches them knows which forward it belongs to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        mark = _Mark(self._switch, self._switch.ticket)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(mark.reached)


class Recording:
    """What `record()` hands out: the routes of the forward inside it."""

    def __init__(self, controller: RouterReplay, ticket: Ticket) -> None:
        self._controller = controller
        self._ticket = ticket

    def batch(self) -> RouteBatch:
        """The routes as they were taken, on the device, ready to be replayed on this rank. Nothing is moved."""
        slots = self._ticket.slots
        if any(slot.earlier for slot in slots.values()):
            raise ReplayStateError(
                "the recording spans several forwards", expected="one", remedy="Take recording.passes()"
            )
        return self._batch({layer: slot.chosen for layer, slot in slots.items()}, self._ticket.fed_ids)

    def passes(self) -> list[RouteBatch]:
        """One batch for each forward that ran inside `record(every_pass=True)`, in order."""
        taken = {layer: [*slot.earlier, slot.chosen] for layer, slot in self._ticket.slots.items()}
        counts = {len(choices) for choices in taken.values()}
        if len(counts) != 1:
            raise ReplayStateError("routers ran unequally often", found={k: len(v) for k, v in taken.items()})
        return [self._batch({layer: v[i] for layer, v in taken.items()}, None) for i in range(counts.pop())]

    def traces(
        self, layout: TokenLayout, token_ids: Sequence[Sequence[int]], weight_version: int = 0
    ) -> list[RouteTrace]:
        """The routes as traces, one for each sequence of the micro-batch; other ranks' tokens are uncovered."""
        batch = self.batch()
        return batch.to_traces(token_ids, layout, weight_version)

    def _batch(self, taken: dict[int, torch.Tensor | None], fed_ids: torch.Tensor | None) -> RouteBatch:
        unrun = [layer for layer, choice in taken.items() if choice is None]
        if unrun:
            raise ReplayStateError("nothing was recorded", layer=", ".join(map(str, unrun)))
        return RouteBatch.recorded(taken, self._controller.topology, fed_ids)


class Replaying:
    """What `replay()` hands out."""

    def __init__(self, controller: RouterReplay, ticket: Ticket) -> None:
        self._controller = controller
        self._ticket = ticket

    def native(self) -> RouteBatch:
        """What the routers would have chosen; needs `replay(batch, observe=True)` and the forward done."""
        choices = {layer: slot.native for layer, slot in self._ticket.slots.items()}
        if any(choice is None for choice in choices.values()):
            raise ReplayStateError(
                "native choices were not observed", remedy="Open replay(batch, observe=True) and run the forward first"
            )
        return RouteBatch.recorded(choices, self._controller.topology, self._ticket.fed_ids)


class _Mark:
    """Sits on the outputs of one forward; autograd calls it before it goes back through that forward."""

    def __init__(self, switch: Switch, ticket: Ticket | None) -> None:
        self.switch = switch
        self.ticket = ticket

    def reached(self, grad: torch.Tensor) -> None:
        self.switch.backward_reached(self.ticket)


def _modules_around_the_layers(model: nn.Module, sites: Sequence[RouterSite]) -> list[nn.Module]:
    """The modules on the way from the model down to the list of decoder layers: every forward passes one of them."""
    paths = [site.name.split(".") for site in sites]
    ways = [path[: next(i for i, part in enumerate(path) if part.isdigit())] for path in paths]
    common = ways[0]
    for way in ways:
        common = common[: next((i for i, (a, b) in enumerate(zip(common, way, strict=False)) if a != b), len(common))]
    return [model.get_submodule(".".join(common[:depth])) for depth in range(len(common) + 1)]


def _fed_token_ids(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
