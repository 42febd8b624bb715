"""`Attribution`: the mismatch of trainer and rollout on one batch, how much of it is routing, and its thresholds.

`tools/attribution.py` computes it. `thresholds.py` has what makes `moe-replay verify` fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_replay.errors import MoeReplayError

FORMAT = 1
NATIVE, AGAIN, R2, R3 = "native", "native again", "R2", "R3"
EXTREME = (2, 5, 10)  # max(ratio, 1 / ratio) of tokens that are counted
_DECADES = [10 ** (half / 2) for half in range(-12, 3)]
HISTOGRAM_EDGES = (*(-edge for edge in reversed(_DECADES)), *_DECADES)
"""(30,) of the log-ratio, symmetric half decades from 1e-6 to 10: rounding of float32 and collapse on one scale."""


class AttributionError(MoeReplayError):
    """An attribution that cannot be computed or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassScores:
    """One pass of the trainer, token by token against the log-probs of the rollout."""

    mismatch: dict[str, float]  # `Mismatch.summary()`
    extreme: dict[int, int]  # for each limit, tokens with max(ratio, 1 / ratio) above it
    # (31,) tokens by log-ratio: below the first of HISTOGRAM_EDGES, between them, above the last
    histogram: tuple[int, ...]
    # `Mismatch.summary()` against the trainer's first native pass; empty for that pass itself
    own: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingScores:
    """Native routes of the trainer against the rollout's, as sets of experts. L layers, P ranges of positions."""

    layers: tuple[int, ...]  # (L,) decoder indices
    compared: tuple[int, ...]  # (L,) tokens that have a route of both
    agreement: tuple[float, ...]  # (L,) fraction of tokens that both send to the same experts; NaN without tokens
    noise: tuple[float, ...]  # (L,) the same between two native passes; NaN where there was one only
    # (L,) agreement while the layers before it replay: the difference that this router makes by itself
    router_alone: tuple[float, ...]
    position_edges: tuple[int, ...]  # (P + 1,) positions in the sequence
    by_position: tuple[tuple[float, ...], ...]  # (L, P) agreement; NaN without tokens
    differing: tuple[int, ...]  # (L + 1,) tokens by the number of their routers that differ: the first agree everywhere

    @property
    def overall(self) -> float:
        """Agreement over all tokens and layers; NaN where there is nothing to compare."""
        differing = sum(routers * tokens for routers, tokens in enumerate(self.differing))
        return 1 - differing / sum(self.compared) if any(self.compared) else math.nan

    @property
    def differing_tokens(self) -> float:
        """Fraction of tokens with at least one router that differs."""
        return sum(self.differing[1:]) / sum(self.differing) if any(self.differing) else math.nan

    @property
    def routers_per_token(self) -> float:
        """Routers that differ, on average over tokens."""
        pairs = sum(routers * tokens for routers, tokens in enumerate(self.differing))
        return pairs / sum(self.differing) if any(self.differing) else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentSummary:
    """The verdict of `verify` as plain data."""

    status: str
    cause: str
    detail: str
    layers: tuple[int, ...]
    samples: tuple[int, ...]
    layer_shift: int | None
    token_shift: int | None
    covered: float  # fraction of (token, layer) pairs with a route
    notes: tuple[str, ...]
    shifts: tuple[int, ...]  # layer and token shifts that were tried
    # [layer shift][token shift], agreement: 1 is the same experts, 0 chance; largest at 0 if aligned
    above_chance: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Native pass and rollout, bit for bit: routes as sets of experts, log-probs as float32."""

    routes: int  # (token, layer) pairs that differ, of those that both have
    logprobs: int  # sampled tokens whose log-probs differ
    # (layer, sample, token) of the first layer that differs and its first token; None if none does
    first_route: tuple[int, int, int] | None
    first_logprob: tuple[int, int] | None  # (sample, token) of the first sampled token that differs; None if none does


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """One batch, sampled by an engine and scored by a trainer: natively, natively again, with R2 and with R3."""

    samples: int  # number of sequences
    tokens: int  # of all sequences
    scored: int  # sampled tokens, whose log-probs are compared
    passes: dict[str, PassScores]  # by name, in the order of the table; empty if there are only routes
    routing: RoutingScores
    alignment: AlignmentSummary
    # for native and R3, of the same tokens: (log-prob of the rollout, log-prob of the trainer)
    scatter: dict[str, tuple[tuple[float, float], ...]]
    differences: Differences | None = None  # bit for bit; None in files of releases without it
    labels: dict[str, str] = field(default_factory=dict)  # engine, model and so on, for the heading

    # ---- JSON ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Encode as JSON; non-finite numbers become null."""
        document = {"format": FORMAT, "labels": self.labels, "histogram_edges": HISTOGRAM_EDGES, **asdict(self)}
        return json.dumps(_finite(document), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Attribution:
        """Decode the output of `to_json`; null becomes NaN."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise AttributionError(f"not JSON: {error}") from error
        version = document.get("format") if isinstance(document, dict) else None
        if version != FORMAT:
            raise AttributionError("not an attribution of this format", expected=f"format {FORMAT}", found=version)
        try:
            return cls(
                samples=document["samples"],
                tokens=document["tokens"],
                scored=document["scored"],
                passes={name: _pass(scores) for name, scores in document["passes"].items()},
                routing=RoutingScores(**{key: _tuples(value) for key, value in document["routing"].items()}),
                alignment=_alignment(document["alignment"]),
                scatter={name: _tuples(pairs) for name, pairs in document["scatter"].items()},
                differences=_differences(document.get("differences")),
                labels=document["labels"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise AttributionError(f"an attribution with missing or unknown fields: {error!r}") from error

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _pass(scores: dict[str, Any]) -> PassScores:
    numbers = {name: {k: _number(v) for k, v in scores[name].items()} for name in ("mismatch", "own")}
    extreme = {int(limit): count for limit, count in scores["extreme"].items()}
    return PassScores(extreme=extreme, histogram=tuple(scores["histogram"]), **numbers)


def _alignment(summary: dict[str, Any]) -> AlignmentSummary:
    shifts = {name: summary[name] for name in ("layer_shift", "token_shift")}  # null: no shift explains it
    return AlignmentSummary(**{key: _tuples(value) for key, value in summary.items()} | shifts)


def _differences(counts: dict[str, Any] | None) -> Differences | None:
    if counts is None:
        return None
    first: dict[str, Any] = {name: counts[name] and tuple(counts[name]) for name in ("first_route", "first_logprob")}
    return Differences(**counts | first)


def _tuples(value: Any) -> Any:
    """Convert lists to tuples and null to NaN, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    """Replace non-finite numbers by None, recursively."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the table -------------------------------------------------------------------------------------------------------

_ROWS = {
    "k3 KL": "k3_kl",
    "|dlogp| mean": "logprob_abs_diff/mean",
    "|dlogp| max": "logprob_abs_diff/max",
    "ratio max": "ratio/max",
    "F(2)": "frac_ratio_gt2",
}


def _lines(attribution: Attribution) -> Iterator[str]:
    if attribution.labels:
        yield ", ".join(f"{name} {value}" for name, value in attribution.labels.items())
    yield f"{attribution.samples} samples of {attribution.tokens:,} tokens, {attribution.scored:,} of them scored"
    if attribution.passes:
        yield ""
        yield from _pass_lines(attribution.passes)
    yield ""
    yield from _routing_lines(attribution.routing)
    yield ""
    yield from _alignment_lines(attribution.alignment)


def _pass_lines(passes: dict[str, PassScores]) -> Iterator[str]:
    yield _row("against the rollout", list(passes))
    for text, key in _ROWS.items():
        yield _row(f"  {text}", [_short(scores.mismatch.get(key)) for scores in passes.values()])
    extreme = ["/".join(str(scores.extreme[limit]) for limit in EXTREME) for scores in passes.values()]
    yield _row(f"  tokens beyond {'/'.join(map(str, EXTREME))}", extreme)
    yield _row("against the first native pass", [])
    for text, key in list(_ROWS.items())[:3]:
        yield _row(f"  {text}", [_short(scores.own.get(key)) for scores in passes.values()])


def _routing_lines(routing: RoutingScores) -> Iterator[str]:
    yield (
        f"routes: {routing.overall:.2%} of choices agree, {routing.differing_tokens:.2%} of tokens differ in at least "
        f"one layer, in {routing.routers_per_token:.3g} of {len(routing.layers)} routers on average"
    )
    yield "layer  agreement  router alone  two native passes"
    numbers = zip(routing.layers, routing.agreement, routing.router_alone, routing.noise, strict=True)
    for layer, agreement, alone, noise in numbers:
        yield f"{layer:<5}  {_percent(agreement):>9}  {_percent(alone):>12}  {_percent(noise):>17}"


def _alignment_lines(alignment: AlignmentSummary) -> Iterator[str]:
    yield f"{alignment.status}: {alignment.detail}" if alignment.detail else alignment.status
    yield from alignment.notes
    yield f"{alignment.covered:.1%} of routes recorded; their agreement above chance, moved by"
    yield "layers \\ tokens " + "".join(f"{shift:+8d}" for shift in alignment.shifts)
    for shift, rates in zip(alignment.shifts, alignment.above_chance, strict=True):
        yield f"{shift:+15d} " + "".join(f"{rate:8.3f}" for rate in rates)


def _row(name: str, cells: Sequence[str]) -> str:
    return (f"{name:<30}" + "".join(f"{cell:>14}" for cell in cells)).rstrip()


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}" if value else "0"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2%}"
