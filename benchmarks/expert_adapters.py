"""LoRA on experts: an update with adapters beside the experts, by grouped GEMMs, against PEFT's, added to all weights.

    python benchmarks/expert_adapters.py                      # a tiny model on the CPU: that everything runs
    python benchmarks/expert_adapters.py --device cuda        # 8 layers of Qwen3-30B-A3B in full width, bfloat16

grouped, peft    as named, layers not compiled
compiled         grouped, with compiled layers as `moe-replay train` has them
attention        compiled, adapters of attention alone: what those of experts cost

Rank 16, the FSDP2 backend on one rank, layers recomputed, native routing. Each variant runs in its own process. The
peak is that of the allocator, with frozen weights. `--kernels 20` prints the kernels of a scoring pass and of an
update that take longest, and how long the device waits between kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from parts.kernels import Profile, difference, profile_of
from parts.qwen3_moe import SLICE, TINY
from parts.training import config_of, now, unrouted
from parts.word_task import write_task

from moe_replay.train.backends import expert_adapters
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.learn.learner import Learner
from moe_replay.train.setup import launch
from moe_replay.train.trajectories.store import InProcessStore
from moe_replay.utils.misc import GIB
from moe_replay.weights.model_folder import read_config

WORK = {"cpu": (8, 64, 256), "cuda": (16, 2048, 8192)}  # sequences, tokens of each, tokens of a micro-batch
VARIANTS = ("grouped", "peft", "compiled", "attention")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def main() -> None:
    """Run each variant, and print how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(WORK), default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["grouped", "peft"])
    parser.add_argument("--kernels", type=int, default=0, help="so many, of each pass")
    parser.add_argument("--tokens", type=int, help="of a micro-batch; 8192")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # of a child process
    parser.add_argument("--folder", type=Path, help="of the model, which stays there; a temporary one")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, arguments)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "model").exists():
            write_task(folder, SLICE if arguments.device == "cuda" else TINY, arguments.device)
        results = {}
        for variant in arguments.variants:
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--variant", variant]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            *tables, result = done.stdout.splitlines()
            print(*tables, f"{variant}: {result}", sep="\n", flush=True)
            results[variant] = json.loads(result)
    print("| | score | update | peak |\n|---|---|---|---|")
    for variant, result in results.items():
        cells = [f"{result[part]:.3f} s" for part in ("score", "update")]
        print(f"| {variant} | {' | '.join(cells)} | {result['peak_gib']:.1f} GiB |")
    first, *others = results
    for other in others:
        for part in ("score", "update"):
            print(f"{other} / {first}, {part}: {results[other][part] / results[first][part]:.2f}")


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a scoring pass and of an update, and the peak of GPU memory."""
    folder, device = arguments.folder, torch.device(arguments.device)
    sequences, tokens, budget = WORK[device.type]
    if variant == "peft":
        expert_adapters.move_adapters = lambda model: None
    config = config_of(
        folder / "model",
        device,
        model={
            **{"gradient_checkpointing": True, "compile": variant in ("compiled", "attention"), "lora_rank": 16},
            **{"lora_target_modules": ATTENTION if variant == "attention" else ["all-linear"], "lora_merge": False},
        },
        replay={"mode": "off"},
        algorithm={"old_logprobs": "always"},
        batch={"tokens_per_micro_batch": arguments.tokens or budget},
        optim={"lr": 1e-5},
    )
    taken: dict[str, list[float]] = {"score": [], "update": []}
    with launch.process_group(device):
        learner = Learner(config, FsdpBackend(config, str(folder / "model"), device))
        trajectories = unrouted(read_config(folder / "model"), sequences, tokens)

        def passes() -> Iterator[tuple[str, Callable[[], Any]]]:
            metrics, store = learner.new_metrics(), InProcessStore()
            updates = learner.prepare(store.put(trajectories), store)
            for part, run in (("score", learner.score), ("update", learner.update)):
                yield part, functools.partial(run, updates, metrics, step=1)

        for _ in range(arguments.repeats + 1):
            for part, run in passes():
                began = now(device)
                run()
                taken[part].append(now(device) - began)
        for part, run in passes() if arguments.kernels else ():
            kernels = profile_of(run, device)
            print(difference(f"{variant}, {part}", kernels, "", Profile({}, 0.0), arguments.kernels))
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
    return {part: statistics.median(seconds[1:]) for part, seconds in taken.items()} | {"peak_gib": peak}


if __name__ == "__main__":
    main()
