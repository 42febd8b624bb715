"""Everything that determines the embedded default: one value, of which the name of its cache folder is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RECIPE = Path(__file__).with_name("recipe.toml")
"""Default settings of a training run of the embedded model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes of the task, of the model and of its warm start.

    seed             of data, weights and batches
    terms            fewest and most digits that are added in one problem
    train_rows       prompts to train on
    eval_rows        prompts to evaluate on; the model never sees them, nor does the warm start
    hidden_size      also that of each expert; 64 is the least that vLLM's CPU kernels take
    layers           decoder layers, of which the first is dense
    num_experts      in each of the others, of which `top_k` serve a token
    batch_size       problems in a step of the warm start
    learning_rate    of the warm start, after `warmup_steps`; it falls in a line to a tenth at `max_steps`
    max_steps        that it takes at most to learn the working
    enough           chance of a right answer at which it knows the working
    mixed_steps      that follow, in which only a share of `worked` shows the working and the others estimate the sum
    """

    seed: int = 0
    terms: tuple[int, int] = (3, 4)
    train_rows: int = 2048
    eval_rows: int = 128
    hidden_size: int = 64
    layers: int = 4
    num_experts: int = 16
    top_k: int = 4
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    max_steps: int = 500
    enough: float = 0.8
    mixed_steps: int = 40
    worked: float = 0.3


FULL = DemoSettings()
QUICK = DemoSettings(
    terms=(2, 2),
    train_rows=32,
    eval_rows=8,
    layers=3,
    num_experts=8,
    batch_size=32,
    warmup_steps=10,
    max_steps=40,
    mixed_steps=10,
)
"""A few seconds' version: everything is there, but the model knows little."""
