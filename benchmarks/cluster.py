"""Cost of Ray: steps of one recipe on Ray and under torchrun with two servers, alternating, and their startup time.

    python benchmarks/cluster.py             # two ranks and two Transformers engines on this machine, a tiny model
    python benchmarks/cluster.py --prompts 48 256 --pairs 20 5

Both runs stay up, and one takes a step while the reward function of the other waits, so that other load on the machine
slows both equally; in every second pair the other run goes first. A step lasts from the last reward of one step to that
of the next: scoring, updates, weight sync, sampling. Startup is the time from the first command to the rewards of the
first step, while the other run waits or does not exist yet. CPU time is that of all processes of a run. The second
table splits it by process, per step and per second of waiting: names with "Ray:" are Ray's own processes, all others
run our code.
"""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from moe_replay import demo

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "moe_replay.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
GENERATIONS = 4
WARM_UP = 2
LIMIT_S = 900.0
IDLE_S, END_S = 20.0, 120.0
TICKS = os.sysconf("SC_CLK_TCK")
PARTS = {
    "torch.distributed.run": "command, torchrun", "ray::RankActor": "ranks", "ray::EngineActor": "actors of engines",
    "ray::RunState": "state actor", "gcs_server": "Ray: GCS",
    "raylet/raylet": "Ray: raylet", "dashboard/agent.py": "Ray: agents", "ray::DashboardAgent": "Ray: agents",
    "runtime_env/agent": "Ray: agents", "ray::RuntimeEnvAgent": "Ray: agents", "log_monitor.py": "Ray: log monitor",
    "autoscaler": "Ray: autoscaler", "ray::": "Ray: idle workers",
}  # fmt: skip
"""Parts of a run, by what is in the command of a process."""
BELOW = {
    "ray::EngineActor": "engines", "cli.main rollout": "engines", "torch.distributed.run": "ranks",
    "dashboard/dashboard.py": "Ray: dashboard",
}  # fmt: skip
"""The same for processes below one with that in its command, and for it."""


# ---- in rank 0 of a run ----------------------------------------------------------------------------------------------


@functools.cache
def _benchmark() -> socket.socket:
    """The connection to the benchmark."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["MOE_REPLAY_BENCHMARK"])
    return connection


def gate(completions: list[str], **columns: Any) -> list[float]:
    """The reward of both runs; the last call of a step waits for its turn."""
    with _LOCK:
        _SCORED.append(len(completions))
        is_last = sum(_SCORED) % int(os.environ["MOE_REPLAY_BENCHMARK_SAMPLES"]) == 0
    if is_last:
        _benchmark().sendall(b".")
        _benchmark().recv(1)  # nothing, when the benchmark has ended
    return [float(len(set(text))) for text in completions]


_SCORED: list[int] = []
_LOCK = threading.Lock()


# ---- a run -----------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Seconds of wall time, and of CPU time of the processes of each part."""

    wall: float
    parts: Mapping[str, float]

    @property
    def cpu(self) -> float:
        """CPU time of all processes."""
        return sum(self.parts.values())


Start = Callable[[IO[bytes]], Sequence[subprocess.Popen[bytes]]]


class Run:
    """A run that takes a step when it is told to.

    start   starts its processes with a file for their output, and returns them
    """

    def __init__(self, name: str, folder: Path, start: Start) -> None:
        self._log = folder / f"{name}.log"
        path = str(folder / f"{name}.socket")
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(path)
            listener.listen()
            listener.settimeout(1.0)
            os.environ["MOE_REPLAY_BENCHMARK"] = path
            began = time.monotonic()
            self._processes = start(log)
            self._own = {process.pid for process in self._processes}
            self._connection = self._accept(listener, began + LIMIT_S)
            self._wait()
            self.start_s = time.monotonic() - began

    def _accept(self, listener: socket.socket, end: float) -> socket.socket:
        while time.monotonic() < end and all(process.poll() is None for process in self._processes):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(LIMIT_S)
            return connection
        raise SystemExit(self._log.read_text())

    def _wait(self) -> None:
        if not self._connection.recv(1):
            raise SystemExit(self._log.read_text())

    def step(self) -> Cost:
        """Take a step."""
        began, before = time.monotonic(), self.cpu()
        self._connection.sendall(b".")
        self._wait()
        wall, after = time.monotonic() - began, self.cpu()
        return Cost(wall, {part: seconds - before.get(part, 0.0) for part, seconds in after.items()})

    def cpu(self) -> dict[str, float]:
        """Return the CPU time of the processes of each part so far, those that have ended included."""
        stats = {one.pid: one for one in map(_stat, Path("/proc").glob("[0-9]*")) if one is not None}
        found: dict[str, float] = defaultdict(float)
        for pid in stats:
            if line := self._line(pid, stats):
                found[part_of(line)] += stats[pid].ticks / TICKS
        return dict(found)

    def _line(self, pid: int, stats: Mapping[int, Stat]) -> list[str]:
        """Return the commands of a process and of those above it, from the first one of this run down; or nothing."""
        commands = []
        while pid in stats:
            commands.append(stats[pid].command)
            if pid in self._own:
                return commands[::-1]
            pid = stats[pid].parent
        return []

    def close(self) -> None:
        """End all processes, the servers last."""
        for process in reversed(self._processes):
            process.terminate()
            self._connection.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def part_of(line: Sequence[str]) -> str:
    """Return the part that a process belongs to, from the commands above it and its own."""
    own = (part for word, part in PARTS.items() if word in line[-1])
    below = (part for word, part in BELOW.items() if any(word in command for command in line))
    return next(chain(own, below), "command, torchrun")


class Stat(NamedTuple):
    """A process.

    command   its first words
    ticks     of CPU, with those of children that have ended
    """

    pid: int
    parent: int
    command: str
    ticks: int


def _stat(folder: Path) -> Stat | None:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return None
    return Stat(int(folder.name), int(fields[1]), " ".join(words[:4]), sum(map(int, fields[11:15])))


def settings(files: demo.DemoFiles, output: Path, prompts: int) -> list[str]:
    """The options that both runs have."""
    options = {
        "output": output, "steps": 10**6, "model.path": files.model, "model.dtype": "float32", "data.path": files.train,
        "data.max_prompt_length": 32, "rollout.prompts_per_step": prompts, "rollout.num_generations": GENERATIONS,
        "rollout.max_tokens": 16, "replay.mode": "r3", "replay.score_native_every": 0, "backend.device": "cpu",
        "checkpoint.every": 0, "reward.functions": "benchmarks.cluster:gate", "reward.workers": 0,
    }  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def with_torchrun(words: Sequence[str], files: demo.DemoFiles, log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
    """Start two servers and two ranks by hand."""
    token, ports = {"MOE_REPLAY_TOKEN": secrets.token_urlsafe(16)}, _free_ports(2)
    server = [*COMMAND, "rollout", "--model", str(files.model), "--engine", "transformers", "--dtype", "float32"]
    started = [_start([*server, "--port", str(port)], log, token) for port in ports]
    for port, process in zip(ports, started, strict=True):
        while socket.socket().connect_ex(("127.0.0.1", port)) and process.poll() is None:
            time.sleep(0.1)
    rollout = ["--rollout.engine", "rollout_server", "--rollout.urls", *(f"http://127.0.0.1:{port}" for port in ports)]
    return [*started, _start([*TORCHRUN, *COMMAND[1:], "train", *words, *rollout], log, token)]


def with_ray(words: Sequence[str], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
    """Start all of that by one command."""
    cluster = ["--cluster.launcher", "ray", "--cluster.ranks_per_node", "2", "--cluster.engines", "2"]
    words = [*COMMAND, "train", *words, *cluster, "--rollout.engine", "transformers"]
    return [_start(words, log, {"RAY_ADDRESS": ""})]


def _start(words: Sequence[str], log: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT, env=os.environ | environment)


def _free_ports(count: int) -> list[int]:
    """Free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


# ---- both in turns ---------------------------------------------------------------------------------------------------


def in_turns(torchrun: Run, ray: Run, pairs: int) -> list[tuple[Cost, Cost]]:
    """Take steps of both in turns; the costs of each pair."""
    found = []
    for number in range(WARM_UP + pairs):
        if number % 2:
            second, first = ray.step(), torchrun.step()
        else:
            first, second = torchrun.step(), ray.step()
        found.append((first, second))
    return found[WARM_UP:]


def waiting(runs: Sequence[Run]) -> list[dict[str, float]]:
    """Return the CPU time of each part of each run in a second in which they wait."""
    before = [run.cpu() for run in runs]
    time.sleep(IDLE_S)
    after = [run.cpu() for run in runs]
    return [
        {part: (seconds - first.get(part, 0.0)) / IDLE_S for part, seconds in last.items()}
        for first, last in zip(before, after, strict=True)
    ]


def mean(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part."""
    return {part: statistics.mean(one.get(part, 0.0) for one in costs) for part in {*chain(*costs)}}


def row(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Medians of both, of their difference in each pair and of their ratio, with its quartiles."""
    ratios = [ray / torchrun for torchrun, ray in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    torchrun, ray = (f"{statistics.median(values):.3f} s" for values in zip(*pairs, strict=True))
    more = f"{1000 * statistics.median(ray - torchrun for torchrun, ray in pairs):+.0f} ms"
    return f"| {name} | {torchrun} | {ray} | {more} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |"


def measure(prompts: int, pairs: int) -> None:
    """Print the tables of steps of so many prompts."""
    os.environ["MOE_REPLAY_BENCHMARK_SAMPLES"] = str(prompts * GENERATIONS)
    with tempfile.TemporaryDirectory() as folder, both(Path(folder), prompts) as (torchrun, ray):
        found = in_turns(torchrun, ray, pairs)
        idle = waiting([torchrun, ray])
    print(f"\n{pairs} pairs of steps of {prompts} x {GENERATIONS} samples\n")
    print("|  | torchrun | Ray | more in a pair | ratio in a pair | half of all pairs |\n|---|---|---|---|---|---|")
    print(row("step, wall time", [(one.wall, other.wall) for one, other in found]))
    print(row("step, CPU time", [(one.cpu, other.cpu) for one, other in found]))
    more, ratio = ray.start_s - torchrun.start_s, ray.start_s / torchrun.start_s
    print(f"| start | {torchrun.start_s:.1f} s | {ray.start_s:.1f} s | {more:+.1f} s | {ratio:.2f} | |")
    print("\n| CPU time, ms | torchrun, a step | Ray, a step | torchrun, a second waiting | Ray, a second waiting |")
    print("|---|---|---|---|---|")
    columns = [*(mean([pair[place].parts for pair in found]) for place in (0, 1)), *idle]
    for part in sorted({*columns[0], *columns[1]}, key=lambda name: (name.startswith("Ray"), name)):
        print(_milliseconds(part, [column.get(part, 0.0) for column in columns]))
    print(_milliseconds("all", [sum(column.values()) for column in columns]), flush=True)


def _milliseconds(name: str, values: Sequence[float]) -> str:
    return f"| {name} | {' | '.join(f'{1000 * seconds:.0f}' if seconds else '' for seconds in values)} |"


@contextmanager
def both(folder: Path, prompts: int) -> Iterator[list[Run]]:
    """Both runs, which wait at the end of their first step."""
    files = demo.prepare(folder / "demo", quick=True)
    with ExitStack() as stack:
        runs: list[Run] = []
        for name in ("torchrun", "ray"):
            words = settings(files, folder / name, prompts)
            start = {
                "torchrun": functools.partial(with_torchrun, words, files),
                "ray": functools.partial(with_ray, words),
            }
            runs.append(Run(name, folder, start[name]))
            stack.callback(runs[-1].close)
        yield runs


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[30], help="of steps, for each number of prompts")
    parser.add_argument("--prompts", type=int, nargs="+", default=[8], help="of a step")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends both runs
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    for prompts, pairs in zip(arguments.prompts, arguments.pairs, strict=True):
        measure(prompts, pairs)


if __name__ == "__main__":
    main()
