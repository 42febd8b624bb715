"""`moe-replay compare`: several runs on one page."""

from __future__ import annotations

from pathlib import Path


class CompareCommand:
    """Compare two or more runs on one page.

    Args:
        runs: Run folders.
        output: HTML page to write; figures go to `<stem>-figures` next to it.
    """

    def __init__(self, runs: tuple[Path, ...], /, *, output: Path = Path("compare.html")) -> None:
        self.runs = runs
        self.output = output

    def __call__(self) -> None:
        from moe_replay.report.compare import write_comparison

        print(write_comparison(self.runs, self.output))
