"""What a `record()` or `replay()` context returns: the routes of the forward inside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_replay.errors import ReplayStateError
from moe_replay.replay.passes import ForwardPass, LayerRoutes
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace


class Recording:
    """The routes recorded inside `record()`."""

    def __init__(self, topology: MoeTopology, forward_pass: ForwardPass) -> None:
        self._topology = topology
        self._pass = forward_pass

    def batch(self) -> RouteBatch:
        """Return the routes as they were taken, on the device, ready to be replayed on this rank. Nothing is moved."""
        layer_routes = self._routes_run()
        if any(routes.earlier for routes in layer_routes.values()):
            raise ReplayStateError(
                "the recording spans several forwards", expected="one", remedy="Use recording.passes()"
            )
        return self._batch({layer: routes.chosen for layer, routes in layer_routes.items()}, self._pass.fed_ids)

    def passes(self) -> list[RouteBatch]:
        """Return one batch for each forward that ran inside `record(every_pass=True)`, in order."""
        taken = {layer: [*routes.earlier, routes.chosen] for layer, routes in self._routes_run().items()}
        counts = {len(choices) for choices in taken.values()}
        if len(counts) != 1:
            raise ReplayStateError("routers ran unequally often", found={k: len(v) for k, v in taken.items()})
        return [self._batch({layer: v[i] for layer, v in taken.items()}, None) for i in range(counts.pop())]

    def traces(
        self, layout: TokenLayout, token_ids: Sequence[Sequence[int]], weight_version: int = 0
    ) -> list[RouteTrace]:
        """Return one trace for each sequence of the micro-batch; tokens of other ranks are uncovered."""
        batch, topology = self.batch(), self._topology
        if not batch.layers:  # a pipeline stage without routers has routes for no token
            return [
                RouteTrace.uncovered(
                    ids, topology.layers, topology.top_k, weight_version, num_experts=topology.num_experts
                )
                for ids in token_ids
            ]
        return batch.to_traces(token_ids, layout, weight_version)

    def _routes_run(self) -> dict[int, LayerRoutes]:
        return {layer: self._pass.layer_routes[layer] for layer in self._pass.layers_run()}

    def _batch(self, taken: dict[int, torch.Tensor | None], fed_ids: torch.Tensor | None) -> RouteBatch:
        found = {layer: choice for layer, choice in taken.items() if choice is not None}
        if len(found) < len(taken):
            raise ReplayStateError("nothing was recorded", layer=", ".join(str(i) for i in taken if i not in found))
        return RouteBatch.recorded(found, self._topology, fed_ids)


class Replaying:
    """What a `replay()` context returns."""

    def __init__(self, topology: MoeTopology, forward_pass: ForwardPass) -> None:
        self._topology = topology
        self._pass = forward_pass

    def native(self) -> RouteBatch:
        """Return what the routers would have chosen; needs `replay(batch, observe=True)` and the forward done."""
        layers, layer_routes = self._pass.layers_run(), self._pass.layer_routes
        choices = {layer: native for layer in layers if (native := layer_routes[layer].native) is not None}
        if len(choices) < len(layers):
            raise ReplayStateError(
                "native choices were not observed", remedy="Open replay(batch, observe=True) and run the forward first"
            )
        return RouteBatch.recorded(choices, self._topology, self._pass.fed_ids)
