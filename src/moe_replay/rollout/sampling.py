"""Sampling from logits; a seeded row is reproducible whatever else is in its batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_replay.rollout.types import SamplingParams


def sampled_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """(B, V) float32: log-probs of the distribution sampled from; greedy ones are at temperature 1."""
    scaled = logits.float() / (params.temperature or 1.0)
    if params.temperature == 0:
        return scaled.log_softmax(-1)
    if 0 < params.top_k < scaled.shape[-1]:
        least = scaled.topk(params.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if params.top_p < 1:
        descending, order = scaled.sort(dim=-1, descending=True)
        probabilities = descending.softmax(-1)
        # A token stays while those before it hold less than top_p: the likeliest one always does.
        dropped = probabilities.cumsum(-1) - probabilities >= params.top_p
        scaled = scaled.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    return scaled.log_softmax(-1)


def draw(logprobs: Tensor, uniform: Tensor, params: SamplingParams) -> Tensor:
    """(B,) token ids from log-probs (B, V), by inverse transform of uniform numbers (B,)."""
    if params.temperature == 0:
        return logprobs.argmax(-1)
    cumulated = logprobs.double().exp().cumsum(-1)
    # side="right": the first token whose share ends beyond the number, so never one of probability zero
    found = torch.searchsorted(cumulated, uniform.double()[:, None] * cumulated[:, -1:], right=True)[:, 0]
    return found.clamp(max=logprobs.shape[-1] - 1)


def prompt_hash(prompt: Sequence[int]) -> int:
    """Return a hash of a prompt to mix into a seed: one seed must not draw the same numbers for all prompts."""
    return zlib.crc32(np.asarray(prompt, np.int32).tobytes())


def uniforms(prompts: Sequence[Sequence[int]], steps: int, params: SamplingParams) -> Tensor:
    """(prompts * n, steps) in [0, 1). A seeded row depends only on the seed, its prompt and its sample index."""
    rows = []
    for prompt in prompts:
        if params.seed is None:
            rows.append(torch.rand(params.n, steps, dtype=torch.float64))
            continue
        for sample in range(params.n):
            random = np.random.default_rng([params.seed, prompt_hash(prompt), sample])
            rows.append(torch.from_numpy(random.random((1, steps))))
    return torch.cat(rows)
