"""What the runs of tests have in common; importable on ranks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_replay.train.config.train_config import TrainConfig


def tiny_config(folder: Path, prompts: Path, output: Path, **overrides: Any) -> TrainConfig:
    """Three steps of four prompts with four samples each, in two updates; overrides go into their sections."""
    settings: dict[str, Any] = {
        "output": output,
        "steps": 3,
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"path": str(prompts), "max_prompt_length": 32, "chat_template": "none"},
        "rollout": {"engine": "transformers", "prompts_per_step": 4, "num_generations": 4, "max_tokens": 12},
        "replay": {"mode": "r3", "score_native_every": 1},
        "algorithm": {"updates_per_rollout": 2},
        "optim": {"lr": 1e-3},
        "batch": {"tokens_per_micro_batch": 96},
        "reward": {"functions": ["tests.train.runs:closeness"], "workers": 0},  # without the start of processes
        "checkpoint": {"export": False},
        "log": {"report": False},  # its figures take longer than the steps
    }
    for name, value in overrides.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return TrainConfig(**settings)


def train_on_rank(folder: str, prompts: str, output: str, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """A run on one of the ranks that a test has started: the lines of its metrics."""
    from moe_replay.train.loop import train

    made = train(tiny_config(Path(folder), Path(prompts), Path(output), **overrides))
    return [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]


def closeness(prompts: list, completions: list[str], solution: list[str], **_: Any) -> list[float | None]:
    """The more characters are right the better: nearly every group has a signal."""
    return [
        sum(a == b for a, b in zip(c, s, strict=False)) - 0.1 * len(c)
        for c, s in zip(completions, solution, strict=True)
    ]
