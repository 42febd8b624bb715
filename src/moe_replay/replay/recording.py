"""What a `record()` or `replay()` context returns: the routes of the forward inside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_replay.errors import ReplayStateError
from moe_replay.replay.fed_tokens import FedTokens
from moe_replay.replay.passes import ForwardPass, LayerRoutes
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import RowOrder, TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace


class Recording:
    """The routes recorded inside `record()`."""

    def __init__(self, topology: MoeTopology, rows: RowOrder, forward_pass: ForwardPass) -> None:
        self._topology = topology
        self._rows = rows
        self._pass = forward_pass

    def batch(self) -> RouteBatch:
        """Return the routes as they were taken, on the device, ready to be replayed on this rank. Nothing is moved."""
        layer_routes = self._routes_run()
        if any(routes.earlier for routes in layer_routes.values()):
            raise ReplayStateError(
                "the recording spans several forwards", expected="one", remedy="Use recording.passes()"
            )
        return self._batch({layer: (routes.chosen, routes.tokens) for layer, routes in layer_routes.items()})

    def passes(self) -> list[RouteBatch]:
        """Return one batch for each forward that ran inside `record(every_pass=True)`, in order."""
        taken = {
            layer: [*routes.earlier, (routes.chosen, routes.tokens)] for layer, routes in self._routes_run().items()
        }
        counts = {len(choices) for choices in taken.values()}
        if len(counts) != 1:
            raise ReplayStateError("routers ran unequally often", found={k: len(v) for k, v in taken.items()})
        return [self._batch({layer: v[i] for layer, v in taken.items()}) for i in range(counts.pop())]

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

    def _routes_run(self) -> dict[int, LayerRoutes]:
        return {layer: self._pass.layer_routes[layer] for layer in self._pass.layers_run()}

    def _batch(self, taken: dict[int, tuple[torch.Tensor | None, FedTokens | None]]) -> RouteBatch:
        found = {layer: choice for layer, (choice, _) in taken.items() if choice is not None}
        if len(found) < len(taken):
            raise ReplayStateError("nothing was recorded", layer=", ".join(str(i) for i in taken if i not in found))
        fed = [tokens for _, tokens in taken.values()] if taken else [self._pass.tokens]
        tokens = self._pass.given or next((one for one in fed if one is not None), None)
        return RouteBatch.recorded(found, self._topology, None if tokens is None else tokens.ids, self._rows)


class Replaying:
    """The value of a `replay()` context."""

    def __init__(self, topology: MoeTopology, rows: RowOrder, forward_pass: ForwardPass) -> None:
        self._topology = topology
        self._rows = rows
        self._pass = forward_pass

    def native(self) -> RouteBatch:
        """Return what the routers would have chosen; needs `replay(batch, observe=True)` and the forward done."""
        layers, layer_routes = self._pass.layers_run(), self._pass.layer_routes
        choices = {layer: native for layer in layers if (native := layer_routes[layer].native) is not None}
        if len(choices) < len(layers):
            raise ReplayStateError(
                "native choices were not observed", remedy="Open replay(batch, observe=True) and run the forward first"
            )
        tokens = self._pass.given or self._pass.tokens
        return RouteBatch.recorded(choices, self._topology, None if tokens is None else tokens.ids, self._rows)

    @property
    def unknown_tokens(self) -> int:
        """Tokens that the model was fed and that no trace has: they were routed natively (`allow_unknown_tokens`)."""
        return 0 if self._pass.tokens is None else self._pass.tokens.unknown
