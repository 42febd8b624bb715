"""The weights of the study of growth: for each depth, number of experts and seed a model trained to one loss.

A Qwen3-MoE of width 64 (a dense layer, then the MoE layers) reads worked problems of `task.py`, one after the other in
rows of 512 tokens, until the mean loss of 8 steps is below TARGET. Problems are new in every step, so this is close to
the held-out loss, which is measured afterwards.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from experiments.fault_models import SCALE, load, new_model, save
from experiments.model import END_ID, IDS, learn
from experiments.scales import Scale
from experiments.task import problems
from moe_replay.demo.warm_start import one_thread

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

TARGET = 1.4
"""Nats a token of the training loss."""
WINDOW = 8
ROW = 512
CHECKED = 8
"""Held-out rows."""
LONGEST = 8192


class Shape(NamedTuple):
    """What of a model varies: MoE layers, experts of each, experts of a token."""

    depth: int = 8
    experts: int = 32
    top_k: int = 4

    @property
    def scale(self) -> Scale:
        """The learning rate stays near its highest: training ends long before `steps`."""
        layers = self.depth + 1
        return replace(SCALE, layers=layers, experts=self.experts, top_k=self.top_k, steps=3000, warmup=20)


def prepare(folder: Path, shape: Shape, seed: int, target: float = TARGET) -> Path:
    """Return the folder of a trained model and its facts (`facts.json`); train it unless it is there."""
    of_model = folder / f"depth_{shape.depth}-experts_{shape.experts}_{shape.top_k}-seed_{seed}"
    if (of_model / "facts.json").exists():
        return of_model
    with one_thread():
        model, optimizer = new_model(shape.scale, seed)
        steps = _train(model, optimizer, shape.scale, seed, target)
        model.config.max_position_embeddings = LONGEST
        save(model, of_model)
        facts = {"steps": steps, "loss": round(held_out_loss(load(of_model)), 4), "sha256": _digest(of_model)}
    (of_model / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return of_model


def facts_of(folder: Path) -> dict[str, Any]:
    """Return steps, held-out loss and the SHA-256 of the weights of a model."""
    return json.loads((folder / "facts.json").read_text(encoding="utf-8"))


def _train(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, scale: Scale, seed: int, target: float) -> int:
    """Train until the mean loss of the last steps is below the target; return the number of steps."""
    text = rows_of(Random(f"growth {seed}"), held_out=False)
    losses = deque[float](maxlen=WINDOW)
    began = time.monotonic()
    model.train()
    for step in range(scale.steps):
        losses.append(float(learn(model, optimizer, scale, step, next(text))))
        mean = sum(losses) / len(losses)
        if step % 20 == 19:
            told = f"{scale.layers - 1} MoE layers of {scale.experts}, seed {seed}, step {step + 1}, loss {mean:.3f}"
            print(f"{told}, {time.monotonic() - began:.0f} s", flush=True)
        if len(losses) == WINDOW and mean < target:
            return step + 1
    raise RuntimeError(f"loss {mean:.3f} after {scale.steps} steps, not {target}")


def rows_of(random: Random, *, held_out: bool) -> Iterator[Tensor]:
    """Yield (1, ROW) token ids of worked problems, one after the other."""
    row: list[int] = []
    for problem in problems(random, SCALE.taught, held_out=held_out):
        row += [IDS[letter] for letter in problem.prompt + problem.worked] + [END_ID]
        while len(row) >= ROW:
            yield torch.tensor([row[:ROW]])
            row = row[ROW:]


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM) -> float:
    """Return the loss on held-out problems, the same for all models."""
    text = rows_of(Random("growth"), held_out=True)
    batches = [next(text) for _ in range(CHECKED)]
    return sum(float(model(input_ids=ids, labels=ids).loss) for ids in batches) / CHECKED


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
