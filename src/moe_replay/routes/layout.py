"""`TokenLayout`: which token of the micro-batch sits in each row that this rank's routers see.

A layout is built in the order in which a trainer processes its data, one step at a time:

    TokenLayout.packed([700, 300], pad_each_to_multiple_of=8)   # what the collator makes
        .context_parallel(rank=1, size=2)                       # what this rank feeds: `fed`
        .sequence_major().sequence_parallel(rank=0, size=2)     # what the model makes of it: `rows`

Every step takes whole columns, so that no composition of steps can silently drop, duplicate or reorder a token. Applied
to the token ids, `fed` must give the ids that the rank really feeds: that equality (`check_fed`) proves alignment.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from moe_replay.errors import AlignmentError, LayoutError

PADDING = -1

Shard = tuple[int, int]  # (rank, size)


class Prefix(NamedTuple):
    """The first tokens of a sequence that are fed once, with an earlier sequence: its first `length` ones."""

    sequence: int = 0
    length: int = 0


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The positions of the tokens of one micro-batch on one rank: B rows fed, W columns, R rows seen by the routers.

    fed             (B, W) int64: index into the concatenated tokens of the micro-batch, -1 for padding
    lengths         tokens of each sequence, whole: the same on every rank
    segments        widths that the columns divide into: one per sequence where packed, else the whole width
    order           how the model flattens (B, W): "batch" major, or "sequence" major as Megatron's [s, b, h]
    context_shard   (rank, size): `fed` holds this rank's part of the columns
    sequence_shard  (rank, size): the routers see this rank's part of the columns of `fed`
    prefixes        of each sequence, what it shares with an earlier one; () where nothing is shared
    """

    fed: np.ndarray
    lengths: tuple[int, ...]
    segments: tuple[int, ...]
    order: Literal["batch", "sequence"] = "batch"
    context_shard: Shard | None = None
    sequence_shard: Shard | None = None
    prefixes: tuple[Prefix, ...] = ()

    def __post_init__(self) -> None:
        fed = np.array(self.fed, np.int64)  # a copy, so that it cannot change afterwards
        fed.flags.writeable = False
        object.__setattr__(self, "fed", fed)
        if fed.ndim != 2 or sum(self.segments) != fed.shape[1]:
            raise LayoutError("fed must be (B, W) with segments that add up to W", found=(fed.shape, self.segments))
        _check_prefixes(self.prefixes, self.lengths)
        is_fed = self.fed_as == np.arange(self.num_tokens)
        _check_each_token_once(fed, is_fed, whole=self.context_shard is None or self.context_shard[1] == 1)

    def __reduce__(self) -> tuple[type[TokenLayout], tuple]:
        """Pickle what it is made from, so that what is read back is checked and read-only."""
        shards = (self.context_shard, self.sequence_shard)
        return TokenLayout, (self.fed, self.lengths, self.segments, self.order, *shards, self.prefixes)

    @classmethod
    def padded(
        cls, lengths: Sequence[int], width: int | None = None, side: Literal["left", "right"] = "right"
    ) -> TokenLayout:
        """Return a layout of one sequence per row, padded on one side to `width` (the longest where None)."""
        counts = _checked_lengths(lengths)
        if side not in ("left", "right"):
            raise LayoutError("unknown padding side", expected="'left' or 'right'", found=repr(side))
        longest = int(counts.max())
        columns = longest if width is None else width
        if longest > columns:
            raise LayoutError(
                "a sequence is longer than the padded width",
                sample=int(counts.argmax()),
                expected=f"at most {columns} tokens",
                found=longest,
                remedy="Truncate the trace with trace[:width] where the response is truncated, or pad wider",
            )
        starts = np.arange(len(counts)) * columns + (columns - counts if side == "left" else 0)
        fed = _placed(counts, starts, len(counts) * columns).reshape(len(counts), columns)
        return cls(fed, tuple(counts.tolist()), (columns,))

    @classmethod
    def packed(
        cls, lengths: Sequence[int], pad_to_multiple_of: int = 1, pad_each_to_multiple_of: int = 1
    ) -> TokenLayout:
        """Return a layout of all sequences in one row, each right-padded to a multiple, then the row to a multiple.

        Megatron (thd) pads each sequence to 2 * context parallel size * tensor parallel size.
        """
        counts = _checked_lengths(lengths)
        multiple = _positive("pad_each_to_multiple_of", pad_each_to_multiple_of)
        segments = -(-counts // multiple) * multiple
        starts = np.cumsum(segments) - segments
        fed = _placed(counts, starts, int(segments.sum()))[None]
        layout = cls(fed, tuple(counts.tolist()), tuple(segments.tolist()))
        return layout.pad_to(multiple_of=pad_to_multiple_of)

    @classmethod
    def shared(cls, lengths: Sequence[int], prefixes: Sequence[tuple[int, int]]) -> TokenLayout:
        """Return a packed layout in which each sequence shares a prefix with an earlier one: (sequence, tokens).

        A prefix may reach into what that sequence shares itself: trees of any depth. At least one token of a sequence
        is not shared. Attention must let every sequence see its prefix: `prefix_rows`.
        """
        counts = _checked_lengths(lengths)
        shared = tuple(Prefix(*prefix) for prefix in prefixes)
        _check_prefixes(shared, tuple(counts.tolist()))
        fed_counts = counts - np.array([prefix.length for prefix in shared], np.int64)
        fed = _ranges(np.cumsum(counts) - fed_counts, fed_counts)[None]  # the last tokens of each sequence
        return cls(fed, tuple(counts.tolist()), tuple(fed_counts.tolist()), prefixes=shared)

    # ---- what is fed --------------------------------------------------------------------------------------------

    def pad_to(self, width: int | None = None, *, multiple_of: int = 1) -> TokenLayout:
        """Add alignment padding at the end of the sequence axis, e.g. for FP8.

        In a packed row it belongs to the last sequence, as in the `cu_seqlens_padded` that trainers give Megatron.
        """
        self._require_outside_model("pad_to")
        present = self.fed.shape[1]
        multiple = _positive("multiple_of", multiple_of)
        padded = -(-max(present, width or 0) // multiple) * multiple
        if width is not None and padded != width:
            raise LayoutError(
                "cannot pad to this width",
                expected=f"at least {present} and a multiple of {multiple}",
                found=width,
            )
        added = padded - present
        return replace(
            self,
            fed=np.pad(self.fed, ((0, 0), (0, added)), constant_values=PADDING),
            segments=(*self.segments[:-1], self.segments[-1] + added),
        )

    def context_parallel(self, rank: int, size: int, style: Literal["zigzag", "contiguous"] = "zigzag") -> TokenLayout:
        """Keep this rank's part of the columns.

        zigzag: every segment is split into 2 * size chunks, of which the rank holds `rank` and `2 * size - 1 - rank`.
        contiguous: the whole width is split into `size` chunks; also what Ulysses-style trainers feed.
        """
        self._require_outside_model("context_parallel")
        shard = _shard("context parallel", rank, size)
        if self.prefixes:
            raise LayoutError(
                "sequences that share a prefix cannot be divided among context parallel ranks",
                remedy="Use TokenLayout.packed, which feeds every sequence whole",
            )
        if self.context_shard is not None:
            raise LayoutError("context_parallel applied twice", found=f"{self.context_shard}, then {shard}")
        if style == "zigzag":
            whole, kept = np.array(self.segments), sorted({rank, 2 * size - 1 - rank}) if size > 1 else [0]
            chunks = 2 * size if size > 1 else 1
        elif style == "contiguous":
            whole, kept, chunks = np.array([self.fed.shape[1]]), [rank], size
        else:
            raise LayoutError("unknown style", expected="'zigzag' or 'contiguous'", found=repr(style))
        self._require_divisible(whole, chunks, f"{style} context parallel of size {size}")
        chunk = whole // chunks
        starts = (np.cumsum(whole) - whole)[:, None] + np.outer(chunk, kept)
        columns = _ranges(starts.ravel(), np.repeat(chunk, len(kept)))
        segments = tuple((chunk * len(kept)).tolist())
        return replace(self, fed=self.fed[:, columns], segments=segments, context_shard=shard)

    # ---- what the routers see -----------------------------------------------------------------------------------

    def sequence_major(self) -> TokenLayout:
        """Order rows as Megatron does: all sequences' first tokens, then all second ones."""
        return replace(self, order="sequence")

    def sequence_parallel(self, rank: int, size: int) -> TokenLayout:
        """Let the routers see chunk `rank` of `size` of the sequence axis; what is fed stays whole."""
        shard = _shard("sequence parallel", rank, size)
        if self.sequence_shard is not None:
            raise LayoutError("sequence_parallel applied twice", found=f"{self.sequence_shard}, then {shard}")
        self._require_divisible(np.array([self.fed.shape[1]]), size, f"sequence parallel of size {size}")
        return replace(self, sequence_shard=shard)

    @cached_property
    def rows(self) -> np.ndarray:
        """(R,) int64: the token in each row that the routers of this rank see, -1 for padding."""
        rank, size = self.sequence_shard or (0, 1)
        chunk = self.fed.shape[1] // size
        grid = self.fed[:, rank * chunk : (rank + 1) * chunk]
        rows = (grid.T if self.order == "sequence" else grid).flatten()
        rows.flags.writeable = False
        return rows

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole micro-batch, on all ranks together."""
        return sum(self.lengths)

    @property
    def num_rows(self) -> int:
        """Rows that the routers of this rank see, padding included."""
        return len(self.rows)

    @cached_property
    def num_padding(self) -> int:
        """Rows that the routers of this rank see and that hold no token."""
        return int(np.count_nonzero(self.rows == PADDING))

    @cached_property
    def starts(self) -> np.ndarray:
        """(sequences + 1,) int64: where each sequence begins in the concatenated tokens, and where the last ends."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def fed_as(self) -> np.ndarray:
        """(num_tokens,) int64: the token that is fed in place of each: itself, or that of the sequence it shares."""
        standing = np.arange(self.num_tokens)
        for start, prefix in zip(self.starts.tolist(), self.prefixes, strict=False):
            first = int(self.starts[prefix.sequence])
            standing[start : start + prefix.length] = standing[first : first + prefix.length]
        standing.flags.writeable = False
        return standing

    @cached_property
    def place(self) -> np.ndarray:
        """(num_tokens,) int64: where each token, or the one in its place, is in the flattened `fed`; -1: nowhere."""
        flat = self.fed.ravel()
        here = np.flatnonzero(flat != PADDING)
        places = np.full(self.num_tokens, PADDING)
        places[flat[here]] = here
        return places[self.fed_as]

    @cached_property
    def unused(self) -> np.ndarray:
        """(R,) bool: rows on which nothing depends where tokens see earlier ones only and each predicts the next.

        Padding, which no token sees, and the last token of a sequence, unless another sequence goes on behind it.
        """
        is_last = np.zeros(self.num_tokens, bool)
        is_last[self.starts[1:][np.array(self.lengths) > 0] - 1] = True
        is_followed = np.zeros(self.num_tokens + 1, bool)
        is_followed[self.fed_as[~is_last]] = True
        return ~is_followed[self.rows]  # padding is -1: the last entry

    def prefix_rows(self, sequence: int) -> np.ndarray:
        """Return where the shared tokens of a sequence are in the flattened `fed`, in their order."""
        start = int(self.starts[sequence])
        return self.place[start : start + (self.prefixes[sequence].length if self.prefixes else 0)]

    @property
    def unshared(self) -> TokenLayout:
        """The packed layout of the same sequences, each with all of its tokens; this one if nothing is shared."""
        return TokenLayout.packed(self.lengths) if self.prefixes else self

    @property
    def num_shared(self) -> int:
        """Tokens that are not fed, because they are those of an earlier sequence."""
        return sum(prefix.length for prefix in self.prefixes)

    def locate(self, token: int) -> tuple[int, int]:
        """Return (sequence, position in it) of an index into the concatenated tokens."""
        if not 0 <= token < self.num_tokens:
            raise LayoutError("no such token", expected=f"0 to {self.num_tokens - 1}", found=token)
        sequence = int(np.searchsorted(self.starts, token, side="right")) - 1
        return sequence, token - int(self.starts[sequence])

    def __repr__(self) -> str:
        batch, width = self.fed.shape
        shards = f", context {self.context_shard}, sequence {self.sequence_shard}"
        return (
            f"TokenLayout({len(self.lengths)} sequences of {self.num_tokens} tokens, fed ({batch}, {width}), "
            f"{self.order}-major{shards}, {self.num_rows} rows, {self.num_padding} padding)"
        )

    # ---- fed token ids ------------------------------------------------------------------------------------------

    def fed_token_ids(self, token_ids: Sequence[np.ndarray | Sequence[int]], pad: int = PADDING) -> np.ndarray:
        """Return the ids (B, W) int32 that this rank must feed, with `pad` as padding."""
        self.check_sequences(token_ids)
        flat = np.concatenate([*(np.asarray(ids, np.int32) for ids in token_ids), np.array([pad], np.int32)])
        if self.prefixes:
            self._check_shared_ids(flat[:-1])
        return flat[self.fed]  # padding is -1: the last entry

    def check_sequences(self, sequences: Sequence[Sized]) -> None:
        """Raise unless there are as many sequences as this layout has, each of the length it has here."""
        if len(sequences) != len(self.lengths):
            raise AlignmentError("another number of sequences", expected=len(self.lengths), found=len(sequences))
        for sample, (expected, sequence) in enumerate(zip(self.lengths, sequences, strict=True)):
            if expected != len(sequence):
                raise AlignmentError(
                    "a sequence has another length than the layout says",
                    sample=sample,
                    expected=f"{expected} tokens",
                    found=f"{len(sequence)} tokens",
                    remedy="Where a response is truncated, truncate its trace too (trace[:length]) before the layout",
                )

    def check_fed(self, token_ids: Sequence[np.ndarray | Sequence[int]], fed_ids: np.ndarray) -> None:
        """Raise unless `fed_ids` (B, W) holds every token where this layout says it is; padding may hold anything."""
        compare_fed(self.fed_token_ids(token_ids), np.asarray(fed_ids), self)

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check_shared_ids(self, ids: np.ndarray) -> None:
        differing = np.flatnonzero(ids != ids[self.fed_as])
        if differing.size:
            sample, position = self.locate(int(differing[0]))
            raise AlignmentError(
                "a sequence has other tokens than the one whose prefix it shares",
                sample=sample,
                token=position,
                expected=f"token id {ids[self.fed_as[differing[0]]]}, as in sequence {self.prefixes[sample].sequence}",
                found=f"token id {ids[differing[0]]}",
                remedy="Share no more than the tokens that both sequences begin with",
            )

    def _require_outside_model(self, step: str) -> None:
        if self.sequence_shard is not None:
            raise LayoutError(
                f"{step} changes what is fed, and sequence parallelism happens after that, inside the model",
                remedy=f"Call {step} before sequence_parallel",
            )

    def _require_divisible(self, widths: np.ndarray, chunks: int, purpose: str) -> None:
        uneven = np.flatnonzero(widths % chunks)
        if uneven.size:
            of_sequence = len(widths) > 1
            remedy = f"pad_each_to_multiple_of={chunks} in packed()" if of_sequence else f"pad_to(multiple_of={chunks})"
            raise LayoutError(
                f"the sequence axis cannot be split evenly for {purpose}",
                sample=int(uneven[0]) if of_sequence else None,
                expected=f"a multiple of {chunks} columns",
                found=int(widths[uneven[0]]),
                remedy=f"Use {remedy}, and pad the fed tokens in the same way",
            )


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Order in which a model flattens its tokens (B, W) into rows: what the token ids themselves cannot show.

    order           row by row of the batch, or sequence-major as Megatron's [s, b, h]
    sequence_shard  (rank, size) of the columns that its routers see; None where it is not known
    """

    order: Literal["batch", "sequence"] = "batch"
    sequence_shard: tuple[int, int] | None = None

    @classmethod
    def of(cls, layout: TokenLayout) -> RowOrder:
        return cls(layout.order, layout.sequence_shard or (0, 1))

    def check(self, other: RowOrder, fed: Sequence[int]) -> None:
        """Raise unless rows in the other order are those of this one, for ids fed in the shape (B, W)."""
        if other.order != self.order and 1 not in fed:
            raise AlignmentError(
                "the model flattens its tokens in another order than the routes",
                expected=f"{self.order}-major",
                found=f"{other.order}-major",
                remedy="End the layout with .sequence_major() for Megatron-Core, and leave it out for Transformers",
            )
        if None not in (self.sequence_shard, other.sequence_shard) and self.sequence_shard != other.sequence_shard:
            raise AlignmentError(
                "the routers of this rank see another part of the columns than the routes",
                expected=f"sequence parallel (rank, size) {self.sequence_shard}",
                found=other.sequence_shard,
                remedy="Use layout.sequence_parallel(tensor parallel rank, size) where sequence_parallel is on, and "
                "replay a recording on the rank that made it",
            )


def compare_fed(expected: np.ndarray, found: np.ndarray, layout: TokenLayout | None = None) -> None:
    """Raise at the first position where two grids (B, W) of token ids differ, unless padding (-1) is expected there."""
    if found.shape != expected.shape:
        raise AlignmentError(
            "the model is fed another shape than the routes belong to",
            expected=f"(B, W) = {expected.shape}",
            found=found.shape,
            remedy="Compare what the collator makes on this rank with the steps of the layout",
        )
    differing = np.argwhere((expected != found) & (expected != PADDING))
    if not len(differing):
        return
    row, column = differing[0].tolist()
    sample, position = (None, None) if layout is None else layout.locate(int(layout.fed[row, column]))
    raise AlignmentError(
        "the model is fed another token than the routes belong to",
        sample=sample,
        token=position,
        expected=f"token id {expected[row, column]} in row {row}, column {column}",
        found=f"token id {found[row, column]} "
        f"({len(differing)} of {np.count_nonzero(expected != PADDING)} tokens differ)",
        remedy="Padding side, packing order, context parallel style and rank must be those of the collator",
    )


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate `arange(start, start + count)` of all pairs, without a loop."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(int(ends[-1]) if len(ends) else 0)


def _placed(counts: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """Return (size,) int64: the tokens 0, 1, 2, ..., `counts[i]` of them from `starts[i]` on, and padding elsewhere."""
    grid = np.full(size, PADDING, np.int64)
    grid[_ranges(starts, counts)] = np.arange(int(counts.sum()))
    return grid


def _check_prefixes(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> None:
    if prefixes and len(prefixes) != len(lengths):
        raise LayoutError("every sequence needs a prefix", expected=len(lengths), found=len(prefixes))
    for sample, prefix in enumerate(prefixes):
        if prefix.length == 0:
            continue
        if not 0 <= prefix.sequence < sample or not 0 < prefix.length < lengths[sample]:
            raise LayoutError(
                "a prefix must be that of an earlier sequence, and leave at least one token",
                sample=sample,
                expected=f"a sequence before {sample}, less than {lengths[sample]} tokens",
                found=f"sequence {prefix.sequence}, {prefix.length} tokens",
            )
        if prefix.length > lengths[prefix.sequence]:
            raise LayoutError(
                "a prefix is longer than the sequence that it is shared with",
                sample=sample,
                expected=f"at most {lengths[prefix.sequence]} tokens",
                found=prefix.length,
            )


def _check_each_token_once(fed: np.ndarray, is_fed: np.ndarray, *, whole: bool) -> None:
    """Raise unless `fed` has each of the tokens that `is_fed` once, or at most once, and no others."""
    tokens = len(is_fed)
    if fed.size and (int(fed.min()) < PADDING or int(fed.max()) >= tokens):
        raise LayoutError("fed names a token that does not exist", expected=f"-1 to {tokens - 1}", found=fed.max())
    times = np.bincount(fed.ravel() + 1, minlength=tokens + 1)[1:]
    differing = np.flatnonzero(times != is_fed if whole else times > is_fed)
    if differing.size:
        raise LayoutError(
            "every token must be fed exactly once",
            expected="once" if is_fed[differing[0]] else "not at all: it is shared",
            found=f"token {differing[0]} of {tokens}: {times[differing[0]]} times",
            remedy="A rank that holds part of the tokens needs context_parallel in its layout",
        )


def _checked_lengths(lengths: Sequence[int]) -> np.ndarray:
    counts = np.asarray(lengths)
    if counts.ndim != 1 or not counts.size or counts.dtype.kind not in "iu" or int(counts.min()) < 0:
        raise LayoutError("lengths must be the number of tokens of each sequence, at least one", found=lengths)
    return counts.astype(np.int64)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise LayoutError(f"{name} must be positive", found=value)
    return value


def _shard(name: str, rank: int, size: int) -> Shard:
    if not 0 <= rank < size:
        raise LayoutError(f"no such {name} rank", expected="0 <= rank < size", found=f"rank {rank} of {size}")
    return rank, size
