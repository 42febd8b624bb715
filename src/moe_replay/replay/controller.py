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
from torch.utils.hooks import RemovableHandle

from moe_replay.errors import AlignmentError, ReplayStateError, UnsupportedRouterError
from moe_replay.replay.passes import Slot, Switch, Ticket
from moe_replay.replay.site import Chunk, PortKind, RouterSite, RowOrder
from moe_replay.replay.topk import TopKPort
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

if TYPE_CHECKING:
    from moe_replay.replay.adapters.megatron import AuxLoss
    from moe_replay.replay.adapters.transformers import RouterRule


def attach(
    model: nn.Module | Sequence[nn.Module],
    routers: Sequence[RouterRule] = (),
    topology: MoeTopology | None = None,
    *,
    aux_loss: AuxLoss = "native",
) -> RouterReplay:
    """Find the routers of a model and put them under a controller. The model computes as before until told otherwise.

    model     a Transformers model, a Megatron-Core model, or the list of Megatron-Core pipeline chunks of this rank
    routers, topology  describe what this release does not know of the model (docs/routers.md)
    aux_loss  Megatron-Core: whose tokens per expert the load-balancing losses count under replay: those of the
              router's own choice, or the replayed ones (docs/megatron.md)
    """
    from moe_replay.replay.adapters import megatron, transformers

    models = [model] if isinstance(model, nn.Module) else list(model)
    if megatron.is_megatron(models):
        found = megatron.find_chunks(models, topology, aux_loss)
        return RouterReplay(found.chunks, found.topology, found.port, found.rows, found.native_sites)
    if len(models) != 1:
        raise UnsupportedRouterError(
            "a list of modules that are not Megatron-Core chunks",
            expected="one model, or the list of this rank's Megatron-Core pipeline chunks",
            found=[type(one).__name__ for one in models],
        )
    known = topology or transformers.topology_of(models[0])
    sites = transformers.find_routers(models[0], routers, known)
    entrances = _modules_around_the_layers(models[0], sites)
    return RouterReplay([Chunk(tuple(entrances), tuple(sites))], known, TopKPort, RowOrder("batch"))


class RouterReplay:
    """The controller of one model's routers, or of those of one rank's pipeline chunks.

    topology      the routers of the whole model, also those of other pipeline stages
    sites         the routers that it drives, by decoder layer
    native_sites  routers that route natively always, e.g. those of multi-token prediction
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        topology: MoeTopology,
        port: PortKind,
        rows: RowOrder,
        native_sites: Sequence[RouterSite] = (),
    ) -> None:
        sites = [site for chunk in chunks for site in chunk.sites]
        for site in sites:
            if port.is_on(site.module):
                raise ReplayStateError(
                    f"the router {site} is attached already",
                    layer=site.layer,
                    remedy="Keep the controller that attach() returned, or call its detach() first",
                )
        self.topology = topology
        self.sites = {site.layer: site for site in sorted(sites, key=lambda site: site.layer)}
        self.native_sites = tuple(native_sites)
        self._chunks = list(chunks)
        self._rows = rows
        self._switch = Switch()
        self._ports = [port(site, self._switch) for site in sites]
        self._hooks = [
            handle
            for chunk in chunks
            for module in chunk.entrances
            for handle in _ChunkHooks(chunk.layers, self._switch).put_on(module)
        ]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose routers this controller drives."""
        return tuple(self.sites)

    def layers_of(self, chunk: nn.Module) -> tuple[int, ...]:
        """Decoder layers of the routers in this pipeline chunk, wrapped or not: the routes that its forward needs."""
        inside = {id(module) for module in chunk.modules()}
        found = [one.layers for one in self._chunks if inside & set(map(id, one.entrances))]
        if not found:
            raise ReplayStateError(
                "a module that this controller is not attached to",
                found=type(chunk).__name__,
                remedy="Give the chunk that attach() was given, or what is wrapped around it",
            )
        return tuple(sorted(layer for layers in found for layer in layers))

    def detach(self) -> None:
        """Take everything off the model again."""
        for port in self._ports:
            port.remove()
        for handle in self._hooks:
            handle.remove()
        self._ports, self._hooks = [], []

    # ---- the two ways to run a model --------------------------------------------------------------------------

    @contextmanager
    def record(self, *, every_pass: bool = False, fed_ids: torch.Tensor | None = None) -> Iterator[Recording]:
        """Remember which experts the routers take in the forward inside this context.

        One forward, so that its backward may recompute layers with the same routes. `every_pass` lifts that for
        token-by-token generation: then `recording.passes()` has one batch for each forward. `fed_ids` are the token
        ids of a pipeline stage that is fed none.
        """
        slots = {layer: Slot(layer) for layer in self.layers}
        ticket = Ticket("record", slots, [chunk.layers for chunk in self._chunks], repeats=every_pass)
        if fed_ids is not None:
            ticket.was_fed(fed_ids)
        with self._opened(ticket):
            yield Recording(self, ticket)

    @contextmanager
    def replay(
        self, batch: RouteBatch, *, fed_ids: torch.Tensor | None = None, observe: bool = False
    ) -> Iterator[Replaying]:
        """Make the routers take the experts of `batch` in the one forward inside this context.

        The token ids that the model is fed are held against those the routes were recorded for; a model that is fed
        embeddings, or a later pipeline stage, cannot show them, so pass `fed_ids`. `observe` also remembers what the
        routers would have chosen. With several pipeline chunks the batch may be for all of them or for some; each runs
        once at most, and at least one does.
        """
        chunks = self._check(batch)
        needed = tuple(layer for layer in self.layers if any(layer in chunk for chunk in chunks))
        if batch.layers != needed:
            batch = batch.select_layers(needed)
        if batch.experts.device.type == "cpu":  # a batch that is on a device already stays there
            batch = batch.to(self._device())
        slots = {}
        for layer in needed:
            experts, valid, all_valid = batch.layer(layer)
            slots[layer] = Slot(layer, experts, valid, all_valid=all_valid, observe=observe)
        ticket = Ticket("replay", slots, chunks, batch=batch)
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
        ticket.check_used()

    def _check(self, batch: RouteBatch) -> list[tuple[int, ...]]:
        """Raise unless the batch can be for this model. The layers of each chunk that it has routes for."""
        if batch.source_layers != self.topology.layers:
            raise AlignmentError(
                "the routes were recorded for other decoder layers than this model has",
                expected=f"layers {list(self.topology.layers)}",
                found=f"layers {list(batch.source_layers)}",
                remedy="Layers are named by decoder index, dense ones counted; a layer the engine cannot capture is "
                "declared with trace.with_uncaptured_layers([...])",
            )
        if batch.layout is not None:
            self._rows.check(batch.layout)
        served = [chunk for chunk in self._chunks if not chunk.layers or set(chunk.layers) & set(batch.layers)]
        for chunk in served or self._chunks:
            for site in chunk.sites:
                batch.check((site.layer,), site.num_experts, site.top_k)
        return [chunk.layers for chunk in served]

    def _device(self) -> torch.device:
        modules = [*(site.module for site in self.sites.values()), *(chunk.entrances[0] for chunk in self._chunks)]
        return next((parameter.device for module in modules for parameter in module.parameters()), torch.device("cpu"))


class _ChunkHooks:
    """On the modules around the decoder layers of one chunk: they see its forward begin and end.

    Bound methods again, so that a deep copy of the model has hooks of its own.
    """

    def __init__(self, layers: tuple[int, ...], switch: Switch) -> None:
        self.layers = layers
        self.switch = switch

    def put_on(self, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        return (
            module.register_forward_pre_hook(self.forward_begins, with_kwargs=True),
            module.register_forward_hook(self.forward_ended),
        )

    def forward_begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        compiling = torch.compiler.is_compiling()
        if not compiling and not self.switch.forward_begins():
            return  # a recomputation inside a backward
        ticket = self.switch.open
        if ticket is None:
            return
        if not compiling:
            ticket.chunk_begins(self.layers)
        ids = _fed_token_ids(args, kwargs)
        if ids is None or ticket.fed_ids is not None:
            return
        ticket.was_fed(ids)
        if not compiling:  # a compiled forward is checked when it has ended
            ticket.check_fed()

    def forward_ended(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Mark the outputs, so that a backward that reaches them knows which forward it belongs to."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        mark = _Mark(self.switch, self.switch.ticket)
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
        slots = self._slots_run()
        if any(slot.earlier for slot in slots.values()):
            raise ReplayStateError(
                "the recording spans several forwards", expected="one", remedy="Take recording.passes()"
            )
        return self._batch({layer: slot.chosen for layer, slot in slots.items()}, self._ticket.fed_ids)

    def _slots_run(self) -> dict[int, Slot]:
        return {layer: self._ticket.slots[layer] for layer in self._ticket.layers_run()}

    def passes(self) -> list[RouteBatch]:
        """One batch for each forward that ran inside `record(every_pass=True)`, in order."""
        taken = {layer: [*slot.earlier, slot.chosen] for layer, slot in self._slots_run().items()}
        counts = {len(choices) for choices in taken.values()}
        if len(counts) != 1:
            raise ReplayStateError("routers ran unequally often", found={k: len(v) for k, v in taken.items()})
        return [self._batch({layer: v[i] for layer, v in taken.items()}, None) for i in range(counts.pop())]

    def traces(
        self, layout: TokenLayout, token_ids: Sequence[Sequence[int]], weight_version: int = 0
    ) -> list[RouteTrace]:
        """The routes as traces, one for each sequence of the micro-batch; other ranks' tokens are uncovered."""
        batch, topology = self.batch(), self._controller.topology
        if not batch.layers:  # a pipeline stage without routers knows of no token where it went
            return [
                RouteTrace.uncovered(
                    ids, topology.layers, topology.top_k, weight_version, num_experts=topology.num_experts
                )
                for ids in token_ids
            ]
        return batch.to_traces(token_ids, layout, weight_version)

    def _batch(self, taken: dict[int, torch.Tensor | None], fed_ids: torch.Tensor | None) -> RouteBatch:
        found = {layer: choice for layer, choice in taken.items() if choice is not None}
        if len(found) < len(taken):
            raise ReplayStateError("nothing was recorded", layer=", ".join(str(i) for i in taken if i not in found))
        return RouteBatch.recorded(found, self._controller.topology, fed_ids)


class Replaying:
    """What `replay()` hands out."""

    def __init__(self, controller: RouterReplay, ticket: Ticket) -> None:
        self._controller = controller
        self._ticket = ticket

    def native(self) -> RouteBatch:
        """What the routers would have chosen; needs `replay(batch, observe=True)` and the forward done."""
        layers, slots = self._ticket.layers_run(), self._ticket.slots
        choices = {layer: native for layer in layers if (native := slots[layer].native) is not None}
        if len(choices) < len(layers):
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
