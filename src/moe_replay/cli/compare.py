"""`moe-replay compare`: several runs on one page."""

from __future__ import annotations

from pathlib import Path


def compare(runs: tuple[Path, ...], /, *, output: Path = Path("compare.html")) -> None:
    """Compare two or more runs on one page.

    Args:
        runs: Run folders.
        output: HTML page to write; figures go to `<stem>-figures` next to it.
    """
    from moe_replay.report.compare import write_comparison

    print(write_comparison(runs, output))
