"""Naming what is wrong with misaligned routes: every known way to misplace them is tried, and the best one named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moe_replay.diagnostics.evidence import Evidence
from moe_replay.diagnostics.row_maps import context_orders, moves_of_sample, transpositions
from moe_replay.diagnostics.shift import SHIFTS
from moe_replay.diagnostics.verdict import Cause, Verdict, late, listed, range_of_layers

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
    made_up = _empty_capture(evidence)
    if made_up is not None:
        return _verdict(evidence, made_up)
    found = [e for e in (*_by_layers(evidence), *_by_ids(evidence), *_by_rows(evidence)) if e.score > EXPLAINS]
    return _verdict(evidence, max(found, key=lambda e: e.score) if found else _unexplained(evidence))


def _verdict(evidence: Evidence, why: Explanation) -> Verdict:
    wrong = tuple(np.unique(evidence.sample_of(evidence.rows)).tolist())
    return Verdict(
        status="misaligned",
        cause=why.cause,
        detail=why.detail,
        layers=tuple(evidence.native.layers[slot] for slot in evidence.slots),
        samples=wrong if len(wrong) < len(evidence.lengths) else (),
        layer_shift=why.layer_shift,
        token_shift=why.token_shift,
    )


# ---- rows that were never recorded -----------------------------------------------------------------------------------


def _empty_capture(evidence: Evidence) -> Explanation | None:
    """Return an explanation where all wrong rows name the same experts, while native routing does not."""
    rows, alike, natural, names = evidence.rows, [], [], Counter[tuple[int, ...]]()
    for slot in evidence.slots:
        valid = evidence.given.valid[slot].numpy()[rows]
        (row, count), *_ = _sets(evidence.given.experts[slot].numpy()[rows[valid]]).most_common(1) or [((), 0)]
        alike.append(count / max(valid.sum(), 1))
        natural.append(_sets(evidence.native.experts[slot].numpy()[rows]).most_common(1)[0][1] / len(rows))
        names[row] += 1
    if np.mean(alike) < 0.9 or np.mean(natural) > 0.6 or len(rows) < 4:
        return None
    (row, _), *_ = names.most_common(1)
    layers = range_of_layers([evidence.native.layers[s] for s in evidence.slots], list(evidence.native.layers))
    everywhere = f"experts {list(row)}" if len(names) == 1 else "the same experts in every row"
    tail = _tail(evidence)
    if tail:
        return Explanation(1.0, Cause.TRUNCATED, f"routes end early: {tail}; the rest names {everywhere}")
    where = _where(evidence)
    return Explanation(1.0, Cause.EMPTY_CAPTURE, f"nothing was captured {layers}{where}: routes name {everywhere}")


def _sets(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, np.sort(rows, axis=1).tolist()))


def _tail(evidence: Evidence) -> str:
    """Return where the wrong rows begin, if in each sample they are several up to its end, but not all of it."""
    texts = []
    for sample, rows in _by_sample(evidence):
        covered = np.flatnonzero(evidence.given.valid[:, evidence.starts[sample] : evidence.starts[sample + 1]].any(0))
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
    covered = evidence.given.valid.any(0).numpy()
    if len(evidence.rows) == covered.sum():
        return ""
    numbers = [sample for sample, _ in samples]
    text = f" in sample{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
    first = {int(rows[0] - evidence.starts[sample]) for sample, rows in samples}
    last = {int(evidence.starts[sample + 1] - rows[-1]) for sample, rows in samples}
    if all(len(rows) == 1 for _, rows in samples):
        return f" in single tokens of{text.removeprefix(' in')}"
    if len(first) == 1 and first != {0}:
        return f"{text} from token {first.pop()} on"
    if len(samples) == 1 and first == {0} and last.pop() > 2:
        return f"{text} up to token {samples[0][1][-1] - evidence.starts[numbers[0]]}"
    return text


def _by_sample(evidence: Evidence) -> list[tuple[int, np.ndarray]]:
    """Return (sample, its wrong rows) of each sample that has any."""
    of_row = evidence.sample_of(evidence.rows)
    return [(int(sample), evidence.rows[of_row == sample]) for sample in np.unique(of_row)]


# ---- explanations ----------------------------------------------------------------------------------------------------


def _by_layers(evidence: Evidence) -> Iterator[Explanation]:
    """Explain by routes of other layers."""
    source, scores = evidence.source_layers(evidence.spread(evidence.rows, 4 * PROBES))
    slots = evidence.slots
    moved = (scores > EXPLAINS) & (source != slots)
    if not moved.any() or moved.sum() < len(slots) // 2:
        return
    score = float(scores[moved].mean())
    names = evidence.native.layers
    layers = range_of_layers([names[slot] for slot in slots], list(names))
    (distance, times), *_ = Counter((slots - source)[moved].tolist()).most_common(1)
    # All have one distance, but where routes wrap around at the last layer; a single layer is shifted only by little.
    if times > 0.6 * moved.sum() and (times > 1 or abs(distance) <= SHIFTS[-1]):
        yield Explanation(
            score, Cause.LAYER_SHIFT, f"routes are {late(distance, 'layer')} {layers}{_where(evidence)}", distance
        )
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
    largest, known = int(evidence.given.experts.max()), evidence.native.num_experts
    if known is not None and largest >= known:
        yield Explanation(
            1.0, Cause.PHYSICAL_IDS, f"routes name expert {largest} while the routers have {known}: physical expert ids"
        )
    score = evidence.relabelled(evidence.spread(evidence.rows, 64 * PROBES))
    layers = range_of_layers([evidence.native.layers[s] for s in evidence.slots], list(evidence.native.layers))
    detail = f"expert ids are renamed {layers}: physical ids of a load balancer in place of logical ones"
    yield Explanation(score, Cause.PHYSICAL_IDS, detail)


def _by_rows(evidence: Evidence) -> Iterator[Explanation]:
    """Explain by routes of other tokens."""
    slots = evidence.telling_slots(PROBED_LAYERS)
    rows = evidence.spread(evidence.rows, PROBES)
    for cause, detail, sources in (*transpositions(evidence, rows), *context_orders(evidence, rows)):
        yield Explanation(float(evidence.explained_by(rows, sources[None], slots)[0]), cause, detail)
    shifts, others, scores = {}, {}, []
    for sample, wrong in _by_sample(evidence)[:SAMPLES_NAMED]:
        probes = evidence.spread(wrong, PROBES)
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
        yield Explanation(float(np.mean(scores)), Cause.OTHER_SAMPLE, listed(pairs) + _from_token(evidence))


def _token_shift(evidence: Evidence, shifts: dict[int, int], score: float) -> Explanation:
    distances = set(shifts.values())
    if len(distances) == 1:
        distance = distances.pop()
        detail = f"routes are {late(distance, 'token')}{_where(evidence)}"
        return Explanation(score, Cause.TOKEN_SHIFT, detail, token_shift=distance)
    by_sample = [f"{late(distance, 'token')} in sample {sample}" for sample, distance in shifts.items()]
    return Explanation(score, Cause.TOKEN_SHIFT, f"routes are displaced otherwise in each sample: {listed(by_sample)}")


def _from_token(evidence: Evidence) -> str:
    text = _where(evidence)
    return text[text.index(" from token") :] if " from token" in text else ""


def _unexplained(evidence: Evidence) -> Explanation:
    """Explain by expert loads alone: routes of this model for other tokens have its loads, other routers do not."""
    layers = range_of_layers([evidence.native.layers[s] for s in evidence.slots], list(evidence.native.layers))
    where = f"{layers}{_where(evidence)}"
    if evidence.load_distance(evidence.spread(evidence.rows, 64 * PROBES)) > 0.1:
        detail = f"routes {where} are of other routers: their experts are used otherwise than natively"
        return Explanation(0.0, Cause.OTHER_ROUTERS, detail)
    detail = f"routes {where} are of other tokens, none of these samples: of another micro-batch, or stale"
    return Explanation(0.0, Cause.OTHER_TOKENS, detail)
