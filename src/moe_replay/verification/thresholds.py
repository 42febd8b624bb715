"""Failures of `moe-replay verify`: limits on mismatch and agreement, misaligned routes, bits that differ."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.verification.attribution import AGAIN, R2, R3, Attribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits for an attribution. The defaults are generous: beyond them, training will hardly work."""

    max_k3: float = 0.01  # k3 estimate of the divergence of the trainer, with R3, from the rollout
    max_frac_ratio_gt2: float = 0.01  # fraction of tokens whose ratio, with R3, is above 2 or below 1/2
    min_agreement: float = 0.7  # of native routes with those of the rollout, over all tokens and layers
    # mean difference of log-probs between a pass and its own replay; twice the noise of native passes is always allowed
    max_r2: float = 1e-4


def failures(attribution: Attribution, limits: Thresholds | None = None) -> list[str]:
    """Return one line for each exceeded limit; empty if the batch passes."""
    limits, lines = limits or Thresholds(), list[str]()
    passes, agreement = attribution.passes, attribution.routing.overall
    if attribution.alignment.status == "misaligned":
        lines.append(f"misaligned: {attribution.alignment.detail}")
    # Comparisons are written so that NaN fails.
    if not agreement >= limits.min_agreement:
        lines.append(f"native agreement is {agreement:.4g}, less than {limits.min_agreement:g}")
    if R3 in passes:
        replayed = passes[R3].mismatch
        if not replayed["k3_kl"] <= limits.max_k3:
            lines.append(f"k3 KL with R3 is {replayed['k3_kl']:.3g}, more than {limits.max_k3:g}")
        if not replayed["frac_ratio_gt2"] <= limits.max_frac_ratio_gt2:
            lines.append(f"F(2) with R3 is {replayed['frac_ratio_gt2']:.3g}, more than {limits.max_frac_ratio_gt2:g}")
    if R2 in passes:
        noise, change = (passes[name].own["logprob_abs_diff/mean"] for name in (AGAIN, R2))
        limit = max(limits.max_r2, 2 * noise)
        if not change <= limit:
            lines.append(f"replaying a recording changes log-probs by {change:.3g} on average, more than {limit:.3g}")
    return lines


def inexact(attribution: Attribution) -> list[str]:
    """Return what is not equal bit for bit, with the first layer and token of it; empty if everything is equal."""
    differences, lines = attribution.differences, list[str]()
    if differences is None:
        return ["not compared bit for bit: written by a release that did not"]
    pairs = sum(attribution.routing.compared)
    if not pairs:
        lines.append("no routes to compare bit for bit")
    if differences.first_route:
        layer, sample, token = differences.first_route
        where = f"first in layer {layer}: sample {sample}, token {token}"
        lines.append(f"routes differ at {differences.routes} of {pairs} tokens and layers, {where}")
    if differences.first_logprob:
        sample, token = differences.first_logprob
        where = f"first in sample {sample}, token {token}"
        lines.append(f"log-probs differ at {differences.logprobs} of {attribution.scored} sampled tokens, {where}")
    return lines
