"""`LogitMask`: which logits of a micro-batch count, where tokens were sampled from a part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.rollout.sampling_mask import SamplingMask


@dataclass(frozen=True, slots=True, eq=False)
class LogitMask:
    """Supports of the n tokens that a rank's target positions predict. No method waits for the device.

    vocab_size   of the engine that sampled
    offsets      (n + 1,) where the support of each starts in `rows` and `columns`; on the host
    rows         (ids of all supports,) int32: the position that an id belongs to
    columns      (ids of all supports,) int32: the id
    is_whole     (n,) bool: nothing was cut off
    """

    vocab_size: int
    offsets: np.ndarray
    rows: Tensor
    columns: Tensor
    is_whole: Tensor

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> LogitMask:
        """Return the mask of n tokens on a device."""
        rows = np.repeat(np.arange(len(mask), dtype=np.int32), mask.counts)
        return cls(
            mask.vocab_size,
            mask.offsets,
            torch.from_numpy(rows).to(device),
            torch.from_numpy(mask.token_ids.copy()).to(device),
            torch.from_numpy(mask.counts == 0).to(device),
        )

    def check_vocabulary(self, width: int) -> None:
        """Raise if the engine has more tokens than the policy, whose head has `width` rows on all ranks."""
        if self.vocab_size > width:
            raise AlignmentError(
                "a sampling mask of a larger vocabulary than the policy's",
                expected=f"at most {width} tokens",
                found=f"{self.vocab_size} tokens",
                remedy="Engine and trainer must have the same model",
            )

    def dropped(self, part: slice, first: int, width: int) -> Tensor:
        """(rows of the slice, width) bool: logits that do not count, of the ids from `first` on."""
        stop = min(part.stop, len(self.offsets) - 1)
        begin, end = self.offsets[part.start], self.offsets[stop]
        columns = self.columns[begin:end].long() - first
        # Ids of other ranks go to a column that is cut off: to select those of this one would wait for the device.
        columns = torch.where((columns >= 0) & (columns < width), columns, width)
        dropped = (~self.is_whole[part])[:, None].repeat(1, width + 1)
        dropped[self.rows[begin:end].long() - part.start, columns] = False
        return dropped[:, :width]
