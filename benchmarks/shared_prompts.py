"""Samples that share a prompt against samples with a copy each: tokens/s and memory of scoring and updates with R3.

    python benchmarks/shared_prompts.py                     # a tiny model on the CPU
    python benchmarks/shared_prompts.py --device cuda       # 8 layers of Qwen3-30B-A3B, bfloat16, recomputed layers

The trainer's FSDP2 backend and learner, both ways in one run, in turn: with the same samples in a micro-batch, one
group of 8, and with the same budget of tokens, as runs have it. Tokens are those of all samples, prompts included.
Memory is what grows with them: the peak above that of a step of a few tokens. The last columns compare what was
computed: log-probs of the first update, and the norm of its gradient.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from parts.qwen3_moe import SLICE, TINY
from parts.training import config_of, made_up, now, write_model

from moe_replay.records import Trajectory
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.train.backends.attention import forward_arguments
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.learn.learner import Learner
from moe_replay.train.setup import launch
from moe_replay.train.trajectories.store import InProcessStore

SAMPLES = 8  # of a prompt
SAME = ("samples", "budget")
FEW = (8, 8)  # tokens of prompt and completion
SHAPES = {"tiny": ((64, 16), (16, 64)), "full": ((2048, 512), (512, 2048))}  # tokens of prompt and completion
MODEL_KEYS = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_experts", "rms_norm_eps", "max_position_embeddings"),
)


class Measured(NamedTuple):
    """One step: rows fed, seconds, peak of memory in bytes, log-probs of all sampled tokens, gradient norm."""

    rows: int
    score_s: float
    update_s: float
    peak: int
    logprobs: np.ndarray
    grad_norm: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; on a CPU there is no other")
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--same", nargs="+", choices=SAME, default=SAME, help="of a micro-batch, both ways")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny or arguments.device == "cpu" else "full"
    device = torch.device(arguments.device)
    model = TINY if size == "tiny" else SLICE
    with launch.process_group(device), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, {key: model[key] for key in MODEL_KEYS} | {"mlp_only_layers": []}, device)
        backend = FsdpBackend(_settings(folder, device, 1, True), str(folder), device)
        attention = backend.model.config._attn_implementation
        print(f"{SAMPLES} samples a prompt, attention {attention}, torch {torch.__version__}")
        few = [one for group in range(arguments.groups) for one in _group(backend, group, *FEW)]
        learner = Learner(_settings(folder, device, SAMPLES * sum(FEW), True), backend)
        floor = [_step(learner, few).peak for _ in range(2)][-1]
        print(
            "| prompt + completion | same in a micro-batch | tokens computed | score tokens/s | update tokens/s | "
            "memory | log-probs | norm |\n|---|---|---|---|---|---|---|---|"
        )
        for shape in SHAPES[size]:
            trajectories = [one for group in range(arguments.groups) for one in _group(backend, group, *shape)]
            for same in arguments.same:
                learners = _learners(backend, folder, shape, same)
                print(_row(learners, trajectories, shape, same, arguments.repeats, floor), flush=True)


def _learners(backend: FsdpBackend, folder: Path, shape: tuple[int, int], same: str) -> dict[bool, Learner]:
    """Return a learner that shares prompts, and one that does not, with the same samples or tokens at a time."""
    prompt, completion = shape
    apart = SAMPLES * (prompt + completion)
    budgets = {False: apart, True: apart if same == "budget" else prompt + SAMPLES * completion}
    return {
        shared: Learner(_settings(folder, backend.device, budget, shared), backend)
        for shared, budget in budgets.items()
    }


def _row(
    learners: dict[bool, Learner],
    trajectories: list[Trajectory],
    shape: tuple[int, int],
    same: str,
    repeats: int,
    floor: int,
) -> str:
    """Return the results of one shape: ratios of the shared way to the other."""
    measured: dict[bool, list[Measured]] = {shared: [] for shared in learners}
    for _ in range(repeats + 1):
        for shared, learner in learners.items():
            measured[shared].append(_step(learner, trajectories))
    apart, together = measured[False], measured[True]
    difference = np.abs(apart[0].logprobs - together[0].logprobs)
    norms = together[0].grad_norm / apart[0].grad_norm
    tokens = len(trajectories) * sum(shape)
    speeds = []
    for part in ("score_s", "update_s"):
        ratio = statistics.median(
            getattr(a, part) / getattr(b, part) for a, b in zip(apart[1:], together[1:], strict=True)
        )
        taken = statistics.median(getattr(step, part) for step in together[1:])
        speeds.append(f"{ratio:.2f}x ({tokens / taken:,.0f})")
    memory = "not measured"
    if floor:
        sizes = [max(step.peak for step in steps) - floor for steps in (apart, together)]
        memory = f"{sizes[1] / sizes[0]:.2f}x ({sizes[1] / 2**30:.1f} GiB)"
    return (
        f"| {shape[0]} + {shape[1]} | {same} | {together[0].rows / apart[0].rows:.2f}x | {speeds[0]} | {speeds[1]} | "
        f"{memory} | {difference.max():.2g} apart, mean {difference.mean():.2g} | {norms:.9f}x |"
    )


def _settings(folder: Path, device: torch.device, budget: int, shared: bool) -> Any:
    return config_of(
        folder,
        device,
        model={"gradient_checkpointing": True},
        replay={"mode": "r3"},
        algorithm={"old_logprobs": "always"},
        batch={"tokens_per_micro_batch": budget, "share_prompts": shared},
        optim={"lr": 0.0},
    )


def _group(backend: FsdpBackend, group: int, prompt: int, completion: int) -> list[Trajectory]:
    """Return samples of one random prompt, routed as the model routes them; the prompt has one route."""
    vocabulary = backend.model.config.vocab_size
    random = np.random.default_rng(group)
    start = random.integers(0, vocabulary, prompt)
    ids = [np.append(start, random.integers(0, vocabulary, completion)).astype(np.int32) for _ in range(SAMPLES)]
    prefixes = [Prefix(), *[Prefix(0, prompt)] * (SAMPLES - 1)]
    layout = TokenLayout.shared([prompt + completion] * SAMPLES, prefixes)
    device = backend.device
    positions = np.tile(np.arange(prompt + completion), SAMPLES)[layout.fed]
    with torch.no_grad(), backend.replay.record() as recording:
        backend.model(
            input_ids=torch.from_numpy(layout.fed_token_ids(ids)).long().to(device),
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=False,
            logits_to_keep=1,
            **forward_arguments(backend.model, layout, device),
        )
    sampled = np.where(np.arange(prompt + completion) < prompt, -1, 0)
    return [
        replace(made_up(SAMPLES * group + number, one, trace, vocabulary), group=group, versions=sampled)
        for number, (one, trace) in enumerate(zip(ids, recording.traces(layout, ids), strict=True))
    ]


def _step(learner: Learner, trajectories: list[Trajectory]) -> Measured:
    device = learner.backend.device
    metrics, store = learner.new_metrics(), InProcessStore()
    updates = learner.prepare(store.put(trajectories), store)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [now(device)]
    learner.score(updates, metrics, step=1)
    times.append(now(device))
    learned = learner.update(updates, metrics, step=1)
    times.append(now(device))
    learner.summarize(metrics, updates)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    by_row: dict[int, np.ndarray] = {}
    for batch in updates[0]:
        assert batch.old_logprobs is not None
        for number, trajectory in enumerate(batch.trajectories):
            by_row[trajectory.row] = batch.old_logprobs[batch.sequence == number].float().cpu().numpy()
    logprobs = np.concatenate([by_row[row] for row in sorted(by_row)])
    rows = sum(batch.layout.num_rows for batch in updates[0])
    return Measured(rows, times[1] - times[0], times[2] - times[1], peak, logprobs, learned["loss/grad_norm"])


if __name__ == "__main__":
    main()
