"""Self-contained HTML pages: no external resources, readable on phones, light and dark. Numbers as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from moe_replay.report.plots import INK, INK_ON_DARK, RenderedFigure, css_variables
from moe_replay.utils.files import write_whole

_STYLE = f"""
:root {{
  color-scheme: light dark;
  --ground: #ffffff; --card: #f6f8fa; --line: #d9dfe5; --ink: {INK}; --faint: #59636e;
  --warn: #9a5b00; --warn-ground: #fff6e0; --good: #1a7f37; --good-ground: #e6f6ea;
  {css_variables(dark=False)}
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --ground: #12171c; --card: #1a2128; --line: #313b45; --ink: {INK_ON_DARK}; --faint: #a3aeb9;
    --warn: #ffc561; --warn-ground: #33280f; --good: #57c878; --good-ground: #10291a;
    {css_variables(dark=True)}
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; max-width: 1240px; padding: 20px 20px 48px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%;
}}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 36px 0 4px; padding-top: 12px; border-top: 1px solid var(--line); }}
h3 {{ font-size: .95rem; margin: 0 0 2px; }}
p {{ margin: 6px 0; max-width: 56rem; overflow-wrap: anywhere; }}
.faint, figcaption {{ color: var(--faint); font-size: .86rem; }}
.lead {{ font-size: 1.04rem; }}
.cards {{ display: grid; gap: 10px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin: 16px 0; }}
.card {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }}
.card b {{
  display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}}
.warnings {{
  background: var(--warn-ground); border-left: 4px solid var(--warn); border-radius: 4px;
  margin: 14px 0; padding: 8px 14px; overflow-wrap: anywhere;
}}
.warnings strong {{ color: var(--warn); }}
.warnings ul {{ margin: 4px 0; padding-left: 20px; }}
.verdict {{ font-size: 1.04rem; font-weight: 600; padding: 8px 14px; border-radius: 4px; max-width: none; }}
.verdict.good {{ background: var(--good-ground); border-left: 4px solid var(--good); }}
.verdict.bad {{ background: var(--warn-ground); border-left: 4px solid var(--warn); }}
.figures {{ display: grid; gap: 18px; grid-template-columns: minmax(0, 1fr); margin: 12px 0; }}
@media (min-width: 740px) and (max-width: 1149px) {{
  .figures {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }}
  .figures figure:last-child:nth-child(odd) {{ grid-column: span 2; }}
}}
@media (min-width: 1150px) {{
  .figures {{ grid-template-columns: repeat(6, minmax(0, 1fr)); }}
  .figures figure {{ grid-column: span 2; }}
  .figures figure.half {{ grid-column: span 3; }}
}}
figure {{
  margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 10px 8px;
}}
figcaption {{ margin-top: 2px; }}
svg {{ display: block; width: 100%; height: auto; color: var(--ink); }}
svg text {{ font-family: inherit !important; }}
.scroll {{ overflow-x: auto; margin: 10px 0; }}
table {{ border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
td + td, th + th {{ text-align: right; }}
td + td {{ white-space: nowrap; }}
table.text td + td, table.text th + th {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
td:first-child {{ min-width: 8.5em; }}
th {{ color: var(--faint); font-weight: 500; }}
.swatch {{
  display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px; vertical-align: middle;
}}
.sample {{ margin: 12px 0; border: 1px solid var(--line); border-radius: 8px; padding: 4px 12px 8px; }}
pre {{
  margin: 6px 0; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: 6px 8px;
  border-radius: 4px; font: .84rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}}
details {{ margin: 12px 0; }}
summary {{ cursor: pointer; color: var(--faint); }}
footer {{ margin-top: 40px; color: var(--faint); font-size: .82rem; }}
@media (max-width: 480px) {{
  body {{ padding: 14px 10px 32px; }}
  figure {{ padding: 10px 4px 8px; }}
  h3, figcaption {{ padding: 0 6px; }}
  table {{ font-size: .8rem; }}
  th, td {{ padding-right: 9px; }}
  td:first-child {{ min-width: 6.5em; }}
  .cards {{ grid-template-columns: 1fr 1fr; }}
}}
@media print {{ figure {{ break-inside: avoid; }} }}
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    colours: Sequence[str] = ()  # CSS colours of the columns after the first, or empty
    prose: bool = False  # cells are text, left-aligned and wrapped, instead of numbers

    def html(self) -> str:
        """Return the table as HTML; it scrolls horizontally if it is too wide."""
        marks = ["", *self.colours]
        head = "".join(
            f"<th>{_swatch(marks[column]) if column < len(marks) else ''}{escape(cell)}</th>"
            for column, cell in enumerate(self.head)
        )
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in self.rows)
        kind = ' class="text"' if self.prose else ""
        top = f"<thead><tr>{head}</tr></thead>" if self.head else ""
        return f'<div class="scroll"><table{kind}>{top}<tbody>\n{rows}</tbody></table></div>'


class Card(NamedTuple):
    """A key number with a note in small print."""

    name: str
    value: str
    note: str = ""

    def html(self) -> str:
        note = f'<span class="faint">{escape(self.note)}</span>' if self.note else ""
        return f'<div class="card">{escape(self.name)}<b>{escape(self.value)}</b>{note}</div>'


class TextSample(NamedTuple):
    """A prompt and its completion, with a line of facts."""

    facts: str
    prompt: str
    completion: str

    def html(self) -> str:
        """Return the sample as HTML, with line breaks preserved."""
        texts = f'<pre class="faint">{escape(self.prompt)}</pre><pre>{escape(self.completion)}</pre>'
        return f'<div class="sample"><p class="faint">{escape(self.facts)}</p>{texts}</div>\n'


@dataclass(slots=True)
class Page:
    """A page built from top to bottom, which escapes all text."""

    title: str
    reload_s: int = 0  # 0: a browser loads the page once
    figures: list[RenderedFigure] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)

    def head(self, subtitle: str, summary: Iterable[str], verdict: tuple[str, bool] | None = None) -> None:
        """Add the title, a subtitle, a verdict and whether it is good, and the paragraphs of the summary."""
        self._parts.append(f'<h1>{escape(self.title)}</h1>\n<p class="faint">{escape(subtitle)}</p>')
        if verdict is not None:
            text, is_good = verdict
            self._parts.append(f'<p class="verdict {"good" if is_good else "bad"}">{escape(text)}</p>')
        self._parts += [f'<p class="lead">{escape(text)}</p>' for text in summary]

    def cards(self, values: Iterable[Card]) -> None:
        self._parts.append(f'<div class="cards">{"".join(card.html() for card in values)}</div>')

    def warnings(self, texts: Sequence[str]) -> None:
        """Add a box of warnings, unless there are none."""
        if texts:
            items = "".join(f"<li>{escape(text)}</li>" for text in texts)
            self._parts.append(f'<div class="warnings"><strong>Warnings</strong><ul>{items}</ul></div>')

    def append(self, other: Page) -> None:
        """Add the contents of another page, without its title."""
        self._parts += other._parts
        self.figures += other.figures

    def heading(self, title: str) -> None:
        self._parts.append(f"<h2>{escape(title)}</h2>")

    def section(
        self, title: str, figures: Iterable[RenderedFigure], text: str = "", table: Table | None = None
    ) -> None:
        """Add a heading, text, a table and figures, or nothing if there is neither a figure nor a table."""
        rendered = list(figures)
        if not rendered and table is None:
            return
        self.heading(title)
        if text:
            self._parts.append(f'<p class="faint">{escape(text)}</p>')
        if table is not None:
            self._parts.append(table.html())
        if rendered:
            halves = len(rendered) - figures_of_half_width(len(rendered))
            parts = [_figure(figure, half=index >= halves) for index, figure in enumerate(rendered)]
            self._parts.append(f'<div class="figures">\n{"".join(parts)}</div>')
        self.figures += rendered

    def text_section(self, title: str, text: str, samples: Iterable[TextSample]) -> None:
        self.heading(title)
        self._parts.append(f'<p class="faint">{escape(text)}</p>')
        self._parts += [sample.html() for sample in samples]

    def details(self, title: str, table: Table) -> None:
        self._parts.append(f"<details><summary>{escape(title)}</summary>{table.html()}</details>")

    def html(self) -> str:
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            + (f'<meta http-equiv="refresh" content="{self.reload_s}">\n' if self.reload_s else "")
            + f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(self._parts)
            + "\n<footer>Generated by moe-replay. The figures are also PNG files next to this page.</footer>\n"
            + "</body>\n</html>\n"
        )

    def write(self, path: Path, figure_folder: Path) -> Path:
        """Write the page to `path` and its figures as PNG files into `figure_folder`."""
        figure_folder.mkdir(parents=True, exist_ok=True)
        for figure in self.figures:
            (figure_folder / f"{figure.name}.png").write_bytes(figure.png)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.html())
        return path


def figures_of_half_width(count: int) -> int:
    """Return how many figures at the end of a section take half a row instead of a third, so that none is alone."""
    return min(count, (0, 4, 2)[count % 3])


def _figure(figure: RenderedFigure, *, half: bool) -> str:
    kind = ' class="half"' if half else ""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f'<figure{kind}><h3 id="title-{figure.name}">{escape(figure.title)}</h3>\n{figure.svg}\n{caption}</figure>\n'


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background: {colour}"></span>' if colour else ""


# ---- numbers as text -------------------------------------------------------------------------------------------------


MISSING = "-"
LEVEL = 1.15  # numbers within this factor count as equal
_FRACTIONS = re.compile(  # metrics that are fractions; rewards are not
    r"/(ess|frac_ratio_gt2|truncated|frac_groups_zero_std|unscored|clip_low|clip_high|agreement|replayed_fraction|"
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
    percent = f" ({format_percent(agreement)} of the routes agree without replay)" if math.isfinite(agreement) else ""
    return (
        "Native routing and replay are level here. That is expected where engine and trainer compute in the same "
        f"precision, so that their routers choose the same experts anyway{percent}, and where the remaining mismatch "
        "comes from attention, quantization or the LM head rather than from routing. A few tokens decide whether a run "
        "collapses: compare the largest ratio and F(2) too. The gap widens with a lower precision of the rollout and "
        "with more layers."
    )
