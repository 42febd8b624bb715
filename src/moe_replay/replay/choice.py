"""`Choice`: the one answer to a router's question "which experts?", whatever library the router comes from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_replay.errors import AlignmentError
from moe_replay.replay.passes import Slot
from moe_replay.replay.site import RouterSite


def narrow(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids in the dtype they rest in: uint8, or int16 above 256 experts (torch computes with few uint16)."""
    return ids.detach().to(torch.uint8 if num_experts <= 256 else torch.int16)


class Choice:
    """What one router takes in one pass: its own choice (recorded), the slot's target (replayed), or both by rows.

    experts  (..., K) what it took; None until it has asked
    native   (..., K) what it would have taken, where that had to be found
    obeyed   the target was taken as it is, on every row
    """

    def __init__(self, site: RouterSite, slot: Slot) -> None:
        self.site = site
        self.slot = slot
        self.experts: torch.Tensor | None = None
        self.native: torch.Tensor | None = None
        self.obeyed = False

    # In every mode the ids are found outside autograd and the caller gathers the scores at them, so that a forward
    # and its recomputation save the same tensors: checkpointing compares them.

    def among(self, scores: torch.Tensor, own_choice: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The experts (..., K) int64 to take among scores (..., E); `own_choice` is what the router would do."""
        slot = self.slot
        # A compiled graph always takes the masked way, so that it never recompiles when a batch becomes fully covered.
        some_rows = slot.valid if torch.compiler.is_compiling() or not slot.all_valid else None
        self.obeyed = slot.target is not None and some_rows is None
        if slot.target is None:
            self.native = experts = _outside_autograd(own_choice)
        elif some_rows is not None:
            self.native = _outside_autograd(own_choice)
            experts = torch.where(some_rows.view(*scores.shape[:-1], 1), self.target(scores), self.native)
        else:
            self.native = _outside_autograd(own_choice) if slot.observe else None
            experts = self.target(scores)
        self.experts = experts
        return experts

    def target(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts (..., K) int64 of the slot, for scores (..., E)."""
        target = self.slot.target
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

    def keep(self) -> None:
        """The router has run: remember what it took, for recordings and for its recomputation."""
        assert self.experts is not None
        self.slot.chosen = self.slot.target if self.obeyed else self._narrowed(self.experts)
        if self.slot.observe:
            assert self.native is not None
            self.slot.native = self._narrowed(self.native)

    def _narrowed(self, ids: torch.Tensor) -> torch.Tensor:
        return narrow(ids, self.site.num_experts).view(-1, self.site.top_k)


def _outside_autograd(own_choice: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return own_choice()
