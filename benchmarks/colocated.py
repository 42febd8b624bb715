"""Trainer and vLLM alternating on one GPU: memory of each phase of a step, next to the estimate of `moe-replay plan`.

    python benchmarks/colocated.py                  # a tiny model on the CPU: a smoke test
    python benchmarks/colocated.py --device cuda    # 8 layers of Qwen3-30B-A3B at full width, bfloat16

FSDP2 with offload, R3, vLLM asleep while the trainer learns. Nothing is saved: the training state has 67 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from parts.qwen3_moe import SLICE, TINY
from parts.word_task import REWARD, write_task

from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.loop import train
from moe_replay.train.setup.memory_plan import GIB, plan_memory
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes

PARTS = ("rollout", "score", "train", "sync")
ROUTES = ("mismatch/rollout_vs_old/k3_kl", "routing/agreement", "reward/mean")


def main() -> None:
    """Train three steps and print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--layers", type=int, help="of the slice")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--sleep-level", type=int, choices=(1, 2), default=2)
    options.add_argument("--share", type=float, default=0.8, help="of the GPU for vLLM while it is awake")
    chosen = options.parse_args()
    model = TINY if chosen.device == "cpu" else SLICE
    if chosen.layers:
        model = model | {"num_hidden_layers": chosen.layers}
    # Processes that import the reward look for it where this file lies.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        count = write_task(Path(folder), model, chosen.device)
        print(f"{count / 1e9:.2f} billion parameters", flush=True)
        config = settings(Path(folder), chosen)
        lines = (train(config) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        plan = None
        if chosen.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory / GIB
            plan = plan_memory(config, ModelSizes.of(read_config(Path(folder) / "model")), gpus=1, gpu_gib=total)
    report([json.loads(line) for line in lines])
    if plan is not None:
        print(plan)


def settings(folder: Path, chosen: argparse.Namespace) -> TrainConfig:
    """Return the settings of the run."""
    tiny = chosen.device == "cpu"
    dtype = "float32" if tiny else "bfloat16"
    engine: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 2**26} if tiny else {}
    return TrainConfig.model_validate(
        {
            "name": "colocated",
            "steps": chosen.steps,
            "output": str(folder / "run"),
            "model": {"path": str(folder / "model"), "dtype": dtype, "gradient_checkpointing": True},
            "backend": {"offload": True, "device": chosen.device},
            "data": {"path": str(folder / "train.jsonl"), "max_prompt_length": 512},
            "rollout": {
                "engine": "vllm",
                "dtype": dtype,
                "sleep": True,
                "sleep_level": chosen.sleep_level,
                "prompts_per_step": 2 if tiny else 16,
                "num_generations": 4 if tiny else 8,
                "max_tokens": 8 if tiny else 512,
                "reproducible": False,
                "probe_tolerance": 0.1,
                "options": {"enforce_eager": True, **(engine or {"gpu_memory_utilization": chosen.share})},
            },
            "replay": {"mode": "r3"},
            "algorithm": {"updates_per_rollout": 2},
            "optim": {"lr": 1e-6},
            "batch": {"tokens_per_micro_batch": 256 if tiny else 16384},
            "reward": {"functions": [REWARD]},
            "checkpoint": {"every": 0, "at_end": False},
        }
    )


def report(steps: list[dict[str, Any]]) -> None:
    """Print seconds, routes and memory of each step."""
    for step in steps:
        seconds = ", ".join(f"{part} {step[f'time/{part}']:.1f} s" for part in PARTS)
        print(f"step {step['step']}: {seconds}; " + ", ".join(f"{name} {step[name]:.3g}" for name in ROUTES))
    for part in PARTS:
        if f"memory/{part}_peak_gib" in steps[0]:
            peak = max(step[f"memory/{part}_peak_gib"] for step in steps)
            device = max(step[f"memory/{part}_device_gib"] for step in steps)
            print(f"{part}: trainer's peak {peak:.1f} GiB, the whole GPU after it {device:.1f} GiB")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
