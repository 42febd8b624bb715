"""Move routes between token-major traces and layer-major batches, through a `TokenLayout`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_replay.routes.layout import PADDING, TokenLayout

TOKENS_PER_RUN = 256  # of 48 layers, top 8: read and written within the first-level cache

LayerIndex = slice | list[int]
Run = tuple[int, slice, slice]  # (sequence, its tokens, their rows)


def runs_of(layout: TokenLayout) -> list[Run]:
    """Return runs of tokens at equal distance in the rows, each short enough for the cache.

    A few for each sequence, whatever the layout, in row order, so that memory is written in order.
    """
    step = layout.fed.shape[0] if layout.order == "sequence" else 1
    filled = np.flatnonzero(layout.rows != PADDING)
    row_of = np.full(layout.num_tokens, PADDING)
    row_of[layout.rows[filled]] = filled
    block = row_of // (TOKENS_PER_RUN * step)  # -1 for tokens of other ranks
    begins = np.ones(layout.num_tokens, bool)
    begins[1:] = (np.diff(row_of) != step) | (np.diff(block) != 0)
    begins[layout.starts[:-1][np.array(layout.lengths) > 0]] = True

    bounds = np.append(np.flatnonzero(begins), layout.num_tokens)
    first, count = bounds[:-1], np.diff(bounds)
    here = row_of[first] != PADDING
    first, count = first[here], count[here]
    in_order = np.argsort(block[first], kind="stable")
    first, count = first[in_order], count[in_order]

    sequence = np.searchsorted(layout.starts, first, side="right") - 1
    token, row = first - layout.starts[sequence], row_of[first]
    numbers = zip(*(a.tolist() for a in (sequence, token, row, count)), strict=True)
    return [(s, slice(t, t + n), slice(r, r + (n - 1) * step + 1, step)) for s, t, r, n in numbers]


def to_layer_major(
    sequences: Sequence[np.ndarray], layout: TokenLayout, runs: Sequence[Run], indices: LayerIndex
) -> np.ndarray:
    """Transpose (T, L) of each sequence to (L, R); zero in rows that hold no token."""
    layers = sequences[0][:0, indices].shape[1]
    out = np.zeros((layers, layout.num_rows), sequences[0].dtype)
    for sequence, tokens, rows in runs:
        out[:, rows] = sequences[sequence][tokens, indices].T
    return out


def to_token_major(batch: np.ndarray, layout: TokenLayout, runs: Sequence[Run]) -> list[np.ndarray]:
    """Transpose (L, R) to (T, L) of each sequence; zero for tokens that no row holds."""
    out = [np.zeros((length, len(batch)), batch.dtype) for length in layout.lengths]
    for sequence, tokens, rows in runs:
        out[sequence][tokens] = batch[:, rows].T
    return out


def as_words(ids: np.ndarray) -> np.ndarray:
    """View ids (X, Y, K) as words (X, Y) of K ids each, so that a row of ids moves as one."""
    size = ids.shape[2] * ids.itemsize
    word = np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype((np.void, size))
    return np.ascontiguousarray(ids).view(word)[..., 0]


def as_ids(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """View words (X, Y) as ids (X, Y, K)."""
    return words.view(dtype).reshape(*words.shape, words.itemsize // dtype.itemsize)


def as_slice(indices: list[int]) -> LayerIndex:
    """Return adjacent indices as a slice, which indexes without a copy."""
    contiguous = indices == list(range(indices[0], indices[0] + len(indices))) if indices else False
    return slice(indices[0], indices[-1] + 1) if contiguous else indices
