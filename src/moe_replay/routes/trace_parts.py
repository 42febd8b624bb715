"""The parts of a `RouteTrace` other than its expert ids: token ids, layers, coverage, and spans of weight versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moe_replay.errors import TraceError

MAX_EXPERTS = 32768  # ids fit int16, which torch computes with everywhere; no model comes near
MAX_TOKEN_ID = 2**31 - 1


class VersionSpan(NamedTuple):
    """The tokens from `start` on were routed by weights `version`, until the next span begins."""

    start: int
    version: int


class TraceParts(NamedTuple):
    """The arrays of a trace, as they are stored."""

    token_ids: np.ndarray  # (T,) int32
    routed_experts: np.ndarray  # (T, L, K) uint8 or uint16, zero where not covered
    layers: tuple[int, ...]  # (L,) decoder indices
    coverage: np.ndarray  # (T, 1) bool where all layers share it, else (T, L)
    versions: tuple[VersionSpan, ...]  # spans of weight versions
    num_experts: int | None  # where known


def narrowest_dtype(num_experts: int) -> np.dtype:
    """Return the dtype that expert ids are stored in."""
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


def checked_token_ids(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return token ids (T,) int32, a copy."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TraceError("token_ids must be one-dimensional integers", found=f"{ids.dtype} {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        position = int(np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))[0])
        raise TraceError(
            "token id out of range",
            token=position,
            expected=f"0 to {MAX_TOKEN_ID}",
            found=ids[position],
            remedy="A trace holds real tokens only: leave padding out",
        )
    return ids.astype(np.int32)  # a copy, always: the caller's array may be a reused buffer


def checked_layers(layers: Iterable[int]) -> tuple[int, ...]:
    """Return increasing decoder indices; a set is sorted."""
    ids = tuple(int(layer) for layer in (sorted(layers) if isinstance(layers, (set, frozenset)) else layers))
    if not ids or ids[0] < 0 or any(b <= a for a, b in pairwise(ids)):
        raise TraceError(
            "layers must be increasing decoder indices",
            expected="e.g. (1, 2, 3) for a model whose layer 0 is dense",
            found=ids,
        )
    return ids


def checked_coverage(valid: Sequence | np.ndarray | None, tokens: int, layers: int) -> np.ndarray:
    """Return the coverage (T, 1) where all layers share it, else (T, L)."""
    if valid is None:
        return np.ones((tokens, 1), bool)
    mask = np.asarray(valid)
    if mask.dtype != np.bool_ and mask.size:
        raise TraceError("valid must be booleans", found=mask.dtype)
    if mask.shape == (tokens,):
        return mask.astype(bool)[:, None]
    if mask.shape == (tokens, layers):
        return mask.astype(bool)
    raise TraceError("valid has the wrong shape", expected=f"({tokens},) or ({tokens}, {layers})", found=mask.shape)


def checked_spans(weight_version: int | Sequence[tuple[int, int]], tokens: int) -> tuple[VersionSpan, ...]:
    """Return spans in canonical form, from one version or (start, version) pairs."""
    if isinstance(weight_version, (int, np.integer)):
        weight_version = [(0, int(weight_version))]
    spans = tuple(VersionSpan(int(start), int(version)) for start, version in weight_version)
    starts = [span.start for span in spans]
    in_order = starts == sorted(set(starts)) and starts[:1] == [0] and (starts[-1] < tokens or starts == [0])
    if not in_order or any(not 0 <= span.version < 2**63 for span in spans):
        raise TraceError(
            "weight_version must be one version or spans in order",
            expected=f"(start, version) pairs, the first at 0, the last before {tokens}, versions >= 0",
            found=weight_version,
        )
    return merged_spans(spans)


def merged_spans(spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Drop empty spans and join neighbours of one version, so that equal histories compare equal."""
    last_at: dict[int, VersionSpan] = {span.start: span for span in spans}  # a later span at one start wins
    kept: list[VersionSpan] = []
    for span in last_at.values():
        if not kept or kept[-1].version != span.version:
            kept.append(span)
    return tuple(kept)


def spans_of(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Return the spans of per-token versions (T,), T at least 1."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(versions)) + 1])
    return tuple(VersionSpan(*span) for span in zip(starts.tolist(), versions[starts].tolist(), strict=True))


def cut_spans(spans: tuple[VersionSpan, ...], start: int, stop: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the tokens from start to stop, counted from start."""
    inside = [VersionSpan(max(span.start, start) - start, span.version) for span in spans if span.start < max(stop, 1)]
    return merged_spans(tuple(inside))
