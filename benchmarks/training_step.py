"""Cost of routing replay in a training step: old log-probs and updates with R2 and R3 against native routing.

    python benchmarks/training_step.py                      # a small model on the CPU
    python benchmarks/training_step.py --device cuda        # 16 MoE layers, 64 experts, top 8, bfloat16

The trainer's FSDP2 backend and learner on synthetic sequences whose routes the model itself chose, as an engine would
have recorded them. `watched` is native routing with the route comparison and the shift test of each step. Ratios are
medians of alternating runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from parts.training import config_of, now, routed, write_model

from moe_replay.records import Trajectory
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.learner import Learner
from moe_replay.train.setup import launch
from moe_replay.train.trajectories.store import InProcessStore

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_experts": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
    "cuda": {
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 17,
        "num_experts": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32768,
    },
}
SHAPE = {"head_dim": 64, "mlp_only_layers": [0]}  # the first layer is dense
WORK = {"cpu": (8, 128), "cuda": (16, 1024)}  # sequences, tokens of each
MODES = {"native": ("off", False), "watched": ("off", True), "r2": ("r2", True), "r3": ("r3", True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with launch.process_group(device), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SIZES[arguments.device] | SHAPE, device)
        backend = FsdpBackend(config(folder, device, *MODES["native"]), str(folder), device)
        trajectories = routed(backend.model, backend.replay, *WORK[arguments.device])
        learners = {mode: Learner(config(folder, device, *how), backend) for mode, how in MODES.items()}
        for learner in learners.values():
            step(learner, trajectories, device)
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(arguments.repeats):
            for mode, learner in learners.items():
                times[mode].append(step(learner, trajectories, device))
    ratios = {
        mode: statistics.median(a / b for a, b in zip(taken, times["native"], strict=True))
        for mode, taken in times.items()
    }
    layers = len(backend.topology.layers)
    print(f"native: {statistics.median(times['native']):.3f} s a step, {layers} MoE layers on {device}")
    print("| | time against native |\n|---|---|")
    for mode, ratio in ratios.items():
        print(f"| {mode} | {ratio:.3f} |")


def config(folder: Path, device: torch.device, mode: str, observe: bool) -> TrainConfig:
    """One update on all sequences."""
    return config_of(
        folder,
        device,
        model={"gradient_checkpointing": True},
        replay={"mode": mode, "observe": observe},
        batch={"tokens_per_micro_batch": 4096},
        optim={"lr": 0.0},
    )


def step(learner: Learner, trajectories: list[Trajectory], device: torch.device) -> float:
    """Seconds of old log-probs and one update, batches made anew as in training."""
    began = now(device)
    metrics = learner.new_metrics()
    store = InProcessStore()
    updates = learner.prepare(store.put(trajectories), store)
    learner.score(updates, metrics, step=1)
    learner.update(updates, metrics, step=1)
    learner.summarize(metrics, updates)
    return now(device) - began


if __name__ == "__main__":
    main()
