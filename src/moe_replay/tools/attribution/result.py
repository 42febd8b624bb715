"""`Attribution`: the mismatch of trainer and rollout on one batch, how much of it is routing, and its thresholds.

`measure.py` computes it; this file stores it, formats it as JSON or as a table, and compares it with thresholds.
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
    """One pass of the trainer, token by token against the log-probs of the rollout.

    mismatch    `Mismatch.summary()`
    extreme     for each limit, tokens with max(ratio, 1 / ratio) above it
    histogram   (31,) tokens by log-ratio: below the first of HISTOGRAM_EDGES, between them, above the last
    own         `Mismatch.summary()` against the trainer's first native pass; empty for that pass itself
    """

    mismatch: dict[str, float]
    extreme: dict[int, int]
    histogram: tuple[int, ...]
    own: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingScores:
    """Native routes of the trainer against those of the rollout, as sets of experts. L layers, P ranges of positions.

    layers           (L,) decoder indices
    compared         (L,) tokens that have a route of both
    agreement        (L,) share of tokens that both send to the same experts; NaN without tokens
    noise            (L,) the same between two native passes; NaN where there was one only
    router_alone     (L,) agreement while the layers before it replay: what this router by itself does otherwise
    position_edges   (P + 1,) positions in the sequence
    by_position      (L, P) agreement; NaN without tokens
    differing        (L + 1,) tokens by the number of their routers that differ: the first agree everywhere
    """

    layers: tuple[int, ...]
    compared: tuple[int, ...]
    agreement: tuple[float, ...]
    noise: tuple[float, ...]
    router_alone: tuple[float, ...]
    position_edges: tuple[int, ...]
    by_position: tuple[tuple[float, ...], ...]
    differing: tuple[int, ...]

    @property
    def overall(self) -> float:
        """Agreement over all tokens and layers; NaN where there is nothing to compare."""
        differing = sum(number * tokens for number, tokens in enumerate(self.differing))
        return 1 - differing / sum(self.compared) if any(self.compared) else math.nan

    @property
    def differing_tokens(self) -> float:
        """Share of tokens with at least one router that differs."""
        return sum(self.differing[1:]) / sum(self.differing) if any(self.differing) else math.nan

    @property
    def routers_per_token(self) -> float:
        """Routers that differ, on average over tokens."""
        pairs = sum(number * tokens for number, tokens in enumerate(self.differing))
        return pairs / sum(self.differing) if any(self.differing) else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentSummary:
    """The verdict of `verify` as plain data.

    covered        share of (token, layer) pairs with a route
    shifts         layer and token shifts that were tried
    above_chance   [layer shift][token shift], agreement: 1 is the same experts, 0 chance; largest at 0 if aligned
    """

    status: str
    cause: str
    detail: str
    layers: tuple[int, ...]
    samples: tuple[int, ...]
    layer_shift: int | None
    token_shift: int | None
    covered: float
    notes: tuple[str, ...]
    shifts: tuple[int, ...]
    above_chance: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits for an attribution. The defaults are generous: beyond them, training will hardly work.

    max_k3           k3 estimate of the divergence of the trainer, with R3, from the rollout
    max_beyond_two   share of tokens whose ratio, with R3, is above 2 or below 1/2
    min_agreement    of native routes with those of the rollout, over all tokens and layers
    max_r2           mean difference of log-probs between a pass and its own replay; twice the noise of native passes
                     is always allowed
    """

    max_k3: float = 0.01
    max_beyond_two: float = 0.01
    min_agreement: float = 0.7
    max_r2: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """One batch, sampled by an engine and scored by a trainer: natively, natively again, with R2 and with R3.

    labels    what was compared, for the heading
    samples   number of sequences
    tokens    of all sequences
    scored    sampled tokens, whose log-probs are compared
    passes    by name, in the order of the table; empty if there are only routes
    scatter   for native and R3, of the same tokens: (log-prob of the rollout, log-prob of the trainer)
    """

    samples: int
    tokens: int
    scored: int
    passes: dict[str, PassScores]
    routing: RoutingScores
    alignment: AlignmentSummary
    scatter: dict[str, tuple[tuple[float, float], ...]]
    labels: dict[str, str] = field(default_factory=dict)

    # ---- thresholds ---------------------------------------------------------------------------------------------

    def failures(self, thresholds: Thresholds | None = None) -> list[str]:
        """Return one line for each exceeded limit; empty if the batch passes."""
        return list(self._failures(thresholds or Thresholds()))

    def _failures(self, limits: Thresholds) -> Iterator[str]:
        if self.alignment.status == "misaligned":
            yield f"misaligned: {self.alignment.detail}"
        # Comparisons are written so that NaN fails.
        if not self.routing.overall >= limits.min_agreement:
            yield f"native agreement is {self.routing.overall:.4g}, less than {limits.min_agreement:g}"
        if R3 in self.passes:
            replayed = self.passes[R3].mismatch
            if not replayed["k3_kl"] <= limits.max_k3:
                yield f"k3 KL with R3 is {replayed['k3_kl']:.3g}, more than {limits.max_k3:g}"
            if not replayed["beyond_two"] <= limits.max_beyond_two:
                yield f"F(2) with R3 is {replayed['beyond_two']:.3g}, more than {limits.max_beyond_two:g}"
        if R2 in self.passes:
            noise, found = (self.passes[name].own["logprob_abs_diff/mean"] for name in (AGAIN, R2))
            limit = max(limits.max_r2, 2 * noise)
            if not found <= limit:
                yield f"replaying a recording changes log-probs by {found:.3g} on average, more than {limit:.3g}"

    # ---- JSON ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Encode as JSON; non-finite numbers become null."""
        told = {"format": FORMAT, "labels": self.labels, "histogram_edges": HISTOGRAM_EDGES, **asdict(self)}
        return json.dumps(_finite(told), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Attribution:
        """Decode the output of `to_json`; null becomes NaN."""
        try:
            told = json.loads(text)
        except json.JSONDecodeError as error:
            raise AttributionError(f"not JSON: {error}") from error
        found = told.get("format") if isinstance(told, dict) else None
        if found != FORMAT:
            raise AttributionError("not an attribution of this format", expected=f"format {FORMAT}", found=found)
        try:
            return cls(
                samples=told["samples"],
                tokens=told["tokens"],
                scored=told["scored"],
                passes={name: _pass(one) for name, one in told["passes"].items()},
                routing=RoutingScores(**{key: _tuples(value) for key, value in told["routing"].items()}),
                alignment=_alignment(told["alignment"]),
                scatter={name: _tuples(pairs) for name, pairs in told["scatter"].items()},
                labels=told["labels"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise AttributionError(f"an attribution with missing or unknown fields: {error!r}") from error

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _pass(told: dict[str, Any]) -> PassScores:
    numbers = {name: {k: _number(v) for k, v in told[name].items()} for name in ("mismatch", "own")}
    extreme = {int(limit): count for limit, count in told["extreme"].items()}
    return PassScores(extreme=extreme, histogram=tuple(told["histogram"]), **numbers)


def _alignment(told: dict[str, Any]) -> AlignmentSummary:
    shifts = {name: told[name] for name in ("layer_shift", "token_shift")}  # null says that no shift explains it
    return AlignmentSummary(**{key: _tuples(value) for key, value in told.items()} | shifts)


def _tuples(value: Any) -> Any:
    """Convert lists to tuples and null to NaN, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else _number(value)


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    """Replace non-finite numbers by None, recursively."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- the table -------------------------------------------------------------------------------------------------------

_ROWS = {
    "k3 KL": "k3_kl",
    "|dlogp| mean": "logprob_abs_diff/mean",
    "|dlogp| max": "logprob_abs_diff/max",
    "ratio max": "ratio/max",
    "F(2)": "beyond_two",
}


def _lines(found: Attribution) -> Iterator[str]:
    if found.labels:
        yield ", ".join(f"{name} {value}" for name, value in found.labels.items())
    yield f"{found.samples} samples of {found.tokens:,} tokens, {found.scored:,} of them scored"
    if found.passes:
        yield ""
        yield from _pass_lines(found.passes)
    yield ""
    yield from _routing_lines(found.routing)
    yield ""
    yield from _alignment_lines(found.alignment)


def _pass_lines(passes: dict[str, PassScores]) -> Iterator[str]:
    yield _row("against the rollout", list(passes))
    for text, key in _ROWS.items():
        yield _row(f"  {text}", [_short(one.mismatch.get(key)) for one in passes.values()])
    extreme = ["/".join(str(one.extreme[limit]) for limit in EXTREME) for one in passes.values()]
    yield _row(f"  tokens beyond {'/'.join(map(str, EXTREME))}", extreme)
    yield _row("against the first native pass", [])
    for text, key in list(_ROWS.items())[:3]:
        yield _row(f"  {text}", [_short(one.own.get(key)) for one in passes.values()])


def _routing_lines(routing: RoutingScores) -> Iterator[str]:
    yield (
        f"routes: {routing.overall:.2%} of choices agree, {routing.differing_tokens:.2%} of tokens differ in at least "
        f"one layer, in {routing.routers_per_token:.3g} of {len(routing.layers)} routers on average"
    )
    yield "layer  agreement  router alone  two native passes"
    numbers = zip(routing.layers, routing.agreement, routing.router_alone, routing.noise, strict=True)
    for layer, agreement, alone, noise in numbers:
        yield f"{layer:<5}  {_share(agreement):>9}  {_share(alone):>12}  {_share(noise):>17}"


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


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2%}"
