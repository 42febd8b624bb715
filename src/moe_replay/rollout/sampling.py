"""Sampling from logits, reproducible row by row: what a row draws depends on its own seed and on nothing beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_replay.rollout.base import SamplingParams


def sampled_logprobs(logits: Tensor, params: SamplingParams) -> Tensor:
    """(B, V) float32: log-probs of the distribution that is really sampled from; greedy ones are at temperature 1."""
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
    """(B,) token ids from log-probs (B, V), by where a uniform number (B,) falls in the cumulated probabilities."""
    if params.temperature == 0:
        return logprobs.argmax(-1)
    cumulated = logprobs.double().exp().cumsum(-1)
    # side="right": the first token whose share ends beyond the number, so never one of probability zero
    found = torch.searchsorted(cumulated, uniform.double()[:, None] * cumulated[:, -1:], right=True)[:, 0]
    return found.clamp(max=logprobs.shape[-1] - 1)


def uniforms(rows: int, steps: int, params: SamplingParams) -> Tensor:
    """(rows, steps) in [0, 1): row r of a prompt's n samples draws from seed + r % n, whatever else is in the batch."""
    if params.seed is None:
        return torch.rand(rows, steps, dtype=torch.float64)
    of_sample = []
    for sample in range(params.n):
        generator = torch.Generator().manual_seed(params.seed + sample)
        of_sample.append(torch.rand(steps, dtype=torch.float64, generator=generator))
    return torch.stack(of_sample).repeat(rows // params.n, 1)
