"""Tiny models whose weights depend on the names in their checkpoint alone: the same with every version of Transformers.

SGLang's answers are recorded once; what they say must be comparable with the same weights wherever the tests run.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from moe_replay.weights.checkpoint import checkpoint_tensors, load_into

FAMILIES = ("qwen3_moe", "glm4_moe")


def sglang_model(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """In float32: qwen3_moe without dense layers, which SGLang does not know there; glm4_moe with a dense first one."""
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3_moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | {"num_experts": 8} | changes))
    elif family == "glm4_moe":
        from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

        routing = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes | routing | {"first_k_dense_replace": 1} | changes))
    else:
        raise AssertionError(family)
    load_into(model, ((name, _tensor(name, tensor, seed)) for name, tensor in checkpoint_tensors(model)))
    return model.eval()


def _tensor(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Wide enough for routes and next tokens to depend on the context; norms are near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randn(like.shape, generator=generator) * 0.08
    return 1 + drawn if like.dim() == 1 and "norm" in name else drawn
