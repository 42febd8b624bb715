"""Layouts against what trainers do, written out with lists: build the padded rows, cut them, transpose them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.errors import AlignmentError, LayoutError
from moe_replay.routes.layout import Prefix, TokenLayout

Kind = Literal["left", "right", "packed"]
Style = Literal["zigzag", "contiguous"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STYLES: tuple[Style, ...] = get_args(Style)

Cell = int | None  # a token, by its place in the concatenated sequences; None is padding
Grid = list[list[Cell]]


@dataclass(frozen=True)
class Case:
    """One way in which a trainer lays out a micro-batch over its ranks."""

    lengths: list[int]
    kind: Kind
    extra_width: int
    each: int  # packed: pad each sequence to a multiple of this
    total: int  # then the row to a multiple of this
    context: int
    style: Style
    local: int  # then this rank's row to a multiple of this
    order: str
    sequence: int

    def layout(self, context_rank: int, sequence_rank: int) -> TokenLayout:
        if self.kind == "packed":
            layout = TokenLayout.packed(self.lengths, self.total, self.each)
        else:
            layout = TokenLayout.padded(self.lengths, max(self.lengths) + self.extra_width, self.kind)
            layout = layout.pad_to(multiple_of=self.total)
        layout = layout.context_parallel(context_rank, self.context, self.style).pad_to(multiple_of=self.local)
        if self.order == "sequence":
            layout = layout.sequence_major()
        return layout.sequence_parallel(sequence_rank, self.sequence)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        return [(c, s) for c in range(self.context) for s in range(self.sequence)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    context, sequence = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    style = draw(st.sampled_from(STYLES))
    pieces = 2 * context if style == "zigzag" and context > 1 else context
    return Case(
        lengths=draw(st.lists(st.integers(0, 9), min_size=1, max_size=5)),
        kind=draw(st.sampled_from(KINDS)),
        extra_width=draw(st.integers(0, 3)),
        each=pieces * draw(st.integers(1, 3)) if style == "zigzag" else draw(st.integers(1, 5)),
        total=pieces * draw(st.integers(1, 3)),
        context=context,
        style=style,
        local=sequence * draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["batch", "sequence"])),
        sequence=sequence,
    )


# ---- what trainers do, step by step ----------------------------------------------------------------------------------


def padded_to(row: list[Cell], multiple: int) -> list[Cell]:
    row = list(row)
    while len(row) % multiple:
        row.append(None)
    return row


def cut(row: list[Cell], pieces: int) -> list[list[Cell]]:
    assert len(row) % pieces == 0
    size = len(row) // pieces
    return [row[i * size : (i + 1) * size] for i in range(pieces)]


def share(row: list[Cell], case: Case, rank: int) -> list[Cell]:
    if case.context == 1:
        return row
    if case.style == "contiguous":
        return cut(row, case.context)[rank]
    chunks = cut(row, 2 * case.context)
    return chunks[rank] + chunks[2 * case.context - 1 - rank]


def trainer_feeds(case: Case, context_rank: int) -> Grid:
    numbers = iter(range(sum(case.lengths)))
    sequences: Grid = [[next(numbers) for _ in range(length)] for length in case.lengths]
    if case.kind == "packed":
        segments = [padded_to(sequence, case.each) for sequence in sequences]
        while sum(map(len, segments)) % case.total:
            segments[-1].append(None)
        if case.style == "contiguous":
            segments = [[cell for segment in segments for cell in segment]]
        grid = [[cell for segment in segments for cell in share(segment, case, context_rank)]]
    else:
        width = max(case.lengths) + case.extra_width
        padding: Grid = [[None] * (width - len(sequence)) for sequence in sequences]
        pairs = zip(padding, sequences, strict=True)
        rows = [pad + row if case.kind == "left" else row + pad for pad, row in pairs]
        grid = [share(padded_to(row, case.total), case, context_rank) for row in rows]
    return [padded_to(row, case.local) for row in grid]


def routers_see(fed: Grid, case: Case, sequence_rank: int) -> list[Cell]:
    fed = [cut(row, case.sequence)[sequence_rank] for row in fed]
    if case.order == "batch":
        return [cell for row in fed for cell in row]
    return [row[column] for column in range(len(fed[0])) for row in fed]


def as_list(indices: np.ndarray) -> list:
    return [[None if i == -1 else i for i in row] for row in np.atleast_2d(indices).tolist()]


def some_ids(lengths: list[int] | tuple[int, ...], first: int = 1000) -> list[np.ndarray]:
    """Distinct token ids in no order that a layout could produce by accident."""
    flat = first + np.random.default_rng(0).permutation(sum(lengths))
    return np.split(flat, np.cumsum(lengths)[:-1])


# ---- layouts are what trainers do ------------------------------------------------------------------------------------


@given(cases())
def test_fed_and_rows_are_what_the_trainer_makes(case: Case) -> None:
    ids = some_ids(case.lengths)
    flat = np.concatenate(ids).tolist()
    for context_rank, sequence_rank in case.ranks:
        layout = case.layout(context_rank, sequence_rank)
        fed = trainer_feeds(case, context_rank)
        rows = routers_see(fed, case, sequence_rank)
        assert as_list(layout.fed) == fed
        assert as_list(layout.rows)[0] == rows
        assert layout.fed_token_ids(ids, pad=7).tolist() == [[7 if c is None else flat[c] for c in r] for r in fed]
        assert (layout.num_rows, layout.num_padding) == (len(rows), rows.count(None))
        assert (layout.lengths, layout.num_tokens) == (tuple(case.lengths), sum(case.lengths))


@given(cases())
def test_all_ranks_together_hold_every_token_exactly_once(case: Case) -> None:
    rows = np.concatenate([case.layout(*ranks).rows for ranks in case.ranks])
    assert sorted(rows[rows != -1]) == list(range(sum(case.lengths)))


def test_zigzag_of_megatron() -> None:
    whole = TokenLayout.padded([16])
    assert whole.context_parallel(0, 2).fed.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert whole.context_parallel(1, 2).fed.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]


def test_megatron_flattens_sequence_first() -> None:
    layout = TokenLayout.padded([3, 3]).sequence_major()
    assert layout.fed.tolist() == [[0, 1, 2], [3, 4, 5]]  # what is fed stays as it is
    assert layout.rows.tolist() == [0, 3, 1, 4, 2, 5]


def test_zigzag_acts_on_each_packed_sequence() -> None:
    layout = TokenLayout.packed([3, 1], pad_each_to_multiple_of=4)
    assert layout.context_parallel(0, 2).fed.tolist() == [[0, -1, 3, -1]]
    assert layout.context_parallel(1, 2).fed.tolist() == [[1, 2, -1, -1]]


def test_padding_of_the_packed_row_belongs_to_the_last_sequence() -> None:
    layout = TokenLayout.packed([4, 4], pad_to_multiple_of=16, pad_each_to_multiple_of=4)
    assert layout.segments == (4, 12)
    assert layout.context_parallel(0, 2).fed.tolist() == [[0, 3, 4, 5, 6, -1, -1, -1]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_locate_names_sequence_and_position(lengths: list[int]) -> None:
    places = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    layout = TokenLayout.packed(lengths)
    assert [layout.locate(i) for i in range(layout.num_tokens)] == places
    for outside in (-1, layout.num_tokens):
        with pytest.raises(LayoutError, match="no such token"):
            layout.locate(outside)


def test_a_layout_cannot_be_changed() -> None:
    mine = np.array([[0, 1]])
    layout = TokenLayout(mine, lengths=(2,), segments=(2,))
    mine[:] = 0
    assert layout.fed.tolist() == [[0, 1]]
    for array in (layout.fed, layout.rows):
        with pytest.raises(ValueError, match="read-only"):
            array[..., 0] = 1


# ---- the alignment proof ---------------------------------------------------------------------------------------------


@given(cases(), st.data())
def test_the_right_ids_pass_whatever_the_padding_holds(case: Case, data: st.DataObject) -> None:
    layout = case.layout(*data.draw(st.sampled_from(case.ranks)))
    ids = some_ids(case.lengths)
    layout.check_fed(ids, layout.fed_token_ids(ids))
    layout.check_fed(ids, layout.fed_token_ids(ids, pad=int(ids[0][0]) if len(ids[0]) else 0).astype(np.int64))


@given(cases(), st.data())
def test_one_wrong_token_is_found_and_named(case: Case, data: st.DataObject) -> None:
    layout = case.layout(*data.draw(st.sampled_from(case.ranks)))
    held = np.argwhere(layout.fed != -1).tolist()
    if not held:
        return
    ids = some_ids(case.lengths)
    fed = layout.fed_token_ids(ids)
    row, column = data.draw(st.sampled_from(held))
    expected = int(fed[row, column])
    fed[row, column] = 5
    with pytest.raises(AlignmentError) as caught:
        layout.check_fed(ids, fed)
    error = caught.value
    assert (error.sample, error.token) == layout.locate(int(layout.fed[row, column]))
    assert str(error.expected) == f"token id {expected} in row {row}, column {column}"
    assert str(error.found) == f"token id 5 (1 of {len(held)} tokens differ)"


@given(cases(), st.data())
def test_moved_tokens_are_found(case: Case, data: st.DataObject) -> None:
    layout = case.layout(*data.draw(st.sampled_from(case.ranks)))
    held = np.argwhere(layout.fed != -1)
    if len(held) < 2:
        return
    ids = some_ids(case.lengths)
    right = layout.fed_token_ids(ids)

    swapped = right.copy()
    one, other = (tuple(held[i]) for i in data.draw(st.permutations(range(len(held))))[:2])
    swapped[one], swapped[other] = right[other], right[one]
    shifted = [np.roll(right, step, axis=1) for step in (-1, 1)]
    batch, width = right.shape
    transposed = right.T.reshape(batch, width)  # sequence-major memory read as batch-major
    for wrong in (swapped, *shifted, transposed):
        if (wrong == right)[layout.fed != -1].all():
            continue  # a single row or column transposed is itself
        with pytest.raises(AlignmentError, match="fed another token"):
            layout.check_fed(ids, wrong)


def test_every_shift_and_transposition_is_another_grid() -> None:
    """The property above skips grids that a move leaves as they were; here is one where none does."""
    layout = TokenLayout.padded([4, 3, 4], side="left")
    ids = some_ids(layout.lengths)
    right = layout.fed_token_ids(ids)
    for wrong in (
        np.roll(right, 1, axis=1),
        np.roll(right, -1, axis=1),
        np.roll(right, 1, axis=0),
        right.T.reshape(3, 4),
    ):
        with pytest.raises(AlignmentError, match="fed another token"):
            layout.check_fed(ids, wrong)
    with pytest.raises(AlignmentError, match=r"another shape .*expected \(B, W\) = \(3, 4\), found \(4, 3\)"):
        layout.check_fed(ids, right.T)


@pytest.mark.parametrize(
    ("layout", "fed"),
    [
        (TokenLayout.padded([3, 5], side="left"), TokenLayout.padded([3, 5], side="right")),
        (TokenLayout.packed([3, 5], 8), TokenLayout.packed([3, 5], 8, 4)),
        (TokenLayout.padded([8]).context_parallel(0, 2), TokenLayout.padded([8]).context_parallel(1, 2)),
        (TokenLayout.padded([8]).context_parallel(0, 2), TokenLayout.padded([8]).context_parallel(0, 2, "contiguous")),
    ],
    ids=["padding side", "packing", "context rank", "context style"],
)
def test_another_layout_is_found(layout: TokenLayout, fed: TokenLayout) -> None:
    ids = some_ids(layout.lengths)
    with pytest.raises(AlignmentError, match="fed another"):
        layout.check_fed(ids, fed.fed_token_ids(ids))


def test_sequences_that_do_not_fit_are_named() -> None:
    layout = TokenLayout.packed([2, 3])
    with pytest.raises(AlignmentError, match=r"\[sample 1\]: expected 3 tokens, found 4 tokens.*trace\[:length\]"):
        layout.fed_token_ids([[1, 2], [3, 4, 5, 6]])
    with pytest.raises(AlignmentError, match="another number of sequences: expected 2, found 1"):
        layout.fed_token_ids([[1, 2]])


# ---- what cannot be --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(2, 4),
    st.sampled_from(STYLES),
    st.booleans(),
)
def test_what_cannot_be_cut_evenly_is_refused_with_a_remedy_that_works(
    lengths: list[int], size: int, style: Style, packed: bool
) -> None:
    pieces = 2 * size if style == "zigzag" else size
    layout = TokenLayout.packed(lengths) if packed else TokenLayout.padded(lengths)
    widths = lengths if packed and style == "zigzag" else [layout.fed.shape[1]]
    if all(width % pieces == 0 for width in widths):
        assert layout.context_parallel(0, size, style).fed.shape[1] == sum(widths) // size
        return
    with pytest.raises(LayoutError, match=f"expected a multiple of {pieces} columns") as caught:
        layout.context_parallel(0, size, style)
    uneven = next(i for i, width in enumerate(widths) if width % pieces)
    assert caught.value.sample == (uneven if len(widths) > 1 else None)
    assert caught.value.found == widths[uneven]
    if len(widths) > 1:
        assert f"pad_each_to_multiple_of={pieces}" in str(caught.value)
        mended = TokenLayout.packed(lengths, pad_each_to_multiple_of=pieces)
    else:
        assert f"pad_to(multiple_of={pieces})" in str(caught.value)
        mended = layout.pad_to(multiple_of=pieces)
    assert mended.context_parallel(0, size, style).num_rows == mended.num_rows // size


def test_sequence_parallel_needs_an_even_cut() -> None:
    layout = TokenLayout.padded([5, 3])
    with pytest.raises(LayoutError, match=r"sequence parallel of size 2: expected a multiple of 2 columns, found 5"):
        layout.sequence_parallel(0, 2)
    assert layout.pad_to(multiple_of=2).sequence_parallel(0, 2).num_rows == 6


def test_one_rank_needs_no_even_cut() -> None:
    assert TokenLayout.padded([5]).context_parallel(0, 1).fed.tolist() == [[0, 1, 2, 3, 4]]


def test_steps_out_of_turn_are_refused() -> None:
    layout = TokenLayout.padded([8])
    inside = layout.sequence_parallel(0, 2)
    with pytest.raises(LayoutError, match="Call context_parallel before sequence_parallel"):
        inside.context_parallel(0, 2)
    with pytest.raises(LayoutError, match="Call pad_to before sequence_parallel"):
        inside.pad_to(multiple_of=16)
    with pytest.raises(LayoutError, match="sequence_parallel applied twice"):
        inside.sequence_parallel(0, 2)
    with pytest.raises(LayoutError, match="context_parallel applied twice"):
        layout.context_parallel(0, 2).context_parallel(0, 2)


ANYTHING: Any = "spiral"  # what no type checker would let pass
FRACTIONS: Any = [1.5]

IMPOSSIBLE = {
    "longer than the width": (
        lambda: TokenLayout.padded([3, 7], width=6),
        r"longer than the padded width \[sample 1\].*6 tokens, found 7",
    ),
    "unknown side": (lambda: TokenLayout.padded([3], side=ANYTHING), "unknown padding side"),
    "no sequences": (lambda: TokenLayout.padded([]), "lengths must be"),
    "negative length": (lambda: TokenLayout.packed([2, -1]), "lengths must be"),
    "nested lengths": (lambda: TokenLayout.packed([ANYTHING]), "lengths must be"),
    "fractional length": (lambda: TokenLayout.packed(FRACTIONS), "lengths must be"),
    "each to a multiple of 0": (
        lambda: TokenLayout.packed([2], pad_each_to_multiple_of=0),
        "pad_each_to_multiple_of must be positive",
    ),
    "to a negative multiple": (lambda: TokenLayout.packed([2], pad_to_multiple_of=-4), "multiple_of must be positive"),
    "narrower than it is": (lambda: TokenLayout.padded([4]).pad_to(3), "at least 4 and a multiple of 1, found 3"),
    "width and multiple disagree": (
        lambda: TokenLayout.padded([4]).pad_to(6, multiple_of=4),
        "a multiple of 4, found 6",
    ),
    "context rank outside": (
        lambda: TokenLayout.padded([4]).context_parallel(2, 2),
        "no such context parallel rank.*rank 2 of 2",
    ),
    "sequence rank outside": (
        lambda: TokenLayout.padded([4]).sequence_parallel(-1, 2),
        "no such sequence parallel rank",
    ),
    "unknown style": (lambda: TokenLayout.padded([4]).context_parallel(0, 2, ANYTHING), "unknown style"),
    "a token twice": (lambda: TokenLayout(np.array([[0, 0]]), (2,), (2,)), "exactly once.*token 0 of 2: 2 times"),
    "a token missing": (lambda: TokenLayout(np.array([[0, -1]]), (2,), (2,)), "exactly once.*token 1 of 2: 0 times"),
    "a token twice in a shard": (
        lambda: TokenLayout(np.array([[0, 0]]), (4,), (2,), context_shard=(0, 2)),
        "exactly once",
    ),
    "a token too many": (lambda: TokenLayout(np.array([[0, 2]]), (2,), (2,)), "does not exist"),
    "below padding": (lambda: TokenLayout(np.array([[0, -2]]), (2,), (2,)), "does not exist"),
    "segments that do not add up": (lambda: TokenLayout(np.array([[0, 1]]), (2,), (3,)), "add up to W"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_layouts_are_refused(name: str) -> None:
    make, problem = IMPOSSIBLE[name]
    with pytest.raises(LayoutError, match=problem):
        make()


def test_padding_to_a_width() -> None:
    layout = TokenLayout.padded([2, 1], side="left").pad_to(4)
    assert layout.fed.tolist() == [[0, 1, -1, -1], [-1, 2, -1, -1]]
    assert layout.num_padding == 5


@settings(max_examples=20)
@given(cases())
def test_a_layout_says_what_it_is(case: Case) -> None:
    layout = case.layout(0, 0)
    assert f"{sum(case.lengths)} tokens" in repr(layout)
    assert f"{layout.num_rows} rows" in repr(layout)


# ---- shared prefixes -------------------------------------------------------------------------------------------------


def test_a_shared_prefix_is_fed_once_with_the_first_sequence() -> None:
    layout = TokenLayout.shared([6, 5, 7, 4], [(0, 0), (0, 3), (1, 4), (0, 0)])
    assert layout.segments == (6, 2, 3, 4)
    assert layout.fed.tolist() == [[0, 1, 2, 3, 4, 5, 9, 10, 15, 16, 17, 18, 19, 20, 21]]
    assert [layout.prefix_rows(i).tolist() for i in range(4)] == [[], [0, 1, 2], [0, 1, 2, 6], []]
    assert (layout.num_shared, layout.num_tokens, layout.num_rows) == (7, 22, 15)
    again = copy.copy(layout)
    assert again.prefixes == layout.prefixes
    assert layout.unshared.lengths == layout.lengths
    assert layout.unshared.num_rows == 22


def test_the_tokens_of_a_shared_prefix_must_be_the_same() -> None:
    layout = TokenLayout.shared([3, 4], [(0, 0), (0, 2)])
    assert layout.fed_token_ids([[5, 6, 7], [5, 6, 8, 9]]).tolist() == [[5, 6, 7, 8, 9]]
    with pytest.raises(AlignmentError, match=r"other tokens than the one whose prefix.*sample 1, token 1"):
        layout.fed_token_ids([[5, 6, 7], [5, 4, 8, 9]])


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([(0, 0)], "every sequence needs a prefix"),
        ([(0, 0), (1, 2)], "an earlier sequence"),
        ([(1, 2), (0, 0)], "an earlier sequence"),
        ([(0, 0), (0, 6)], "leave at least one token"),
        ([(0, 0), (0, 4)], "longer than the sequence that it is shared with"),
    ],
)
def test_prefixes_that_cannot_be_are_refused(prefixes: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        TokenLayout.shared([3, 6], prefixes)


def test_a_token_that_is_shared_must_not_be_fed_again() -> None:
    with pytest.raises(LayoutError, match="not at all: it is shared"):
        TokenLayout(np.arange(6)[None], (3, 3), (3, 3), prefixes=(Prefix(), Prefix(0, 2)))


def test_shared_prefixes_and_context_parallel_are_refused_together() -> None:
    with pytest.raises(LayoutError, match="cannot be divided among context parallel ranks"):
        TokenLayout.shared([4, 4], [(0, 0), (0, 2)]).context_parallel(0, 2)


# ---- rows on which nothing depends -----------------------------------------------------------------------------------


@given(cases())
def test_unused_rows_are_padding_and_the_last_tokens(case: Case) -> None:
    last = {sum(case.lengths[: number + 1]) - 1 for number, length in enumerate(case.lengths) if length}
    for ranks in case.ranks:
        layout = case.layout(*ranks)
        assert layout.unused.tolist() == [token == -1 or token in last for token in layout.rows.tolist()]


def test_a_last_token_is_used_by_a_sequence_that_goes_on_behind_it() -> None:
    shared = TokenLayout.shared([3, 5, 6, 4], [(0, 0), (0, 3), (1, 4), (2, 3)])
    assert shared.rows[shared.unused].tolist() == [7, 13, 17]  # not 2, the last of the first
    twice = TokenLayout.shared([2, 3, 4], [(0, 0), (0, 2), (1, 3)])
    assert twice.rows[twice.unused].tolist() == [8]
