"""`moe-replay report`: the report of a run or of an attribution."""

from __future__ import annotations

import sys
import time
from pathlib import Path

FOLLOW_S = 10


class ReportCommand:
    """Write the report of a run: report.html and figures/*.png in the run folder.

    Args:
        run: Run folder, or an attribution.json written by `moe-replay verify`.
        output: HTML page for an attribution.json; default: next to it.
        follow: Write the page again after each step, and let the browser reload it, until the run has made all its
            steps or Ctrl-C.
    """

    def __init__(self, run: Path, /, *, output: Path | None = None, follow: bool = False) -> None:
        self.run = run
        self.output = output
        self.follow = follow

    def __call__(self) -> None:
        """Write the page; print its path, and to stderr the verdict on the run."""
        if self.run.is_file():
            from moe_replay.report.attribution_report import read_attribution, write_attribution_report

            output = self.output or self.run.with_suffix(".html")
            print(write_attribution_report(read_attribution(self.run), output))
            return
        from moe_replay.report.record import read_run
        from moe_replay.report.run_report import verdict, warnings, write_run_report

        if self.follow:
            self._follow()
        print(write_run_report(self.run))
        run = read_run(self.run)
        print(verdict(run, list(warnings(run))), file=sys.stderr)

    def _follow(self) -> None:
        from moe_replay.report.record import ReportError, read_run
        from moe_replay.report.run_report import write_run_report

        written = None
        try:
            while True:
                try:
                    run = read_run(self.run)
                except ReportError:
                    if not self.run.is_dir():
                        raise
                    run = None  # before the first step
                if run is not None and (run.failure or run.steps == run.settings.get("steps")):
                    return
                if run is not None and run.steps != written:
                    page = write_run_report(self.run, reload_s=FOLLOW_S)
                    print(f"step {run.steps}: {page}", flush=True)
                    written = run.steps
                time.sleep(FOLLOW_S / 5)
        except KeyboardInterrupt:
            print()
