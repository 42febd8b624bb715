"""Sizes of the study: on a GPU, and the tiny one that shows on a CPU that everything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Model, pre-training and RL of one size of the study.

    task             problems: `task.py`, or `long_task.py`, which trains its own tokenizer
    vocabulary       rows of the embedding; the most tokens of the tokenizer
    hidden, expert, layers, experts, top_k, heads   of the model; the first of its layers is dense
    context          positions of the model, and the longest sequence of the engine
    taught           fewest and most steps of the problems of pre-training
    asked            of the problems of RL, which go beyond those
    batch_tokens     of a step of pre-training
    steps            of pre-training
    lr               of pre-training, after `warmup` steps
    rl_steps         of a run, each one rollout and its updates
    prompts, samples a step; max_tokens of a completion
    kv_gib           KV cache of the engine
    """

    name: str
    task: Literal["short", "long"] = "short"
    vocabulary: int = 64
    context: int = 1024
    kv_gib: int = 2
    hidden: int
    expert: int
    layers: int
    experts: int
    top_k: int
    heads: int
    taught: tuple[int, int]
    asked: tuple[int, int]
    batch_tokens: int
    steps: int
    lr: float
    warmup: int
    rl_steps: int
    prompts: int
    samples: int
    max_tokens: int
    eval_prompts: int
    eval_every: int
    train_rows: int = 4096


GPU = Scale(
    name="gpu",
    hidden=384,
    expert=128,
    layers=13,
    experts=64,
    top_k=8,
    heads=6,
    taught=(1, 12),
    asked=(8, 20),
    batch_tokens=32768,
    steps=1100,
    lr=1e-3,
    warmup=100,
    rl_steps=24,
    prompts=32,
    samples=8,
    max_tokens=320,
    eval_prompts=128,
    eval_every=8,
)
"""121 million parameters, of which a token uses 21 million."""

TINY = Scale(
    name="tiny",
    hidden=64,
    expert=32,
    layers=3,
    experts=8,
    top_k=2,
    heads=2,
    taught=(1, 2),
    asked=(1, 2),
    batch_tokens=512,
    steps=4,
    lr=3e-3,
    warmup=2,
    rl_steps=2,
    prompts=4,
    samples=4,
    max_tokens=8,
    eval_prompts=4,
    eval_every=1,
    train_rows=32,
)
"""Seconds on a CPU; its numbers mean nothing."""

LARGE = Scale(
    name="large",
    task="long",
    vocabulary=4096,
    hidden=512,
    expert=128,
    layers=33,
    experts=64,
    top_k=8,
    heads=8,
    context=2560,
    taught=(4, 100),
    asked=(80, 104),
    batch_tokens=65536,
    steps=600,
    lr=6e-4,
    warmup=60,
    rl_steps=12,
    prompts=32,
    samples=8,
    max_tokens=2048,
    kv_gib=24,
    eval_prompts=128,
    eval_every=4,
)
"""434 million parameters in 32 MoE layers, of which a token uses 81 million; completions of 1,000 tokens and more."""

TINY_LONG = replace(TINY, name="tiny-long", task="long", vocabulary=512, context=512, max_tokens=32)
"""The same for the long problems."""

Scales = Mapping[str, Scale]
"""By device."""
SCALES: Scales = {"cuda": GPU, "cpu": TINY}
LARGE_SCALES: Scales = {"cuda": LARGE, "cpu": TINY_LONG}
