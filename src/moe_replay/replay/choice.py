"""`Choice`: which experts a router takes in one pass, whatever library the router comes from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_replay.errors import AlignmentError
from moe_replay.replay.passes import LayerRoutes
from moe_replay.replay.site import RouterSite


def narrow(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return ids in their storage dtype: uint8, or int16 above 256 experts (torch supports few uint16 operations)."""
    return ids.detach().to(torch.uint8 if num_experts <= 256 else torch.int16)


class Choice:
    """The experts that a router takes in one pass: its own choice (recorded), the target (replayed), or a mix by rows.

    experts         (..., K) experts taken; None until the router has made its choice
    native          (..., K) experts that it would have taken natively, where they were computed
    fully_replayed  whether the target was taken on every row
    """

    def __init__(self, site: RouterSite, routes: LayerRoutes) -> None:
        self.site = site
        self.routes = routes
        self.experts: torch.Tensor | None = None
        self.native: torch.Tensor | None = None
        self.fully_replayed = False

    # In every mode the ids are computed outside autograd and the caller gathers the scores at them, so that a forward
    # and its recomputation save the same tensors: checkpointing compares them.

    def select(self, scores: torch.Tensor, native_choice: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the experts (..., K) int64 to take for scores (..., E); `native_choice` computes the router's own."""
        routes = self.routes
        # A compiled graph always takes the masked branch: it must not recompile when a batch becomes fully covered.
        some_rows = routes.valid if torch.compiler.is_compiling() or not routes.all_valid else None
        self.fully_replayed = routes.target is not None and some_rows is None
        if routes.target is None:
            self.native = experts = _outside_autograd(native_choice)
        elif some_rows is not None:
            self.native = _outside_autograd(native_choice)
            experts = torch.where(some_rows.view(*scores.shape[:-1], 1), self.target(scores), self.native)
        else:
            self.native = _outside_autograd(native_choice) if routes.observe else None
            experts = self.target(scores)
        self.experts = experts
        return experts

    def target(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the target experts (..., K) int64, for scores (..., E)."""
        target = self.routes.target
        assert target is not None
        rows = scores.shape[:-1].numel()
        if target.shape[0] != rows:
            raise AlignmentError(
                f"the router {self.site} sees another number of rows than the routes have",
                layer=self.site.layer,
                expected=f"{target.shape[0]} rows",
                found=f"{rows} rows",
                remedy="The layout of the batch must be the one this rank's model sees: padding, packing, "
                "context and sequence parallel",
            )
        return target.long().view(*scores.shape[:-1], self.site.top_k)

    def store(self) -> None:
        """Store what the router took, for recordings and for its recomputation."""
        assert self.experts is not None
        self.routes.chosen = self.routes.target if self.fully_replayed else self._narrowed(self.experts)
        if self.routes.observe:
            assert self.native is not None
            self.routes.native = self._narrowed(self.native)

    def _narrowed(self, ids: torch.Tensor) -> torch.Tensor:
        return narrow(ids, self.site.num_experts).view(-1, self.site.top_k)


def _outside_autograd(native_choice: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return native_choice()
