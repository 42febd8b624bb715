"""Every rank gets its own share of the trajectories, and computes what it would with all of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moe_replay.distributed.collectives import broadcast_bytes, open_control_group
from moe_replay.distributed.ranks import barrier, rank
from moe_replay.records import RolloutBatch, Trajectory
from moe_replay.train.trajectories.store import THREADS, RankStore, StoreError
from moe_replay.train.trajectories.wire import (
    HEADER_BYTES,
    batch_from_bytes,
    batch_to_bytes,
    header_of,
)
from tests.distributed import harness, megatron_models
from tests.distributed.shares import HALVES, share_of, trajectories
from tests.distributed.test_training import save_model
from tests.faults.processes import LIMIT_S
from tests.support.trajectory_bytes import trajectories_from_bytes, trajectories_to_bytes
from tests.train.runs import train_on_rank
from tests.train.trajectories import LAYERS

pytest.importorskip("transformers")
harness.PRELOADED.extend(megatron_models.PRELOADED)


def share_on_machines(machines: str, data_ranks: Sequence[int], layers: Sequence[Sequence[int]]) -> list[int]:
    """The bytes of `share_of`, and those that rank 0 has sent."""
    stores = []

    def opened(own: int) -> RankStore:
        stores.append(RankStore(data_ranks[own], tuple(layers[own]), 60.0, machine=machines[own]))
        return stores[0]

    received, share, _ = share_of(opened, data_ranks, layers)
    return [received, share, stores[0].sent_bytes]


@pytest.mark.parametrize(
    ("machines", "data_ranks", "layers", "fetches"),
    [
        ("aaaa", (0, 1, 2, 0), (LAYERS,) * 4, 0),
        ("aabb", (0, 1, 2, 2), (LAYERS,) * 4, 1),  # two ranks of another machine share a copy
        ("aabb", (0, 0, 1, 1), (*HALVES, *HALVES), 2),
        ("abbb", (0, 0, 0, 1), (LAYERS, LAYERS, (), LAYERS), 3),  # a stage without routers
    ],
)
def test_a_rank_receives_its_own_share(
    machines: str, data_ranks: tuple[int, ...], layers: tuple[tuple[int, ...], ...], fetches: int
) -> None:
    every = harness.run_ranks(4, share_on_machines, machines, data_ranks, layers)
    for received, share, _ in every:
        assert 0.8 * share < received <= share  # the table of records does not count
    assert (every[0][2] > 0) == (fetches > 0)
    assert [sent for _, _, sent in every[1:]] == [0, 0, 0]
    distinct = {(m, d, tuple(some)) for m, d, some in zip(machines, data_ranks, layers, strict=True) if m != "a"}
    assert len(distinct) == fetches
    assert every[0][2] <= 2 * 1.3 * fetches * max(share for _, share, _ in every)  # in two steps


def ask_for_what_is_gone() -> str:
    with open_control_group():
        store = RankStore(rank(), LAYERS, 60.0, machine="ab"[rank()])
        batch = batch_from_bytes(broadcast_bytes(batch_to_bytes(store.put(trajectories())) if rank() == 0 else None))
        said = ""
        if rank() == 1:
            try:
                store.get(replace(batch, number=7), [0], LAYERS)
            except StoreError as error:
                said = str(error)
            store._token = bytes(len(store._token))
            with pytest.raises(StoreError, match=r"rank 1 could not fetch its trajectories"):
                store.get(batch, [0], LAYERS)
        barrier()
        store.close()
    return said


def test_what_rank_0_does_not_have_is_an_error_with_its_address() -> None:
    said = harness.run_ranks(2, ask_for_what_is_gone)[1]
    assert "rank 1 could not fetch its trajectories from rank 0: it does not have them" in said
    assert "backend.heartbeat_timeout_s" in said


def fetch_among_strangers() -> list[int]:
    with open_control_group():
        store = RankStore(rank(), LAYERS, LIMIT_S, machine="ab"[rank()])
        batch = batch_from_bytes(broadcast_bytes(batch_to_bytes(store.put(trajectories())) if rank() == 0 else None))
        with ExitStack() as strangers:
            for _ in range(2 * THREADS if rank() == 1 else 0):
                strangers.enter_context(socket.create_connection((store._host, store._port)))
            lengths = [len(trajectory.trace) for trajectory in store.get(batch, [0, 1], LAYERS)]
        barrier()
        store.close()
    return lengths


def test_silent_connections_do_not_hold_the_server() -> None:
    first, second = harness.run_ranks(2, fetch_among_strangers)
    assert first == second


def test_heads_are_small() -> None:
    assert HEADER_BYTES <= 100


# ---- whole runs ------------------------------------------------------------------------------------------------------


class BroadcastStore:
    """All trajectories with all layers on every rank, as before there was a store."""

    received_bytes = 0

    def __init__(self, *_: Any) -> None:
        self._content: bytes | None = None

    def put(self, made: Sequence[Trajectory]) -> RolloutBatch:
        self._content = trajectories_to_bytes(made)
        return RolloutBatch(headers=list(map(header_of, made)), layers=made[0].trace.layers)

    def get(self, batch: RolloutBatch, numbers: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        self._content = broadcast_bytes(self._content if rank() == 0 else None)
        return self.whole(batch, numbers)

    def whole(self, batch: RolloutBatch, numbers: Sequence[int]) -> list[Trajectory]:
        assert self._content is not None
        found = trajectories_from_bytes(self._content)
        return [found[number] for number in numbers]

    def close(self) -> None:
        self._content = None


def train_with(broadcast: bool, *arguments: Any) -> list[dict[str, Any]]:
    if not broadcast:
        return train_on_rank(*arguments)
    with mock.patch("moe_replay.train.run.open_store", BroadcastStore):
        return train_on_rank(*arguments)


@pytest.mark.whole_runs
@pytest.mark.parametrize(
    "backend",
    [{"kind": "fsdp"}, {"kind": "megatron", "pipeline_parallel": 2, "context_parallel": 2}],
    ids=["fsdp", "megatron"],
)
def test_a_run_is_the_same_bit_for_bit(demo_files: Any, tmp_path: Path, backend: dict[str, Any]) -> None:
    model = demo_files.model
    if backend["kind"] == "megatron":
        pytest.importorskip("megatron.core")
        model = save_model(
            tmp_path / "model", demo_files.model, dense_layers=(2, 3)
        )  # the last stage asks for no routes
    curves, traces = [], []
    for name, broadcast in (("shares", False), ("all", True)):
        arguments = (str(model), str(demo_files.train), str(tmp_path / name))
        settings = {"backend": backend, "steps": 2, "log": {"traces": 2}}
        every = harness.run_ranks(4, train_with, broadcast, *arguments, settings)
        assert all(lines == every[0] for lines in every)
        curves.append([{k: v for k, v in line.items() if not k.startswith(("time", "weights/"))} for line in every[0]])
        traces.append([path.read_bytes() for path in sorted((tmp_path / name / "traces").glob("*.mrt"))])
    assert curves[0] == curves[1]
    assert curves[0][1]["loss/grad_norm"] > 0
    assert traces[0] == traces[1]
    assert len(traces[0]) == 2
