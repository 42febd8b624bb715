"""What a model is fed in one forward, copied, and compared with the tokens that the routes belong to."""

from __future__ import annotations

import torch

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch


class FedTokens:
    """The token ids of one forward.

    ids      (B, W), a copy: the caller may reuse its buffer
    mask     (B, W) where the attention mask is of this shape: zero for padding
    checked  whether they were compared with those of a batch
    unknown  tokens fed that the batch has no routes for, where they were counted
    """

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        self.ids = ids
        self.mask = mask if mask is not None and mask.shape == ids.shape else None
        self.checked = False
        self.unknown = 0

    @classmethod
    def copied(cls, ids: torch.Tensor, mask: torch.Tensor | None = None) -> FedTokens:
        """Copy the ids that a model is fed; no device sync."""
        return cls(ids.detach().clone(), mask)

    def copy(self) -> None:
        """Replace the ids by a copy."""
        self.ids = self.ids.detach().clone()

    def check(self, batch: RouteBatch | None, allow_unknown: bool) -> None:
        """Raise unless these are the tokens of the batch, where there is one. One device sync."""
        if batch is not None and not self.checked:
            self.unknown = batch.check_fed(self.ids, self.mask, allow_unknown=allow_unknown)
            self.checked = True

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
