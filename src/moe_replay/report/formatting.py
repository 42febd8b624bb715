"""Numbers as words, for the head of a report."""

from __future__ import annotations

import math

UNKNOWN = "-"


def number(value: float) -> str:
    """Three digits, however large or small; a dash for what is not known."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def percent(value: float) -> str:
    """A share, in percent."""
    return f"{100 * value:.4g}%" if math.isfinite(value) else UNKNOWN


def times_less(before: float, after: float) -> str:
    """In words, how much smaller a number has become."""
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0:
        return ""
    if after <= 0:
        return "down to exactly 0"
    factor = before / after
    if factor >= 1.15:
        return f"{number(round(factor, 1 if factor < 10 else 0))} times less"
    return "about the same" if factor > 1 / 1.15 else f"{number(round(1 / factor, 1))} times more"
