"""Time of a Megatron-Core training step: sequential or grouped experts, padded or packed.

    python benchmarks/megatron_experts.py                   # a small model on the CPU
    python benchmarks/megatron_experts.py --device cuda     # 128 experts, top 8, the widths of Qwen3-30B-A3B, bfloat16

Sequences of different lengths are scored with their routes recorded, then trained on with these routes replayed (R2).
`apart` is the largest log-prob difference between update and scoring pass; `noise` is the same for two identical
scoring passes. With `deterministic` both are 0. Each row is measured in a separate process: Megatron-Core's gradient
hooks keep a model alive as long as its process, so a second model would add to the peak of the first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.training import config_of, made_up, now, write_model
from torch import Tensor

from moe_replay.records import MicroBatch, Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Backend, Routing
from moe_replay.train.learn.batches import mini_batches
from moe_replay.train.setup import launch
from moe_replay.train.trajectories.store import InProcessStore

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_experts": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
    },
    "cuda": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_experts": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32768,
    },
}
WORK = {"cpu": (8, 128), "cuda": (32, 1024)}  # sequences, most tokens of each


class Setup(NamedTuple):
    """One row of the table."""

    grouped: bool
    packed: bool
    deterministic: bool = False


SETUPS = (Setup(False, False), Setup(True, False), Setup(True, True), Setup(True, True, deterministic=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_process(context, write_model, folder, SIZES[arguments.device], torch.device(arguments.device))
        trajectories = sequences_of(SIZES[arguments.device]["vocab_size"], *WORK[arguments.device])
        print(f"{len(trajectories)} sequences, {sum(map(len, trajectories))} tokens, {arguments.device}")
        print(
            "| experts | batch | score, s | update, s | peak, GiB | apart | noise |\n|---|---|---|---|---|---|---|",
            flush=True,
        )
        for setup in SETUPS:
            in_process(context, print_row, setup, folder, arguments.device, arguments.repeats)


def in_process(context: Any, function: Any, *arguments: Any) -> None:
    """Call a function in a process of its own; raise if it fails there."""
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}{arguments} failed")


def print_row(setup: Setup, folder: Path, device_type: str, repeats: int) -> None:
    """Print one row of the table."""
    device = torch.device(device_type)
    trajectories = sequences_of(SIZES[device_type]["vocab_size"], *WORK[device_type])
    with launch.process_group(device), launch.deterministic_kernels(setup.deterministic):
        print(measured(setup, folder, trajectories, device, repeats), flush=True)


def measured(setup: Setup, folder: Path, trajectories: list[Trajectory], device: torch.device, repeats: int) -> str:
    """Open the backend, take some steps, and return the row of the table."""
    config = config_of(
        folder,
        device,
        backend={"kind": "megatron", "megatron": {"moe_grouped_gemm": setup.grouped}},
        batch={"tokens_per_micro_batch": 8192, "packed": setup.packed},
    )
    backend = launch.open_backend(config, str(folder), device)
    store = InProcessStore()
    (batches,) = mini_batches(
        store.put(trajectories),
        store,
        backend,
        updates=1,
        aggregation="seq_mean_token_mean",
        max_tokens=WORK[device.type][1],
        budget=config.batch.tokens_per_micro_batch,
        packed=setup.packed,
    )
    times: list[tuple[float, float]] = []
    noise = distance(scored(backend, batches), scored(backend, batches))
    apart: list[float] = []

    def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
        assert batch.old_logprobs is not None
        apart.append((logprobs.detach() - batch.old_logprobs).abs().max().item())
        return (logprobs * batch.advantages * batch.loss_weights).sum()

    for _ in range(repeats + 1):
        began = now(device)
        for batch, old in zip(batches, scored(backend, batches), strict=True):
            batch.old_logprobs = old
        between = now(device)
        backend.update(batches, loss, Routing("replay", "recorded"), lr=0.0)
        times.append((between - began, now(device) - between))
    score, update = (statistics.median(column) for column in zip(*times[1:], strict=True))
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    backend.close()
    experts = "grouped" if setup.grouped else "one after another"
    batch = ("packed" if setup.packed else "padded") + (", deterministic" if setup.deterministic else "")
    return f"| {experts} | {batch} | {score:.3f} | {update:.3f} | {peak:.1f} | {max(apart):.1e} | {noise:.1e} |"


def scored(backend: Backend, batches: list[MicroBatch]) -> list[Tensor]:
    """Return the log-probs of each micro-batch; its routes are recorded."""
    return [scores.logprobs for scores in backend.score(batches, Routing("record")) if scores is not None]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference of a log-prob."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def sequences_of(vocabulary: int, sequences: int, longest: int) -> list[Trajectory]:
    """Return random sequences of different lengths, without routes of an engine."""
    random = np.random.default_rng(0)
    lengths = random.integers(longest // 4, longest + 1, sequences)
    tokens = [random.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    return [made_up(number, ids, RouteTrace.uncovered(ids, [0], 8), vocabulary) for number, ids in enumerate(tokens)]


if __name__ == "__main__":
    main()
