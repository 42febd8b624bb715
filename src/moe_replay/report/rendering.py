"""`render`: one figure, as SVG for embedding in a page and as a standalone PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_replay.errors import MissingExtraError
from moe_replay.report.colours import INK, use_css_variables

WIDTH = 5.0  # inches: about the width of a phone's screen, so that 10 pt text is 10 pt there
PNG_DPI = 200
RASTER_DPI = 160  # of rasterized parts inside the SVG

_STYLE = {
    "svg.fonttype": "none",  # keep text as text: searchable, in the font and colour of the page
    "svg.hashsalt": "moe-replay",
    "font.family": "DejaVu Sans",  # ships with matplotlib, and is wider than page fonts, so no text overflows
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of runs and rewards may contain dollar signs
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class RenderedFigure:
    """A finished figure.

    name      stem of the PNG file, and anchor on the page
    caption   how to read it
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def render(
    name: str, title: str, caption: str, plot: Callable[[Any], None], *, height: float = 2.9, panels: int = 1
) -> RenderedFigure:
    """Render a figure whose axes are filled by `plot`, which gets a list of axes if there are several panels."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingExtraError("figures need matplotlib", remedy="pip install 'moe-replay[report]'") from missing

    # Without pyplot no figure stays open and no display is needed.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        layout = figure.get_layout_engine()
        axes = figure.subplots(1, panels, squeeze=False, sharex=panels > 1, sharey=panels > 1)[0]
        plot(axes[0] if panels == 1 else list(axes))
        _arrange(figure, layout)
        content = io.StringIO()
        figure.savefig(content, format="svg", dpi=RASTER_DPI, metadata={"Date": None})
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
        _arrange(figure, layout)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return RenderedFigure(name, title, caption, _for_page(content.getvalue(), name), image.getvalue())


def _arrange(figure: Any, layout: Any) -> None:
    """Make room for labels and titles. A figure that keeps its layout engine is drawn twice whenever it is saved."""
    layout.execute(figure)
    figure.set_layout_engine(None)


def _for_page(svg: str, name: str) -> str:
    """Adapt matplotlib's SVG for embedding: scalable, with ids unique on the page and colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None, "matplotlib always writes a viewBox"
    svg = f'<svg viewBox="{box[1]}" role="img" aria-labelledby="title-{name}">{rest}'
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r"\n\s*", "\n", svg)
    return use_css_variables(svg)
