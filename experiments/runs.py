"""Runs arms: several at a time, each in a separate process, within a time limit; the same command continues them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import results
from experiments.arms import Arm
from experiments.model import prepare
from experiments.scales import Scale
from moe_replay.errors import ExitStatus

ROOT = Path(__file__).resolve().parents[1]
Running = dict[Arm, tuple[subprocess.Popen[bytes], float]]
"""Processes of arms, and when they were started."""
LAST_S = 45.0
"""Seconds reserved before the time limit for runs to finish their step and save."""


def run_arms(
    arms: Sequence[Arm],
    scale: Scale,
    device: str,
    work: Path,
    *,
    together: int = 1,
    minutes: float = math.inf,
    into: Path = results.FOLDER,
) -> bool:
    """Run the arms that have no finished result; return whether all of them have one now."""
    until = time.monotonic() + 60 * minutes
    data = prepare(scale, device, work, minutes)
    waiting = [arm for arm in arms if not any(run.finished for run in results.read([arm], into))]
    running: Running = {}

    def start(arm: Arm) -> subprocess.Popen[bytes]:
        return _start(arm, scale, data, work, device, together)

    def keep(arm: Arm, status: int, seconds: float) -> None:
        _keep(arm, scale, work, device, status, seconds, into)

    try:
        _run_all(waiting, running, together, until, start, keep)
    finally:
        for process, _ in running.values():
            process.kill()
    return all(any(run.finished for run in results.read([arm], into)) for arm in arms)


def _run_all(
    waiting: list[Arm],
    running: Running,
    together: int,
    until: float,
    start: Callable[[Arm], subprocess.Popen[bytes]],
    keep: Callable[[Arm, int, float], None],
) -> None:
    """Run arms until there are none left, or until it is time to stop them."""
    stopping = False
    while running or (waiting and not stopping):
        while waiting and len(running) < together and not stopping:
            arm = waiting.pop(0)
            print(f"{arm.name}: started", flush=True)
            running[arm] = (start(arm), time.monotonic())
        time.sleep(0.2)
        if not stopping and time.monotonic() > until - LAST_S:
            stopping = True
            for process, _ in running.values():
                process.send_signal(signal.SIGTERM)  # it finishes its step, saves, and ends
        for arm in [arm for arm, (process, _) in running.items() if process.poll() is not None]:
            process, began = running.pop(arm)
            keep(arm, process.returncode, time.monotonic() - began)


def output_of(arm: Arm, work: Path) -> Path:
    """Return the folder of an arm's run."""
    return work / "runs" / arm.name


def _start(arm: Arm, scale: Scale, data: Path, work: Path, device: str, together: int) -> subprocess.Popen[bytes]:
    """Start `moe-replay train` on the recipe of an arm, which is written next to its log."""
    from moe_replay.train.config.file import to_toml
    from moe_replay.train.config.train_config import TrainConfig

    recipe = work / "runs" / f"{arm.name}.toml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    settings = arm.settings(scale, data, output_of(arm, work), device)
    recipe.write_text(to_toml(TrainConfig.model_validate(settings)), encoding="utf-8")
    command = [sys.executable, "-m", "moe_replay.cli.main", "train", str(recipe)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Trainer and engine of each run would otherwise use all cores: eight runs did not start within minutes.
    threads = str(max(1, (os.cpu_count() or 1) // (2 * together)))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
    with open(recipe.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _keep(arm: Arm, scale: Scale, work: Path, device: str, status: int, seconds: float, into: Path) -> None:
    path = results.write(arm, output_of(arm, work), scale.rl_steps, device, seconds, into)
    (result,) = results.read([arm], into)
    steps = f"{result.steps} of {scale.rl_steps} steps"
    print(f"{arm.name}: status {status}, {steps} after {seconds:.0f} s, {path.name}", flush=True)
    if status not in (ExitStatus.OK, ExitStatus.INTERRUPTED):
        log = (work / "runs" / f"{arm.name}.log").read_text(encoding="utf-8", errors="replace")
        print(*(f"  | {line}" for line in log.splitlines()[-12:]), sep="\n", flush=True)
