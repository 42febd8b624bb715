"""`moe-replay inspect`: the contents of trace files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from moe_replay.routes.topology import MoeTopology
    from moe_replay.tools.inspect import TraceSummary

_LEVELS = " ▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = " .:-=+*#@"


class InspectCommand:
    """Show the contents of trace files: tokens, layers, coverage, weight versions, expert load."""

    def __init__(
        self, files: tuple[Path, ...], /, *, check: str | None = None, json: bool = False, width: int = 64
    ) -> None:
        """Show the contents of trace files: tokens, layers, coverage, weight versions, expert load.

        Args:
            files: Trace files, or the bytes of one trace each; several are summed up as if they were one.
            check: Folder, config.json or name of a model. Exit with 1 unless the traces fit it.
            json: Print everything as JSON.
            width: Maximum columns of the bar chart; more experts are binned.
        """
        self.files = files
        self.check = check
        self.json = json
        self.width = width

    def __call__(self) -> None:
        """Read each file once, print, and check."""
        from moe_replay.errors import MoeReplayError
        from moe_replay.tools.inspect import read_traces, summarize

        if not self.files:
            raise MoeReplayError("no trace file is given", expected="moe-replay inspect FILE ...")
        summary = summarize(trace for file in self.files for trace in read_traces(file))
        topology = None if self.check is None else _topology(self.check)
        if self.json:
            told = summary.to_dict()
            if topology is not None:
                told["differences"] = summary.differences(topology)
            print(json.dumps(told, indent=2))
        else:
            wide = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
            of_files = f"{len(self.files)} files: " if len(self.files) > 1 else ""
            print(of_files + summary_text(summary, self.width, _LEVELS if wide else _PLAIN_LEVELS))
        if topology is not None:
            summary.check(topology)


def summary_text(summary: TraceSummary, width: int = 64, levels: str = _LEVELS) -> str:
    """Format the summary for a terminal, with a bar chart of the expert load of each layer."""
    routers = ", ".join(f"top {k} of {e or '?'}" for k, e in sorted(summary.routers, key=str)) or "nothing"
    versions = ", ".join(f"{version} ({tokens:,} tokens)" for version, tokens in sorted(summary.versions.items()))
    lines = [
        f"{summary.traces} traces, {summary.tokens:,} tokens, the longest of {summary.longest:,}; "
        f"{len(summary.layers)} layers, {routers}",
        f"covered: {summary.coverage:.2%} of (token, layer) pairs; weight versions: {versions or 'none'}",
    ]
    if summary.duplicates:
        lines.append(f"BROKEN: {summary.duplicates:,} rows name an expert twice, which no router does")
    if summary.repeated:
        lines.append(f"{summary.repeated} traces have exactly the tokens of an earlier one")
    lines += ["", "layer  covered  entropy  peak   unused  load, expert by expert"]
    for layer in sorted(summary.layers):
        one = summary.layers[layer]
        share = one.covered / one.tokens if one.tokens else 0.0
        numbers = f"{layer:<6} {share:>7.1%}  {one.entropy:>7.3f}  {one.peak:>4.1f}x  {one.unused:>6}"
        lines.append(f"{numbers}  {bars(one.load, width, levels)}")
    return "\n".join(lines)


def bars(load: np.ndarray, width: int, levels: str = _LEVELS) -> str:
    """Draw one character per expert, or per bin of neighbouring experts, scaled to the largest."""
    import numpy as np

    if not load.any():
        return ""
    edges = np.linspace(0, len(load), min(width, len(load)) + 1).astype(int)[:-1]
    counts = np.diff([*edges, len(load)])
    heights = np.add.reduceat(load, edges) / counts
    steps = np.ceil(heights / heights.max() * (len(levels) - 1)).astype(int)
    return "".join(levels[step] for step in steps)


def _topology(model: str) -> MoeTopology:
    from moe_replay.routes.topology import MoeTopology
    from moe_replay.tools.model_config import model_config

    return MoeTopology.from_config(model_config(model))
