"""`ForwardPass`: the routes of one forward of a micro-batch and of its recomputation.

A forward uses the pass that a `record()` or `replay()` context opened. A backward uses the pass of the forward that
built its graph, so that recomputed layers get the routes of their own micro-batch, whatever the order of micro-batches.
Router hooks only read `ActivePass.current`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from moe_replay.errors import AlignmentError, ReplayStateError

if TYPE_CHECKING:
    from moe_replay.routes.batch import RouteBatch


class LayerRoutes:
    """The routes of one layer in one pass, used exactly once.

    target     (R, K) the experts to take, or None to let the router choose and record its choice
    valid      (R,) rows that have a target; the others are routed natively
    all_valid  whether every row has a target, as known on the host
    observe    also record what the router would have chosen
    chosen     (R, K) the experts taken, in the target's narrow dtype; None until the router has run
    native     (R, K) the router's own choice, where observed
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


class ForwardPass:
    """One forward of a micro-batch through one model, or its recomputation in the backward.

    purpose       what the pass is for, for error messages
    layer_routes  the routes of each layer, by decoder layer
    chunks        the layers of each pipeline chunk that has routes; a whole model is one chunk
    thread        the only thread whose forward may use it; None in a backward, which autograd may run in any thread
    batch         the routes that are replayed, if any
    repeats       whether a recording may span many forwards (token-by-token generation)
    fed_ids       the token ids that the model was fed
    """

    def __init__(
        self,
        purpose: str,
        layer_routes: Mapping[int, LayerRoutes],
        chunks: Sequence[tuple[int, ...]] = (),
        *,
        batch: RouteBatch | None = None,
        repeats: bool = False,
    ) -> None:
        self.purpose = purpose
        self.layer_routes = dict(layer_routes)
        self.chunks = tuple(chunks)
        self.batch = batch
        self.repeats = repeats
        self.thread: int | None = threading.get_ident()
        self.fed_ids: torch.Tensor | None = None
        self._fed_checked = False
        self._started: set[tuple[int, ...]] = set()

    def begin_chunk(self, layers: tuple[int, ...]) -> None:
        """Start the forward of the chunk with these layers."""
        if layers not in self.chunks:
            raise AlignmentError(
                f"a pipeline chunk runs that this {self.purpose} has no routes for",
                layer=", ".join(map(str, layers)),
                expected=f"layers {list(layers)}",
                found=f"layers {sorted(self.layer_routes)}",
                remedy="Make the batch for the layers of this chunk: replay.layers_of(chunk), or replay.layers for all",
            )
        self._started.add(layers)

    def set_fed_ids(self, token_ids: torch.Tensor) -> None:
        """Set the token ids (B, W) that the model is fed."""
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

    def claim(self, layer: int) -> LayerRoutes:
        """Return the routes of a router that is about to run."""
        routes = self.layer_routes.get(layer)
        if routes is None:
            raise ReplayStateError(
                f"a router ran that this {self.purpose} has no routes for",
                layer=layer,
                expected=f"routers of layers {sorted(self.layer_routes)}",
                remedy="Run each pipeline chunk in a context with the routes of its own layers",
            )
        if not torch.compiler.is_compiling() and self.thread not in (None, threading.get_ident()):
            raise ReplayStateError(
                f"a router ran in another thread than the one that opened this {self.purpose}",
                layer=layer,
                remedy="Open record() or replay() in the thread that runs the model; it serves one thread at a time",
            )
        if routes.chosen is not None:
            if not self.repeats:
                raise ReplayStateError(
                    f"a router used the routes of one {self.purpose} twice",
                    layer=layer,
                    expected="one forward of the model for each context",
                    found="a second one",
                    remedy="Open a new context for each micro-batch; do not nest checkpoints around a router",
                )
            routes.earlier.append(routes.chosen)
        return routes

    def layers_run(self) -> list[int]:
        """Return the decoder layers of the chunks that have started; of all chunks where none has."""
        return [layer for chunk in self._chunks_run() or self.chunks for layer in chunk]

    def check_used(self) -> None:
        """Raise unless at least one chunk has run, and each that has used all its routers."""
        unused = [layer for layer in self.layers_run() if self.layer_routes[layer].chosen is None]
        if not unused and self._chunks_run():
            return
        raise ReplayStateError(
            f"routers did not run inside this {self.purpose}" if unused else f"no model ran inside this {self.purpose}",
            layer=", ".join(map(str, unused)) or None,
            expected=f"one forward through {len(self.layer_routes)} routers",
            found=f"{len(self.layer_routes) - len(unused)} that ran",
            remedy="Call the attached model itself inside the context, once",
        )

    def _chunks_run(self) -> list[tuple[int, ...]]:
        def used(chunk: tuple[int, ...]) -> bool:  # a compiled forward runs no start hook
            return any(self.layer_routes[layer].chosen is not None for layer in chunk)

        return [chunk for chunk in self.chunks if chunk in self._started or used(chunk)]

    def for_recompute(self) -> ForwardPass:
        """Return a pass for recomputation in the backward: the experts taken in the forward are taken again."""
        if any(routes.earlier for routes in self.layer_routes.values()):
            raise ReplayStateError(
                "a recording of several passes cannot be recomputed in a backward",
                expected="one forward for each record() when gradients are needed",
                found="several",
                remedy="Open record() once for each micro-batch, or run generation under torch.no_grad()",
            )
        again = ForwardPass(
            f"backward of a {self.purpose}",
            {
                layer: LayerRoutes(layer, routes.chosen, all_valid=True)
                for layer, routes in self.layer_routes.items()
                if routes.chosen is not None
            },
        )
        again.thread = None
        return again


class ActivePass:
    """Which pass the routers of one model use now: `current`, or None for native routing.

    A forward uses the pass that is open. When autograd reaches the output of a forward, `enter_backward` makes that
    forward's pass current until the backward ends, and then restores the previous one.
    """

    def __init__(self) -> None:
        self.current: ForwardPass | None = None
        self.opened: ForwardPass | None = None
        self._backwards: dict[int, _Backward] = {}  # by autograd graph task

    def open(self, forward_pass: ForwardPass) -> None:
        """Make a pass the open one; passes do not nest."""
        if self.opened is not None:
            raise ReplayStateError(
                f"a {forward_pass.purpose} was opened inside a {self.opened.purpose} of the same model",
                remedy="Contexts do not nest: close the first; to see native choices while replaying, "
                "use replay(batch, observe=True)",
            )
        self.opened = self.current = forward_pass
        self._backwards.clear()  # what an aborted backward left behind

    def close(self) -> None:
        """Close the open pass."""
        self.opened = self.current = None

    def begin_forward(self) -> bool:
        """Return whether this is a forward, and not a recomputation inside a backward.

        Drops a backward that was aborted by an exception, so that its routes cannot leak into this forward.
        """
        if torch._C._current_graph_task_id() != -1:
            return False
        self.current = self.opened
        self._backwards.clear()
        return True

    def enter_backward(self, forward_pass: ForwardPass | None) -> None:
        """Make the pass of a forward current whose output autograd has reached (None: a native forward)."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is None:
            backward = self._backwards[task] = _Backward(previous=self.current)
            # Runs when this backward has ended, also inside the nested backwards of reentrant checkpointing.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        self.current = backward.pass_for(forward_pass)

    def _end_backward(self, task: int) -> None:
        backward = self._backwards.pop(task, None)
        if backward is not None:
            self.current = backward.previous


class _Backward:
    """One running backward: the passes whose outputs it has reached."""

    def __init__(self, previous: ForwardPass | None) -> None:
        self.previous = previous
        self._recomputed: dict[int, ForwardPass] = {}

    def pass_for(self, forward_pass: ForwardPass | None) -> ForwardPass | None:
        if forward_pass is None:
            return None
        if id(forward_pass) not in self._recomputed:
            self._recomputed[id(forward_pass)] = forward_pass.for_recompute()
        return self._recomputed[id(forward_pass)]
