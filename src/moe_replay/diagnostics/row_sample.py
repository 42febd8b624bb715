"""`RowSample`: rows drawn at random from the sequences of a micro-batch, and the alternatives they are compared with.

Rows of one sequence that are tested together form a unit: its prompt, or its sampled tokens; its first and its second
half where it is not known which tokens were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_replay.routes.layout import PADDING, TokenLayout

PROMPT, SAMPLED, UNKNOWN = SEGMENTS = range(3)
NUM_CONTROLS = 4
SAMPLED_SHARE = 2 / 3  # of the rows that are drawn from a sequence
NEAR_SHIFTS = (1, -1, 2, -2)
MAX_SHIFT = 12
NEAR_SEQUENCES = (1, -1, 2, -2, 3, -3)
OTHER_SEQUENCES = 6
SHIFTS = (*NEAR_SHIFTS, *(sign * shift for shift in range(3, MAX_SHIFT + 1) for sign in (1, -1)))
NUM_ALTERNATIVES = len(SHIFTS) + len(NEAR_SEQUENCES) + OTHER_SEQUENCES


@dataclass(frozen=True, eq=False, slots=True)
class RowSample:
    """Rows of U units, up to M each, and for each row the alternatives: other rows that its routes may belong to.

    rows           (U, M) int64: rows of the layout; -1 where a unit has fewer
    sequence       (U,) int64: the sequence of each unit
    segment        (U,) int64: PROMPT, SAMPLED or UNKNOWN
    alternatives   (P, U, M) int64: other rows, -1 where this rank has none: first the token that many tokens before,
                   for each of `SHIFTS`; then the same position in other sequences, the nearest first
    controls       (NUM_CONTROLS, U, M) int64: rows drawn at random
    """

    rows: np.ndarray
    sequence: np.ndarray
    segment: np.ndarray
    alternatives: np.ndarray
    controls: np.ndarray

    @classmethod
    def draw(
        cls,
        layout: TokenLayout,
        chance: np.random.Generator,
        *,
        sequences: int,
        rows: int,
        sampled: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> RowSample:
        """Draw `rows` rows altogether, from at most `sequences` sequences, uniformly within each unit.

        sampled   (num_tokens,) bool: which of the concatenated tokens were sampled
        allowed   rows to draw from; all that hold a token where None
        """
        allowed = np.flatnonzero(layout.rows != PADDING) if allowed is None else allowed
        row_of = np.full(layout.num_tokens + 1, PADDING)
        row_of[layout.rows[allowed]] = allowed
        before = np.concatenate([[0], np.cumsum(row_of[:-1] != PADDING)])[layout.starts]  # tokens before each
        chosen = chance.permutation(np.flatnonzero(np.diff(before)))[:sequences]
        each = max(rows // max(len(chosen), 1), 2)
        units, segments = [], []
        for one in chosen:
            tokens = slice(layout.starts[one], layout.starts[one + 1])
            for segment, part in _split(row_of[tokens], None if sampled is None else sampled[tokens], each, chance):
                units.append(part)
                segments.append(segment)
        widest = max(map(len, units), default=0)
        picked = np.full((len(units), widest), PADDING)
        for unit, part in enumerate(units):
            picked[unit, : len(part)] = part
        of_unit = np.repeat(chosen, 2)
        return cls(
            rows=picked,
            sequence=of_unit,
            segment=np.array(segments, np.int64),
            alternatives=_alternatives(layout, picked, of_unit, row_of, chance),
            controls=_controls(picked, allowed, chance),
        )

    @property
    def present(self) -> np.ndarray:
        """(U, M) bool: where there is a row."""
        return self.rows != PADDING

    @property
    def index(self) -> np.ndarray:
        """(1 + P + NUM_CONTROLS, U, M) int64: `rows`, then `alternatives`, then `controls`."""
        return np.concatenate([self.rows[None], self.alternatives, self.controls])

    @property
    def segments(self) -> np.ndarray:
        """(segments, U) float64: 1 for the segment of each unit, else 0."""
        return (self.segment == np.array(SEGMENTS)[:, None]).astype(np.float64)

    def part(self, first: int, last: int) -> RowSample:
        """Return the units from `first` up to `last`."""
        units = slice(first, last)
        return RowSample(
            rows=self.rows[units],
            sequence=self.sequence[units],
            segment=self.segment[units],
            alternatives=self.alternatives[:, units],
            controls=self.controls[:, units],
        )


def _split(
    own: np.ndarray, sampled: np.ndarray | None, each: int, chance: np.random.Generator
) -> list[tuple[int, np.ndarray]]:
    """Return two units of one sequence, `each` rows together: prompt and sampled tokens, or two halves.

    own       (T,) rows of its tokens, PADDING for those that are not drawn from
    sampled   (T,) bool, or None where not known
    """
    here = own != PADDING
    if sampled is None:
        allowed = own[here]
        half = len(allowed) // 2
        parts, wanted = (allowed[:half], allowed[half:]), each // 2
        segments = (UNKNOWN, UNKNOWN)
    else:
        parts, wanted = (own[here & ~sampled], own[here & sampled]), round(SAMPLED_SHARE * each)
        segments = (PROMPT, SAMPLED)
    last = min(len(parts[1]), max(wanted, each - len(parts[0])))
    return [
        (segment, chance.choice(part, count, replace=False))
        for segment, part, count in zip(segments, parts, (min(each - last, len(parts[0])), last), strict=True)
    ]


def _alternatives(
    layout: TokenLayout, picked: np.ndarray, sequence: np.ndarray, row_of: np.ndarray, chance: np.random.Generator
) -> np.ndarray:
    lengths, starts = np.array(layout.lengths), layout.starts
    known = picked != PADDING
    position = np.where(known, layout.rows[picked] - starts[sequence][:, None], 0)  # (U, M)
    moved = position - np.array(SHIFTS)[:, None, None]
    others = _others(sequence, len(lengths), chance)
    there = np.concatenate([moved, np.broadcast_to(position, (len(others), *position.shape))])
    of = np.concatenate([np.broadcast_to(sequence, (len(SHIFTS), len(sequence))), others])[..., None]  # (P, U, 1)
    inside = known & (of != PADDING) & (there >= 0) & (there < lengths[of])
    return np.where(inside, row_of[np.where(inside, starts[of] + there, layout.num_tokens)], PADDING)


def _others(sequence: np.ndarray, count: int, chance: np.random.Generator) -> np.ndarray:
    """Return (alternatives, U): the nearest sequences, then others at random; -1 where there are too few."""
    near = [step for step in NEAR_SEQUENCES if 2 * abs(step) < count or 2 * step == count]
    far = [step for step in chance.permutation(count).tolist() if step and not {step, step - count} & set(near)]
    steps = [*near, *[None] * (len(NEAR_SEQUENCES) - len(near)), *far[:OTHER_SEQUENCES]]
    steps += [None] * (len(NEAR_SEQUENCES) + OTHER_SEQUENCES - len(steps))
    return np.stack([np.full_like(sequence, PADDING) if step is None else (sequence + step) % count for step in steps])


def _controls(picked: np.ndarray, allowed: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    if not len(allowed):
        return np.full((NUM_CONTROLS, *picked.shape), PADDING)
    drawn = allowed[chance.integers(0, len(allowed), (NUM_CONTROLS, *picked.shape))]
    return np.where((drawn == picked) | (picked == PADDING), PADDING, drawn)
