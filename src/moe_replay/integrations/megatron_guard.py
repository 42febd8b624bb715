"""`RouterGuard`: a trainer's own replay on Megatron-Core, compared with the routes of the tokens, or ours in its place.

check: the trainer replays. Before the first layer of a micro-batch runs, what it has put on each router is compared
with the routes of the tokens that the router will see; the router's own choices go to the alignment check.
fix: `RouterReplay` of this library replays, and the trainer's replay stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.integrations.hosts import ReplaySettings, printed_before_raised
from moe_replay.integrations.step_metrics import StepMetrics
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.device import read_later, to_device

Routers = Callable[[Any], list[tuple[int, Any]]]  # chunk -> (decoder layer, the replay object of its router)


class RouterGuard:
    """The routers of one rank, what is expected of them, and what is measured.

    trainer       its name, in errors
    chunks        Megatron-Core models of this rank, without wrappers
    settings      of the run
    routers       finds the replay objects of a chunk
    device        that the routers compute on
    compares_ids  whether a chunk is fed the ids that its routers see: not where images are put among them
    """

    def __init__(
        self,
        trainer: str,
        chunks: Sequence[Any],
        settings: ReplaySettings,
        routers: Routers,
        device: torch.device,
        *,
        compares_ids: bool,
    ) -> None:
        self._trainer = trainer
        self._routers = routers
        self.device = device
        self._compares_ids = compares_ids
        self.topology = MoeTopology.from_config(chunks[0].config)
        self.metrics = StepMetrics(self.topology, device, settings)
        self.controller: RouterReplay | None = attach(list(chunks)) if settings.guard == "fix" else None
        self._native: dict[int, Tensor] | None = None  # while a forward is observed: layer -> (R, K)
        if self.controller is None:
            for chunk in chunks:
                for layer, router in routers(chunk):
                    _observe(router, layer, self)

    # ---- a micro-batch ------------------------------------------------------------------------------------------

    def follow(
        self,
        run: Callable[[], Any],
        host: Any,
        chunk: Any,
        expected: RouteBatch,
        ids: Iterable[Sequence[int]],
        *,
        observes: bool,
    ) -> tuple[Any, RouteBatch | None]:
        """Run the trainer's forward of a micro-batch on the expected routes, under its own replay or under ours.

        host   whose replay is left off under ours
        ids    of each sample

        Returns what `run` does, and the routers' own choices if they are observed.
        """
        if self.controller is None:
            return self.check(run, chunk, expected, observes=observes)
        assert expected.layout is not None
        fed_ids = self._fed_ids(chunk, expected.layout, ids)
        with without_own_replay(host), self.controller.replay(expected, fed_ids=fed_ids, observe=observes) as replaying:
            result = run()
        return result, replaying.native() if observes else None

    def record(
        self, run: Callable[[], Any], host: Any, chunk: Any, layout: TokenLayout, ids: Sequence[Sequence[int]]
    ) -> tuple[Any, list[RouteTrace]]:
        """Run a forward in which the trainer records, or we in its place; return the routes on this rank too."""
        if self.controller is None:
            with self._observing(True) as native:
                result = run()
            return result, RouteBatch.recorded(native, self.topology).to_traces(ids, layout, unverified=True)
        fed_ids = self._fed_ids(chunk, layout, ids)
        with without_own_replay(host), self.controller.record(fed_ids=fed_ids) as recording:
            result = run()
        return result, recording.traces(layout, ids)

    def expected(self, traces: Sequence[RouteTrace], layout: TokenLayout, chunk: Any) -> RouteBatch:
        """Return the routes that the routers of a chunk should follow; traces of R2 have layers of this stage only."""
        if self.controller is None:
            layers = tuple(layer for layer, _ in self._routers(chunk))
        else:
            layers = self.controller.layers_of(chunk)
        all_layers = self.topology.layers
        return RouteBatch.from_traces(traces, layout, layers, source_layers=all_layers, device=self.device)

    def _fed_ids(self, chunk: Any, layout: TokenLayout, ids: Iterable[Sequence[int]]) -> Tensor | None:
        """Return the ids for a chunk that is not fed any; None for the first."""
        return None if chunk.pre_process else to_device(layout.fed_token_ids(list(ids)), self.device)

    # ---- check --------------------------------------------------------------------------------------------------

    def check(
        self, run: Callable[[], Any], chunk: Any, expected: RouteBatch, *, observes: bool
    ) -> tuple[Any, RouteBatch | None]:
        """Run the trainer's forward of a micro-batch; raise if it replays anything else.

        Compared before the first layer and read after the last, so that the device never waits for the host. Returns
        what `run` does, and the routers' own choices if they are observed.
        """
        verdicts: list[Callable[[], None]] = []

        def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            fed = kwargs.get("input_ids", args[0] if args else None)
            with printed_before_raised():
                compared = self._compare(expected, chunk, fed if chunk.pre_process and self._compares_ids else None)
            verdicts.append(compared)

        handle = chunk.register_forward_pre_hook(before, with_kwargs=True)
        try:
            with self._observing(observes) as native:
                result = run()
        finally:
            handle.remove()
            with printed_before_raised():  # also of a forward that such routes have broken
                for raise_if_wrong in verdicts:
                    raise_if_wrong()
        return result, RouteBatch.recorded(native, self.topology) if observes else None

    @contextmanager
    def _observing(self, observes: bool) -> Iterator[dict[int, Tensor]]:
        native: dict[int, Tensor] = {}
        self._native = native if observes else None
        try:
            yield native
        finally:
            self._native = None

    def _compare(self, expected: RouteBatch, chunk: Any, fed: Tensor | None) -> Callable[[], None]:
        """Compare what the trainer has put on each router, without a device sync; return what raises if it is wrong."""
        fed = None if fed is None else fed.clone()  # the trainer may use its buffer again before it is looked at
        counts = [] if fed is None else [expected.count_wrong(fed)]
        wrong_rows, targets = [], []
        for layer, router in self._routers(chunk):
            expected_ids, valid, _ = expected.layer(layer)
            target, mask = router.target_topk_idx, getattr(router, "target_replay_mask", None)
            if target is None or target.shape != expected_ids.shape:
                raise AlignmentError(
                    f"{self._trainer} gives a router another number of rows than it will see",
                    layer=layer,
                    expected=tuple(expected_ids.shape),
                    found=None if target is None else tuple(target.shape),
                )
            replayed = valid if mask is None else valid & mask.to(valid.device).bool().flatten()
            wrong_rows.append((target.to(valid.device) != expected_ids).any(1) & replayed)
            targets.append(target)
        wrong = torch.stack(wrong_rows) if wrong_rows else expected.valid[:0]
        wrong_counts = read_later(torch.cat([*counts, wrong.sum(1)]))

        def raise_if_wrong() -> None:
            if not wrong_counts().any():
                return
            if fed is not None:
                expected.check_fed(fed)
            self._raise_wrong(expected, wrong, targets)

        return raise_if_wrong

    def _raise_wrong(self, expected: RouteBatch, wrong: Tensor, targets: Sequence[Tensor]) -> None:
        slot, row = wrong.nonzero()[0].tolist()
        layer, layout = expected.layers[slot], expected.layout
        assert layout is not None
        sample, token = layout.locate(int(layout.rows[row]))
        counts = dict(zip(expected.layers, wrong.sum(1).tolist(), strict=True))
        raise AlignmentError(
            f"{self._trainer} replays routes of other tokens or layers",
            sample=sample,
            layer=layer,
            token=token,
            expected=sorted(expected.layer(layer)[0][row].tolist()),
            found=f"{sorted(targets[slot][row].tolist())}; wrong rows by layer: {counts}",
            remedy=f"MOE_REPLAY_GUARD=fix replays without {self._trainer}'s packing of routes",
        )

    # ---- what the routers would choose --------------------------------------------------------------------------

    def observed(self, layer: int, routed_experts: Tensor) -> None:
        """Take what a router would choose, (R, K), in a forward that is observed."""
        if self._native is not None and torch._C._current_graph_task_id() == -1:
            self._native[layer] = routed_experts

    @property
    def observes(self) -> bool:
        """Whether native choices are wanted now."""
        return self._native is not None


def _observe(router: Any, layer: int, guard: RouterGuard) -> None:
    """Let the guard know what this router would choose; its own instance only."""
    choose = router.get_replay_topk

    def get_replay_topk(
        scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None, default_compute_topk: Any = None
    ) -> Any:
        if guard.observes:
            with torch.no_grad():
                _, routed_experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            guard.observed(layer, routed_experts)
        return choose(
            scores, topk, num_groups=num_groups, group_topk=group_topk, default_compute_topk=default_compute_topk
        )

    router.get_replay_topk = get_replay_topk


def token_layout(packed: Tensor, lengths: Sequence[int], config: Any) -> TokenLayout:
    """Return where a trainer puts tokens on this rank, from the index that went through its packing; 0 is padding."""
    from megatron.core import parallel_state

    shards: dict[str, Any] = {}
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        shards["context_shard"] = parallel_state.get_context_parallel_rank(), size
    if config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        shards["sequence_shard"] = parallel_state.get_tensor_model_parallel_rank(), size
    fed = packed.cpu().numpy() - 1
    return TokenLayout(fed, tuple(lengths), (fed.shape[1],), "sequence", **shards)


@contextmanager
def without_own_replay(host: Any) -> Iterator[None]:
    """Switch off the replay of an engine or trainer of another project."""
    before, host.enable_routing_replay = host.enable_routing_replay, False
    try:
        yield
    finally:
        host.enable_routing_replay = before
