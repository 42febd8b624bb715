"""The files of examples/cluster, with stand-ins for SLURM and Kubernetes and everything else real."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from moe_replay.cli.main import main
from moe_replay.cluster.capacity import Node, Resources
from moe_replay.tools import dry_run
from moe_replay.train.config.file import to_toml
from tests.train.runs import tiny_config

pytestmark = pytest.mark.slow

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
LIMIT_S = 600.0
SRUN = """while [[ $1 == --* ]]; do
    [[ $1 == --output=* ]] && exec > "${1#--output=}" 2>&1
    shift
done
exec "$@"
"""
SCONTROL = """if [[ $1 == show ]]; then tr ' ' '\\n' <<< "$3"; else echo "$@" >> "$REQUEUED"; fi
"""


# ---- KubeRay ---------------------------------------------------------------------------------------------------------


def test_the_machines_of_the_rayjob_hold_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    nodes = [
        _node(group["template"]["spec"]["containers"][0]["resources"]["limits"])
        for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for _ in range(group.get("replicas", 1))
    ]
    monkeypatch.setattr(dry_run, "nodes_of", lambda config: nodes)
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(job["spec"]["entrypoint"].replace("/shared/recipes/", "recipes/"))
    assert program == "moe-replay"
    with pytest.raises(SystemExit):  # neither data nor model are here
        main([*words, "--dry-run"])
    told = capsys.readouterr()
    assert re.search(r"^cluster  2 trainer nodes .* 4 engines with 2 GPUs, .* on 4 nodes$", told.out, re.M)
    assert re.findall(r"not ready: (\w+ \w+)", told.err) == ["no data", "the model"]


def _node(limits: dict[str, str]) -> Node:
    has = Resources(float(limits["cpu"]), float(limits.get("nvidia.com/gpu", 0)))
    return Node("pod", has, has)


# ---- SLURM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_are_valid(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    head = script.read_text().split("set -euo pipefail")[0]
    assert f"sbatch {script.name} recipe.toml" in head
    assert "#SBATCH --signal=B:TERM@300" in head


def start_script(name: str, folder: Path, *words: str, commands: dict[str, str], **variables: str) -> Any:
    """Start a script as SLURM would on two machines, both of which are this one."""
    place = folder / "commands"
    place.mkdir()
    for command, text in ({"srun": SRUN, "scontrol": SCONTROL} | commands).items():
        (place / command).write_text(f"#!/bin/bash\n{text}\n")
        (place / command).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "HOME": str(folder),  # where Ray looks for the token of its clusters
        "REQUEUED": str(folder / "requeued"),
        "STARTED": str(folder / "started"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost localhost",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    return subprocess.Popen(
        ["bash", FOLDER / name, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_script(name: str, folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run a script with the commands that are installed: its status and what it printed."""
    ours = {"moe-replay": f'exec {sys.executable} -m moe_replay.cli.main "$@"'}
    with start_script(name, folder, *words, commands=ours, **variables) as script:
        told, _ = script.communicate(timeout=LIMIT_S)
    return script.returncode, told


SLEEPING = "exec sleep infinity"
INTERRUPTED = 'trap "exit 75" TERM; touch "$STARTED"; while :; do sleep 0.05; done'
ON_RAY = {"ray": f"[[ $1 == start ]] || exit 0; {SLEEPING}", "python": "exit 0", "moe-replay": INTERRUPTED}
WITH_TORCHRUN = {"curl": "exit 0", "moe-replay": SLEEPING, "torchrun": INTERRUPTED}


@pytest.mark.parametrize(
    ("script", "words", "commands"),
    [("slurm-ray", ("recipe.toml",), ON_RAY), ("slurm-torchrun", ("recipe.toml", "model"), WITH_TORCHRUN)],
)
def test_a_run_that_saves_before_the_time_limit_is_queued_again(
    script: str, words: tuple[str, ...], commands: dict[str, str], tmp_path: Path
) -> None:
    """SLURM signals the script alone; Ray and servers go on until the run has ended, and end with it."""
    with start_script(f"{script}.sbatch", tmp_path, *words, commands=commands) as started:
        wait_until((tmp_path / "started").exists)
        started.terminate()
        told, _ = started.communicate(timeout=LIMIT_S)  # until nothing is left that could write
    assert started.returncode == 75, told
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("script", "words", "commands"),
    [
        ("slurm-ray", ("recipe.toml",), ON_RAY | {"ray": "[[ $1 == start ]] || exit 0; exit 3", "python": "exit 1"}),
        ("slurm-torchrun", ("recipe.toml", "model"), WITH_TORCHRUN | {"curl": "exit 1", "moe-replay": "exit 3"}),
    ],
)
def test_a_job_whose_servers_do_not_start_ends(
    script: str, words: tuple[str, ...], commands: dict[str, str], tmp_path: Path
) -> None:
    with start_script(f"{script}.sbatch", tmp_path, *words, commands=commands) as started:
        told, _ = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 1, told
    assert not (tmp_path / "started").exists()


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def recipe_of(demo_files: Any, folder: Path, **overrides: Any) -> str:
    settings = {"steps": 1, "backend": {"device": "cpu"}, "checkpoint": {"every": 0}} | overrides
    config = tiny_config(demo_files.model, demo_files.train, folder / "run", **settings)
    (folder / "recipe.toml").write_text(to_toml(config))
    return str(folder / "recipe.toml")


def processes_with(text: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [line for line in [file.read_text()] if text in line]
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.engine
@pytest.mark.whole_runs
def test_ray_under_slurm_with_the_real_vllm(
    demo_files: Any, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on one Ray node and vLLM on the other; the rank replays its routes, and the probe compares its weights."""
    pytest.importorskip("vllm")
    # The last one saves a third of the CPU time of a start.
    for name, value in {
        "LOGGING_LEVEL": "WARNING",
        "CPU_OMP_THREADS_BIND": "nobind",
        "ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        monkeypatch.setenv(f"VLLM_{name}", value)
    recipe = recipe_of(
        demo_files,
        tmp_path,
        steps=2,
        rollout={
            "engine": "vllm",
            "dtype": "float32",
            "options": {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**26},
            "probe_tolerance": 1e-3,
        },
        cluster={"launcher": "ray", "engines": 1},
    )
    options = "--object-store-memory 80000000"
    status, told = run_script("slurm-ray.sbatch", tmp_path, recipe, RAY_PORT=str(port), RAY_OPTIONS=options)
    assert status == 0, told
    assert f":{port} (2 nodes, 2 CPUs)" in told
    assert "step 2/2" in told
    assert not (tmp_path / "requeued").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["routing/replayed_fraction"] > 0.5 for line in lines)
    assert all(line["mismatch/rollout_vs_old/k3_kl"] < 1e-6 for line in lines)
    wait_until(lambda: not processes_with(f":{port}"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.engine
@pytest.mark.whole_runs
def test_torchrun_and_a_server_under_slurm(demo_files: Any, tmp_path: Path, port: int) -> None:
    rollout = {"engine": "rollout_server", "urls": ["http://replaced:1"]}
    recipe = recipe_of(demo_files, tmp_path, rollout=rollout)
    status, told = run_script(
        "slurm-torchrun.sbatch",
        tmp_path,
        recipe,
        str(demo_files.model),
        RANKS_PER_NODE="1",
        RDZV_PORT="0",
        SERVER_PORT=str(port),
        SERVER_OPTIONS="--engine transformers",
        MAX_LENGTH="64",
    )
    assert status == 0, told + (tmp_path / "server-localhost.log").read_text()
    assert "step 1/1" in told
