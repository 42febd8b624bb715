"""Routes that no router would choose, each a function of the tokens so far and of the layer: easy to recognise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import moe_replay as mr
from tests.integrations.trl_tiny import LAYERS

EXPERTS = 8


def experts_of(prefix: Sequence[int], layer: int) -> list[int]:
    """The two experts of the last token of `prefix`."""
    first = (31 * sum((i + 1) * token for i, token in enumerate(prefix)) + layer) % EXPERTS
    return [first, (first + 1 + prefix[-1] % (EXPERTS - 1)) % EXPERTS]


def is_covered(position: int, length: int) -> bool:
    """No route for the last token, nor for the second."""
    return position not in (1, length - 1)


def foreign_trace(tokens: Sequence[int]) -> mr.RouteTrace:
    experts = [[experts_of(tokens[: t + 1], layer) for layer in LAYERS] for t in range(len(tokens))]
    valid = [is_covered(t, len(tokens)) for t in range(len(tokens))]
    return mr.RouteTrace(tokens, experts, LAYERS, valid, num_experts=EXPERTS)


def foreign_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and on the place in the batch of all ranks, of different lengths."""
    accelerator = trainer.accelerator
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completion_ids = []
    for place, ids in enumerate(prompt_ids, accelerator.process_index * len(prompts)):
        random = np.random.default_rng([place, *ids])
        drawn = random.integers(2, 14, random.integers(2, 6)).tolist()
        completion_ids.append([*drawn, 1] if place % 3 else drawn)
    sequences = [[*p, *c] for p, c in zip(prompt_ids, completion_ids, strict=True)]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-2.0] * len(ids) for ids in completion_ids],
        "routes": [foreign_trace(ids) for ids in sequences],
    }


@dataclass
class Watched:
    """What one pass of a model was fed, and where its tokens went: layer -> (B, W, K), once more where recomputed."""

    ids: torch.Tensor
    mask: torch.Tensor
    with_gradient: bool
    routes: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def count(self, expected: Callable[[Sequence[int], int], list[int]]) -> tuple[int, int]:
        """(layer, token) pairs with a route that went where expected, and all of them."""
        went_there = pairs = 0
        for row in range(len(self.ids)):
            columns = self.mask[row].nonzero()[:, 0].tolist()
            tokens = self.ids[row, columns].tolist()
            for layer in LAYERS:
                for routes in self.routes[layer]:
                    for position, column in enumerate(columns):
                        if is_covered(position, len(tokens)):
                            pairs += 1
                            went_there += routes[row, column].tolist() == expected(tokens[: position + 1], layer)
        return went_there, pairs


class Watcher:
    """Looks at what reaches the experts, with no help of the library."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[Watched] = []
        decoder = model.get_submodule("model")
        decoder.register_forward_pre_hook(self._begins, with_kwargs=True)
        for layer in LAYERS:
            experts = decoder.get_submodule(f"layers.{layer}.mlp.experts")
            experts.register_forward_pre_hook(lambda m, args, layer=layer: self._sees(layer, args[1]))

    def _begins(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.passes.append(Watched(kwargs["input_ids"], kwargs["attention_mask"], torch.is_grad_enabled()))

    def _sees(self, layer: int, chosen: torch.Tensor) -> None:
        now = self.passes[-1]
        now.routes.setdefault(layer, []).append(chosen.view(*now.ids.shape, -1))
