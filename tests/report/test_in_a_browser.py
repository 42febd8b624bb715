"""Reports as Chromium shows them, on a phone and on a desk, in the light and in the dark; skipped without one."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from moe_replay.report.plots import INK, INK_ON_DARK

pytest.importorskip("matplotlib", reason="figures need matplotlib")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
WITHOUT = "no Chromium here: on Debian, apt-get install --no-install-recommends chromium"
pytestmark = [pytest.mark.slow, pytest.mark.whole_runs, pytest.mark.skipif(BROWSER is None, reason=WITHOUT)]

DARK, LIGHT = 0, 1  # as Chromium counts them
LOOK = """<script>
for (const closed of document.querySelectorAll("details")) closed.open = true;
const outside = [], small = [], fills = new Set();
for (const text of document.querySelectorAll("svg text")) {
  const [inner, outer] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
  const past = Math.max(outer.left - inner.left, inner.right - outer.right, outer.top - inner.top,
                        inner.bottom - outer.bottom);
  if (past > 2) outside.push(text.textContent);
  if (parseFloat(getComputedStyle(text).fontSize) * outer.width / text.ownerSVGElement.viewBox.baseVal.width < 8.5)
    small.push(text.textContent);
  fills.add(getComputedStyle(text).fill);
}
const seen = {
  outside, small, fills: [...fills],
  width: document.documentElement.scrollWidth, window: window.innerWidth,
  ground: getComputedStyle(document.body).backgroundColor,
  figures: [...document.querySelectorAll("figure")].map(figure => figure.getBoundingClientRect().width),
};
parent.document.body.dataset.seen = JSON.stringify(seen);
</script>"""


def look_at(page: Path, folder: Path, width: int, scheme: int) -> dict[str, Any]:
    """What a browser makes of the page: sizes, colours, texts that do not fit."""
    probed = folder / "probed.html"
    content = html.escape(page.read_text().replace("</body>", f"{LOOK}</body>"))
    # In a frame, since a window of a browser cannot be as narrow as a phone.
    frame = f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{content}"></iframe>'
    style = "<style>:root { color-scheme: light dark; } body { margin: 0; }</style>"
    probed.write_text(f'<!DOCTYPE html><meta charset="utf-8">{style}<body>{frame}</body>')
    command = [
        *(str(BROWSER), "--headless", "--disable-gpu", "--hide-scrollbars", "--dump-dom", "--no-first-run"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # the sandbox refuses root
        *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1400,900",
        f"--user-data-dir={tempfile.mkdtemp(dir=folder)}",
        probed.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize(("width", "scheme"), [(390, DARK), (1280, LIGHT)], ids=["phone, dark", "desk, light"])
def test_a_report_can_be_read(full_page: Path, compared: Path, tmp_path: Path, width: int, scheme: int) -> None:
    for page in (full_page, compared):
        seen = look_at(page, tmp_path, width, scheme)
        assert seen["window"] == width
        assert seen["width"] <= width, "the page must not scroll sideways"
        assert seen["outside"] == [], "texts that leave their figure"
        assert seen["small"] == [], "texts that are too small"
        assert min(seen["figures"]) > 330
        ground, ink = ("rgb(18, 23, 28)", INK_ON_DARK) if scheme == DARK else ("rgb(255, 255, 255)", INK)
        assert seen["ground"] == ground
        assert _rgb(ink) in seen["fills"]


def _rgb(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"
