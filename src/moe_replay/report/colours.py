"""One meaning, one colour, on light and on dark ground; told apart by colour-blind readers too (Okabe and Ito)."""

from __future__ import annotations

from typing import Literal

Role = Literal["replayed", "native", "noise", "own", "plain", "second", "third", "fourth", "fifth", "sixth", "seventh"]

INK = "#1f2933"  # text and axes; on a page they follow its text
INK_ON_DARK = "#e4e8ec"

# role: (on light ground and in PNG files, on dark ground)
COLOURS: dict[Role, tuple[str, str]] = {
    "replayed": ("#0072b2", "#58b4ea"),  # routes of the rollout, replayed
    "native": ("#d55e00", "#ff9248"),  # the trainer's own choice
    "noise": ("#7c8792", "#9aa5b0"),  # the same pass once more
    "own": ("#009e73", "#3ecb9f"),  # the trainer's earlier routes, replayed (R2)
    "plain": ("#5b4a9c", "#b3a4ee"),  # anything else
    "second": ("#b0457f", "#ea94c3"),
    "third": ("#a67c00", "#e8c04a"),
    "fourth": ("#46525e", "#b9c3cd"),
    "fifth": ("#2f7d87", "#6fc5d0"),
    "sixth": ("#8c5a3c", "#cf9f82"),
    "seventh": ("#6d8b1f", "#b2d05f"),
}
# Side by side, a run has a colour for no other reason than to be found again.
OF_RUNS: tuple[Role, ...] = ("replayed", "native", "own", "plain", "third", "second", "fourth")


def colour(role: Role) -> str:
    """The colour as matplotlib draws it."""
    return COLOURS[role][0]


def css_variables(*, dark: bool) -> str:
    """Declarations of all colours, for a page on light or on dark ground."""
    return " ".join(f"--{role}: {shades[dark]};" for role, shades in COLOURS.items())


def as_variables(svg: str) -> str:
    """The SVG with variables of the page in place of the colours, so that it changes with the page."""
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg.replace(INK, "currentColor")
