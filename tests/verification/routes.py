"""Routes as routers make them, without a model: tokens that resemble their neighbours, experts with uneven loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import moe_replay as mr

HIDDEN = 24


class Routers:
    """One linear router a layer. Decoder layer 0 is dense: the routers are layers 1 to L."""

    def __init__(self, seed: int, layers: int = 8, num_experts: int = 32, top_k: int = 4, skew: float = 0.3) -> None:
        self.chance = np.random.default_rng(seed)
        self.layers, self.num_experts, self.top_k = range(1, layers + 1), num_experts, top_k
        self.weights = self.chance.normal(size=(layers, HIDDEN, num_experts))
        self.bias = skew * HIDDEN**0.5 * self.chance.normal(size=(layers, num_experts))

    def tokens(self, lengths: Sequence[int], alike: float = 0.3) -> list[np.ndarray]:
        """Hidden states (T, H) of each sequence; `alike` is the correlation of neighbours."""
        sequences = [self.chance.normal(size=(length, HIDDEN)) for length in lengths]
        for hidden in sequences:
            for t in range(1, len(hidden)):
                hidden[t] = alike * hidden[t - 1] + (1 - alike**2) ** 0.5 * hidden[t]
        return sequences

    def route(self, sequences: Sequence[np.ndarray], noise: float = 0.0, last: bool = True) -> list[mr.RouteTrace]:
        """A trace of each sequence, its logits off by `noise` of their spread, with or without the last token."""
        traces = []
        for number, hidden in enumerate(sequences):
            logits = np.einsum("th,lhe->tle", hidden, self.weights) + self.bias
            logits += noise * HIDDEN**0.5 * self.chance.normal(size=logits.shape)
            experts = np.argsort(-logits, axis=-1)[..., : self.top_k]
            ids = 1000 * number + np.arange(len(hidden))
            valid = np.arange(len(hidden)) < len(hidden) - (not last)
            traces.append(mr.RouteTrace(ids, experts, self.layers, valid, num_experts=self.num_experts))
        return traces


def healthy(seed: int, lengths: Sequence[int] = (96, 81, 75, 88), noise: float = 0.15, alike: float = 0.3, **routers):
    """(native, given) traces of the same tokens, as engine and trainer with different kernels make them."""
    made = Routers(seed, **routers)
    tokens = made.tokens(lengths, alike)
    return made.route(tokens), made.route(tokens, noise, last=False)


def with_routes(trace: mr.RouteTrace, experts: np.ndarray, valid: np.ndarray | None = None) -> mr.RouteTrace:
    """The same tokens with other routes; rows that nobody recorded become those that were shifted into their place."""
    covered = trace.valid if valid is None else valid
    return mr.RouteTrace(trace.token_ids, experts, trace.layers, covered, num_experts=trace.num_experts)


def siblings(seed: int, count: int = 8, prompt: int = 30, completion: int = 40, period: int = 0, **settings):
    """(native, given) of completions of one prompt; `period`: each completion repeats its first tokens."""
    sizes = {"noise": 0.12, "own_noise": 0.12, "alike": 0.6} | settings
    noise, own_noise, alike = (sizes.pop(name) for name in ("noise", "own_noise", "alike"))
    made = Routers(seed, **sizes)
    (shared,) = made.tokens([prompt], alike)
    tails = made.tokens([completion] * count, alike)
    if period:
        tails = [np.resize(t[:period], t.shape) + 0.25 * made.chance.normal(size=t.shape) for t in tails]
    sequences = [np.concatenate([shared, tail]) for tail in tails]
    return made.route(sequences, own_noise), made.route(sequences, noise, last=False)
