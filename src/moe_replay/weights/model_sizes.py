"""Sizes of a model from its config: parameters by kind, and the floating point operations of a pass."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_replay.routes.router_families import setting
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.weights.model_folder import build_model

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_ROUTERS = {"gate", "router"}
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
FUSED |= {"w2": "down_proj"}
"""Projections of an expert -> the tensor of Transformers 5 with that of all experts of a layer; some hold two."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Parameter counts and widths of a model.

    experts, dense   parameters of all routed experts, and of everything else in the decoder layers
    by_layer         the same two of each decoder layer
    embedding        parameters of the embedding; the head has as many, or is the same tensor (`tied`)
    largest          parameters of the largest tensor
    attention_width  mean width of the two products of attention, scores and values, over all heads
    matrices         of weights in decoder layers, by the last name of their layer: rows and columns of all together
    windows          of each layer: tokens that a token attends to at most; None: all before it; 0: no attention matrix
    """

    layers: int
    hidden: int
    vocabulary: int
    experts: int
    dense: int
    by_layer: tuple[tuple[int, int], ...]
    embedding: int
    largest: int
    tied: bool
    top_k: int
    num_experts: int
    expert_width: int
    query_width: int
    key_value_width: int
    attention_width: float
    matrices: Mapping[str, tuple[int, int]]
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, config: Any, topology: MoeTopology | None = None, *, trust_remote_code: bool = False) -> ModelSizes:
        """Build the model on the meta device and count its parameters."""
        with torch.device("meta"):
            model = build_model(config, trust_remote_code=trust_remote_code)
        text, topology = text_config(config), topology or MoeTopology.from_config(config)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head.weight is embedding.weight
        total = sum(parameter.numel() for parameter in model.parameters())
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        by_layer = [[0, 0] for _ in range(topology.num_layers)]
        for name, parameter in model.named_parameters():
            if (number := _LAYER.search(name)) is not None and int(number[1]) < len(by_layer):
                by_layer[int(number[1])][".experts." not in name] += parameter.numel()
        vocabulary, hidden = embedding.weight.shape
        heads = setting(text, "num_attention_heads")
        head_width = setting(text, "head_dim") or hidden // heads
        width = setting(text, "moe_intermediate_size") or setting(text, "intermediate_size")
        return cls(
            layers=topology.num_layers,
            hidden=hidden,
            vocabulary=vocabulary,
            experts=experts,
            dense=total - experts - vocabulary * hidden * (1 if tied else 2),
            by_layer=tuple((of_experts, others) for of_experts, others in by_layer),
            embedding=vocabulary * hidden,
            largest=max(parameter.numel() for parameter in model.parameters()),
            tied=tied,
            top_k=topology.top_k,
            num_experts=topology.num_experts,
            expert_width=int(width),
            query_width=heads * head_width,
            key_value_width=(setting(text, "num_key_value_heads") or heads) * head_width,
            attention_width=heads * _head_width(text, head_width),
            matrices=_matrices(model),
            windows=_windows(text, topology.num_layers),
        )

    @property
    def total(self) -> int:
        return self.experts + self.dense + self.embedding * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Parameters of the largest decoder layer."""
        return max(map(sum, self.by_layer))

    def adapter_parameters(self, rank: int, targets: Collection[str], *, split: bool = False) -> int:
        """Return the parameters of LoRA adapters on layers of these names (`model.lora_target_modules`).

        split   of experts whose two input projections are one tensor, each has its own, as in an engine
        """
        names = {FUSED.get(name, name) for name in targets} | {*targets}
        if "all-linear" in targets:
            names |= self.matrices.keys() - _ROUTERS
        if "router" in targets:
            names |= _ROUTERS
        repeats = {"gate_up_proj": 2 if split else 1}
        chosen = {name: self.matrices[name] for name in names & self.matrices.keys()}
        return rank * sum(rows + repeats.get(name, 1) * columns for name, (rows, columns) in chosen.items())

    def layer_activations(self, tokens: float, compute: int) -> float:
        """Return the bytes that one MoE layer saves for its backward; `compute`: bytes per element."""
        attention = 4 * self.hidden + 5 * self.query_width + 6 * self.key_value_width
        experts = self.top_k * (2 * self.hidden + 4 * self.expert_width)
        return tokens * (compute * (attention + experts) + 4 * self.num_experts)

    def forward_flops(self, lengths: Sequence[int], scored: int) -> Flops:
        """Return the floating point operations of one forward over sequences of these lengths.

        Two for each multiplication of a token with a parameter that it meets: everything but the embedding, `top_k` of
        the routed experts, and the head only at the `scored` tokens that are predicted.
        """
        active = self.dense + self.experts * self.top_k / self.num_experts
        pairs = sum(_pairs(length, window) for window in self.windows for length in lengths)
        return Flops(2.0 * (active * sum(lengths) + self.embedding * scored), 4.0 * self.attention_width * pairs)

    def expert_fraction(self, lengths: Sequence[int]) -> float:
        """Return how much of the operations of a forward over sequences of these lengths is in routed experts."""
        in_experts = 2.0 * self.experts * self.top_k / self.num_experts * sum(lengths)
        return in_experts / self.forward_flops(lengths, sum(lengths)).forward


class Flops(NamedTuple):
    """Floating point operations of a forward: with parameters, and in attention between tokens."""

    parameters: float
    attention: float

    @property
    def forward(self) -> float:
        return self.parameters + self.attention

    def update(self, *, frozen: bool) -> float:
        """Return those of forward and backward; recomputation does not count.

        frozen   whether parameters have no gradients (LoRA, whose adapters are left out)
        """
        return (2 if frozen else 3) * self.parameters + 3 * self.attention


def _matrices(model: Any) -> dict[str, tuple[int, int]]:
    matrices: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():
        if _LAYER.search(name) and parameter.ndim > 1:
            *_, owner, leaf = name.split(".")
            leaf = owner if leaf == "weight" else leaf
            count = parameter.shape[:-2].numel()
            rows, columns = matrices.get(leaf, (0, 0))
            matrices[leaf] = rows + count * parameter.shape[-2], columns + count * parameter.shape[-1]
    return matrices


def _pairs(length: int, window: int | None) -> float:
    """Return how many (token, token attended to) a causal sequence has."""
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) / 2 + (length - reach) * reach


def _head_width(text: Any, head_width: int) -> float:
    keys = (setting(text, "qk_nope_head_dim") or 0) + (setting(text, "qk_rope_head_dim") or 0)
    return ((keys or head_width) + (setting(text, "v_head_dim") or head_width)) / 2


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    kinds = setting(text, "layer_types") or ["full_attention"] * layers
    window = setting(text, "sliding_window") or setting(text, "attention_chunk_size")
    limits = {"sliding_attention": window, "chunked_attention": window}
    return tuple(limits.get(kind) if "attention" in kind and "linear" not in kind else 0 for kind in kinds)
