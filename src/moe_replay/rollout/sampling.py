"""Sampling from logits; a seeded row is reproducible whatever else is in its batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_replay.rollout.sampling_mask import SamplingMask
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


class Supports:
    """Collects the supports of B rows, column by column."""

    def __init__(self) -> None:
        self._counts: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._vocab_size = 0

    def add(self, logprobs: Tensor) -> None:
        """Add the next token of all rows, from the log-probs (B, V) of the distributions it is sampled from."""
        kept = logprobs > -torch.inf
        rows, ids = kept.nonzero(as_tuple=True)
        self._counts.append(kept.sum(-1))
        self._rows.append(rows)
        self._ids.append(ids)
        self._vocab_size = logprobs.shape[-1]

    def masks(self, lengths: Sequence[int]) -> list[SamplingMask]:
        """Return the mask of the first tokens of each row, `lengths` (B,) of them."""
        counts = torch.stack(self._counts, 1).cpu().numpy()
        order = torch.cat(self._rows).argsort(stable=True)
        ids = torch.cat(self._ids)[order].cpu().numpy()
        ends = np.concatenate([[0], np.cumsum(counts)])
        first = np.arange(len(counts)) * counts.shape[1]
        return [
            SamplingMask(self._vocab_size, counts[row, :length], ids[ends[start] : ends[start + length]])
            for row, (start, length) in enumerate(zip(first.tolist(), lengths, strict=True))
        ]


def request_seed(params: SamplingParams, prompt: Sequence[int]) -> int | None:
    """Return the seed of one prompt's request; None where `params` has none. Equal prompts have equal seeds."""
    return None if params.seed is None else params.seed ^ prompt_hash(prompt)


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
