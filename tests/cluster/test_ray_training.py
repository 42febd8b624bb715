"""Runs on a real Ray cluster of three nodes: the numbers of torchrun, whatever is lost, joins or leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from moe_replay.cli.main import main
from moe_replay.cluster.capacity import CapacityError
from moe_replay.cluster.control import NoRunError, RunControl
from moe_replay.engines.server.client import RolloutClient
from moe_replay.train.config.file import to_toml
from tests.cluster.local_cluster import Events, Gates, kill, node_of, ray_cluster, train_on
from tests.distributed import harness
from tests.engines.test_pool import TOKEN, server_process, wait_until_healthy
from tests.faults.forked import fork_python
from tests.faults.processes import LIMIT_S
from tests.train.runs import tiny_config, train_on_rank

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.engine]

STEPS = 4
RUN: dict[str, Any] = {
    "steps": STEPS,
    "backend": {"device": "cpu"},
    "reward": {"functions": ["tests.cluster.local_cluster:gated"], "timeout_s": LIMIT_S},
    "checkpoint": {"every": 1, "keep": 2, "export": False},
    "replay": {"score_native_every": 0},
}
TORCHRUN = """
import os, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from moe_replay.cli.main import main

def rank(recipe):
    sys.argv[:] = ["moe-replay", "train", recipe]
    main()

ranks = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
elastic_launch(LaunchConfig(**ranks, **place, max_restarts=0, monitor_interval=0.1), rank)(sys.argv[1])
"""


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what its clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time", "servers/"))} for line in lines
    ]


@pytest.fixture(scope="module")
def by_torchrun(demo_files: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks of torchrun and two servers of `moe-replay rollout` make of the recipe."""
    folder = tmp_path_factory.mktemp("torchrun")
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process(demo_files.model)) for _ in range(2)]
        for process, url in servers:
            wait_until_healthy(process, stack.enter_context(RolloutClient(url, token=TOKEN)))
        rollout = {"engine": "rollout_server", "urls": [url for _, url in servers]}
        config = tiny_config(demo_files.model, demo_files.train, folder / "run", **RUN, rollout=rollout)
        (folder / "recipe.toml").write_text(to_toml(config))
        variables = {"GLOO_SOCKET_IFNAME": "lo", "MOE_REPLAY_TOKEN": TOKEN}
        with fork_python(TORCHRUN, str(folder / "recipe.toml"), environment=variables) as agent:
            told, _ = agent.communicate(LIMIT_S)
            assert agent.returncode == 0, told
    return numbers(folder / "run")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_cluster(3, cpus=3) as cluster:  # two of them hold ranks and engines, wherever those are
        yield cluster


def test_engines_that_are_lost_change_no_number(
    demo_files: Any, tmp_path: Path, nodes: Any, by_torchrun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once: the numbers are those of torchrun."""
    gates = Gates(tmp_path / "gates", "0-2")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def disturb(events: Events) -> None:
        events.wait_for_step(1)
        lose_all_engines(events)
        gates.open("0-2")

    cluster = {"trainer_nodes": 2, "engines": 2}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **RUN, cluster=cluster)
    assert train_on(nodes, config, disturb) == 0
    assert numbers(tmp_path / "run") == by_torchrun
    told = (tmp_path / "run/logs/cluster.log").read_text()
    for number in (0, 1):
        assert f"engine {number} exited with status -9; restarting (1 of 3)" in told


@pytest.mark.whole_runs
def test_engines_on_the_trainers_machines_have_the_numbers_of_torchrun(
    demo_files: Any,
    tmp_path: Path,
    nodes: Any,
    by_torchrun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank and an engine in turns on each of two of three machines; two drivers; all output in the run's folder."""
    gates = Gates(tmp_path / "gates", "0-1")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def look(events: Events) -> None:
        ranks, engines = (
            [node_of(nodes, pid) for pid in found] for found in (events.ranks(), map(events.engine, (0, 1)))
        )
        assert ranks[0] is not ranks[1]
        assert engines == ranks
        with pytest.raises(NoRunError, match="run run cannot be scaled"):
            RunControl().scale(3)
        gates.open("0-1")

    cluster = {"launcher": "ray", "trainer_nodes": 2, "engines": 2, "placement": "colocated"}
    turns = {"rollout": {"sleep": True, "workers": 2}, "backend": {"device": "cpu", "offload": True}}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **RUN | turns, cluster=cluster)
    assert train_on(nodes, config, look) == 0
    assert numbers(tmp_path / "run") == by_torchrun
    shown = capsys.readouterr().out
    assert "2 rollout workers: processes" in shown
    assert "ray: placing 2 ranks on 2 nodes with 2 CPU each; 2 engines on the same nodes" in shown
    assert shown.count(f"step {STEPS}/{STEPS}") == 1
    logs = {path.name for path in (tmp_path / "run/logs").iterdir()}
    assert logs == {"cluster.log", "rank-0.log", "rank-1.log", "engine-0.log", "engine-1.log"}


@pytest.mark.whole_runs
def test_what_is_lost_and_what_joins_or_leaves_changes_no_number(
    demo_files: Any,
    tmp_path: Path,
    nodes: Any,
    by_torchrun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All engines at once, a rank, and a machine, whose place a third one takes; a third engine for a while."""
    gates = Gates(tmp_path / "gates", "0-2", "0-3", "1-2")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def disturb(events: Events) -> None:
        events.wait_for_step(1)
        lose_all_engines(events)
        refuse_other_numbers_of_engines()
        scale(3)
        events.wait_for("rollout server joined", count=3, log="../log.txt")
        main(["cluster", "status"])
        gates.open("0-2")
        events.wait_for_checkpoint(2)
        scale(2)
        kill(events.ranks()[1])
        gates.open("0-3")
        events.ranks(count=2)
        events.wait_for_checkpoint(3)
        (lost, *_) = [node for node in map(of_nodes, events.ranks(count=2)) if node is not nodes.head_node]
        nodes.remove_node(lost, allow_graceful=False)
        gates.open("1-2")

    def of_nodes(pid: int) -> Any:
        return node_of(nodes, pid)

    cluster = {"trainer_nodes": 2, "engines": 2}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **RUN, cluster=cluster)
    assert train_on(nodes, config, disturb) == 0
    assert numbers(tmp_path / "run") == by_torchrun
    told = (tmp_path / "run/logs/cluster.log").read_text()
    for number in (0, 1):
        assert f"engine {number} exited with status -9; restarting (1 of 3)" in told
    assert "engine 2 joins: 3 of 3 engines" in told
    assert "engine 2 leaves" in told
    assert re.search(r"rank 1 was lost .*; restarting all ranks from the newest checkpoint \(1 of 3\)", told)
    assert re.search(r"lost .*; restarting all ranks from the newest checkpoint \(2 of 3\)", told)
    shown = capsys.readouterr().out
    assert "run: 2 -> 3 engines, between steps" in shown
    assert shown.count("run: 3 of 3 engines ready, 0 starting\n  http://") == 2
    assert "run: 3 -> 2 engines, between steps\n" in shown
    assert "run: 2 of 2 engines ready, 0 starting\n" in shown


def lose_all_engines(events: Events) -> None:
    """Kill both engines of a run at once, and wait until others have taken their place."""
    for pid in [events.engine(0), events.engine(1)]:
        kill(pid)
    for number in (0, 1):
        events.engine(number, count=2)
    events.wait_for("rollout server restarted, resending weights", log="rank-0.log")


def scale(engines: int) -> None:
    main(["cluster", "scale", "--engines", str(engines), "--run", "run", "--wait", str(LIMIT_S)])


def refuse_other_numbers_of_engines() -> None:
    with pytest.raises(CapacityError, match="too small for 7 more engines"):
        RunControl().scale(9)
    with pytest.raises(NoRunError, match="at least one engine"):
        RunControl().scale(0)
    with pytest.raises(NoRunError, match="expected --run and one of run, found other"):
        RunControl("other")


@pytest.mark.whole_runs
def test_engines_run_ahead_of_training_with_the_numbers_of_ranks_without_ray(
    demo_files: Any, tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step ahead, and one is lost. Each sequence is of one version of the weights, whoever is faster."""
    rollout = {"max_staleness": 1, "partial_rollout": False}
    settings = RUN | {"steps": 3, "checkpoint": {"every": 0, "at_end": False}, "rollout": rollout}
    files = (str(demo_files.model), str(demo_files.train), str(tmp_path / "ranks"))
    harness.run_ranks(2, train_on_rank, *files, settings)
    gates = Gates(tmp_path / "gates", "0-2")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def disturb(events: Events) -> None:
        gates.wait_until_reached("0-2")  # sampled while the trainer has the first step
        kill(events.engine(0))
        events.wait_for("engine 0 exited with status -9; restarting")
        gates.open("0-2")

    cluster = {"trainer_nodes": 2, "engines": 2}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "ray", **settings, cluster=cluster)
    assert train_on(nodes, config, disturb) == 0
    found = numbers(tmp_path / "ray")
    for name in ("completion/staleness_mean", "completion/staleness_max"):
        assert [line[name] for line in found] == [0, 1, 1]  # of the weights before the first step, then after it
    assert found == numbers(tmp_path / "ranks")


@pytest.mark.thorough
def test_a_lost_engine_on_the_trainers_machines_changes_no_number(
    demo_files: Any, tmp_path: Path, nodes: Any, by_torchrun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines, which share devices, all start again."""
    gates = Gates(tmp_path / "gates", "0-2")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def disturb(events: Events) -> None:
        events.wait_for_checkpoint(1)
        kill(events.engine(1))
        events.ranks(count=2)
        gates.open("0-2")

    cluster = {"trainer_nodes": 2, "engines": 2, "placement": "colocated"}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **RUN, cluster=cluster)
    assert train_on(nodes, config, disturb) == 0
    assert numbers(tmp_path / "run") == by_torchrun
    told = (tmp_path / "run/logs/cluster.log").read_text()
    why = "colocated engine 1 exited with status -9"
    assert f"{why}; restarting all ranks from the newest checkpoint (1 of 3)" in told


@pytest.mark.thorough
def test_a_run_goes_on_with_the_machines_that_are_left(
    demo_files: Any, tmp_path: Path, nodes: Any, by_torchrun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(tmp_path / "gates", "0-2")
    monkeypatch.setenv("MOE_REPLAY_GATES", str(gates.folder))

    def disturb(events: Events) -> None:
        events.wait_for_checkpoint(1)
        for node in list(nodes.worker_nodes):
            nodes.remove_node(node, allow_graceful=False)
        gates.open("0-2")

    cluster = {"trainer_nodes": 2, "engines": 1, "node_timeout_s": 5}
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **RUN, cluster=cluster)
    assert train_on(nodes, config, disturb) == 0
    found = numbers(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert found[0] == by_torchrun[0]
    for name in ("reward/mean", "completion/length_mean", "loss/entropy"):
        assert found[1][name] == pytest.approx(by_torchrun[1][name], rel=1e-4)
    told = (tmp_path / "run/logs/cluster.log").read_text()
    assert "1 of 2 trainer nodes left; continuing with 1 rank" in told
