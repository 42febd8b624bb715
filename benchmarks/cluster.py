"""What a Ray cluster costs: steps and start of one recipe on Ray, beside the same under torchrun with two servers.

    python benchmarks/cluster.py             # two ranks and two Transformers engines on this machine, a tiny model
    python benchmarks/cluster.py --steps 60

Both runs take place at the same time, so that other load on the machine slows both alike. A row is the median over the
steps after the first ones; the start is the time from the command to the first step, servers included.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from moe_replay import demo

COMMAND = [sys.executable, "-m", "moe_replay.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WARM_UP = 3
PHASES = ("step", "rollout", "score", "train", "sync")


def settings(files: demo.DemoFiles, output: Path, steps: int) -> list[str]:
    """The options that both runs have."""
    options = {
        "output": output, "steps": steps, "model.path": files.model, "model.dtype": "float32", "data.path": files.train,
        "data.max_prompt_tokens": 32, "rollout.prompts_per_step": 8, "rollout.num_generations": 4,
        "rollout.max_tokens": 16, "replay.mode": "r3", "replay.compare_every": 0, "backend.device": "cpu",
        "checkpoint.every": 0,
    }  # fmt: skip
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def free_ports(count: int) -> list[int]:
    """Free ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run(words: Sequence[str], environment: dict[str, str]) -> float:
    """Run a command to its end; returns the seconds until it has completed a step."""
    began, first = time.monotonic(), float("nan")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.split()[:1] == ["step"] and first != first:
                first = time.monotonic() - began
    if process.returncode:
        raise SystemExit("".join(lines))
    return first


def with_torchrun(words: Sequence[str], files: demo.DemoFiles) -> float:
    """Start two servers and two ranks by hand; returns the seconds until the first step is complete."""
    token, ports = {"MOE_REPLAY_TOKEN": secrets.token_urlsafe(16)}, free_ports(2)
    began = time.monotonic()
    server = [*COMMAND, "rollout", "--model", str(files.model), "--engine", "transformers", "--dtype", "float32"]
    servers = [subprocess.Popen([*server, "--port", str(port)], env=os.environ | token) for port in ports]
    try:
        for port in ports:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        ready = time.monotonic() - began
        rollout = ["--rollout.engine", "vllm_server", "--rollout.urls", *urls]
        return ready + run([*TORCHRUN, *COMMAND[1:], "train", *words, *rollout], token)
    finally:
        for process in servers:
            process.terminate()
        for process in servers:
            process.wait()


def with_ray(words: Sequence[str]) -> float:
    """Start all of that by one command; returns the seconds until the first step is complete."""
    cluster = ["--cluster.kind", "ray", "--cluster.ranks_per_node", "2", "--cluster.engines", "2"]
    return run([*COMMAND, "train", *words, *cluster, "--rollout.engine", "transformers"], {"RAY_ADDRESS": ""})


def medians(output: Path) -> dict[str, float]:
    """Seconds of each phase, in the median over the steps after the first ones."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    return {phase: statistics.median(line[f"time/{phase}"] for line in lines) for phase in PHASES}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        files = demo.prepare(Path(folder, "demo"), quick=True)
        starts: dict[str, float] = {}
        outputs = {name: Path(folder, name) for name in ("torchrun", "ray")}
        words = {name: settings(files, output, arguments.steps) for name, output in outputs.items()}

        def torchrun() -> None:
            starts["torchrun"] = with_torchrun(words["torchrun"], files)

        beside = threading.Thread(target=torchrun)
        beside.start()
        starts["ray"] = with_ray(words["ray"])
        beside.join()
        found = {name: medians(output) for name, output in outputs.items()}
    print(f"| {'':8} | torchrun | Ray | ratio |\n|---|---|---|---|")
    rows = {"start": starts} | {phase: {name: one[phase] for name, one in found.items()} for phase in PHASES}
    for name, row in rows.items():
        print(f"| {name:8} | {row['torchrun']:.3f} s | {row['ray']:.3f} s | {row['ray'] / row['torchrun']:.3f} |")


if __name__ == "__main__":
    main()
