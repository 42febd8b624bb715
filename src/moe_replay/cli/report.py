"""`moe-replay report`: a run, or what `moe-replay verify` measured, as a page."""

from __future__ import annotations

from pathlib import Path


class ReportCommand:
    """Write the report of a run: report.html and figures/*.png in its folder."""

    def __init__(self, run: Path, /, *, output: Path | None = None) -> None:
        """Write the report of a run: report.html and figures/*.png in its folder.

        Args:
            run: Folder of a run, or an attribution.json that `moe-replay verify` wrote.
            output: Page to write for an attribution.json; beside it if not given.
        """
        self.run = run
        self.output = output

    def __call__(self) -> None:
        """Write it, and say where."""
        if self.run.is_file():
            from moe_replay.report.attribution_report import read_attribution, write_attribution_report

            output = self.output or self.run.with_suffix(".html")
            print(write_attribution_report(read_attribution(self.run), output))
            return
        from moe_replay.report.run_report import write_run_report

        print(write_run_report(self.run))
