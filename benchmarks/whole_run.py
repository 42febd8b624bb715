"""Whole training runs with rollouts: `moe-replay train` with R3 and without replay, and TRL, one after another.

    python benchmarks/whole_run.py --device cuda    # 0.87 B parameters, 64 prompts x 8 samples of up to 1024 tokens
    python benchmarks/whole_run.py                  # tiny, on the CPU, without vLLM: that everything runs

The same model, prompts, reward and sizes, vLLM on the trainer's GPU, one update a step. Every run is a process; the
first step, in which kernels are compiled, does not count. Tokens are those of prompts and completions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from parts.qwen3_moe import SMALL, TINY
from parts.word_task import REWARD, even_words, write_task


class Size(NamedTuple):
    """Sizes of a run: prompts of a step, samples of each, their greatest length, and tokens of a micro-batch."""

    prompts: int
    samples: int
    tokens: int
    budget: int


SIZES = {"cpu": Size(2, 4, 8, 256), "cuda": Size(64, 8, 1024, 16384)}
MODELS = {"cpu": TINY, "cuda": SMALL | {"num_hidden_layers": 16, "mlp_only_layers": [0]}}
GPU_FRACTION = 0.35
VARIANTS = ("ours r3", "ours native", "trl")
Steps = list[dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", type=Path, help="keep the steps of runs in this file, also those that it has")
    parser.add_argument("--folder", type=Path, help="where models, logs and results of the runs stay; a temporary one")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # folder, in a child process
    arguments = parser.parse_args()
    if arguments.trl:
        run_trl(arguments.trl, arguments.device, arguments.steps)
        return
    results: dict[str, Steps] = {}
    if arguments.write and arguments.write.exists():
        results = json.loads(arguments.write.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        size = SIZES[arguments.device]
        write_task(folder, MODELS[arguments.device], arguments.device, prompts=8 * size.prompts)
        for variant in arguments.variants:
            results[variant] = run(variant, folder, arguments.device, arguments.steps)
            show(variant, results)
            if arguments.write:
                arguments.write.write_text(json.dumps(results, indent=2) + "\n")


def run(variant: str, folder: Path, device: str, steps: int) -> Steps:
    """Run a variant in its own process; return seconds, tokens and parts of each step."""
    output = folder / variant.replace(" ", "-")
    output.mkdir()
    if variant == "trl":
        command = [sys.executable, __file__, "--trl", str(folder), "--device", device, "--steps", str(steps)]
    else:
        mode = "r3" if variant == "ours r3" else "off"
        command = ours(folder, output, device, steps, mode)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    began = time.monotonic()
    with (output / "log").open("w") as log:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, check=False, env=os.environ | {"PYTHONPATH": path}
        )
    print(f"{variant}: {time.monotonic() - began:.0f} s from start to end", flush=True)
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n" + (output / "log").read_text()[-3000:])
    lines = (output / "metrics.jsonl" if variant != "trl" else folder / "trl.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines] if variant == "trl" else [_parts(json.loads(line)) for line in lines]


def _parts(metrics: dict[str, Any]) -> dict[str, float]:
    parts = {name: metrics[f"time/{name}"] for name in ("rollout", "score", "train", "sync")}
    seconds = metrics["time/step"]
    return {"seconds": seconds, "tokens": seconds * metrics["time/tokens_per_second"], **parts}


def show(variant: str, results: dict[str, Steps]) -> None:
    """Print the steps of a run but for the first, and how it compares with the runs before."""
    counted = results[variant][1:]
    rates = {
        name: statistics.median(step["tokens"] / step["seconds"] for step in results[name][1:]) for name in results
    }
    for step in counted:
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in step.items()))
    print(f"{variant}: {rates[variant]:.0f} tokens/s", flush=True)
    for other in results:
        if other != variant:
            print(f"{other} / {variant}: {rates[other] / rates[variant]:.2f}", flush=True)


# ---- the two trainers ------------------------------------------------------------------------------------------------


def ours(folder: Path, output: Path, device: str, steps: int, mode: str) -> list[str]:
    """Return the command of a run."""
    size, on_gpu = SIZES[device], device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    engine = ["--rollout.engine", "transformers"]
    if on_gpu:
        options = ["--rollout.options", "gpu_memory_utilization", str(GPU_FRACTION)]
        engine = ["--rollout.engine", "vllm", "--rollout.probe_tolerance", "0.1", *options]
    return [
        *(sys.executable, "-m", "moe_replay.cli.main", "train", "--name", "whole-run", "--steps", str(steps)),
        *("--output", str(output), "--model.path", str(folder / "model"), "--model.dtype", dtype),
        *("--data.path", str(folder / "train.jsonl"), "--reward.functions", REWARD, *engine),
        *("--rollout.dtype", dtype, "--rollout.max_tokens", str(size.tokens)),
        *("--rollout.prompts_per_step", str(size.prompts), "--rollout.num_generations", str(size.samples)),
        *("--replay.mode", mode, "--backend.device", device, "--optim.lr", "1e-6"),
        *(
            "--batch.tokens_per_micro_batch",
            str(size.budget),
            "--checkpoint.every",
            "0",
            "--checkpoint.at_end",
            "false",
        ),
    ]


def run_trl(folder: Path, device: str, steps: int) -> None:
    """Run TRL's GRPOTrainer in this process; write a line for each step to `trl.jsonl`."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    size, on_gpu = SIZES[device], device == "cuda"
    rows = size.budget // size.tokens if on_gpu else size.samples
    file = folder / "trl.jsonl"

    class Timer(TrainerCallback):
        """Writes how long each step took, and its tokens."""

        began, before = 0.0, 0.0

        def on_step_begin(self, *args: Any, **settings: Any) -> None:
            self.began = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **settings: Any) -> None:
            if "num_tokens" in logs:
                seconds, tokens = time.monotonic() - self.began, logs["num_tokens"] - self.before
                self.before = logs["num_tokens"]
                with file.open("a") as lines:
                    lines.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")

    engine: dict[str, Any] = {}
    if on_gpu:
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": GPU_FRACTION}
        engine["vllm_max_model_length"] = 2 * size.tokens
    settings = GRPOConfig(
        output_dir=str(folder / "trl-output"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=size.prompts * size.samples // rows,
        num_generations=size.samples,
        max_completion_length=size.tokens,
        max_steps=steps,
        beta=0.0,
        learning_rate=1e-6,
        temperature=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **engine,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=_reward,
        args=settings,
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
        callbacks=[Timer()],
    )
    trainer.train()


def _reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    return even_words(prompts, completions)


if __name__ == "__main__":
    main()
