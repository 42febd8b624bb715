"""Which of the ranks that hold the same part of a model writes it: each part is saved once, and all of them save."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather
from moe_replay.distributed.control import control_group


def signature(keys: Iterable[str]) -> int:
    """Return a number for a part of a model, from the names of its regions."""
    digest = hashlib.blake2b("\n".join(sorted(keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def writers(signatures: Sequence[int]) -> dict[int, int]:
    """Return the rank that writes each part of this rank, by its signature. All ranks call it."""
    if dist.get_world_size() == 1:
        return dict.fromkeys(signatures, 0)
    gathered = all_gather(np.unique(np.array(signatures, np.uint64)).view(np.uint8), control_group())
    return chosen(signatures, [np.frombuffer(one.tobytes(), np.uint64) for one in gathered])


def chosen(signatures: Sequence[int], by_rank: Sequence[np.ndarray]) -> dict[int, int]:
    """Return the writer of each part, of the ranks that have it; parts are spread evenly over them.

    by_rank   signatures of the parts of each rank
    """
    own = np.unique(np.array(signatures, np.uint64))
    holds = [np.isin(own, one) for one in by_rank]
    place = own % np.sum(holds, axis=0, dtype=np.uint64)  # among the ranks that have it
    found, before = np.zeros(len(own), np.int64), np.zeros(len(own), np.uint64)
    for rank, has in enumerate(holds):
        found[has & (before == place)] = rank
        before += has.astype(np.uint64)
    return dict(zip(own.tolist(), found.tolist(), strict=True))
