"""`plan_layout`: whether a layout is possible, which rank replays which layers and rows, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from moe_replay.errors import LayoutError
from moe_replay.replay.adapters.megatron_settings import WRONG_EXPERT_GRADIENTS, has_wrong_expert_gradients
from moe_replay.routes.router_families import setting
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeTopology, text_config
from moe_replay.tools.plan.parallel import Parallel, RouteBytes, Work
from moe_replay.train.trajectories.wire import HEADER_BYTES, table_bytes

_MAX_SHOWN_STAGES = 24


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of the trainer: ranks per node, and network bandwidth per node in Gbit/s."""

    ranks_per_node: int = 8
    gbit: float = 100.0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The ranks of one pipeline stage."""

    stage: int
    decoder_layers: tuple[tuple[int, ...], ...]  # per chunk
    routing_layers: tuple[tuple[int, ...], ...]  # per chunk, those with routers
    in_flight: int  # maximum number of micro-batches of a chunk between forward and backward
    batch_bytes: int  # routes of one micro-batch, all chunks, on one device
    in_flight_bytes: int  # peak of routes on one device if each batch is copied when its forward begins (R3)
    step_bytes: int  # routes of all micro-batches of a step on one rank, which recording keeps (R2)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: coordinates, routing layers per chunk, rows and bytes per micro-batch."""

    rank: int
    coordinates: dict[str, int]
    routing_layers: tuple[tuple[int, ...], ...]
    rows: int
    token_rows: int
    batch_bytes: int


@dataclass(frozen=True)
class Plan:
    """A layout's cost for routing replay. `print(plan)` shows the essentials, `to_json` everything."""

    topology: MoeTopology
    parallel: Parallel
    work: Work
    cluster: Cluster
    stages: tuple[StagePlan, ...]
    rows: int  # rows that every rank's routers see in a micro-batch, padding included
    token_rows: np.ndarray  # (cp, sequence shards), rows that hold a token
    token_id_bytes: int  # token ids of a micro-batch on each rank, for the token check
    with_routes: bool = True  # the rollout returns routes

    # ---- ranks --------------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> RankPlan:
        if not 0 <= rank < self.parallel.world:
            raise IndexError(f"rank {rank} is out of range: ranks are 0 to {self.parallel.world - 1}")
        coordinates = {name: int(ranks[rank]) for name, ranks in self.parallel.coordinates().items()}
        stage, tokens = self.stages[coordinates["pp"]], int(self.table["token_rows"][rank])
        return RankPlan(rank, coordinates, stage.routing_layers, self.rows, tokens, stage.batch_bytes)

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """Coordinates, token rows, routing layers and bytes of every rank, (world,) each."""
        coordinates = self.parallel.coordinates()
        stage, tensor_rank = coordinates["pp"], coordinates["tp"]
        shard = tensor_rank if self.parallel.sequence_shards > 1 else np.zeros_like(tensor_rank)
        layers = np.array([sum(map(len, stage.routing_layers)) for stage in self.stages])
        batch = np.array([stage.batch_bytes for stage in self.stages])
        step = np.array([stage.step_bytes for stage in self.stages])
        return coordinates | {
            "token_rows": self.token_rows[coordinates["cp"], shard],
            "routing_layers": layers[stage],
            "batch_bytes": batch[stage],
            "step_bytes": step[stage],
            "fetched_bytes": self.fetched_bytes[stage],
        }

    # ---- network ------------------------------------------------------------------------------------------------

    @cached_property
    def fetched_bytes(self) -> np.ndarray:
        """(stages,) int64: trajectory bytes that a rank of each stage fetches from rank 0's store per step."""
        sizes = RouteBytes(self.topology, self.with_routes)
        counts = [sum(map(len, stage.routing_layers)) for stage in self.stages]
        per_batch = [sum(sizes.record(length, layers) for length in self.work.lengths) for layers in counts]
        is_single_rank = self.parallel.world == 1  # it has them already
        return np.array(per_batch, np.int64) * (0 if is_single_rank else self.work.micro_batches)

    @cached_property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes per step, as the trainer moves them (docs/cluster.md).

        step                   routes, from the engines to rank 0, each prompt once per group
        store                  trajectories on rank 0, encoded once per pipeline stage
        headers                of all trajectories, to each rank
        rank                   largest amount of trajectories per rank: mapped on rank 0's node, fetched on others
        all_nodes              into all nodes except rank 0's: once per distinct part that ranks of a node need
        fullest_node           into the busiest of these nodes
        step_as_base64_int32   `step` as most projects encode it
        """
        sizes, parallel = RouteBytes(self.topology, self.with_routes), self.parallel
        sequences = len(self.work.lengths) * self.work.micro_batches
        stages = self.table["pp"]
        nodes = np.arange(parallel.world) // self.cluster.ranks_per_node
        fetched = np.unique(np.stack([nodes, self.table["dp"], self._layer_sets[stages]], axis=1)[nodes > 0], axis=0)
        by_set = np.zeros(parallel.pp, np.int64)
        by_set[self._layer_sets] = self.fetched_bytes + table_bytes(sequences)
        per_node = np.bincount(fetched[:, 0], by_set[fetched[:, 2]], minlength=1)
        plain = sum(sizes.base64_int32(length) for length in self.work.lengths) * self.work.micro_batches
        distinct = np.unique(self._layer_sets, return_index=True)[1]
        return {
            "step": sizes.sequences(self.work) * self.work.micro_batches * parallel.dp,
            "store": int(self.fetched_bytes[distinct].sum()) * parallel.dp,
            "headers": HEADER_BYTES * sequences * parallel.dp,
            "rank": int(self.fetched_bytes.max()),
            "all_nodes": int(per_node.sum()),
            "fullest_node": int(per_node.max()),
            "step_as_base64_int32": plain * parallel.dp,
        }

    @cached_property
    def _layer_sets(self) -> np.ndarray:
        """(stages,): index of the first stage with the same routing layers; several stages may have none."""
        sets = [sum(stage.routing_layers, ()) for stage in self.stages]
        return np.array([sets.index(layers) for layers in sets])

    @property
    def wire_seconds(self) -> float:
        """Seconds per step for routes into rank 0's node and trajectories out of it, at full bandwidth."""
        moved = self.wire_bytes["step"] + self.wire_bytes["all_nodes"]
        return moved * 8 / (self.cluster.gbit * 1e9)

    # ---- output -------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        idle = [stage.stage for stage in self.stages if not any(stage.routing_layers)]
        notes = []
        if idle:
            notes.append(f"stages without routers: {idle}; they replay nothing and run the same code")
        if self.parallel.pp == 2 and self.parallel.vpp > 1:
            notes.append("pp 2 with vpp: set overlap_p2p_comm=True, batch_p2p_comm=False, or attach refuses the model")
        token_fraction = self.token_rows.sum() / (self.rows * self.token_rows.size)
        if token_fraction < 0.75:
            notes.append(f"{1 - token_fraction:.0%} of the rows are padding: pack, or sort sequences by length")
        return notes

    def __str__(self) -> str:
        return _text(self)

    def to_json(self) -> str:
        """Return everything except the table of ranks as JSON."""
        wire = self.wire_bytes | {"seconds": self.wire_seconds}
        content: dict[str, Any] = {
            "parallel": {**asdict(self.parallel), "world": self.parallel.world},
            "work": asdict(self.work),
            "cluster": asdict(self.cluster),
            "model": {
                "type": self.topology.model_type,
                "decoder_layers": self.topology.num_layers,
                "routing_layers": list(self.topology.layers),
                "num_experts": self.topology.num_experts,
                "top_k": self.topology.top_k,
            },
            "rows": self.rows,
            "token_rows": self.token_rows.tolist(),
            "token_id_bytes": self.token_id_bytes,
            "stages": [asdict(stage) for stage in self.stages],
            "wire_bytes": wire,
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)


def plan_layout(
    topology: MoeTopology,
    parallel: Parallel,
    work: Work,
    *,
    dimensions: Dimensions | None = None,
    cluster: Cluster | None = None,
    with_routes: bool = True,
) -> Plan:
    """Plan a layout, or raise an `ImpossibleLayoutError` with every problem.

    dimensions    of the model, to check heads, vocabulary and experts too
    with_routes   the rollout returns routes; False: nothing replays or compares them
    """
    problems = find_problems(topology, parallel, work, dimensions)
    if problems:
        raise ImpossibleLayoutError(problems)
    rows = work.rows(parallel)
    batch, width = work.input_shape(parallel.column_multiple, each=not parallel.ulysses)
    stages = [_stage(stage, topology, parallel, work, rows) for stage in range(parallel.pp)]
    return Plan(
        topology=topology,
        parallel=parallel,
        work=work,
        cluster=cluster or Cluster(),
        stages=tuple(stages),
        rows=rows,
        token_rows=work.token_rows(parallel),
        token_id_bytes=4 * batch * width // parallel.cp,
        with_routes=with_routes,
    )


def in_flight(parallel: Parallel, stage: int, micro_batches: int) -> int:
    """Return the maximum number of outstanding backward passes per chunk, for plain or interleaved 1F1B."""
    ahead = parallel.pp - stage - 1
    if parallel.vpp > 1:
        ahead = 2 * ahead + (parallel.vpp - 1) * parallel.pp
    return min(ahead + 1, micro_batches * parallel.vpp)


def _stage(stage: int, topology: MoeTopology, parallel: Parallel, work: Work, rows: int) -> StagePlan:
    sizes, routing = RouteBytes(topology), set(topology.layers)
    chunks = [tuple(layers) for layers in parallel.stage_layers(topology.num_layers)[stage]]
    routed = [tuple(layer for layer in layers if layer in routing) for layers in chunks]
    per_chunk = [sizes.batch(len(layers), rows) for layers in routed]
    flight = in_flight(parallel, stage, work.micro_batches)
    return StagePlan(
        stage=stage,
        decoder_layers=tuple(chunks),
        routing_layers=tuple(routed),
        in_flight=flight,
        batch_bytes=sum(per_chunk),
        in_flight_bytes=flight * max(per_chunk),
        step_bytes=work.micro_batches * sum(per_chunk),
    )


# ---- impossible layouts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a model that parallel sizes must divide; None is not checked."""

    heads: int | None = None
    key_value_heads: int | None = None
    vocabulary: int | None = None
    expert_width: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> Dimensions:
        text = text_config(config)
        width = setting(text, "moe_intermediate_size") or setting(text, "intermediate_size")
        return cls(
            setting(text, "num_attention_heads"),
            setting(text, "num_key_value_heads"),
            setting(text, "vocab_size"),
            width if isinstance(width, int) else None,
        )


class ImpossibleLayoutError(LayoutError):
    """An impossible parallel layout; `problems` has every reason."""

    def __init__(self, problems: Sequence[LayoutError]) -> None:
        self.problems = tuple(problems)
        super().__init__("impossible layout" + "".join(f"\n  - {problem}" for problem in problems))


def find_problems(
    topology: MoeTopology, parallel: Parallel, work: Work, dimensions: Dimensions | None = None
) -> list[LayoutError]:
    """Return every reason why a model cannot be trained in a layout; sizes below one are reported alone."""
    return list(_sizes(parallel, work)) or [
        *_model(topology, parallel, dimensions or Dimensions()),
        *_pipeline(topology, parallel, work),
        *_experts(topology, parallel),
        *_tokens(parallel, work),
    ]


def _sizes(parallel: Parallel, work: Work) -> Iterator[LayoutError]:
    sizes = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    numbers = {
        name: size for name, size in sizes.items() if name not in ("sp", "chunk_layers", "ulysses") and size is not None
    }
    numbers |= {"micro_batches": work.micro_batches, "group": work.group, "sequences": len(work.lengths)}
    for name, size in numbers.items():
        if size < 1:
            yield LayoutError(f"invalid size {name}", expected="at least 1", found=size)
    if min(work.lengths, default=1) < 1:
        yield LayoutError("a sequence without tokens", expected="at least 1 token", found=min(work.lengths))


def _divides(subject: str, count: int | None, divisor: str, size: int, remedy: str = "") -> Iterator[LayoutError]:
    if count is not None and count % size:
        yield LayoutError(
            f"{subject} cannot be divided evenly",
            expected=f"a multiple of {divisor} {size}",
            found=count,
            remedy=remedy,
        )


def _model(topology: MoeTopology, parallel: Parallel, model: Dimensions) -> Iterator[LayoutError]:
    yield from _divides("attention heads", model.heads, "tp", parallel.tp)
    heads = model.key_value_heads
    if heads is not None and heads % parallel.tp and parallel.tp % heads:
        yield LayoutError(
            "key-value heads cannot be divided evenly",
            expected=f"a multiple or a divisor of tp {parallel.tp}",
            found=heads,
        )
    yield from _divides(
        "the vocabulary", model.vocabulary, "tp", parallel.tp, "Padding it would change the log-probabilities"
    )
    yield from _divides("the hidden size of an expert", model.expert_width, "etp", parallel.expert_tensor)
    if parallel.tp > 1 and parallel.sequence_shards == 1:
        yield LayoutError(
            "Megatron-Core does not train MoE models with tensor parallelism alone",
            expected="sequence parallelism with tp above 1",
            found=f"tp {parallel.tp} without it",
            remedy="Leave sp on",
        )
    attention_routers = [layer for layer in topology.layers if layer >= ATTENTION_ROUTER]
    if attention_routers:
        yield LayoutError(
            "routers inside attention", expected="routers of MLP layers", found=f"{len(attention_routers)} others"
        )


def _pipeline(topology: MoeTopology, parallel: Parallel, work: Work) -> Iterator[LayoutError]:
    chunks, chunk_layers = parallel.pp * parallel.vpp, parallel.chunk_layers
    if parallel.vpp > 1 and parallel.pp == 1:
        yield LayoutError(
            "chunks without stages", expected="vpp above 1 only with pp above 1", found=f"vpp {parallel.vpp}, pp 1"
        )
    if chunk_layers is None:
        yield from _divides("decoder layers", topology.num_layers, "pp * vpp", chunks, "Or set chunk_layers")
    elif len(chunk_layers) != chunks or sum(chunk_layers) != topology.num_layers or min(chunk_layers) < 0:
        yield LayoutError(
            "chunk_layers does not fit the model",
            expected=f"{chunks} numbers that add up to {topology.num_layers}",
            found=f"{len(chunk_layers)} numbers that add up to {sum(chunk_layers)}",
        )
    if parallel.vpp > 1:
        yield from _divides(
            "micro-batches of an interleaved pipeline", work.micro_batches, "pp", parallel.pp, "Change the batch size"
        )


def _experts(topology: MoeTopology, parallel: Parallel) -> Iterator[LayoutError]:
    for num_experts in sorted({moe.num_experts for moe in topology.moe_layers}):
        yield from _divides("experts", num_experts, "ep", parallel.ep)
    ranks, expert_ranks = parallel.tp * parallel.cp * parallel.dp, parallel.ep * parallel.expert_tensor
    yield from _divides("the ranks of a stage, tp * cp * dp,", ranks, "ep * etp", expert_ranks, "Change dp, ep or etp")
    if has_wrong_expert_gradients(parallel.tp, parallel.expert_tensor, parallel.ep):
        yield LayoutError(
            WRONG_EXPERT_GRADIENTS,
            expected=f"etp {parallel.tp}, as tp",
            found=f"etp {parallel.expert_tensor}",
            remedy="Set them equal, or use ep above 1",
        )


def _tokens(parallel: Parallel, work: Work) -> Iterator[LayoutError]:
    multiple, width = parallel.column_multiple, work.width
    needed = replace(work, width=None).input_shape(multiple, each=not parallel.ulysses)[1]
    if width is not None and (width % multiple or width < needed):
        yield LayoutError(
            "the input width cannot be divided evenly",
            expected=f"at least {needed} and a multiple of {multiple} (2 * cp with cp above 1, times tp)",
            found=width,
        )
    if work.prompt and work.prompt >= min(work.lengths):
        yield LayoutError(
            "the prompt is the whole sequence", expected=f"below {min(work.lengths)} tokens", found=work.prompt
        )


# ---- text ------------------------------------------------------------------------------------------------------------


def _text(plan: Plan) -> str:
    parallel, work, wire = plan.parallel, plan.work, plan.wire_bytes
    model, token_rows = plan.topology, plan.token_rows
    nodes = -(-parallel.world // plan.cluster.ranks_per_node)
    with_sp = " with sequence parallel" if parallel.sequence_shards > 1 else ""
    lines = [
        f"{model.model_type or 'model'}: {model.num_layers} decoder layers, {len(model.layers)} of them route, "
        f"top {model.top_k} of {model.num_experts}",
        f"{parallel.world} ranks on {nodes} nodes: tp {parallel.tp}{with_sp}, "
        f"cp {parallel.cp}, pp {parallel.pp}, vpp {parallel.vpp}, dp {parallel.dp}; "
        f"experts: ep {parallel.ep}, etp {parallel.expert_tensor}, dp {parallel.expert_data}",
        f"step: {work.micro_batches} micro-batches on each of {parallel.dp} data-parallel ranks, "
        f"{len(work.lengths)} sequences with {work.tokens:,} tokens in each{', packed' if work.packed else ''}; "
        f"{parallel.dp * work.micro_batches * work.tokens:,} tokens in all",
        f"router rows per rank and micro-batch: {plan.rows:,}, "
        f"{_span(token_rows.min(), token_rows.max())} of them tokens",
        "",
        *_stage_table(plan.stages),
        "",
        f"token ids per micro-batch, for the token check: {size(plan.token_id_bytes)} on each rank",
        f"routes per step: {size(wire['step'])} from the engines to rank 0 "
        f"(as base64 int32 {size(wire['step_as_base64_int32'])})"
        if plan.with_routes
        else f"routes per step: none requested; tokens alone are {size(wire['step'])} from the engines to rank 0",
        f"trajectories per step: {size(wire['store'])} in rank 0's memory, twice that while they are encoded; "
        f"at most {size(wire['rank'])} to a rank, and {size(wire['headers'])} of headers to each",
        f"into nodes other than rank 0's: {size(wire['fullest_node'])} into the busiest, "
        f"{size(wire['all_nodes'])} in total",
        f"at {plan.cluster.gbit:g} Gbit/s per node (extrapolated): {plan.wire_seconds:.3g} s per step",
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def size(count: int | float) -> str:
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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[-1] = 0
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _stage_table(stages: Sequence[StagePlan]) -> list[str]:
    head = ("stage", "per micro-batch", "in flight", "on device (R3)", "per step (R2)", "routing layers by chunk")
    half = _MAX_SHOWN_STAGES // 2
    shown = stages if len(stages) <= _MAX_SHOWN_STAGES else [*stages[:half], *stages[-half:]]
    rows = [
        (
            str(stage.stage),
            size(stage.batch_bytes),
            str(stage.in_flight),
            size(stage.in_flight_bytes),
            size(stage.step_bytes),
            " | ".join(ranges(layers) for layers in stage.routing_layers),
        )
        for stage in shown
    ]
    lines = aligned([head, *rows])
    if len(shown) < len(stages):
        lines.insert(1 + half, f"... {len(stages) - len(shown)} more")
    return lines


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
