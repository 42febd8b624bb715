"""`write_attribution_report`: the measurements of `moe-replay verify` as a page or as a section of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moe_replay.report.attribution_figures import ROLES, attribution_figures
from moe_replay.report.formatting import (
    MISSING,
    describe_change,
    explain_level,
    format_metric,
    format_number,
    format_percent,
    is_level,
)
from moe_replay.report.page import Card, Page, Table
from moe_replay.tools.attribution.result import EXTREME, NATIVE, R3, Attribution

_ROWS = (
    ("k3 (KL per token)", "k3_kl"),
    ("k1 (KL per token)", "k1_kl"),
    ("|Δ log p|, mean", "logprob_abs_diff/mean"),
    ("|Δ log p|, largest", "logprob_abs_diff/max"),
    ("ratio, largest", "ratio/max"),
    ("effective samples", "ess"),
    ("F(2)", "beyond_two"),
)


def read_attribution(path: Path) -> Attribution:
    """Read an attribution.json."""
    return Attribution.from_json(path.read_text(encoding="utf-8"))


def write_attribution_report(found: Attribution, output: Path) -> Path:
    """Write the report page of an attribution, and its figures as PNG files in `<stem>-figures` next to it."""
    page = Page("Rollout against trainer")
    labels = " · ".join(f"{name} {value}" for name, value in found.labels.items())
    page.head(labels or "one batch", _summary(found))
    page.cards(_cards(found))
    page.warnings(found.failures())
    page.section("Where they differ", attribution_figures(found), _counts(found), _passes(found))
    return page.write(output, output.with_name(f"{output.stem}-figures"))


def add_attribution(page: Page, found: Attribution) -> None:
    """Add a section with the verdict, the table of passes and all figures."""
    text = f"{_verdict(found)} {_counts(found)}"
    page.section("Attribution of one batch", attribution_figures(found), text, _passes(found))


def _counts(found: Attribution) -> str:
    return f"{found.samples} samples, {found.tokens:,} tokens, {found.scored:,} of them scored."


def _summary(found: Attribution) -> Iterator[str]:
    yield _verdict(found)
    routing = found.routing
    yield (
        f"Routing natively, the trainer picks the rollout's experts in {format_percent(routing.overall)} of all "
        f"(token, layer) pairs; {format_percent(routing.differing_tokens)} of the tokens differ in at least one layer."
    )
    if NATIVE in found.passes and R3 in found.passes:
        native, replayed = (found.passes[name].mismatch.get("k3_kl", float("nan")) for name in (NATIVE, R3))
        yield (
            f"The mean k3 between rollout and trainer is {format_number(native)} per token with native routing and "
            f"{format_number(replayed)} with the rollout's routes replayed: {describe_change(native, replayed)}."
        )
        if is_level(native, replayed):
            yield explain_level(routing.overall)


def _verdict(found: Attribution) -> str:
    alignment = found.alignment
    verdict = {
        "aligned": "The routes are aligned: each belongs to its token and layer.",
        "misaligned": "The routes are MISALIGNED.",
        "unclear": "Whether the routes are aligned is unclear.",
    }.get(alignment.status, alignment.status)
    return " ".join([verdict, *([f"{alignment.detail}."] if alignment.detail else []), *alignment.notes])


def _cards(found: Attribution) -> Iterator[Card]:
    yield Card("alignment", found.alignment.status)
    yield Card("route agreement", format_percent(found.routing.overall))
    yield Card("tokens that differ", format_percent(found.routing.differing_tokens))
    for name, label in ((NATIVE, "k3 without replay"), (R3, "k3 with replay")):
        if name in found.passes:
            yield Card(label, format_number(found.passes[name].mismatch.get("k3_kl", float("nan"))), "mean over tokens")


def _median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of |Δ log p| over the tokens that were kept, up to 2000 of them."""
    differences = np.abs(np.diff(np.array(pairs, float).reshape(-1, 2)))
    known = differences[np.isfinite(differences)]
    return float(np.median(known)) if len(known) else math.nan


def _passes(found: Attribution) -> Table | None:
    if not found.passes:
        return None
    unknown = float("nan")
    rows = [
        (label, *(format_metric(f"/{key}", one.mismatch.get(key, unknown)) for one in found.passes.values()))
        for label, key in _ROWS
    ]
    if found.scatter:
        medians = {name: _median_difference(pairs) for name, pairs in found.scatter.items()}
        rows.insert(3, ("|Δ log p|, median", *(format_number(medians.get(name, unknown)) for name in found.passes)))
    rows += [
        (f"tokens off by a factor of {limit}", *(str(one.extreme.get(limit, MISSING)) for one in found.passes.values()))
        for limit in EXTREME
    ]
    rows.append(
        ("k3 against the first pass", *(format_number(one.own.get("k3_kl", unknown)) for one in found.passes.values())),
    )
    colours = [f"var(--{ROLES.get(name, 'plain')})" for name in found.passes]
    return Table(("compared with the rollout", *found.passes), rows, colours)
