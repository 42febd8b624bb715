"""Known ways to put routes at the wrong tokens, each as a map: row -> the row whose routes stand there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_replay.diagnostics.evidence import Evidence
from moe_replay.diagnostics.verdict import Cause

RowMap = tuple[Cause, str, np.ndarray]
"""Cause, its description, and for each of n rows its source: a row, or -1 for none."""

CONTEXT_SIZES = (2, 4, 8)
LARGEST_MOVE = 4096


def transpositions(evidence: Evidence, rows: np.ndarray) -> Iterator[RowMap]:
    """Yield rows flattened batch-first and read sequence-first, and the reverse, in micro-batches of any size."""
    sample, count = evidence.sample_of(rows), len(evidence.lengths)
    position = rows - evidence.starts[sample]
    for size in (n for n in range(2, count + 1) if count % n == 0):
        first = sample // size * size
        blocks = evidence.lengths.reshape(-1, size).max(1)
        width = np.full(len(rows), evidence.width) if evidence.width else blocks[sample // size]
        inside = sample - first
        sequence_first = position * size + inside
        yield (
            Cause.TRANSPOSED,
            f"routes are batch-first where rows are sequence-first, in micro-batches of {size}",
            _row(evidence, first + sequence_first // width, sequence_first % width),
        )
        batch_first = inside * width + position
        yield (
            Cause.TRANSPOSED,
            f"routes are sequence-first where rows are batch-first, in micro-batches of {size}",
            _row(evidence, first + batch_first % size, batch_first // size),
        )


def context_orders(evidence: Evidence, rows: np.ndarray) -> Iterator[RowMap]:
    """Yield routes cut contiguously where tokens are cut in zigzag over context parallel ranks, and the reverse."""
    sample = evidence.sample_of(rows)
    position = rows - evidence.starts[sample]
    for size in CONTEXT_SIZES:
        chunk = -(-evidence.lengths[sample] // (2 * size))
        order = np.array([part for rank in range(size) for part in (rank, 2 * size - 1 - rank)])
        for way, parts in (("contiguous", np.argsort(order)), ("zigzag", order)):
            source = parts[np.minimum(position // np.maximum(chunk, 1), 2 * size - 1)] * chunk + position % chunk
            yield (
                Cause.CONTEXT_PARALLEL,
                f"routes are cut {way} over {size} context parallel ranks, and tokens are not",
                _row(evidence, sample, source),
            )


def moves_of_sample(evidence: Evidence, sample: int, rows: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return (sample of origin, tokens late) of H ways to move routes in or into a sample, and sources (H, n)."""
    begin, length = evidence.starts[sample], int(evidence.lengths[sample])
    position = rows - begin
    reach = min(length - 1, LARGEST_MOVE)
    shifts = [shift for shift in range(-reach, reach + 1) if shift]
    moved = [_row(evidence, np.full(len(rows), sample), position - shift) for shift in shifts]
    others = [other for other in range(len(evidence.lengths)) if other != sample]
    taken = [_row(evidence, np.full(len(rows), other), position) for other in others]
    ways = [(sample, shift) for shift in shifts] + [(other, 0) for other in others]
    return ways, np.array([*moved, *taken], np.int64).reshape(len(ways), len(rows))


def _row(evidence: Evidence, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the row of each token; -1 where there is no such token."""
    known = (sample >= 0) & (sample < len(evidence.lengths))
    owner = np.where(known, sample, 0)
    inside = known & (position >= 0) & (position < evidence.lengths[owner])
    return np.where(inside, evidence.starts[owner] + position, -1)
