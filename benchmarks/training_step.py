"""What routing replay costs in a training step: old log-probs and updates with R2 and R3 against native routing.

    python benchmarks/training_step.py                      # a small model on the CPU
    python benchmarks/training_step.py --device cuda        # 16 MoE layers, 64 experts, top 8, bfloat16

The FSDP2 backend and the learner of the trainer on made-up sequences whose routes the model itself has chosen, as an
engine would have recorded them. `watched` is native routing with the comparison of routes and the shift test of each
step. Ratios are medians of runs that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_replay.rollout.types import FinishReason
from moe_replay.routes.layout import TokenLayout
from moe_replay.train import launch
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learner import Learner
from moe_replay.train.types import Trajectory

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_experts": 32,
        "vocab_size": 512,
    },
    "cuda": {
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 17,
        "num_experts": 64,
        "vocab_size": 32768,
    },
}
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
        write_model(folder, SIZES[arguments.device], device)
        backend = FsdpBackend(config(folder, device, *MODES["native"]), str(folder), device)
        trajectories = made_up(backend, *WORK[arguments.device])
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


def write_model(folder: Path, sizes: dict[str, Any], device: torch.device) -> None:
    """A Qwen3-MoE with a dense first layer and random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = sizes["hidden_size"] // 64
    settings = Qwen3MoeConfig(
        **sizes,
        intermediate_size=2 * sizes["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=64,
        num_experts_per_tok=8,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    with device:
        Qwen3MoeForCausalLM(settings).save_pretrained(folder)


def config(folder: Path, device: torch.device, mode: str, observe: bool) -> TrainConfig:
    """One update on all sequences; what is not about the learner does not matter here."""
    return TrainConfig.model_validate(
        {
            "model": {
                "path": str(folder),
                "dtype": "bfloat16" if device.type == "cuda" else "float32",
                "gradient_checkpointing": True,
            },
            "data": {"path": "unused"},
            "backend": {"device": device.type},
            "replay": {"mode": mode, "observe": observe},
            "batch": {"tokens_per_micro_batch": 4096},
            "optim": {"lr": 0.0},
        }
    )


def made_up(backend: FsdpBackend, sequences: int, tokens: int) -> list[Trajectory]:
    """Random sequences, half prompt and half completion, routed as the model routes them."""
    random = np.random.default_rng(0)
    vocabulary = backend.model.config.vocab_size
    found = []
    for number in range(sequences):
        ids = random.integers(0, vocabulary, tokens).astype(np.int32)
        fed = torch.from_numpy(ids[None]).long().to(backend.device)
        with torch.no_grad(), backend.replay.record() as recording:
            backend.model(input_ids=fed, use_cache=False)
        (trace,) = recording.traces(TokenLayout.packed([tokens]), [ids])
        versions = np.where(np.arange(tokens) < tokens // 2, -1, 0)
        found.append(
            Trajectory(
                row=number,
                group=number // 2,
                token_ids=ids,
                logprobs=np.full(tokens, -np.log(vocabulary), np.float32),
                versions=versions,
                trace=trace,
                finish_reason=FinishReason.STOP,
                reward=float(number % 2),
                advantage=float(number % 2) - 0.5,
            )
        )
    return found


def step(learner: Learner, trajectories: list[Trajectory], device: torch.device) -> float:
    """Seconds of old log-probs and one update, batches made anew as in training."""
    synchronise(device)
    began = time.perf_counter()
    metrics = learner.new_metrics()
    updates = learner.prepare(trajectories)
    learner.score(updates, metrics, step=1)
    learner.update(updates, metrics, step=1)
    learner.summarize(metrics)
    synchronise(device)
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
