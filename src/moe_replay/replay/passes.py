"""`Ticket`: the routes of one micro-batch, on their way to the routers of one model.

A forward pass belongs to the ticket that a `record()` or `replay()` context opened. A backward pass belongs to the
ticket of the forward that built its graph, so that recomputed layers find the routes of their own micro-batch,
whatever the order of micro-batches. Routers know nothing of this: they look at the `Switch` and obey.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moe_replay.errors import AlignmentError, ReplayStateError

if TYPE_CHECKING:
    from moe_replay.routes.batch import RouteBatch


class Slot:
    """One router's share of a ticket. It is used exactly once in a pass.

    target     (R, K) the experts to take, or None to let the router choose and remember its choice
    valid      (R,) rows the target speaks for; the others are routed natively
    all_valid  the target speaks for every row, as known on the host
    observe    also remember what the router would have chosen
    chosen     (R, K) what it took, in the target's narrow dtype; None until the router has run
    native     (R, K) what it would have taken, where that was asked for
    """

    def __init__(
        self,
        layer: int,
        target: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        *,
        all_valid: bool = False,
        observe: bool = False,
    ) -> None:
        self.layer = layer
        self.target = target
        self.valid = valid
        self.all_valid = all_valid
        self.observe = observe
        self.chosen: torch.Tensor | None = None
        self.native: torch.Tensor | None = None
        self.earlier: list[torch.Tensor] = []  # choices of earlier passes, when one recording spans many


class Ticket:
    """The slots of one pass over one model, keyed by decoder layer.

    purpose    what the pass is for, in words, for error messages
    chunks     the layers of each pipeline chunk that the slots are for; a whole model is one chunk
    thread     the only thread whose forward may use it; None in a backward, which autograd runs where it likes
    batch      the routes that are replayed, if any are
    repeats    a recording may span many passes (token by token generation); nothing else may
    fed_ids    the token ids that the model was really fed
    """

    def __init__(
        self,
        purpose: str,
        slots: Mapping[int, Slot],
        chunks: Sequence[tuple[int, ...]] = (),
        *,
        batch: RouteBatch | None = None,
        repeats: bool = False,
    ) -> None:
        self.purpose = purpose
        self.slots = dict(slots)
        self.chunks = tuple(chunks)
        self.batch = batch
        self.repeats = repeats
        self.thread: int | None = threading.get_ident()
        self.fed_ids: torch.Tensor | None = None
        self._fed_checked = False
        self._begun: set[tuple[int, ...]] = set()

    def chunk_begins(self, layers: tuple[int, ...]) -> None:
        """The forward of the chunk with these layers begins."""
        if layers not in self.chunks:
            raise AlignmentError(
                f"a pipeline chunk runs that this {self.purpose} has no routes for",
                layer=", ".join(map(str, layers)),
                expected=f"layers {list(layers)}",
                found=f"layers {sorted(self.slots)}",
                remedy="Make the batch for the layers of this chunk: replay.layers_of(chunk), or replay.layers for all",
            )
        self._begun.add(layers)

    def was_fed(self, token_ids: torch.Tensor) -> None:
        """These token ids go into the model."""
        self.fed_ids = token_ids

    def check_fed(self) -> None:
        """Raise unless the model is fed the tokens that the routes were recorded for. One device sync, once."""
        if self._fed_checked or self.batch is None or self.batch.fed_token_ids is None:
            return
        if self.fed_ids is None:
            raise AlignmentError(
                "the model was not fed token ids, so nothing proves that the routes belong to its tokens",
                remedy="Pass the ids that the embeddings were made from: replay(batch, fed_ids=...)",
            )
        self.batch.check_fed(self.fed_ids)
        self._fed_checked = True

    def claim(self, layer: int) -> Slot:
        """The slot of a router that is about to run."""
        slot = self.slots.get(layer)
        if slot is None:
            raise ReplayStateError(
                f"a router ran that this {self.purpose} has no routes for",
                layer=layer,
                expected=f"routers of layers {sorted(self.slots)}",
                remedy="Run each pipeline chunk in a context with the routes of its own layers",
            )
        if not torch.compiler.is_compiling() and self.thread not in (None, threading.get_ident()):
            raise ReplayStateError(
                f"a router ran in another thread than the one that opened this {self.purpose}",
                layer=layer,
                remedy="Open record() or replay() in the thread that runs the model; it serves one thread at a time",
            )
        if slot.chosen is not None:
            if not self.repeats:
                raise ReplayStateError(
                    f"a router used the routes of one {self.purpose} twice",
                    layer=layer,
                    expected="one forward of the model for each context",
                    found="a second one",
                    remedy="Open a new context for each micro-batch; nest no checkpoints around a router",
                )
            slot.earlier.append(slot.chosen)
        return slot

    def layers_run(self) -> list[int]:
        """Decoder layers of the chunks that have run or begun to; of all chunks where none has."""
        return [layer for chunk in self._chunks_run() or self.chunks for layer in chunk]

    def check_used(self) -> None:
        """Raise unless at least one chunk has run, and each that has ran through all its routers."""
        unused = [layer for layer in self.layers_run() if self.slots[layer].chosen is None]
        if not unused and self._chunks_run():
            return
        raise ReplayStateError(
            f"routers did not run inside this {self.purpose}" if unused else f"no model ran inside this {self.purpose}",
            layer=", ".join(map(str, unused)) or None,
            expected=f"one forward through {len(self.slots)} routers",
            found=f"{len(self.slots) - len(unused)} that ran",
            remedy="Call the attached model itself inside the context, once",
        )

    def _chunks_run(self) -> list[tuple[int, ...]]:
        def used(chunk: tuple[int, ...]) -> bool:  # a compiled forward cannot say that it begins
            return any(self.slots[layer].chosen is not None for layer in chunk)

        return [chunk for chunk in self.chunks if chunk in self._begun or used(chunk)]

    def for_recompute(self) -> Ticket:
        """The same routes for a backward that runs layers again: what was taken then is taken now."""
        if any(slot.earlier for slot in self.slots.values()):
            raise ReplayStateError(
                "a recording of several passes cannot be recomputed in a backward",
                expected="one forward for each record() when gradients are wanted",
                found="several",
                remedy="Open record() once for each micro-batch, or run generation under torch.no_grad()",
            )
        again = Ticket(
            f"backward of a {self.purpose}",
            {
                layer: Slot(layer, slot.chosen, all_valid=True)
                for layer, slot in self.slots.items()
                if slot.chosen is not None
            },
        )
        again.thread = None
        return again


class Switch:
    """What the routers of one model look at: the ticket in force, or None for native routing.

    A forward obeys the ticket that is open. When autograd reaches the output of a forward, `backward_reached` puts
    that forward's ticket in force until the backward ends, and then what was in force before returns.
    """

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.open: Ticket | None = None
        self._backwards: dict[int, _Backward] = {}  # by autograd graph task

    def open_ticket(self, ticket: Ticket) -> None:
        if self.open is not None:
            raise ReplayStateError(
                f"a {ticket.purpose} was opened inside a {self.open.purpose} of the same model",
                remedy="Contexts do not nest: close the first; to see native choices while replaying, "
                "use replay(batch, observe=True)",
            )
        self.open = self.ticket = ticket
        self._backwards.clear()  # what an aborted backward left behind

    def close_ticket(self) -> None:
        self.open = self.ticket = None

    def forward_begins(self) -> bool:
        """Whether this is a forward of its own, and no recomputation inside a backward.

        Forgets a backward that was aborted by an exception, so that its routes cannot leak into this forward.
        """
        if torch._C._current_graph_task_id() != -1:
            return False
        self.ticket = self.open
        self._backwards.clear()
        return True

    def backward_reached(self, ticket: Ticket | None) -> None:
        """Autograd has reached the output of the forward that `ticket` belonged to (None: a native forward)."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            backward = self._backwards[task] = _Backward(before=self.ticket)
            # Runs when this backward has ended, also inside the nested backwards of reentrant checkpointing.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ended(task))
        self.ticket = backward.ticket_for(ticket)

    def _backward_ended(self, task: int) -> None:
        backward = self._backwards.pop(task, None)
        if backward is not None:
            self.ticket = backward.before


class _Backward:
    """One running backward: the tickets whose outputs it has reached."""

    def __init__(self, before: Ticket | None) -> None:
        self.before = before
        self._again: dict[int, Ticket] = {}

    def ticket_for(self, ticket: Ticket | None) -> Ticket | None:
        if ticket is None:
            return None
        if id(ticket) not in self._again:
            self._again[id(ticket)] = ticket.for_recompute()
        return self._again[id(ticket)]
