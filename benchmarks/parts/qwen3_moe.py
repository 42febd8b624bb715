"""Configs of Qwen3-MoE models for benchmarks of engines: tiny, 0.8 B parameters, and 8 layers of Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 8,
}


def sizes(
    *, vocab: int, hidden: int, expert: int, layers: int, heads: int, kv: int, head: int, experts: int
) -> dict[str, int]:
    """Return the sizes of a model as its config names them."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": expert,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "num_experts": experts,
    }


TINY = (
    COMMON
    | sizes(vocab=512, hidden=64, expert=32, layers=3, heads=2, kv=1, head=32, experts=16)
    | {"torch_dtype": "float32"}
)
SMALL = COMMON | sizes(vocab=32768, hidden=1024, expert=256, layers=15, heads=16, kv=4, head=64, experts=64)
SLICE = COMMON | sizes(vocab=151936, hidden=2048, expert=768, layers=8, heads=32, kv=4, head=128, experts=128)
