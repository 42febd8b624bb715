"""Formatting a plan for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moe_replay.tools.plan.layout_plan import Plan, StagePlan

_MOST_STAGES = 24


def plan_text(plan: Plan) -> str:
    """Return the text that `print(plan)` shows."""
    parallel, work, wire = plan.parallel, plan.work, plan.wire_bytes
    model, shape = plan.topology, plan.token_rows
    nodes = -(-parallel.world // plan.cluster.ranks_per_node)
    with_sp = " with sequence parallel" if parallel.sequence_shards > 1 else ""
    lines = [
        f"{model.model_type or 'model'}: {model.num_layers} decoder layers, {len(model.layers)} of them route, "
        f"top {model.top_k} of {model.num_experts}",
        f"{parallel.world} ranks on {nodes} nodes: tp {parallel.tp}{with_sp}, "
        f"cp {parallel.cp}, pp {parallel.pp}, vpp {parallel.vpp}, dp {parallel.dp}; "
        f"experts: ep {parallel.ep}, etp {parallel.expert_tensor}, dp {parallel.expert_data}",
        f"a step: {work.micro_batches} micro-batches on each of {parallel.dp} data-parallel ranks, "
        f"{len(work.lengths)} sequences with {work.tokens:,} tokens in each{', packed' if work.packed else ''}; "
        f"{parallel.dp * work.micro_batches * work.tokens:,} tokens in all",
        f"rows of a rank's routers in a micro-batch: {plan.rows:,}; {_span(shape.min(), shape.max())} of them tokens",
        "",
        *_stage_table(plan.stages),
        "",
        f"token ids of a micro-batch, for the token check: {size(plan.fed_bytes)} on each rank",
        f"routes of a step: {size(wire['step'])} from the engines to rank 0 "
        f"(as base64 int32 {size(wire['step_as_base64_int32'])})"
        if plan.routes_travel
        else f"routes of a step: not asked for; tokens alone are {size(wire['step'])} from the engines to rank 0",
        f"trajectories of a step: {size(wire['store'])} in the memory of rank 0, as much again while they are encoded; "
        f"{size(wire['rank'])} for a rank at most, {size(wire['headers'])} of headers for each",
        f"into other nodes than that of rank 0: {size(wire['fullest_node'])} into the busiest, "
        f"{size(wire['all_nodes'])} into all",
        f"extrapolated from {plan.cluster.gbit:g} Gbit/s a node: {plan.wire_seconds:.3g} s a step for both",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def size(count: int | float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def ranges(numbers: Sequence[int]) -> str:
    """Format `[1, 2, 3, 7]` as `1-3 7`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[-1] = 0
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _stage_table(stages: Sequence[StagePlan]) -> list[str]:
    head = ("stage", "a micro-batch", "in flight", "on device (R3)", "of a step (R2)", "routing layers, chunk by chunk")
    shown = stages if len(stages) <= _MOST_STAGES else [*stages[: _MOST_STAGES // 2], *stages[-_MOST_STAGES // 2 :]]
    rows = [
        (
            str(stage.stage),
            size(stage.batch_bytes),
            str(stage.in_flight),
            size(stage.flight_bytes),
            size(stage.step_bytes),
            " | ".join(ranges(layers) for layers in stage.routing_layers),
        )
        for stage in shown
    ]
    lines = aligned([head, *rows])
    if len(shown) < len(stages):
        lines.insert(1 + _MOST_STAGES // 2, f"... {len(stages) - len(shown)} more")
    return lines


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
