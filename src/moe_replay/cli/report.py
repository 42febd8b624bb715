"""`moe-replay report`: write the report page of a run or of an attribution."""

from __future__ import annotations

from pathlib import Path


class ReportCommand:
    """Write the report of a run: report.html and figures/*.png in the run folder."""

    def __init__(self, run: Path, /, *, output: Path | None = None) -> None:
        """Write the report of a run: report.html and figures/*.png in the run folder.

        Args:
            run: Run folder, or an attribution.json written by `moe-replay verify`.
            output: Page to write for an attribution.json; next to it by default.
        """
        self.run = run
        self.output = output

    def __call__(self) -> None:
        """Write the page and print its path."""
        if self.run.is_file():
            from moe_replay.report.attribution_report import read_attribution, write_attribution_report

            output = self.output or self.run.with_suffix(".html")
            print(write_attribution_report(read_attribution(self.run), output))
            return
        from moe_replay.report.run_report import write_run_report

        print(write_run_report(self.run))
