"""`ForwardPass`: the token ids and routes of one forward of a micro-batch and of its recomputation.

A forward uses the pass that a `record()` or `replay()` context opened. A backward uses the pass of the forward that
built its graph, so that recomputed layers get the routes of their own micro-batch, in any order of micro-batches.
Router hooks only ask `ActivePass.for_router()`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from moe_replay.errors import AlignmentError, ReplayStateError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.plan import DispatchPlan, version_of
from moe_replay.utils.device import read_later


class FedTokens:
    """The token ids of one forward. No device sync, but by `check`.

    ids      (B, W), a copy: the caller may reuse its buffer
    mask     (B, W) where the attention mask is of this shape: zero for padding
    checked  whether they were compared with those of a batch
    unknown  tokens fed that the batch has no routes for, where they were counted
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        self.ids = ids.detach().clone()
        self.mask = mask if mask is not None and mask.shape == ids.shape else None
        self.checked = False
        self.unknown = 0
        self._wrong_counts: Callable[[], torch.Tensor] | None = None  # on their way to the host

    def copy(self) -> None:
        self.ids = self.ids.detach().clone()

    def compare(self, batch: RouteBatch) -> Callable[[], torch.Tensor]:
        """Compare these tokens with those of the batch, for a later `check`; no device sync."""
        self._wrong_counts = read_later(batch.count_wrong(self.ids, self.mask))
        return self._wrong_counts

    def check(self, batch: RouteBatch | None, allow_unknown: bool) -> None:
        """Raise unless these are the tokens of the batch, where there is one. One device sync, if not compared yet."""
        if batch is None or self.checked:
            return
        wrong_counts = self._wrong_counts or self.compare(batch)
        differing, unknown = wrong_counts().tolist()
        if differing or (unknown and not allow_unknown):
            unknown = batch.check_fed(self.ids, self.mask, allow_unknown=allow_unknown)
        self.unknown, self.checked = unknown, True

    def check_equal(self, other: FedTokens) -> None:
        """Raise unless the model is fed the ids that the caller passed. One device sync."""
        if self.ids.shape == other.ids.shape and bool((self.ids == other.ids.to(self.ids.device)).all()):
            return
        raise AlignmentError(
            "the model is fed other token ids than those passed as fed_ids",
            expected=tuple(self.ids.shape),
            found=tuple(other.ids.shape),
            remedy="Leave fed_ids out for a model that is fed token ids",
        )


@dataclass(eq=False)
class LayerRoutes:
    """The routes of one layer in one pass, used exactly once."""

    layer: int
    routed_experts: torch.Tensor | None = None  # (R, K) to replay; None: the router chooses, and its choice is recorded
    valid: torch.Tensor | None = None  # (R,) rows with a route to replay; the others are routed natively
    _: KW_ONLY
    all_valid: bool = False  # whether every row has one, as known on the host
    observe: bool = False  # also record the router's native choice
    plan: DispatchPlan | None = None  # of the rows of all layers, where each has a route
    keep_gates: bool = False  # also record the scores that gate weights are made of
    margin: float = math.inf  # by which the router may prefer another expert to one that is replayed
    gates: torch.Tensor | None = None  # (R, K) such scores to replay in `gated_rows`; None: current ones
    gated_rows: torch.Tensor | None = None  # (R,)
    keep_weights: bool = False  # also record the logarithms of routing weights at the experts taken
    # (R, K) experts and logarithms of their routing weights in an earlier forward, to compare with
    since: tuple[torch.Tensor, torch.Tensor] | None = None

    # What the router has done, None until it has run.
    taken_routed_experts: torch.Tensor | None = field(default=None, init=False)  # (R, K) in the same narrow dtype
    native_routed_experts: torch.Tensor | None = field(default=None, init=False)  # (R, K), where observed
    taken_gates: torch.Tensor | None = field(default=None, init=False)  # (R, K), where kept
    taken_weights: torch.Tensor | None = field(default=None, init=False)  # (R, K), where kept
    shift: torch.Tensor | None = field(default=None, init=False)  # (R,) mean distance from the weights of `since`
    # (2, R) uint8, with a margin alone: recorded experts of each row that the router would not have taken, and those of
    # them that were taken
    choices: torch.Tensor | None = field(default=None, init=False)
    tokens: FedTokens | None = field(default=None, init=False)  # fed in the forward in which the router ran
    # of earlier forwards of one recording
    earlier: list[tuple[torch.Tensor, FedTokens | None]] = field(default_factory=list, init=False)

    @property
    def reads_weights(self) -> bool:
        """Whether routing weights of all experts are needed."""
        return self.margin < math.inf or self.keep_weights or self.since is not None


class ForwardPass:
    """One forward of a micro-batch through one model, or its recomputation in the backward.

    purpose       record or replay, for error messages
    layer_routes  the routes of each layer, by decoder layer
    chunks        the layers of each pipeline chunk that has routes; a whole model is one chunk
    thread        the only thread whose forward may use it; None in a backward, which autograd may run in any thread
    batch         the routes whose tokens the model must be fed; None where nothing is to be compared
    repeats       whether a recording may span many forwards (token-by-token generation)
    given_ids     (B, W) the token ids that the caller of a model without any has passed
    allow_unknown whether the model may be fed tokens that the batch has no routes for
    deferred      whether the tokens are compared without a device sync, and an error is raised by `check_fed`
    tokens        what the model was fed in the latest forward
    """

    def __init__(
        self,
        purpose: str,
        layer_routes: Mapping[int, LayerRoutes],
        chunks: Sequence[tuple[int, ...]] = (),
        *,
        batch: RouteBatch | None = None,
        repeats: bool = False,
        given_ids: torch.Tensor | None = None,
        allow_unknown: bool = False,
        deferred: bool = False,
    ) -> None:
        self.purpose = purpose
        self.layer_routes = dict(layer_routes)
        self.chunks = tuple(chunks)
        self.batch = batch
        self.repeats = repeats
        self.allow_unknown = allow_unknown
        self.deferred = deferred
        self.thread: int | None = threading.get_ident()
        self.given: FedTokens | None = None
        self.tokens: FedTokens | None = None
        self._forwards: dict[tuple[int, ...], _ChunkForward] = {}
        self._compared: list[FedTokens] = []  # and not checked yet
        if given_ids is not None:
            self.given = FedTokens(given_ids)
            self._compare(self.given)

    # ---- what the model is fed ----------------------------------------------------------------------------------

    def begin_chunk(self, layers: tuple[int, ...], depth: int) -> None:
        """Enter a module of the chunk with these layers, `depth` modules inside the outermost; start its forward."""
        if layers not in self.chunks:
            raise AlignmentError(
                f"a pipeline chunk runs that this {self.purpose} has no routes for",
                layer=", ".join(map(str, layers)),
                expected=f"layers {list(layers)}",
                found=f"layers {sorted(self.layer_routes)}",
                remedy="Make the batch for the layers of this chunk: replay.layers_of(chunk), or replay.layers for all",
            )
        self._check_thread("a forward started")
        running = self._forwards.get(layers)
        if running is None or depth <= running.depth:  # at the same depth or further out, the forward before has ended
            self._forwards[layers] = running = _ChunkForward()
            self.tokens = None
        running.depth = depth

    def feed(self, layers: tuple[int, ...], depth: int, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Take the token ids (B, W) that a module of the chunk is fed, and compare them with those of the batch."""
        running = self._forwards[layers]
        if running.is_known(depth, ids):
            return
        fed = FedTokens(ids, mask)
        self._compare(fed)
        if self.given is not None and self.batch is None:
            self.given.check_equal(fed)
        for routes in self.layer_routes.values():  # a module further in, or a later hook, has changed them
            if routes.tokens is not None and routes.tokens is running.tokens:
                routes.tokens = fed
        running.set(depth, ids, fed)
        self.tokens = fed

    def _compare(self, fed: FedTokens) -> None:
        if not self.deferred:
            fed.check(self.batch, self.allow_unknown)
        elif self.batch is not None:
            fed.compare(self.batch)
            self._compared.append(fed)

    def feed_compiled(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Copy the token ids (B, W) of a compiled forward in its graph; they are compared when the context closes."""
        self.tokens = FedTokens(ids, mask)

    def copy_compiled(self) -> None:
        """Copy the ids of compiled forwards out of the memory of their graphs, which the next run may overwrite."""
        eager = {id(forward.tokens) for forward in self._forwards.values()}
        fed = [self.tokens, *(routes.tokens for routes in self.layer_routes.values())]
        for tokens in {id(tokens): tokens for tokens in fed if tokens is not None and id(tokens) not in eager}.values():
            tokens.copy()

    def check_fed(self) -> None:
        """Raise unless the tokens of the forward have been compared with those of the routes."""
        if self.batch is None:
            return
        for tokens in (*self._compared, self.tokens):
            if tokens is not None:
                tokens.check(self.batch, self.allow_unknown)
        if not self.fed():
            raise AlignmentError(
                "the model was not fed token ids, so nothing proves that the routes belong to its tokens",
                remedy="Pass the ids that the embeddings were made from: replay(batch, fed_ids=...)",
            )

    def fed(self) -> list[FedTokens]:
        """Return what the model was fed, and last what its caller has passed."""
        fed = [self.tokens, *(forward.tokens for forward in self._forwards.values()), self.given]
        return [tokens for tokens in fed if tokens is not None]

    # ---- what its routers do ------------------------------------------------------------------------------------

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
        if not torch.compiler.is_compiling():
            self._check_thread("a router ran", layer)
        if routes.taken_routed_experts is not None:
            if not self.repeats:
                raise ReplayStateError(
                    f"a router used the routes of one {self.purpose} twice",
                    layer=layer,
                    expected="one forward of the model for each context",
                    found="a second one",
                    remedy="Open a new context for each micro-batch; do not nest checkpoints around a router",
                )
            routes.earlier.append((routes.taken_routed_experts, routes.tokens))
        routes.tokens = self.tokens
        return routes

    def _check_thread(self, problem: str, layer: int | None = None) -> None:
        if self.thread not in (None, threading.get_ident()):
            raise ReplayStateError(
                f"{problem} in another thread than the one that opened this {self.purpose}",
                layer=layer,
                remedy="Open record() or replay() in the thread that runs the model; it serves one thread at a time",
            )

    def layers_run(self) -> list[int]:
        """Return the decoder layers of the chunks that have started; of all chunks where none has."""
        return [layer for chunk in self._chunks_run() or self.chunks for layer in chunk]

    def check_used(self) -> None:
        """Raise unless at least one chunk has run, and each that has used all its routers."""
        unused = [layer for layer in self.layers_run() if self.layer_routes[layer].taken_routed_experts is None]
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
            return any(self.layer_routes[layer].taken_routed_experts is not None for layer in chunk)

        return [chunk for chunk in self.chunks if chunk in self._forwards or used(chunk)]

    def for_recompute(self) -> ForwardPass:
        """Return a pass for recomputation in the backward: the experts taken in the forward are taken again."""
        if any(routes.earlier for routes in self.layer_routes.values()):
            raise ReplayStateError(
                "a recording of several passes cannot be recomputed in a backward",
                expected="one forward for each record() when gradients are needed",
                found="several",
                remedy="Open record() once for each micro-batch, or run generation under torch.no_grad()",
            )
        recompute = ForwardPass(
            f"backward of a {self.purpose}",
            {
                layer: LayerRoutes(
                    layer,
                    routes.taken_routed_experts,
                    all_valid=True,
                    plan=routes.plan,
                    gates=routes.gates,
                    gated_rows=routes.gated_rows,
                )
                for layer, routes in self.layer_routes.items()
                if routes.taken_routed_experts is not None
            },
        )
        recompute.thread = None
        return recompute


class _ChunkForward:
    """The latest forward of one chunk in a pass: how far in its modules it is, and what it is fed."""

    def __init__(self) -> None:
        self.depth = -1
        self.tokens: FedTokens | None = None
        self._latest: tuple[torch.Tensor, int] | None = None  # the tensor that was copied, and its version then
        self._fed: dict[int, torch.Tensor] = {}  # by depth: what each module was given

    def set(self, depth: int, ids: torch.Tensor, tokens: FedTokens) -> None:
        self.tokens = tokens
        self._fed[depth] = ids
        self._latest = (ids, version_of(ids))

    def is_known(self, depth: int, ids: torch.Tensor) -> bool:
        """Return whether a module is given ids that were copied before, here or further out, and are unchanged."""
        if ids is self._fed.get(depth):  # the forward has ended: the model may write to its ids
            return True
        unchanged = (
            not ids.is_inference()  # nobody counts the changes in place of such a tensor
            and self._latest is not None
            and ids is self._latest[0]
            and version_of(ids) == self._latest[1]
        )
        if unchanged:
            self._fed[depth] = ids
        return unchanged
