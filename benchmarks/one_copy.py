"""LoRA with vLLM on one GPU: one copy of the frozen weights against two, in memory, time and bits.

    python benchmarks/one_copy.py                                   # a tiny model on the CPU: that everything runs
    python benchmarks/one_copy.py --device cuda --parts check       # 8 layers of Qwen3-30B-A3B: bits, sleep, kill
    python benchmarks/one_copy.py --device cuda --parts one two     # the same layers: runs of 5 steps, peak of the card
    python benchmarks/one_copy.py --device cuda --parts one --layers 48 --folder /dev/shm/one-copy
                                  # the whole model: 57 GiB of files in memory; --targets attention for small adapters

Random weights, R3, rank 16. Each part is a process. The peak of the card is that of all processes, read every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from parts.qwen3_moe import SLICE, TINY
from parts.word_task import REWARD, write_task

from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.memory_plan import GIB, plan_memory
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes

PHASES = ("rollout", "score", "train", "sync")
TARGETS = {"all": ["all-linear"], "attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def main() -> None:
    """Make the model and run each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", nargs="+", choices=("check", "one", "two"), default=["check", "one", "two"])
    parser.add_argument("--layers", type=int, help="of Qwen3-30B-A3B; 8")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, help="of a completion at most; 2048")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with 8 samples each")
    parser.add_argument("--targets", choices=TARGETS, help="of adapters; all, on a CPU attention")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="KV cache of vLLM")
    parser.add_argument("--offload", action="store_true", help="optimizer state and, while vLLM samples, adapters")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and CUDA graphs")
    parser.add_argument("--folder", type=Path, help="of the model and the runs, which stay there; a temporary one")
    parser.add_argument(
        "--only", choices=("model", "check", "one", "two"), help=argparse.SUPPRESS
    )  # in a child process
    chosen = parser.parse_args()
    if chosen.only:
        run_part(chosen.only, chosen.folder, chosen)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        parts = chosen.parts if (folder / "train.jsonl").exists() else ["model", *chosen.parts]
        for part in parts:
            print(f"---- {part}", flush=True)
            path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--only", part]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def run_part(part: str, folder: Path, chosen: argparse.Namespace) -> None:
    """Run one part in this process."""
    if part == "model":
        model = TINY if chosen.device == "cpu" else SLICE
        count = write_task(
            folder, model | ({"num_hidden_layers": chosen.layers} if chosen.layers else {}), chosen.device
        )
        print(f"{count / 1e9:.2f} billion parameters", flush=True)
    elif part == "check":
        check(folder, settings(folder, chosen, one_copy=True))
    else:
        measure(folder, settings(folder, chosen, one_copy=part == "one"))


def settings(folder: Path, chosen: argparse.Namespace, *, one_copy: bool) -> TrainConfig:
    """Return the settings of a run."""
    tiny = chosen.device == "cpu"
    dtype, targets = "float32" if tiny else "bfloat16", TARGETS[chosen.targets or ("attention" if tiny else "all")]
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**26 if tiny else int(chosen.kv_gib * GIB)}
    options |= {"enforce_eager": True} if tiny or chosen.eager else {}
    options |= {"block_size": 32} if tiny else {"max_num_batched_tokens": 8192}
    return TrainConfig.model_validate(
        {
            "name": f"{'one' if one_copy else 'two'}-{time.time_ns()}",
            "steps": chosen.steps if not tiny else 2,
            "output": str(folder / f"run-{time.time_ns()}"),
            "model": {
                **{"path": str(folder / "model"), "dtype": dtype, "gradient_checkpointing": not tiny, "lora_rank": 16},
                **{"lora_target_modules": targets, "lora_merge": False},
            },
            "backend": {"device": chosen.device, "offload": chosen.offload},
            "data": {"path": str(folder / "train.jsonl"), "max_prompt_length": 512},
            "rollout": {
                **{"engine": "vllm", "dtype": dtype, "lora": True, "sleep": True, "share_weights": one_copy},
                "prompts_per_step": 2 if tiny else chosen.prompts,
                "num_generations": 4 if tiny else 8,
                "max_tokens": 8 if tiny else chosen.tokens or 2048,
                "probe_tolerance": 0.1,
                "options": options,
            },
            "replay": {"mode": "r3"},
            "algorithm": {"updates_per_rollout": 2},
            "optim": {"lr": 1e-5},
            "batch": {"tokens_per_micro_batch": 256 if tiny else 8192},
            "reward": {"functions": [REWARD]},
            "checkpoint": {"every": 0, "at_end": False},
            "log": {"report": False},
        }
    )


# ---- whole runs ------------------------------------------------------------------------------------------------------


def measure(folder: Path, config: TrainConfig) -> None:
    """Train, and print what each phase took and the peak of the card."""
    from moe_replay.train.loop import train

    with peak_of_card(config.backend.device) as peak:
        began = time.monotonic()
        lines = (train(config) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    for step in steps:
        seconds = ", ".join(f"{phase} {step[f'time/{phase}']:.1f} s" for phase in PHASES)
        others = {name: step.get(name) for name in ("time/tokens_per_second", "time/train_mfu", "routing/agreement")}
        print(f"step {step['step']}: {seconds}; {others}; k3 {step['mismatch/rollout_vs_old/k3_kl']:.3g}")
    for phase in PHASES:
        if f"memory/{phase}_peak_gib" in steps[0]:
            own, device = (max(step[f"memory/{phase}_{kind}_gib"] for step in steps) for kind in ("peak", "device"))
            print(f"{phase}: trainer's peak {own:.1f} GiB, the whole card after it {device:.1f} GiB")
    print(f"peak of the whole card: {peak[0] / GIB:.1f} GiB; {time.monotonic() - began:.0f} s from start to end")
    if config.backend.device == "cuda":
        print(plan_memory(config, ModelSizes.of(read_config(folder / "model")), gpus=1, gpu_gib=79.6))


@contextmanager
def peak_of_card(device: str) -> Iterator[list[int]]:
    """Yield a list whose number is the most bytes of the card in use at any time in this context, by all processes."""
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            peak[0] = max(peak[0], total - free)

    watcher = threading.Thread(target=watch, daemon=True)
    if device == "cuda":
        watcher.start()
    try:
        yield peak
    finally:
        is_over.set()


# ---- bits and lifetime -----------------------------------------------------------------------------------------------


def check(folder: Path, config: TrainConfig) -> None:
    """Compare a policy in the engine's memory with one that has its own, and follow the memory through its life."""
    from moe_replay.train.backends.fsdp import FsdpBackend
    from moe_replay.train.setup import launch
    from moe_replay.train.setup.engines import open_engine

    path, device = str(folder / "model"), launch.choose_device(config)
    config = launch.with_memory_decided(config, path, device, print)
    with launch.process_group(device):
        engine: Any = open_engine(config, path, share_weights=True)
        export = engine.share_weights()
        policies: dict[str, FsdpBackend] = {}
        for kind in ("shared", "own"):
            before, began = allocated(device), time.monotonic()
            torch.manual_seed(1)
            policy: Any = launch.open_backend(config, path, device, print, export if kind == "shared" else None)
            policies[kind] = policy
            taken = time.monotonic() - began
            print(f"{kind}: {(allocated(device) - before) / GIB:.2f} GiB, ready in {taken:.1f} s; {in_use(device)}")
        print(f"log-probs bit for bit the same: {same_logits(policies, device)}")
        base = policies["shared"].shared_base
        assert base is not None, "it was given the engine's weights"

        def probe(moment: str) -> None:
            began = time.monotonic()
            base.check(engine.shared_digests())
            print(f"digests {moment}: unchanged ({time.monotonic() - began:.2f} s)", flush=True)

        probe("at the start")
        engine.sleep(2)
        probe(f"asleep, {in_use(device)}")
        engine.wake_for_update()
        engine.update_adapter(policies["shared"].adapter(), 1)
        probe(f"after wake and a new adapter, {in_use(device)}")
        print(f"log-probs bit for bit the same: {same_logits(policies, device)}")
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        time.sleep(1)
        print(f"after the engine was killed: log-probs the same: {same_logits(policies, device)}, {in_use(device)}")


def same_logits(policies: dict[str, Any], device: torch.device) -> bool:
    ids = torch.arange(3, 259, device=device)[None]
    with torch.no_grad():
        logits = [policy.model.eval()(input_ids=ids, use_cache=False).logits for policy in policies.values()]
    return torch.equal(*logits)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return "on the CPU"
    free, total = torch.cuda.mem_get_info(device)
    return f"{(total - free) / GIB:.1f} GiB of the card in use"


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
