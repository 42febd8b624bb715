"""Training runs of the Megatron-Core backend with vLLM on the same device: R2 and R3, padded and packed.

    python benchmarks/megatron_runs.py                  # tiny, one run on the CPU: a smoke test
    python benchmarks/megatron_runs.py --device cuda    # 8 layers, hidden size 1024, 64 experts, top 8, bfloat16

Each run is a process with its own vLLM. If the first update differs from the scoring pass, the log says whether that is
noise or an error; it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from parts.qwen3_moe import COMMON, TINY, sizes
from parts.word_task import REWARD, write_task

MEDIUM = COMMON | sizes(vocab=8192, hidden=1024, expert=512, layers=8, heads=16, kv=4, head=64, experts=64)
MODELS = {"cpu": TINY, "cuda": MEDIUM | {"mlp_only_layers": [0]}}
RUNS: dict[str, list[str]] = {
    "R2, padded": ["--replay.mode", "r2", "--batch.packed", "false"],
    "R2, packed": ["--replay.mode", "r2", "--batch.packed", "true"],
    "R3, padded": ["--replay.mode", "r3", "--batch.packed", "false"],
    "R3, packed": ["--replay.mode", "r3", "--batch.packed", "true"],
    "R2, packed, deterministic": ["--replay.mode", "r2", "--batch.packed", "true", "--replay.deterministic", "true"],
    "R3, packed, experts one after another": [
        *("--replay.mode", "r3", "--batch.packed", "true"),
        *("--backend.megatron", "moe_grouped_gemm", "false"),
    ],
}
SHOWN = {
    "reward": "reward/mean",
    "k3 rollout/train": "mismatch/rollout_vs_train/k3_kl",
    "k3 old/train": "mismatch/old_vs_train/k3_kl",
    "route agreement": "routing/agreement",
    "gradient norm": "loss/grad_norm",
    "peak GiB": "memory/train_peak_gib",
}


def main() -> None:
    """Run them, `--together` at a time, and print a line for each step."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--runs", nargs="+", choices=RUNS, help="which of them; all on a GPU, R3 packed on the CPU")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--together", type=int, default=3, help="runs at the same time")
    chosen = options.parse_args()
    names = chosen.runs or (["R3, packed"] if chosen.device == "cpu" else list(RUNS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_task(folder, MODELS[chosen.device], chosen.device, prompts=64, words=24)
        for first in range(0, len(names), chosen.together):
            started = {
                name: start(name, folder, chosen.device, chosen.steps)
                for name in names[first : first + chosen.together]
            }
            for name, process in started.items():
                report(name, folder, process.wait())


def output_of(name: str, folder: Path) -> Path:
    """Return the folder of a run."""
    return folder / re.sub(r"\W+", "-", name)


def start(name: str, folder: Path, device: str, steps: int) -> subprocess.Popen[bytes]:
    """Start one run, with its log beside its folder."""
    output = output_of(name, folder)
    dtype = "float32" if device == "cpu" else "bfloat16"
    cache = {"cpu": ["kv_cache_memory_bytes", str(2**26), "block_size", "32"]}.get(
        device, ["kv_cache_memory_bytes", str(2**30), "gpu_memory_utilization", "0.1"]
    )
    sequences = {"cpu": ("2", "4", "8"), "cuda": ("8", "8", "32")}[device]
    command = [
        *(sys.executable, "-m", "moe_replay.cli.main", "train", "--name", output.name, "--steps", str(steps)),
        *("--output", str(output), "--model.path", str(folder / "model"), "--model.dtype", dtype),
        *("--data.path", str(folder / "train.jsonl"), "--data.max_prompt_length", "64", "--reward.functions", REWARD),
        *("--rollout.engine", "vllm", "--rollout.dtype", dtype, "--rollout.probe_tolerance", "0.1"),
        *("--rollout.options", "enforce_eager", "true", *cache),
        *("--rollout.prompts_per_step", sequences[0], "--rollout.num_generations", sequences[1]),
        *("--rollout.max_tokens", sequences[2], "--backend.kind", "megatron", "--backend.device", device),
        *("--algorithm.updates_per_rollout", "2", "--optim.lr", "1e-5", "--batch.tokens_per_micro_batch", "1024"),
        *("--checkpoint.every", "0", "--checkpoint.at_end", "false", *RUNS[name]),
    ]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with open(f"{output}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path})


def report(name: str, folder: Path, status: int) -> None:
    """Print the metrics of a run, and what its log says of noise and errors."""
    output = output_of(name, folder)
    logs = [Path(f"{output}.log"), *output.glob("**/log.txt")]  # the console, and what the run itself keeps
    log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    print(f"{name}: status {status}")
    for path in output.glob("**/metrics.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            step = json.loads(line)
            shown = [f"{label} {step[key]:.3g}" for label, key in SHOWN.items() if key in step]
            print(f"  step {step['step']}: {', '.join(shown)}")
    notable = [line.strip() for line in log.splitlines() if re.search(r"identical passes|rror:", line)]
    for line in [*dict.fromkeys(notable), *(log.splitlines()[-15:] if status else [])]:
        print(f"  | {line}", flush=True)


if __name__ == "__main__":
    main()
