"""Numbers as text."""

from __future__ import annotations

import math

MISSING = "-"


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


def describe_change(before: float, after: float) -> str:
    """Describe how much lower or higher `after` is than `before`."""
    if not (math.isfinite(before) and math.isfinite(after)) or before <= 0:
        return ""
    if after <= 0:
        return "down to exactly 0"
    factor = before / after
    if factor >= 1.15:
        return f"{format_number(round(factor, 1 if factor < 10 else 0))} times lower"
    return "about the same" if factor > 1 / 1.15 else f"{format_number(round(1 / factor, 1))} times higher"
