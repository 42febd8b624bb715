"""`moe-replay report`: the report of a run or of an attribution."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

FOLLOW_S = 10


def report(run: Path, /, *, output: Path | None = None, follow: bool = False) -> None:
    """Write the report of a run: report.html and figures/*.png in the run folder.

    Args:
        run: Run folder, or an attribution.json written by `moe-replay verify`.
        output: HTML page for an attribution.json; default: next to it.
        follow: Write the page after each step too, for a browser to reload, until all steps are made or Ctrl-C.
    """
    if run.is_file():
        from moe_replay.report.attribution_report import read_attribution, write_attribution_report

        print(write_attribution_report(read_attribution(run), output or run.with_suffix(".html")))
        return
    from moe_replay.report.record import ReportError, read_run
    from moe_replay.report.run_report import verdict, warnings, write_run_report

    if output is not None:
        raise ReportError("--output is for an attribution.json", remedy="The report of a run goes into its folder")
    if follow:
        _follow(run)
    print(write_run_report(run))
    record = read_run(run)
    print(verdict(record, list(warnings(record))), file=sys.stderr)


def _follow(folder: Path) -> None:
    from moe_replay.report.record import ReportError, read_run
    from moe_replay.report.run_report import write_run_report

    written = None
    try:
        while True:
            try:
                run = read_run(folder)
            except ReportError:
                if not folder.is_dir():
                    raise
                run = None  # before the first step
            if run is not None and (run.failure or run.steps >= run.settings.get("steps", math.inf)):
                return
            if run is not None and run.steps != written:
                page = write_run_report(folder, reload_s=FOLLOW_S)
                print(f"step {run.steps}: {page}", flush=True)
                written = run.steps
            time.sleep(FOLLOW_S / 5)
    except KeyboardInterrupt:
        print()
