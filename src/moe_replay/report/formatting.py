"""Numbers as text."""

from __future__ import annotations

import math
import re

MISSING = "-"
LEVEL = 1.15  # numbers within this factor are about the same
_FRACTIONS = re.compile(  # metrics between 0 and 1 that are shares of something; rewards are none
    r"/(ess|beyond_two|truncated|groups_without_signal|unscored|clip_low|clip_high|agreement|replayed_fraction|"
    r"unrouted_fraction)$|/agreement/layer_"
)


def format_number(value: float) -> str:
    """Format with about three significant digits; a dash for NaN and infinities."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def format_percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.4g}%" if math.isfinite(value) else MISSING


def format_metric(name: str, value: float) -> str:
    """Format the value of a metric: fractions as percentages, everything else as a number."""
    return format_percent(value) if _FRACTIONS.search(name) else format_number(value)


def describe_change(before: float, after: float) -> str:
    """Describe how much lower or higher `after` is than `before`."""
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0:
        return ""
    if after <= 0:
        return "down to exactly 0"
    factor = before / after
    if factor >= LEVEL:
        return f"{format_number(round(factor, 1 if factor < 10 else 0))} times lower"
    return "about the same" if is_level(before, after) else f"{format_number(round(1 / factor, 1))} times higher"


def is_level(before: float, after: float) -> bool:
    """Whether two positive numbers are about the same."""
    return before > 0 and after > 0 and 1 / LEVEL < before / after < LEVEL


def explain_level(agreement: float) -> str:
    """Explain why replay may change little, given the route agreement of native routing."""
    known = f" ({format_percent(agreement)} of the routes agree without replay)" if math.isfinite(agreement) else ""
    return (
        "Native routing and replay are level here. That is expected where engine and trainer compute in the same "
        f"precision, so that their routers choose the same experts anyway{known}, and where the remaining mismatch "
        "comes from attention, quantization or the LM head rather than from routing. A few tokens decide whether a run "
        "collapses: compare the largest ratio and F(2) too. The gap widens with a lower precision of the rollout and "
        "with more layers."
    )
