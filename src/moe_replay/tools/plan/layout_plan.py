"""`plan_layout`: which rank replays which layers and rows, and what that costs, for any number of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moe_replay.routes.topology import MoeTopology
from moe_replay.tools.plan.checks import Dimensions, ImpossibleLayoutError, find_problems
from moe_replay.tools.plan.parallel import Parallel
from moe_replay.tools.plan.work import RouteBytes, Work
from moe_replay.train.trajectories.header import HEADER_BYTES
from moe_replay.train.trajectories.wire import table_bytes


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes: ranks on each, and network bandwidth of each in Gbit/s."""

    ranks_per_node: int = 8
    gbit: float = 100.0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The ranks of one pipeline stage.

    decoder_layers   of each chunk
    routing_layers   of each chunk, those with routers
    in_flight        maximum number of micro-batches of a chunk between forward and backward
    batch_bytes      routes of one micro-batch, all chunks, on one device
    flight_bytes     peak of routes on one device if each batch is copied when its forward begins (R3)
    step_bytes       routes of all micro-batches of a step on one rank, which recording keeps (R2)
    """

    stage: int
    decoder_layers: tuple[tuple[int, ...], ...]
    routing_layers: tuple[tuple[int, ...], ...]
    in_flight: int
    batch_bytes: int
    flight_bytes: int
    step_bytes: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: coordinates, routing layers of each chunk, rows and bytes of a micro-batch."""

    rank: int
    coordinates: dict[str, int]
    routing_layers: tuple[tuple[int, ...], ...]
    rows: int
    token_rows: int
    batch_bytes: int


@dataclass(frozen=True)
class Plan:
    """Consequences of a layout for routing replay. `print(plan)` shows the essentials, `to_json` everything.

    rows         rows that every rank's routers see in a micro-batch, padding included
    token_rows   (cp, sequence shards), rows that hold a token
    fed_bytes    token ids of a micro-batch on each rank, for the token check
    routes_travel   from the rollout to the ranks
    """

    topology: MoeTopology
    parallel: Parallel
    work: Work
    cluster: Cluster
    stages: tuple[StagePlan, ...]
    rows: int
    token_rows: np.ndarray
    fed_bytes: int
    routes_travel: bool = True

    # ---- ranks --------------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        if not 0 <= rank < self.parallel.world:
            raise IndexError(f"there are ranks 0 to {self.parallel.world - 1}, and no {rank}")
        here = {name: int(value[0]) for name, value in self.parallel.coordinates(np.array([rank])).items()}
        stage = self.stages[here["pp"]]
        shard = here["tp"] if self.parallel.sequence_shards > 1 else 0
        tokens = int(self.token_rows[here["cp"], shard])
        return RankPlan(rank, here, stage.routing_layers, self.rows, tokens, stage.batch_bytes)

    @cached_property
    def table(self) -> dict[str, np.ndarray]:
        """Coordinates, token rows, routing layers and bytes of every rank, (world,) each."""
        where = self.parallel.coordinates()
        shard = where["tp"] if self.parallel.sequence_shards > 1 else np.zeros_like(where["tp"])
        layers = np.array([sum(map(len, stage.routing_layers)) for stage in self.stages])
        batch = np.array([stage.batch_bytes for stage in self.stages])
        step = np.array([stage.step_bytes for stage in self.stages])
        numbers = {
            "token_rows": self.token_rows[where["cp"], shard],
            "routing_layers": layers[where["pp"]],
            "batch_bytes": batch[where["pp"]],
            "step_bytes": step[where["pp"]],
            "share_bytes": self.share_bytes[where["pp"]],
        }
        return where | numbers

    # ---- network ------------------------------------------------------------------------------------------------

    @cached_property
    def share_bytes(self) -> np.ndarray:
        """(stages,) int64: bytes of trajectories that a rank of each stage gets from the store of rank 0 in a step."""
        sizes = RouteBytes(self.topology, self.routes_travel)
        counts = [sum(map(len, stage.routing_layers)) for stage in self.stages]
        one = [sum(sizes.record(length, layers) for length in self.work.lengths) for layers in counts]
        alone = self.parallel.world == 1  # it has them already
        return np.array(one, np.int64) * (0 if alone else self.work.micro_batches)

    @cached_property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes of a step, as the trainer moves them (docs/scale.md).

        step           routes, from the engines to rank 0, each prompt once per group
        store          trajectories on rank 0, encoded once for each pipeline stage
        headers        of all trajectories, into each rank
        rank           trajectories of a rank, at most: mapped on the node of rank 0, fetched on others
        all_nodes      into all nodes but that of rank 0: once for each share that ranks of a node need
        fullest_node   into the busiest of them
        step_as_base64_int32   `step` as most projects encode it
        """
        sizes, parallel = RouteBytes(self.topology, self.routes_travel), self.parallel
        sequences = len(self.work.lengths) * self.work.micro_batches
        stages = self.table["pp"]
        nodes = np.arange(parallel.world) // self.cluster.ranks_per_node
        fetched = np.unique(np.stack([nodes, self.table["dp"], self._layer_sets[stages]], axis=1)[nodes > 0], axis=0)
        by_set = np.zeros(parallel.pp, np.int64)
        by_set[self._layer_sets] = self.share_bytes + table_bytes(sequences)
        per_node = np.bincount(fetched[:, 0], by_set[fetched[:, 2]], minlength=1)
        plain = sum(sizes.base64_int32(length) for length in self.work.lengths) * self.work.micro_batches
        distinct = np.unique(self._layer_sets, return_index=True)[1]
        return {
            "step": sizes.sequences(self.work) * self.work.micro_batches * parallel.dp,
            "store": int(self.share_bytes[distinct].sum()) * parallel.dp,
            "headers": HEADER_BYTES * sequences * parallel.dp,
            "rank": int(self.share_bytes.max()),
            "all_nodes": int(per_node.sum()),
            "fullest_node": int(per_node.max()),
            "step_as_base64_int32": plain * parallel.dp,
        }

    @cached_property
    def _layer_sets(self) -> np.ndarray:
        """(stages,): stages with the same number have the same routing layers, which for several is none."""
        sets = [sum(stage.routing_layers, ()) for stage in self.stages]
        return np.array([sets.index(layers) for layers in sets])

    @property
    def wire_seconds(self) -> float:
        """Seconds of a step's routes into the node of rank 0 and of its trajectories out of it, at full bandwidth."""
        moved = self.wire_bytes["step"] + self.wire_bytes["all_nodes"]
        return moved * 8 / (self.cluster.gbit * 1e9)

    # ---- output -------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """Remarks on a layout that is possible but noteworthy."""
        idle = [stage.stage for stage in self.stages if not any(stage.routing_layers)]
        found = []
        if idle:
            found.append(f"stages without routers: {idle}; they replay nothing and run the same code")
        if self.parallel.pp == 2 and self.parallel.vpp > 1:
            found.append("pp 2 with vpp: set overlap_p2p_comm=True, batch_p2p_comm=False, or attach refuses the model")
        held = self.token_rows.sum() / (self.rows * self.token_rows.size)
        if held < 0.75:
            found.append(f"{1 - held:.0%} of the rows are padding: pack, or sort sequences by length")
        return found

    def to_json(self) -> str:
        """Return everything but the table of ranks as JSON."""
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
            "fed_bytes": self.fed_bytes,
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
    routes_travel: bool = True,
) -> Plan:
    """Plan a layout, or raise an `ImpossibleLayoutError` with every reason.

    dimensions      of the model, to check heads, vocabulary and experts too
    routes_travel   from the rollout to the ranks; False: nothing replays or compares them
    """
    problems = find_problems(topology, parallel, work, dimensions)
    if problems:
        raise ImpossibleLayoutError(problems)
    rows = work.rows(parallel)
    batch, width = work.fed_shape(parallel.column_multiple)
    stages = [_stage(number, topology, parallel, work, rows) for number in range(parallel.pp)]
    return Plan(
        topology=topology,
        parallel=parallel,
        work=work,
        cluster=cluster or Cluster(),
        stages=tuple(stages),
        rows=rows,
        token_rows=work.token_rows(parallel),
        fed_bytes=4 * batch * width // parallel.cp,
        routes_travel=routes_travel,
    )


def in_flight(parallel: Parallel, stage: int, micro_batches: int) -> int:
    """Return the maximum number of outstanding backwards of one chunk, for plain or interleaved 1F1B."""
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
        flight_bytes=flight * max(per_chunk),
        step_bytes=work.micro_batches * sum(per_chunk),
    )
