"""Real Ray clusters of several nodes on this machine, and runs on them that tests disturb."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 600.0
MB = 2**20


@contextmanager
def ray_cluster(nodes: int, cpus: int = 2) -> Iterator[Any]:
    """A cluster of so many nodes without a dashboard; this process is not connected to it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    settings: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": 80 * MB, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**settings)
        yield cluster
    finally:
        cluster.shutdown()


def train_on(cluster: Any, config: Any, disturb: Callable[[Events], None] | None = None) -> int:
    """Run a config on a cluster, as the command does, while `disturb` looks at what happens; the exit status."""
    from moe_replay.cli.train import run_rank
    from moe_replay.cluster.driver import run_on_ray

    settings = config.cluster.model_copy(update={"launcher": "ray", "address": cluster.address})
    config = config.model_copy(update={"cluster": settings})
    failures: list[BaseException] = []

    def disturbing() -> None:
        try:
            assert disturb is not None
            disturb(Events(Path(config.output)))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=disturbing, daemon=True)
    if disturb is not None:
        thread.start()
    status = run_on_ray(config, run_rank)
    if disturb is not None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert not failures, failures
    return status


class Events:
    """What a run on Ray has said so far, in the logs of its folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.log = run / "logs" / "cluster.log"

    def wait_for(self, pattern: str, count: int = 1, log: str = "cluster.log") -> re.Match[str]:
        """Wait until a log has so many lines with a pattern; return the last match."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            path = self.run / "logs" / log
            text = path.read_text() if path.exists() else ""
            if len(found := list(re.finditer(pattern, text))) >= count:
                return found[count - 1]
            time.sleep(0.05)
        raise AssertionError(f"{count} times {pattern!r} not in\n{text}")

    def engine(self, number: int, count: int = 1) -> int:
        """The process of an engine, once it is ready for the `count`th time."""
        return int(self.wait_for(rf"engine {number}: ready at .* process (\d+)", count)[1])

    def ranks(self, count: int = 1) -> list[int]:
        """The processes of all ranks, once they are started for the `count`th time."""
        return [int(pid) for pid in self.wait_for(r"processes ([\d, ]+);", count)[1].split(", ")]

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        self.wait_for(rf"step {step}/", log="rank-0.log")

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until the checkpoint of a step is complete."""
        end = time.monotonic() + LIMIT_S
        while not (self.run / "checkpoints" / f"step-{step:08d}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def node_of(cluster: Any, pid: int) -> Any:
    """The node of a cluster on which a process runs: the one whose raylet has started it, or one above it."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in _nodes(cluster)}
    while pid not in raylets:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return raylets[pid]


def _nodes(cluster: Any) -> list[Any]:
    return [cluster.head_node, *cluster.worker_nodes]


class Gates:
    """Steps of a run that wait until they are let through: "1-2" is the second step after the first restart."""

    def __init__(self, folder: Path, *held: str) -> None:
        self.folder = folder
        folder.mkdir()
        for name in held:
            (folder / name).touch()

    def open(self, name: str) -> None:
        (self.folder / name).unlink()

    def wait_until_reached(self, name: str) -> None:
        """Wait until a step waits at its gate."""
        end = time.monotonic() + LIMIT_S
        while not _reached(self.folder / name).exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def gated(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """The reward of tiny runs, of four prompts a step; it waits at gates in the folder that $MOE_REPLAY_GATES names.

    Samples of prompts that are drawn again, because their engine was lost, belong to the same step.
    """
    from tests.train.runs import closeness

    if "MOE_REPLAY_GATES" in os.environ:
        _PROMPTS.add(repr((prompts[0], sorted(columns.items()))))
        step = -(-len(_PROMPTS) // 4)
        gate = Path(os.environ["MOE_REPLAY_GATES"], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{step}")
        if gate.exists():
            _reached(gate).touch()
        end = time.monotonic() + LIMIT_S
        while gate.exists() and time.monotonic() < end:
            time.sleep(0.05)
    return closeness(prompts=prompts, completions=completions, **columns)


def _reached(gate: Path) -> Path:
    return gate.with_name(f"{gate.name}-reached")


_PROMPTS: set[str] = set()
