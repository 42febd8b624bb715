"""`SamplingMask`: the tokens that top-k and top-p left to sample from, for each token of a sequence.

The trainer scores a token over the same support: over the whole vocabulary, old and rollout log-probs of the same
weights would differ by the probability that was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from moe_replay.errors import EngineError

MAX_VOCAB_SIZE = 2**24


class SamplingMask:
    """Support of each of T tokens, in a vocabulary of V. Arrays are read-only.

    vocab_size   V
    counts       (T,) int64: size of the support; 0: the whole vocabulary
    token_ids    (sum of counts,) int32: the supports one after another, each in increasing order
    """

    __slots__ = ("counts", "token_ids", "vocab_size")

    def __init__(
        self, vocab_size: int, counts: np.ndarray, token_ids: np.ndarray, *, sample: int | str | None = None
    ) -> None:
        """Check and keep the arrays; a support of the whole vocabulary gets the count 0.

        sample   for errors
        """
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise EngineError(
                "a sampling mask of an impossible vocabulary", expected=f"1 to {MAX_VOCAB_SIZE}", found=vocab_size
            )
        counts, ids = np.asarray(counts, np.int64), np.asarray(token_ids)
        if counts.ndim != 1 or counts.min(initial=0) < 0 or int(counts.sum()) != len(ids):
            raise EngineError(
                "the supports of a sampling mask do not add up",
                sample=sample,
                expected=f"{len(ids)} ids, as listed",
                found=f"{int(counts.sum())} ids counted for {len(counts)} tokens",
            )
        _check_ids(vocab_size, counts, ids, sample)
        whole = counts == vocab_size
        if whole.any():
            ids = ids[~np.repeat(whole, counts)]
            counts = np.where(whole, 0, counts)
        self.vocab_size = vocab_size
        self.counts = _read_only(counts.copy())
        self.token_ids = _read_only(ids.astype(np.int32))

    @classmethod
    def whole(cls, num_tokens: int, vocab_size: int) -> SamplingMask:
        """Return the mask of tokens that nothing was cut off for."""
        return cls(vocab_size, np.zeros(num_tokens, np.int64), np.zeros(0, np.int32))

    @classmethod
    def of_lists(
        cls, supports: Sequence[Sequence[int]], vocab_size: int, *, sample: int | str | None = None
    ) -> SamplingMask:
        """Return the mask of supports listed in any order; an empty one is an error."""
        counts = np.fromiter(map(len, supports), np.int64, len(supports))
        if not counts.all():
            raise EngineError(
                "a token with an empty support", sample=sample, token=int(np.argmin(counts)), expected="at least one id"
            )
        ids = np.fromiter(chain.from_iterable(supports), np.int64, int(counts.sum()))
        rows = np.repeat(np.arange(len(counts)), counts)
        if len(ids) and not _is_increasing(rows, ids).all():
            ids = ids[np.lexsort((ids, rows))]
        return cls(vocab_size, counts, ids, sample=sample)

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SamplingMask)
            and self.vocab_size == other.vocab_size
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.token_ids, other.token_ids)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SamplingMask({len(self)} tokens, {len(self.token_ids)} ids, vocabulary of {self.vocab_size})"

    @property
    def offsets(self) -> np.ndarray:
        """(T + 1,) int64: where the support of each token starts in `token_ids`, and the end."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def sizes(self) -> np.ndarray:
        """(T,) int64: size of each support, V where nothing was cut off."""
        return np.where(self.counts == 0, self.vocab_size, self.counts)

    def take(self, tokens: np.ndarray) -> SamplingMask:
        """Return the mask of these tokens (n,), in their order."""
        counts = self.counts[tokens]
        ends = np.cumsum(counts)
        position = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        ids = self.token_ids[np.repeat(self.offsets[:-1][tokens], counts) + position]
        return SamplingMask(self.vocab_size, counts, ids)

    @classmethod
    def concatenate(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the mask of the tokens of all masks, of which there is at least one."""
        sizes = {mask.vocab_size for mask in masks}
        if len(sizes) != 1:
            raise EngineError("sampling masks of several vocabularies in one sequence", found=sorted(sizes))
        counts = np.concatenate([mask.counts for mask in masks])
        return cls(sizes.pop(), counts, np.concatenate([mask.token_ids for mask in masks]))

    def check_sampled(self, sampled: np.ndarray, *, sample: int | str | None = None) -> None:
        """Raise unless each of the sampled tokens (T,) is in its own support."""
        if len(sampled) != len(self):
            raise EngineError(
                "a sampling mask needs one support per sampled token",
                sample=sample,
                expected=f"{len(sampled)} tokens",
                found=f"{len(self)} tokens",
            )
        rows = np.repeat(np.arange(len(self)), self.counts)
        inside = self.counts == 0
        inside[rows[self.token_ids == np.asarray(sampled)[rows]]] = True
        if not inside.all():
            token = int(np.argmin(inside))
            raise EngineError(
                "a sampled token is not in its own support",
                sample=sample,
                token=token,
                expected=f"one of {int(self.counts[token])} ids",
                found=f"token id {int(sampled[token])} ({int((~inside).sum())} such tokens)",
                remedy="The engine returned the mask of other tokens, or sampled from another distribution",
            )


def _check_ids(vocab_size: int, counts: np.ndarray, ids: np.ndarray, sample: int | str | None) -> None:
    rows = np.repeat(np.arange(len(counts)), counts)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise EngineError(
            "a sampling mask has an id outside of the vocabulary",
            sample=sample,
            token=int(rows[outside[0]]),
            expected=f"0 <= id < {vocab_size}",
            found=int(ids[outside[0]]),
        )
    unordered = np.flatnonzero(~_is_increasing(rows, ids))
    if unordered.size:
        raise EngineError(
            "the ids of a support must increase, each once",
            sample=sample,
            token=int(rows[unordered[0] + 1]),
            found=f"{int(ids[unordered[0]])} before {int(ids[unordered[0] + 1])}",
        )


def _is_increasing(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(n - 1,) bool: whether an id is followed by a larger one, or by that of another token."""
    return (ids[1:] > ids[:-1]) | (rows[1:] != rows[:-1])


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
