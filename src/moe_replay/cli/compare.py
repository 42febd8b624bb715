"""`moe-replay compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path


class CompareCommand:
    """Put two or more runs side by side on one page."""

    def __init__(self, runs: tuple[Path, ...], /, *, output: Path = Path("compare.html")) -> None:
        """Put two or more runs side by side on one page.

        Args:
            runs: Folders of the runs.
            output: Page to write; its figures go as PNG files into a folder named like it.
        """
        self.runs = runs
        self.output = output

    def __call__(self) -> None:
        """Write it, and say where."""
        from moe_replay.report.compare import write_comparison

        print(write_comparison(self.runs, self.output))
