"""Cost of `replay.score_native_every`: steps that also score their batch natively against steps that do not.

    python benchmarks/compare_every.py                           # the embedded recipe, with rollouts by vLLM on the CPU
    python benchmarks/compare_every.py --engine transformers --max-tokens 4      # mostly trainer time

One run with R3 in which every second step compares. Each comparing step is divided by the step before it, so that other
load on the machine affects both. Steps differ in their samples, hence medians. With the default, every tenth step, the
overhead of a run is a tenth of the overhead of a comparing step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_replay import demo
from moe_replay.train.config.file import load_config
from moe_replay.train.loop import train
from moe_replay.train.output.sinks import SinkContext
from moe_replay.utils.device import cpu_has_bfloat16

NATIVE = "mismatch/rollout_vs_native/k3_kl"


class CpuTime:
    """Writes the CPU time of this process, which does not count other work of the machine, at the end of each step."""

    def __init__(self, context: SinkContext) -> None:
        self._file = (context.folder / "cpu.txt").open("w")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(f"{time.process_time()}\n")

    def close(self) -> None:
        self._file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=24, help="of a completion")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name, "recipe.toml")
        lines = demo.RECIPE.read_text(encoding="utf-8").splitlines(keepends=True)
        is_vllm = arguments.engine == "vllm"
        recipe.write_text("".join(line for line in lines if is_vllm or not line.startswith("options = ")))
        folder = train(load_config(recipe, settings(arguments, Path(name, "run"))))
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ends = [float(line) for line in (folder / "cpu.txt").read_text().split()]
    for step, begin, end in zip(steps[1:], ends, ends[1:], strict=False):
        step["cpu"] = end - begin
    pairs = list(zip(steps[2::2], steps[3::2], strict=True))  # the first two warm up
    assert all(NATIVE in compared and NATIVE not in plain for plain, compared in pairs)
    print("| of a step that compares, against the one before it | ratio, median | added to a run, every tenth step |")
    print("|---|---|---|")
    for title, parts in (
        ("CPU time of the trainer's process", ("cpu",)),
        ("score and updates", ("time/score", "time/train")),
        ("the whole step", ("time/step",)),
    ):
        ratio = statistics.median(total(compared, parts) / total(plain, parts) for plain, compared in pairs)
        print(f"| {title} | {ratio:.3f} | {(ratio - 1) / 10:.1%} |")


def settings(arguments: argparse.Namespace, output: Path) -> list[str]:
    """Return the settings that differ from the embedded recipe, as on a command line."""
    values: dict[str, Any] = {
        "output": output,
        "steps": 2 * arguments.pairs + 2,
        "rollout.engine": arguments.engine,
        "rollout.dtype": engine_dtype(arguments.engine),
        "rollout.max_tokens": arguments.max_tokens,
        "replay.score_native_every": 2,
        "checkpoint.every": 0,
        "log.sinks": "__main__:CpuTime",
    }
    return [str(word) for key, value in values.items() for word in (f"--{key}", value)]


def engine_dtype(engine: str) -> str:
    """Return the type that an engine samples in quickly on this CPU."""
    if engine == "transformers":
        return "float32"
    return "bfloat16" if cpu_has_bfloat16() else "float16"


def total(step: Mapping[str, float], parts: tuple[str, ...]) -> float:
    """Return the seconds of some parts of a step."""
    return sum(step[part] for part in parts)


if __name__ == "__main__":
    main()
