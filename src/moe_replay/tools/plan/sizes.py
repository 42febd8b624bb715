"""Parameters of a model by kind, and what its layers keep for a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_replay.rollout.model_folder import build_model
from moe_replay.routes.layer_rules import setting
from moe_replay.routes.topology import MoeTopology, text_config


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model.

    experts, dense   parameters of all routed experts, and of all else in decoder layers
    embedding        parameters of the embedding; the head has as many, or is the same (`tied`)
    largest          parameters of the largest tensor of the live model
    """

    layers: int
    hidden: int
    vocabulary: int
    experts: int
    dense: int
    embedding: int
    largest: int
    tied: bool
    top_k: int
    num_experts: int
    expert_width: int
    query_width: int
    key_value_width: int

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """Build the model of a config without memory and count its parameters."""
        with torch.device("meta"):
            model = build_model(config)
        text, topology = text_config(config), MoeTopology.from_config(config)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head.weight is embedding.weight
        total = sum(parameter.numel() for parameter in model.parameters())
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
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
            embedding=vocabulary * hidden,
            largest=max(parameter.numel() for parameter in model.parameters()),
            tied=tied,
            top_k=topology.top_k,
            num_experts=topology.num_experts,
            expert_width=int(width),
            query_width=heads * head_width,
            key_value_width=(setting(text, "num_key_value_heads") or heads) * head_width,
        )

    @property
    def total(self) -> int:
        """All parameters."""
        return self.experts + self.dense + self.embedding * (1 if self.tied else 2)

    @property
    def layer(self) -> float:
        """Parameters of a decoder layer, on average."""
        return (self.experts + self.dense) / self.layers

    def layer_activations(self, tokens: float, compute: int) -> float:
        """Return the bytes that one MoE layer keeps for its backward, in a compute type of `compute` bytes."""
        attention = 4 * self.hidden + 5 * self.query_width + 6 * self.key_value_width
        experts = self.top_k * (2 * self.hidden + 4 * self.expert_width)
        return tokens * (compute * (attention + experts) + 4 * self.num_experts)
