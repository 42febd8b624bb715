"""Cost of distributing a step's trajectories to the training ranks, against broadcasting everything.

    python benchmarks/data_plane.py [--ranks 2 4 8] [--megabytes 250] [--sequence 8192]     (Linux; gloo; minutes)

Rank 0 has the trajectories of a step, with routes of 48 layers, top 8 of 128 experts; every rank trains on an equal
number of sequences. `--megabytes` is the payload per rank: ranks and payload grow together.

  broadcast     all trajectories in one broadcast, decoded by every rank
  one machine   the store, with all ranks on rank 0's machine: they map its memory
  machines      the store, with every rank on a separate machine: they fetch over TCP (here over loopback)

Received bytes are the maximum over ranks other than 0, relative to the bytes of tokens, log-probs and routes that a
rank trains on; so is the peak of host memory above the start. Shared pages count for every rank that maps them, and
the file that rank 0 serves from counts for rank 0, in addition to its trajectories.

CPU is user and system time: the maximum over ranks other than 0, and rank 0's per rank served. Wall time is that of all
processes on the available cores. "flat": CPU grows by less than half from the fewest to the most ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import broadcast_bytes, open_control_group
from moe_replay.distributed.ranks import barrier
from moe_replay.records import FinishReason, Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.trajectories.store import RankStore
from moe_replay.train.trajectories.wire import (
    batch_from_bytes,
    batch_to_bytes,
    read_section,
    record_parts,
    table,
    table_bytes,
)

LAYERS, TOP_K, EXPERTS = tuple(range(48)), 8, 128
TOKEN_BYTES = len(LAYERS) * TOP_K + 4 + 4
FLAT = 1.5
WAYS = ("broadcast", "one machine", "machines")


class Cost(NamedTuple):
    """Of one rank: bytes received, peak of host memory (on rank 0 with the file that it serves), seconds, CPU."""

    received: int
    peak: int
    seconds: float
    cpu_s: float


def made_up(number: int, tokens: int, encoded: bytes) -> Trajectory:
    """A trajectory with memory of its own."""
    trace = RouteTrace.from_bytes(bytes(bytearray(encoded)))
    return Trajectory(
        row=number,
        group=number,
        token_ids=trace.token_ids,
        logprobs=np.full(tokens, -1.0, np.float32),
        versions=np.where(np.arange(tokens) < tokens // 8, -1, 0).astype(np.int64),
        trace=trace,
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )


def encoded_trace(tokens: int) -> bytes:
    """The routes of one sequence."""
    random = np.random.default_rng(0)
    first = random.integers(0, EXPERTS, (tokens, len(LAYERS), 1))
    experts = (first + np.arange(TOP_K) * (EXPERTS // TOP_K)) % EXPERTS
    ids = random.integers(0, 150_000, tokens)
    covered = np.arange(tokens) < tokens - 1
    return RouteTrace(ids, experts.astype(np.uint8), LAYERS, covered, num_experts=EXPERTS).to_bytes()


def as_section(trajectories: Sequence[Trajectory]) -> bytes:
    """All of them as bytes, with the routes of all layers."""
    records = [record_parts(trajectory, None) for trajectory in trajectories]
    sizes = [table_bytes(len(records)), *(sum(map(len, record)) for record in records)]
    return b"".join([table(list(accumulate(sizes))), *chain.from_iterable(records)])


def measured(way: str, rank: int, ranks: int, sequences: int, tokens: int) -> Cost:
    """Bring the sequences of each rank to it; all of them are on rank 0."""
    held: list[Trajectory] = []
    if rank == 0:
        encoded = encoded_trace(tokens)
        held = [made_up(number, tokens, encoded) for number in range(sequences * ranks)]
    numbers = list(range(rank, sequences * ranks, ranks))
    with open_control_group():
        store = RankStore(rank, LAYERS, 600.0, machine="" if way == "machines" else None)
        barrier()
        before, began, used, file = _reset_peak(), time.monotonic(), time.process_time(), 0
        if way == "broadcast":
            content = broadcast_bytes(as_section(held) if rank == 0 else None)
            everything = list(read_section(memoryview(content)))
            own, received = [everything[number] for number in numbers], len(content)
        else:
            batch = store.put(held) if rank == 0 else None
            file = 0 if batch is None else sum(size for _, size in batch.sections)
            headers = broadcast_bytes(None if batch is None else batch_to_bytes(batch))
            own = store.get(batch_from_bytes(headers), numbers, LAYERS)
            received = store.received_bytes + len(headers)
        used = time.process_time() - used
        barrier()
        seconds, peak = time.monotonic() - began, _peak() - before + file
        assert [one.row for one in own] == numbers
        assert all(one.trace.top_k == TOP_K for one in own)
        barrier()
        store.close()
    return Cost(received, peak, seconds, used)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def on_rank(way: str, rank: int, ranks: int, sequences: int, tokens: int, port: int, result: Connection) -> None:
    """Be one rank."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    result.send(measured(way, rank, ranks, sequences, tokens))
    dist.barrier()
    dist.destroy_process_group()


def run(way: str, ranks: int, sequences: int, tokens: int) -> list[Cost]:
    """The cost of every rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "moe_replay.train.trajectories.store"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=on_rank, args=(way, number, ranks, sequences, tokens, port, pipes[number][1]))
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    for _, sending in pipes:
        sending.close()
    found = [receiving.recv() for receiving, _ in pipes]
    for process in processes:
        process.join()
    return found


def row(way: str, ranks: int, sequences: int, tokens: int, costs: Sequence[Cost]) -> str:
    """A row of the table."""
    share = sequences * tokens * TOKEN_BYTES
    others = costs[1:]
    received, peak = (max(getattr(cost, name) for cost in others) / share for name in ("received", "peak"))
    of_first = costs[0].peak / (share * ranks)
    seconds = max(cost.seconds for cost in costs)
    payload = f"{share * ranks / 1e6:,.0f} MB"
    sizes = f"{received:.2f} x | {peak:.2f} x | {of_first:.2f} x"
    cpu = f"{1e3 * _cpu_of_others(costs):.0f} ms | {1e3 * _cpu_of_first(costs):.0f} ms"
    return f"| {ranks} | {payload} | {way} | {sizes} | {cpu} | {seconds:.2f} s |"


def _cpu_of_others(costs: Sequence[Cost]) -> float:
    return max(cost.cpu_s for cost in costs[1:])


def _cpu_of_first(costs: Sequence[Cost]) -> float:
    """Return the CPU seconds of rank 0 for each rank."""
    return costs[0].cpu_s / len(costs)


def flatness(way: str, fewest: Sequence[Cost], most: Sequence[Cost]) -> str:
    """Say whether the cost of a rank stays as it is when ranks and payload grow together."""
    growth = [
        after / max(before, 1e-2)
        for before, after in (
            (_cpu_of_others(fewest), _cpu_of_others(most)),
            (_cpu_of_first(fewest), _cpu_of_first(most)),
        )
    ]
    verdict = "flat" if max(growth) < FLAT else "not flat"
    return (
        f"{way}: from {len(fewest)} to {len(most)} ranks CPU of a rank x {growth[0]:.2f}, of rank 0 for each rank "
        f"x {growth[1]:.2f}: {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, default=50.0, help="share of one rank")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(arguments)
    sequences = max(1, round(options.megabytes * 1e6 / (options.sequence * TOKEN_BYTES)))
    print(
        "| ranks | payload | way | received, of own share | peak, of own share | peak of rank 0, of payload "
        "| CPU of a rank | CPU of rank 0 for each rank | wall |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[str, list[list[Cost]]] = {way: [] for way in options.ways}
    for ranks in options.ranks:
        for way in options.ways:
            costs = run(way, ranks, sequences, options.sequence)
            found[way].append(costs)
            print(row(way, ranks, sequences, options.sequence, costs), flush=True)
    for way, by_ranks in found.items():
        print(flatness(way, by_ranks[0], by_ranks[-1]))


if __name__ == "__main__":
    main()
