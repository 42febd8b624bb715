"""The cause of misaligned routes: every known way to misplace them is tried, and the best explanation named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.verification.agreement import expert_overlap
from moe_replay.verification.alignment_verdict import Cause, Verdict, late, listed, range_of_layers
from moe_replay.verification.shift import CELLS, SHIFTS, experts_counted


def spread(values: np.ndarray, count: int) -> np.ndarray:
    """Return at most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class Evidence:
    """Routes of packed sequences: row r is token r of the concatenated sequences.

    native, replayed   of the same layers and rows
    rows, slots        the rows and the indices of the layers that are wrong
    """

    native: RouteBatch
    replayed: RouteBatch
    starts: np.ndarray  # (sequences + 1,) where each sequence begins, and where the last ends
    chance: np.ndarray  # (L,) agreement of routes of the same layer that know nothing of each other
    rows: np.ndarray
    slots: np.ndarray
    width: int | None = None  # columns of the micro-batch, where sequences were padded to more than the longest

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def layers_in_words(self) -> str:
        """Which layers are wrong."""
        return range_of_layers([self.native.layers[slot] for slot in self.slots], list(self.native.layers))

    def sample_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the sequence that each row belongs to."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def telling_slots(self, count: int) -> np.ndarray:
        """Return at most `count` of the layers that are wrong, those that can tell most."""
        return self.slots[np.argsort(np.nan_to_num(self.chance[self.slots], nan=1.0))[:count]]

    def explained_by(self, rows: np.ndarray, sources: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return (H,): agreement above chance of routes replayed in `rows` (n,) and native ones of `sources` (H, n).

        A source of -1 is none, and explains its row no better than chance.
        """
        replayed = self.replayed.routed_experts[slots][:, rows]  # (l, n, K)
        valid = self.replayed.valid[slots][:, rows]
        chance = torch.from_numpy(np.nan_to_num(self.chance[slots], nan=1.0))[:, None, None]
        possible = ((1 - chance) * valid[:, None]).sum().clamp(min=1e-9)
        result = np.empty(len(sources))
        step = max(1, CELLS // max(replayed.numel() * replayed.shape[-1], 1))
        for first in range(0, len(sources), step):
            part = torch.from_numpy(sources[first : first + step])
            known = (part >= 0)[None] & valid[:, None]  # (l, h, n)
            shared = expert_overlap(replayed[:, None], self.native.routed_experts[slots][:, part.clamp(min=0)])
            gained = ((shared - chance) * known).sum((0, 2))
            result[first : first + step] = (gained / possible).numpy()
        return result

    def source_layers(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each slot that is wrong, the slot whose native routes explain it best, and how well."""
        best, score = np.empty(len(self.slots), np.int64), np.empty(len(self.slots))
        native = self.native.routed_experts[:, rows]
        own_load = self._load(native, torch.ones(native.shape[:2], dtype=torch.bool))
        for index, slot in enumerate(self.slots):
            valid = self.replayed.valid[slot, rows]
            replayed = self.replayed.routed_experts[slot, rows]
            shared = (expert_overlap(replayed[None], native) * valid).sum(1).double() / valid.sum().clamp(min=1)
            chance = own_load @ self._load(replayed[None], valid[None])[0] * self.replayed.top_k
            above = (shared - chance) / (1 - chance).clamp(min=1e-6)
            best[index], score[index] = int(above.argmax()), float(above.max())
        return best, score

    def relabelled(self, rows: np.ndarray) -> float:
        """Return the agreement above chance once each layer's replayed expert ids are renamed to fit native routing.

        The names are fitted on every other row and tried on the rest.
        """
        gained = possible = 0.0
        for slot in self.slots:
            valid = self.replayed.valid[slot, rows].numpy()
            fit, trial = rows[valid][::2], rows[valid][1::2]
            native, replayed = self.native.routed_experts[slot].long(), self.replayed.routed_experts[slot].long()
            count = int(max(native.max(), replayed.max())) + 1
            pairs = native[fit][:, None, :] * count + replayed[fit][:, :, None]
            together = torch.bincount(pairs.flatten(), minlength=count * count).view(count, count).double()
            expected = together.sum(1, keepdim=True) * together.sum(0, keepdim=True) / together.sum().clamp(min=1)
            name = ((together - expected) / (expected + 1).sqrt()).argmax(0)
            shared = expert_overlap(native[trial], name[replayed[trial]]).double()
            load = self._load(native[None, trial], torch.ones(1, len(trial), dtype=torch.bool))[0]
            renamed = self._load(name[replayed[None, trial]], torch.ones(1, len(trial), dtype=torch.bool))[0]
            chance = float(load @ renamed) * self.replayed.top_k
            gained += float(shared.sum()) - chance * len(trial)
            possible += (1 - chance) * len(trial)
        return gained / possible if possible > 0 else 0.0

    def load_distance(self, rows: np.ndarray) -> float:
        """Return how much further replayed loads are from native ones than halves of each from each other, 0 to 1."""
        native, replayed = self.native.routed_experts[self.slots], self.replayed.routed_experts[self.slots]
        valid = self.replayed.valid[self.slots]
        halves = [self._load(native[:, part], valid[:, part]) for part in (rows[::2], rows[1::2])]
        replayed_halves = [self._load(replayed[:, part], valid[:, part]) for part in (rows[::2], rows[1::2])]

        def apart(a: Tensor, b: Tensor) -> float:
            return float((a - b).abs().sum(1).mean()) / 2

        return apart(halves[0], replayed_halves[1]) - max(apart(*halves), apart(*replayed_halves))

    def _load(self, routed_experts: Tensor, valid: Tensor) -> Tensor:
        """Return (l, E): the fraction of all choices (l, n, K) that goes to each expert; every id has a column."""
        count = experts_counted(self.native, self.replayed)
        load = torch.zeros(len(routed_experts), count, dtype=torch.float64)
        counted = valid[..., None].expand(routed_experts.shape).flatten(1).double()
        load.scatter_add_(1, routed_experts.flatten(1).long(), counted)
        return load / load.sum(1, keepdim=True).clamp(min=1)


EXPLAINS = 0.3  # agreement above chance that an explanation must reach
PROBES = 96  # rows that explanations are tried on
PROBED_LAYERS = 6
SAMPLES_NAMED = 16


@dataclass(frozen=True, slots=True)
class Explanation:
    """A way to misplace routes, and the agreement above chance that undoing it brings."""

    score: float
    cause: Cause
    detail: str
    layer_shift: int | None = None
    token_shift: int | None = None


def explain(evidence: Evidence) -> Verdict:
    """Return the verdict on routes that are wrong, with their best explanation."""
    unwritten = _empty_capture(evidence)
    if unwritten is not None:
        return _verdict(evidence, unwritten)
    candidates = [e for e in (*_by_layers(evidence), *_by_ids(evidence), *_by_rows(evidence)) if e.score > EXPLAINS]
    return _verdict(evidence, max(candidates, key=lambda e: e.score) if candidates else _unexplained(evidence))


def _verdict(evidence: Evidence, why: Explanation) -> Verdict:
    wrong_samples = tuple(np.unique(evidence.sample_of(evidence.rows)).tolist())
    return Verdict(
        status="misaligned",
        cause=why.cause,
        detail=why.detail,
        layers=tuple(evidence.native.layers[slot] for slot in evidence.slots),
        samples=wrong_samples if len(wrong_samples) < len(evidence.lengths) else (),
        layer_shift=why.layer_shift,
        token_shift=why.token_shift,
    )


# ---- rows that were never recorded -----------------------------------------------------------------------------------


def _empty_capture(evidence: Evidence) -> Explanation | None:
    """Return an explanation where all wrong rows name the same experts, while native routing does not."""
    rows, replayed_equal, native_equal, names = evidence.rows, [], [], Counter[tuple[int, ...]]()
    for slot in evidence.slots:
        valid = evidence.replayed.valid[slot].numpy()[rows]
        (row, count), *_ = _sets(evidence.replayed.routed_experts[slot].numpy()[rows[valid]]).most_common(1) or [
            ((), 0)
        ]
        replayed_equal.append(count / max(valid.sum(), 1))
        native_equal.append(_sets(evidence.native.routed_experts[slot].numpy()[rows]).most_common(1)[0][1] / len(rows))
        names[row] += 1
    if np.mean(replayed_equal) < 0.9 or np.mean(native_equal) > 0.6 or len(rows) < 4:
        return None
    (row, _), *_ = names.most_common(1)
    everywhere = f"experts {list(row)}" if len(names) == 1 else "the same experts in every row"
    tail = _tail(evidence)
    if tail:
        return Explanation(1.0, Cause.TRUNCATED, f"routes end early: {tail}; the rest names {everywhere}")
    where = f"{evidence.layers_in_words}{_where(evidence)}"
    return Explanation(1.0, Cause.EMPTY_CAPTURE, f"nothing was captured {where}: routes name {everywhere}")


def _sets(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, np.sort(rows, axis=1).tolist()))


def _tail(evidence: Evidence) -> str:
    """Return where the wrong rows begin, if in each sample they are several up to its end, but not all of it."""
    texts = []
    for sample, rows in _by_sample(evidence):
        covered = np.flatnonzero(
            evidence.replayed.valid[:, evidence.starts[sample] : evidence.starts[sample + 1]].any(0)
        )
        position = rows - evidence.starts[sample]
        if len(position) < 2 or position[-1] != covered[-1] or position[0] == covered[0]:
            return ""
        if (np.diff(position) != 1).any():
            return ""
        texts.append(f"at token {position[0]} of {evidence.lengths[sample]} in sample {sample}")
    return listed(texts)


def _where(evidence: Evidence) -> str:
    """Return in words which tokens of which samples are wrong; empty where all are."""
    samples = _by_sample(evidence)
    covered = evidence.replayed.valid.any(0).numpy()
    if len(evidence.rows) == covered.sum():
        return ""
    numbers = f"sample{'s' if len(samples) > 1 else ''} {listed([sample for sample, _ in samples])}"
    if all(len(rows) == 1 for _, rows in samples):
        return f" in single tokens of {numbers}"
    return f" in {numbers}{_which_tokens(evidence)}"


def _which_tokens(evidence: Evidence) -> str:
    """Return in words which tokens of samples are wrong, where that can be said; empty where all are."""
    samples, covered = _by_sample(evidence), evidence.replayed.valid.any(0).numpy()
    if len(evidence.rows) == covered.sum():
        return ""
    first = {int(rows[0] - evidence.starts[sample]) for sample, rows in samples}
    # One token more may be right by chance.
    to_the_end = all(not covered[rows[-1] + 2 : evidence.starts[sample + 1]].any() for sample, rows in samples)
    if to_the_end and len(first) == 1 and first != {0}:
        return f" from token {first.pop()} on"
    if to_the_end or len(samples) > 1:
        return ""
    (sample, rows), *_ = samples
    last = rows[-1] - evidence.starts[sample]
    return f" up to token {last}" if first == {0} else f", tokens {first.pop()} to {last}"


def _by_sample(evidence: Evidence) -> list[tuple[int, np.ndarray]]:
    """Return (sample, its wrong rows) of each sample that has any."""
    of_row = evidence.sample_of(evidence.rows)
    return [(int(sample), evidence.rows[of_row == sample]) for sample in np.unique(of_row)]


# ---- explanations ----------------------------------------------------------------------------------------------------


def _by_layers(evidence: Evidence) -> Iterator[Explanation]:
    source, scores = evidence.source_layers(spread(evidence.rows, 4 * PROBES))
    slots = evidence.slots
    moved = (scores > EXPLAINS) & (source != slots)
    if not moved.any() or moved.sum() < len(slots) // 2:
        return
    score = float(scores[moved].mean())
    names = evidence.native.layers
    (distance, times), *_ = Counter((slots - source)[moved].tolist()).most_common(1)
    # All have one distance, but where routes wrap around at the last layer; a single layer is shifted only by little.
    if times > 0.6 * moved.sum() and (times > 1 or abs(distance) <= SHIFTS[-1]):
        detail = f"routes are {late(distance, 'layer')} {evidence.layers_in_words}{_where(evidence)}"
        yield Explanation(score, Cause.LAYER_SHIFT, detail, distance)
        return
    pairs = [f"layer {names[slot]} has those of {names[origin]}" for slot, origin in zip(slots, source, strict=True)]
    whole = np.arange(len(names))
    whole[slots] = source
    if _reversed_chunks(whole.tolist()):
        yield Explanation(score, Cause.CHUNKS_REVERSED, f"pipeline chunks are in reverse order: {listed(pairs)}")
    else:
        shown = [pair for pair, is_moved in zip(pairs, moved, strict=True) if is_moved]
        yield Explanation(score, Cause.LAYER_ORDER, f"layers have routes of other layers: {listed(shown)}")


def _reversed_chunks(source: list[int]) -> bool:
    """Return whether runs of neighbouring layers, each whole, are in reverse order."""
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(source)) if b != a + 1]
    heads = [source[i] for i in [0, *cuts]]
    return sorted(source) == list(range(len(source))) and len(heads) > 1 and heads == sorted(heads, reverse=True)


def _by_ids(evidence: Evidence) -> Iterator[Explanation]:
    """Explain by the same experts under other ids."""
    largest, num_experts = int(evidence.replayed.routed_experts.max()), evidence.native.num_experts
    if num_experts is not None and largest >= num_experts:
        yield Explanation(
            1.0,
            Cause.PHYSICAL_IDS,
            f"routes name expert {largest} while the routers have {num_experts}: physical expert ids",
        )
    score = evidence.relabelled(spread(evidence.rows, 64 * PROBES))
    detail = (
        f"expert ids are renamed {evidence.layers_in_words}: physical ids of a load balancer in place of logical ones"
    )
    yield Explanation(score, Cause.PHYSICAL_IDS, detail)


def _by_rows(evidence: Evidence) -> Iterator[Explanation]:
    slots = evidence.telling_slots(PROBED_LAYERS)
    rows = spread(evidence.rows, PROBES)
    for cause, detail, sources in (*transpositions(evidence, rows), *context_orders(evidence, rows)):
        yield Explanation(float(evidence.explained_by(rows, sources[None], slots)[0]), cause, detail)
    shifts, others, scores = {}, {}, []
    for sample, rows_of_sample in _by_sample(evidence)[:SAMPLES_NAMED]:
        probes = spread(rows_of_sample, PROBES)
        moves, sources = moves_of_sample(evidence, sample, probes)
        if not len(moves):
            continue
        score = evidence.explained_by(probes, sources, slots)
        best = int(score.argmax())
        noise = 0.5 / np.sqrt(len(probes) * len(slots))
        if score[best] < max(EXPLAINS, 5 * noise):
            continue
        scores.append(float(score[best]))
        origin, shift = moves[best]
        (shifts if origin == sample else others)[sample] = shift if origin == sample else origin
    if shifts and len(shifts) >= len(others):
        yield _token_shift(evidence, shifts, float(np.mean(scores)))
    elif others:
        pairs = [f"sample {sample} has the routes of sample {origin}" for sample, origin in others.items()]
        yield Explanation(float(np.mean(scores)), Cause.OTHER_SAMPLE, listed(pairs) + _which_tokens(evidence))


def _token_shift(evidence: Evidence, shifts: dict[int, int], score: float) -> Explanation:
    distances = set(shifts.values())
    if len(distances) == 1:
        distance = distances.pop()
        detail = f"routes are {late(distance, 'token')}{_where(evidence)}"
        return Explanation(score, Cause.TOKEN_SHIFT, detail, token_shift=distance)
    by_sample = [f"{late(distance, 'token')} in sample {sample}" for sample, distance in shifts.items()]
    return Explanation(score, Cause.TOKEN_SHIFT, f"routes are displaced otherwise in each sample: {listed(by_sample)}")


def _unexplained(evidence: Evidence) -> Explanation:
    """Explain by expert loads alone: routes of this model for other tokens have its loads, other routers do not."""
    where = f"{evidence.layers_in_words}{_where(evidence)}"
    if evidence.load_distance(spread(evidence.rows, 64 * PROBES)) > 0.1:
        detail = f"routes {where} are of other routers: their experts are used otherwise than natively"
        return Explanation(0.0, Cause.OTHER_ROUTERS, detail)
    detail = f"routes {where} are of other tokens, none of these samples: of another micro-batch, or stale"
    return Explanation(0.0, Cause.OTHER_TOKENS, detail)


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
        for style, parts in (("contiguous", np.argsort(order)), ("zigzag", order)):
            source = parts[np.minimum(position // np.maximum(chunk, 1), 2 * size - 1)] * chunk + position % chunk
            yield (
                Cause.CONTEXT_PARALLEL,
                f"routes are cut {style} over {size} context parallel ranks, and tokens are not",
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
    moves = [(sample, shift) for shift in shifts] + [(other, 0) for other in others]
    return moves, np.array([*moved, *taken], np.int64).reshape(len(moves), len(rows))


def _row(evidence: Evidence, sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the row of each token; -1 where there is no such token."""
    known = (sample >= 0) & (sample < len(evidence.lengths))
    owner = np.where(known, sample, 0)
    inside = known & (position >= 0) & (position < evidence.lengths[owner])
    return np.where(inside, evidence.starts[owner] + position, -1)
