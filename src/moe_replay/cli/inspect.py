"""`moe-replay inspect`: a summary of trace files."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from moe_replay.routes.topology import MoeTopology
    from moe_replay.tools.inspect import TraceSummary

_LEVELS = " ▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = " .:-=+*#@"


def inspect(files: tuple[Path, ...], /, *, check: str | None = None, json: bool = False, width: int = 64) -> None:
    """Summarize trace files: tokens, layers, coverage, weight versions, expert load.

    Args:
        files: Trace files, or files with the bytes of one trace; several files are summarized together.
        check: Model folder, config.json or Hub name. Exit with 1 if the traces do not match the model.
        json: Print JSON.
        width: Maximum width of the bar charts; more experts are binned.
    """
    from moe_replay.errors import MoeReplayError
    from moe_replay.tools.inspect import read_traces, summarize

    if not files:
        raise MoeReplayError("no trace file", expected="moe-replay inspect FILE ...")
    if width < 1:
        raise MoeReplayError("--width must be at least 1", found=width)
    summary = summarize(trace for file in files for trace in read_traces(file))
    topology = None if check is None else _topology(check)
    if json:
        result = summary.to_dict()
        if topology is not None:
            result["differences"] = summary.differences(topology)
        print(dumps(result, indent=2))
    else:
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        file_count = f"{len(files)} files: " if len(files) > 1 else ""
        print(file_count + summary_text(summary, width, _LEVELS if is_utf8 else _PLAIN_LEVELS))
    if topology is not None:
        summary.check(topology)


def summary_text(summary: TraceSummary, width: int = 64, levels: str = _LEVELS) -> str:
    """Format the summary for a terminal, with a bar chart of the expert load of each layer."""
    routers = ", ".join(f"top {k} of {e or '?'}" for k, e in sorted(summary.routers, key=str)) or "no routers"
    versions = ", ".join(f"{version} ({tokens:,} tokens)" for version, tokens in sorted(summary.versions.items()))
    lines = [
        f"{summary.traces} traces, {summary.tokens:,} tokens, longest {summary.longest:,}; "
        f"{len(summary.layers)} layers, {routers}",
        f"covered: {summary.coverage:.2%} of (token, layer) pairs; weight versions: {versions or 'none'}",
    ]
    if summary.duplicates:
        lines.append(f"BROKEN: {summary.duplicates:,} rows contain the same expert twice, which no router produces")
    if summary.repeated:
        lines.append(f"{summary.repeated} traces repeat the tokens of an earlier one")
    lines += ["", "layer  covered  entropy  peak   unused  load by expert"]
    for layer in sorted(summary.layers):
        stats = summary.layers[layer]
        coverage = stats.covered / stats.tokens if stats.tokens else 0.0
        columns = f"{layer:<6} {coverage:>7.1%}  {stats.entropy:>7.3f}  {stats.peak:>4.1f}x  {stats.unused:>6}"
        lines.append(f"{columns}  {bars(stats.load, width, levels)}")
    return "\n".join(lines)


def bars(load: np.ndarray, width: int, levels: str = _LEVELS) -> str:
    """Draw one character per expert, or per bin of adjacent experts, scaled to the maximum."""
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
    from moe_replay.weights.model_folder import read_config

    return MoeTopology.from_config(read_config(model))
