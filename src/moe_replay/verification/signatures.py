"""`moe-replay verify --gate`: what a fault looks like in the numbers of an attribution, and which fault it may be.

The limits are those of `experiments/faults.py`: three times the worst of the healthy runs there. Which number shows
which fault is in docs/lab/does-it-help.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_replay.verification.attribution import NATIVE, R3, Attribution

NO_FAULT = ("none", "not enough evidence")  # causes of the shift test


GATE = {
    "k3": 0.0008,
    "k3_native": 0.005,
    "f2": 0.0011,
    "f2_native": 0.0052,
    "ratio_errors": 3.7,
    "agreement": 0.88,
    "worst_layer": 0.84,
}
"""Limits on numbers of a `Signature`, measured by `python -m experiments.faults`: those in LOWER from below."""
LOWER = ("agreement", "worst_layer")
FIRST_LAYER = 0.2
"""Disagreement of the first layer, as a part of the worst one's, below which the layers between are at fault."""
BEGIN = 1.5
"""Disagreement at the beginning of sequences, as a multiple of that at the end, above which prefixes are at fault."""
NUMBERS = {
    "k3": "k3 with R3",
    "k3_native": "k3, native",
    "f2": "F(2) with R3",
    "f2_native": "F(2), native",
    "ratio_errors": "mean ratio, standard errors from 1",
    "agreement": "agreement",
    "worst_layer": "agreement in the worst layer",
}

MISPLACED = "routes that are not those of these tokens and layers"
TRUNCATED = "log-probs of another distribution than tokens were drawn from, such as top-p without its mask"
ROUTERS = "routers that differ from the trainer's, in precision or in age"
EXPERTS = "weights of experts, such as the expert-parallel slice of another rank"
PREFIX = "a prefix cache that was kept over a weight update"
OLD_WEIGHTS = "old weights in the engine"
ADAPTER = "an adapter that the engine ignores"
OLD_LOGPROBS = "log-probs of older weights than the routes, kept when a sample was retracted and resumed"
TEMPERATURE = "another temperature in the trainer than in the engine"
RECENT_WEIGHTS = "weights a few updates old"
PRECISION = "kernels or precision alone, which R3 makes up for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The numbers of an attribution that faults differ in. NaN where there are no log-probs.

    k3, k3_native           of trainer and rollout, with R3 and natively
    f2, f2_native           fraction of tokens whose ratio is above 2 or below 1/2
    """

    k3: float
    k3_native: float
    f2: float
    f2_native: float
    mean_ratio: float  # with R3; 1 in expectation, whatever the weights, if tokens were drawn from their log-probs
    ratio_errors: float  # standard errors between the mean ratio and 1
    agreement: float  # of native routes with those of the rollout, over all tokens and layers
    first_layer: float  # the same in the first layer that routes
    worst_layer: float  # the same in the layer that agrees least
    begin: float  # the same in the first quarter of positions, over all layers
    end: float  # the same in the others
    cause: str  # of misaligned routes, by the shift test; "none" if they are aligned

    @classmethod
    def of(cls, attribution: Attribution) -> Signature:
        native, replayed = (
            attribution.passes[name].mismatch if name in attribution.passes else {} for name in (NATIVE, R3)
        )
        rates = [rate for rate in attribution.routing.agreement if not math.isnan(rate)]
        begin, end = _by_place(attribution)
        return cls(
            k3=replayed.get("k3_kl", math.nan),
            k3_native=native.get("k3_kl", math.nan),
            f2=replayed.get("frac_ratio_gt2", math.nan),
            f2_native=native.get("frac_ratio_gt2", math.nan),
            mean_ratio=replayed.get("ratio/mean", math.nan),
            ratio_errors=_ratio_errors(replayed, attribution.scored),
            agreement=attribution.routing.overall,
            first_layer=rates[0] if rates else math.nan,
            worst_layer=min(rates, default=math.nan),
            begin=begin,
            end=end,
            cause=attribution.alignment.cause,
        )


def _ratio_errors(mismatch: dict[str, float], tokens: int) -> float:
    """Return |mean ratio - 1| in standard errors, from the mean and the effective sample size."""
    mean, fraction = mismatch.get("ratio/mean", math.nan), mismatch.get("ess", math.nan)
    if math.isnan(mean) or not fraction > 0:  # log-probs that are none, or too far apart for float64
        return math.nan
    variance = mean * mean * max(1 / fraction - 1, 0.0)
    return abs(mean - 1) / math.sqrt(variance / tokens) if variance > 0 else 0.0


def _by_place(attribution: Attribution) -> tuple[float, float]:
    """Return the mean agreement of the first quarter of the ranges of positions, and of the others."""
    by_place = list(zip(*attribution.routing.by_position, strict=True))
    parts = by_place[: len(by_place) // 4], by_place[len(by_place) // 4 :]
    rates = [[rate for place in part for rate in place if not math.isnan(rate)] for part in parts]
    begin, end = (sum(part) / len(part) if part else math.nan for part in rates)
    return begin, end


# ---- the gate --------------------------------------------------------------------------------------------------------


def is_beyond(numbers: Mapping[str, Any], field: str) -> bool:
    """Return whether a number of a signature is beyond its limit; NaN is."""
    value, limit = numbers[field], GATE[field]
    return not (value >= limit if field in LOWER else value <= limit)


def gate(attribution: Attribution) -> list[str]:
    """Return the lines of `judge` for an attribution; without log-probs, of its agreement alone."""
    return judge(Signature.of(attribution), tuple(NUMBERS) if attribution.passes else LOWER)


def judge(signature: Signature, names: Sequence[str] = tuple(NUMBERS)) -> list[str]:
    """Return a line for each of these numbers beyond its limit, and one with the faults that look like this.

    Empty if no number is beyond its limit and routes are not misaligned.
    """
    numbers = asdict(signature)
    lines = []
    for name in names:
        if is_beyond(numbers, name):
            side = "less" if name in LOWER else "more"
            lines.append(f"{NUMBERS[name]} is {numbers[name]:.3g}, {side} than {GATE[name]:g}")
    if lines or signature.cause not in NO_FAULT:
        lines.append(f"likely fault: {'; or '.join(likely_faults(signature))}")
    return lines


def likely_faults(signature: Signature) -> tuple[str, ...]:
    """Return the faults whose signature is most like this one; meaningful where a number is beyond its limit."""
    numbers = asdict(signature)
    differs = is_beyond(numbers, "k3") or is_beyond(numbers, "f2")
    reroutes = is_beyond(numbers, "agreement") or is_beyond(numbers, "worst_layer")
    if signature.cause not in NO_FAULT:
        return (f"{MISPLACED}, {signature.cause}",)
    if is_beyond(numbers, "ratio_errors"):
        return (TRUNCATED,)
    if differs and signature.k3 > signature.k3_native:
        return (MISPLACED,)
    if reroutes and 1 - signature.first_layer < FIRST_LAYER * (1 - signature.worst_layer):
        return (EXPERTS,)
    if reroutes and 1 - signature.begin > BEGIN * (1 - signature.end):
        return (PREFIX,)
    if reroutes:
        return (OLD_WEIGHTS, ADAPTER) if differs else (ROUTERS,)
    return (OLD_LOGPROBS, TEMPERATURE, RECENT_WEIGHTS) if differs else (PRECISION,)
