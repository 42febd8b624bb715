"""`RouteTrace`: which experts each token of one sequence was sent to, layer by layer.

Letters used in shapes throughout the package:
T tokens of a sequence, R rows a router sees, L MoE layers, K experts per token, E experts.

Engines have their own conventions (T-1 rows, zeros for dense layers, base64 int32, ...), which end at the adapter that
builds the trace. Slicing, appending a turn and resuming a partial rollout are done here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from moe_replay.errors import TraceError
from moe_replay.routes.codec import DEFAULT_LIMITS, BlobSource, Limits, buffer_source, decode, encode
from moe_replay.routes.trace_parts import (
    MAX_EXPERTS,
    TraceParts,
    VersionSpan,
    checked_coverage,
    checked_layers,
    checked_spans,
    checked_token_ids,
    cut_spans,
    merged_spans,
    narrowest_dtype,
    spans_of,
)


class RouteTrace:
    """The recorded routes of one sequence. Immutable; every method returns a new trace.

    token_ids       (T,) int32
    routed_experts  (T, L, K) uint8 or uint16, in the order the engine chose them; zero where not valid
    layers          (L,) global decoder index of each slice, increasing; MoE layers only
    valid           (T, L) bool: False where no route was recorded, so that the trainer routes natively
    versions        the weight version each span of tokens was routed with
    num_experts     experts the router chooses from, where known: then every id is checked against it

    Example:
        trace = RouteTrace(token_ids=[5, 7], routed_experts=[[[0, 3]], [[2, 1]]], layers=[1], num_experts=4)
    """

    __slots__ = ("_coverage", "_rows_distinct", "layers", "num_experts", "routed_experts", "token_ids", "versions")

    token_ids: np.ndarray
    routed_experts: np.ndarray
    layers: tuple[int, ...]
    versions: tuple[VersionSpan, ...]
    num_experts: int | None
    _coverage: np.ndarray  # (T, 1) where all layers share it, else (T, L)
    _rows_distinct: bool  # no expert twice in a valid row: checked already

    def __init__(
        self,
        token_ids: Sequence[int] | np.ndarray,
        routed_experts: Sequence | np.ndarray,
        layers: Iterable[int],
        valid: Sequence | np.ndarray | None = None,
        weight_version: int | Sequence[tuple[int, int]] = 0,
        *,
        num_experts: int | None = None,
    ) -> None:
        ids = checked_token_ids(token_ids)
        layer_ids = checked_layers(layers)
        array = np.asarray(routed_experts)
        if array.ndim != 3 or array.shape[:2] != (len(ids), len(layer_ids)) or array.shape[2] == 0:
            raise TraceError(
                "routed_experts has the wrong shape",
                expected=f"(tokens={len(ids)}, layers={len(layer_ids)}, top_k)",
                found=array.shape,
                remedy="One row per token, one slice per MoE layer; tokens without a route are rows with valid=False",
            )
        coverage = checked_coverage(valid, len(ids), len(layer_ids))
        narrowed = _narrowed_ids(array, coverage, layer_ids, num_experts)
        spans = checked_spans(weight_version, len(ids))
        self._fill(TraceParts(ids, narrowed, layer_ids, coverage, spans, num_experts))
        self.check_rows()

    @classmethod
    def uncovered(
        cls,
        token_ids: Sequence[int] | np.ndarray,
        layers: Iterable[int],
        top_k: int,
        weight_version: int = 0,
        *,
        num_experts: int | None = None,
    ) -> RouteTrace:
        """Return a trace of tokens that no engine routed: a tool's output, a prompt not yet prefilled."""
        ids, layer_ids = checked_token_ids(token_ids), checked_layers(layers)
        dtype = narrowest_dtype(num_experts or 0)
        routed_experts = np.zeros((len(ids), len(layer_ids), top_k), dtype)
        return cls(ids, routed_experts, layer_ids, np.zeros(len(ids), bool), weight_version, num_experts=num_experts)

    # ---- properties ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def top_k(self) -> int:
        return self.routed_experts.shape[2]

    @property
    def valid(self) -> np.ndarray:
        """(T, L) bool, read-only."""
        return np.broadcast_to(self._coverage, self.routed_experts.shape[:2])

    @property
    def covered_fraction(self) -> float:
        """Fraction of (token, layer) pairs with a recorded route."""
        return float(self._coverage.mean()) if self._coverage.size else 0.0

    @property
    def token_versions(self) -> np.ndarray:
        """(T,) int64: the weight version of each token."""
        starts = [span.start for span in self.versions]
        return np.repeat([span.version for span in self.versions], np.diff([*starts, len(self)])).astype(np.int64)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RouteTrace):
            return NotImplemented
        return (
            self.layers == other.layers
            and self.versions == other.versions
            and self.num_experts == other.num_experts
            and np.array_equal(self.token_ids, other.token_ids)
            and np.array_equal(self.routed_experts, other.routed_experts)
            and np.array_equal(self.valid, other.valid)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        layers = f"{len(self.layers)} layers {_brief(self.layers)}"
        return (
            f"RouteTrace({len(self)} tokens, {layers}, top {self.top_k} of {self.num_experts or '?'}, "
            f"{self.covered_fraction:.1%} covered, versions {[span.version for span in self.versions]})"
        )

    def check_rows(self, sample: int | None = None) -> None:
        """Raise if a valid row names an expert twice. Runs once for each trace.

        `sample` is the index of this trace in a batch, for the message.
        """
        if self._rows_distinct:
            return
        place = first_duplicate(self.routed_experts, self.valid)
        if place is not None:
            token, index = place
            row = self.routed_experts[token, index].tolist()
            raise TraceError(
                "an expert occurs twice in one row",
                sample=sample,
                layer=self.layers[index],
                token=token,
                expected=f"{self.top_k} distinct experts",
                found=row,
                remedy="An all-equal row is what an engine's unwritten capture buffer looks like; "
                "mark tokens without a route with valid=False",
            )
        self._rows_distinct = True

    # ---- parts --------------------------------------------------------------------------------------------------

    def __getitem__(self, tokens: slice) -> RouteTrace:
        """Return a contiguous range of tokens, e.g. `trace[:100]` when a response is truncated."""
        if not isinstance(tokens, slice):
            raise TypeError("a RouteTrace is indexed by a slice of tokens, e.g. trace[:100]")
        start, stop, step = tokens.indices(len(self))
        if step != 1:
            raise TraceError("tokens of a trace can only be cut as one contiguous range", expected="step 1", found=step)
        stop = max(start, stop)
        return self._derived(
            token_ids=self.token_ids[start:stop],
            routed_experts=self.routed_experts[start:stop],
            coverage=self._coverage[start:stop],
            versions=cut_spans(self.versions, start, stop),
        )

    def select_layers(self, layers: Iterable[int]) -> RouteTrace:
        """Return only these decoder layers, e.g. those of one pipeline stage."""
        selected = checked_layers(layers)
        indices = self.layer_indices(selected)
        coverage = self._coverage if self._coverage.shape[1] == 1 else self._coverage[:, indices]
        routed_experts = np.take(self.routed_experts, indices, axis=1)  # token-major in memory too, unlike [:, indices]
        return self._derived(routed_experts=routed_experts, coverage=coverage, layers=selected)

    def with_uncaptured_layers(self, layers: Iterable[int]) -> RouteTrace:
        """Return the same trace over more layers; the added ones are uncovered and will route natively."""
        all_layers = checked_layers(set(layers) | set(self.layers))
        indices = [all_layers.index(layer) for layer in self.layers]
        routed_experts = np.zeros((len(self), len(all_layers), self.top_k), self.routed_experts.dtype)
        valid = np.zeros((len(self), len(all_layers)), bool)
        routed_experts[:, indices], valid[:, indices] = self.routed_experts, self.valid
        return self._derived(routed_experts=routed_experts, coverage=valid, layers=all_layers)

    def layer_indices(self, layers: Sequence[int]) -> list[int]:
        """Return the position of each decoder layer on the layer axis."""
        index_of = {layer: index for index, layer in enumerate(self.layers)}
        missing = [layer for layer in layers if layer not in index_of]
        if missing:
            raise TraceError(
                "the trace has no routes for a layer that needs them",
                layer=missing[0],
                expected=f"layers {_brief(layers)}",
                found=f"layers {_brief(self.layers)}",
                remedy="If the engine cannot capture this layer, declare it with trace.with_uncaptured_layers([...])",
            )
        return [index_of[layer] for layer in layers]

    # ---- growing ------------------------------------------------------------------------------------------------

    def extend(self, other: RouteTrace) -> RouteTrace:
        """Return this trace followed by the tokens of `other`: the next turn of a conversation."""
        self._require_same_routers(other)
        same_coverage = self._coverage.shape[1] == other._coverage.shape[1]
        parts = (self._coverage, other._coverage) if same_coverage else (self.valid, other.valid)
        added = other.versions if len(other) else ()
        moved = tuple(VersionSpan(span.start + len(self), span.version) for span in added)
        joined = self._derived(
            token_ids=np.concatenate([self.token_ids, other.token_ids]),
            routed_experts=np.concatenate([self.routed_experts, other.routed_experts]),  # numpy widens uint8 + uint16
            coverage=np.concatenate(parts),
            versions=merged_spans(self.versions + moved),
            num_experts=self.num_experts if self.num_experts == other.num_experts else None,
        )
        joined._rows_distinct = self._rows_distinct and other._rows_distinct
        return joined

    def append_tokens(self, token_ids: Sequence[int] | np.ndarray, weight_version: int | None = None) -> RouteTrace:
        """Return this trace followed by tokens that no engine has routed yet, such as a tool's output."""
        version = self.versions[-1].version if weight_version is None and self.versions else weight_version or 0
        tail = RouteTrace.uncovered(token_ids, self.layers, self.top_k, version, num_experts=self.num_experts)
        return self.extend(tail)

    def continued_by(self, later: RouteTrace, keep: Literal["as_sampled", "latest"] = "as_sampled") -> RouteTrace:
        """Return this trace resumed after an engine has processed the whole sequence again, prefix included.

        `later` begins with this trace's tokens. `as_sampled`: routes already recorded stay, with their weight
        version; the later pass only covers what was uncovered. `latest`: its routes replace the earlier ones
        wherever it has any. Tokens beyond this trace always come from `later`.
        """
        if keep not in ("as_sampled", "latest"):
            raise TraceError("unknown way to continue a trace", expected="'as_sampled' or 'latest'", found=repr(keep))
        self._require_same_routers(later)
        length = len(self)
        if len(later) < length or not np.array_equal(later.token_ids[:length], self.token_ids):
            common = min(length, len(later))
            differing = np.flatnonzero(later.token_ids[:common] != self.token_ids[:common])
            position = int(differing[0]) if differing.size else common
            raise TraceError(
                "the later pass does not begin with this trace's tokens",
                token=position,
                expected=f"token id {self.token_ids[position]}",
                found=f"token id {later.token_ids[position]}" if position < len(later) else "the end of the sequence",
                remedy="Send token ids to the engine, not text: re-tokenising can change earlier ids",
            )
        prefix = later[:length]
        take_later = prefix.valid & ~self.valid if keep == "as_sampled" else prefix.valid
        if not take_later.any():
            return self.extend(later[length:])
        newer = take_later.any(axis=1)
        if keep == "as_sampled":
            newer &= ~self.valid.any(axis=1)
        versions = np.where(newer, prefix.token_versions, self.token_versions)
        merged = self._derived(
            routed_experts=np.where(take_later[..., None], prefix.routed_experts, self.routed_experts),
            coverage=self.valid | take_later,
            versions=spans_of(versions),
        )
        merged._rows_distinct = self._rows_distinct and later._rows_distinct
        return merged.extend(later[length:])

    @classmethod
    def merge(cls, shards: Sequence[RouteTrace]) -> RouteTrace:
        """Return one whole trace from the parts that ranks recorded of the same sequence.

        Ranks hold different layers (pipeline) or different tokens (context and sequence parallel). Where two shards
        cover the same (token, layer) they must agree.
        """
        if not shards:
            raise TraceError("nothing to merge", expected="at least one trace", found="none")
        first = shards[0]
        layers = checked_layers({layer for shard in shards for layer in shard.layers})
        dtype = np.result_type(*(shard.routed_experts.dtype for shard in shards))
        routed_experts = np.zeros((len(first), len(layers), first.top_k), dtype)
        valid = np.zeros((len(first), len(layers)), bool)
        for number, shard in enumerate(shards):
            passes = [(part.top_k, part.num_experts, part.versions) for part in (shard, first)]
            if passes[0] != passes[1] or not np.array_equal(shard.token_ids, first.token_ids):
                raise TraceError(
                    "only shards of one sequence, routed by the same weights, can be merged",
                    sample=f"shard {number}",
                    expected=first,
                    found=shard,
                )
            indices = [layers.index(layer) for layer in shard.layers]
            both = valid[:, indices] & shard.valid
            clash = np.argwhere((routed_experts[:, indices] != shard.routed_experts).any(-1) & both)
            if clash.size:
                token, index = clash[0].tolist()
                raise TraceError(
                    "two shards hold different routes for one token",
                    layer=shard.layers[index],
                    token=token,
                    expected=routed_experts[token, indices[index]].tolist(),
                    found=shard.routed_experts[token, index].tolist(),
                )
            routed_experts[:, indices] = np.where(
                shard.valid[..., None], shard.routed_experts, routed_experts[:, indices]
            )
            valid[:, indices] |= shard.valid
        return cls(first.token_ids, routed_experts, layers, valid, first.versions, num_experts=first.num_experts)

    def _require_same_routers(self, other: RouteTrace) -> None:
        unlike = None not in (self.num_experts, other.num_experts) and self.num_experts != other.num_experts
        if unlike or (self.layers, self.top_k) != (other.layers, other.top_k):
            raise TraceError(
                "traces of different routers cannot be joined",
                expected=f"layers {_brief(self.layers)}, top {self.top_k} of {self.num_experts or '?'}",
                found=f"layers {_brief(other.layers)}, top {other.top_k} of {other.num_experts or '?'}",
            )

    # ---- bytes --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the trace in the format of docs/trace-format.md."""
        return b"".join(encode(self.parts))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RouteTrace:
        """Read a trace from untrusted bytes; anything but a whole, intact trace is an error."""
        parts, _ = decode(buffer_source(data), slice(None), DEFAULT_LIMITS)
        return cls.from_parts(parts)

    def __reduce__(self) -> tuple[Callable[[bytes], RouteTrace], tuple[bytes]]:
        """Pickle as bytes, so that what is read back is checked and read-only."""
        return RouteTrace.from_bytes, (self.to_bytes(),)

    def __copy__(self) -> RouteTrace:
        return self  # immutable

    def __deepcopy__(self, memo: dict) -> RouteTrace:
        return self

    @property
    def parts(self) -> TraceParts:
        """The arrays themselves, for writers."""
        return TraceParts(
            self.token_ids, self.routed_experts, self.layers, self._coverage, self.versions, self.num_experts
        )

    @classmethod
    def from_parts(cls, parts: TraceParts) -> RouteTrace:
        """Make a trace from parts whose shapes, ranges and order are checked; only `check_rows` is left."""
        trace = object.__new__(cls)
        trace._fill(parts)
        return trace

    def _derived(self, **parts: Any) -> RouteTrace:
        """Return a copy with some parts replaced by views of them, whose rows were checked already."""
        trace = RouteTrace.from_parts(self.parts._replace(**parts))
        trace._rows_distinct = self._rows_distinct
        return trace

    def _fill(self, parts: TraceParts) -> None:
        self.token_ids, self.routed_experts = _frozen(parts.token_ids), _frozen(parts.routed_experts)
        self.layers, self._coverage = parts.layers, _frozen(parts.coverage)
        self.versions, self.num_experts = parts.versions, parts.num_experts
        self._rows_distinct = False


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _brief(numbers: Sequence[int]) -> str:
    shown = [str(n) for n in numbers]
    return "[" + ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", *shown[-2:]]) + "]"


def encode_parts(trace: RouteTrace, *, limits: Limits = DEFAULT_LIMITS) -> list[memoryview]:
    """`to_bytes` as buffers, for vectored writes. Up to 256 experts, ids are views of the trace and not copied."""
    return encode(trace.parts, limits)


def decode_trace(
    data: bytes | bytearray | memoryview,
    tokens: slice = slice(None),
    layers: Sequence[int] | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> RouteTrace:
    """Return the trace in a blob, or only a range of its tokens and some of its layers.

    Every byte that is used is verified; only `RouteTrace.check_rows` is left to the user of the routes. A read-only
    buffer is viewed, a writable one copied: `memoryview(buffer).toreadonly()` promises not to write any more.
    """
    return read_blob(buffer_source(data), tokens, layers, limits)


def read_blob(source: BlobSource, tokens: slice, layers: Sequence[int] | None, limits: Limits) -> RouteTrace:
    parts, chosen = decode(source, tokens, limits)
    trace = RouteTrace.from_parts(parts)[chosen]
    return trace if layers is None else trace.select_layers(layers)


# ---- expert ids ------------------------------------------------------------------------------------------------------


def first_duplicate(routed_experts: np.ndarray, valid: np.ndarray) -> tuple[int, int] | None:
    """Return (token, layer index) of the first valid row that names an expert twice, or None.

    Compares the columns with those 1, 2, ... further on, over blocks that stay in cache: over ten times faster than
    sorting the rows.
    """
    tokens, layers, top_k = routed_experts.shape
    if top_k == 1 or not routed_experts.size:
        return None
    block = max(1, 8192 // layers)
    for start in range(0, tokens, block):
        rows = routed_experts[start : start + block].reshape(-1, top_k)
        columns = np.ascontiguousarray(rows.T)
        twice = np.zeros(len(rows), bool)
        equal = np.empty(columns.shape, bool)
        for further in range(1, top_k):
            matches = np.equal(columns[further:], columns[:-further], out=equal[further:])
            if matches.any():
                twice |= matches.any(axis=0)
        if twice.any():
            twice &= valid[start : start + block].reshape(-1)
            if twice.any():
                row = int(np.argmax(twice))
                return start + row // layers, row % layers
    return None


def _narrowed_ids(
    routed_experts: np.ndarray, coverage: np.ndarray, layers: tuple[int, ...], num_experts: int | None
) -> np.ndarray:
    """Return ids checked for range, zero where uncovered, in the narrowest dtype."""
    if routed_experts.size and routed_experts.dtype.kind not in "iu":
        raise TraceError("expert ids must be integers", found=routed_experts.dtype)
    if num_experts is not None and not routed_experts.shape[2] <= num_experts <= MAX_EXPERTS:
        raise TraceError(
            "impossible number of experts",
            expected=f"{routed_experts.shape[2]} (top_k) to {MAX_EXPERTS}",
            found=num_experts,
        )
    if not coverage.all():
        routed_experts = _zero_where_uncovered(routed_experts, coverage)
    limit = num_experts or MAX_EXPERTS
    if routed_experts.size and (
        int(routed_experts.max()) >= limit or (routed_experts.dtype.kind == "i" and int(routed_experts.min()) < 0)
    ):
        token, index, _ = np.argwhere((routed_experts < 0) | (routed_experts >= limit))[0].tolist()
        raise TraceError(
            "expert id out of range",
            layer=layers[index],
            token=token,
            expected=f"0 to {limit - 1}",
            found=routed_experts[token, index].tolist(),
            remedy="Negative ids are markers: mark what is missing with valid=False. Ids beyond the experts are "
            "often physical (load-balanced) ids; capture logical ones",
        )
    largest = num_experts if num_experts is not None else int(routed_experts.max(initial=0)) + 1
    return np.array(routed_experts, dtype=narrowest_dtype(largest), order="C")


def _zero_where_uncovered(routed_experts: np.ndarray, coverage: np.ndarray) -> np.ndarray:
    """Return the ids, zero where uncovered; a copy only if they are not."""
    if coverage.shape[1] > 1:
        return np.where(coverage[..., None], routed_experts, 0)
    uncovered = np.flatnonzero(~coverage[:, 0])  # a few rows: the last token's, most of the time
    if routed_experts[uncovered].any():
        routed_experts = routed_experts.copy()
        routed_experts[uncovered] = 0
    return routed_experts
