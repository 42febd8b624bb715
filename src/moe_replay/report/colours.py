"""Colours by meaning, for light and dark backgrounds; distinguishable to colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

from typing import Literal

Role = Literal[
    "replayed", "native", "noise", "recorded", "plain", "second", "third", "fourth", "fifth", "sixth", "seventh"
]

INK = "#1f2933"  # text and axes; replaced by the page's text colour there
INK_ON_DARK = "#e4e8ec"

# role: (on a light background and in PNG files, on a dark background)
COLOURS: dict[Role, tuple[str, str]] = {
    "replayed": ("#0072b2", "#58b4ea"),  # routes of the rollout, replayed
    "native": ("#d55e00", "#ff9248"),  # the trainer's native routing
    "noise": ("#7c8792", "#9aa5b0"),  # the same pass, repeated
    "recorded": ("#009e73", "#3ecb9f"),  # the trainer's recorded routes, replayed (R2)
    "plain": ("#5b4a9c", "#b3a4ee"),  # anything else
    "second": ("#b0457f", "#ea94c3"),
    "third": ("#a67c00", "#e8c04a"),
    "fourth": ("#46525e", "#b9c3cd"),
    "fifth": ("#2f7d87", "#6fc5d0"),
    "sixth": ("#8c5a3c", "#cf9f82"),
    "seventh": ("#6d8b1f", "#b2d05f"),
}
# In a comparison, colours only identify the runs.
RUN_ROLES: tuple[Role, ...] = ("replayed", "native", "recorded", "plain", "third", "second", "fourth")


def colour(role: Role) -> str:
    """Return the colour that matplotlib draws with."""
    return COLOURS[role][0]


def css_variables(*, dark: bool) -> str:
    """Return CSS declarations of all colours, for a light or a dark page."""
    return " ".join(f"--{role}: {shades[dark]};" for role, shades in COLOURS.items())


def use_css_variables(svg: str) -> str:
    """Replace the colours in an SVG by CSS variables, so that it follows the colour scheme of the page."""
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg.replace(INK, "currentColor")
