"""Random models of several families, with sizes that vLLM's GPU kernels accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

VOCABULARY = 512
BODY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": BODY | {"num_experts": 8, "moe_intermediate_size": 128, "mlp_only_layers": [0]},
    "mixtral": BODY | {"num_local_experts": 8},
    "deepseek_v3": BODY
    | ROUTED
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 2,
        "topk_group": 1,
        # In the config of every released checkpoint, though Transformers has no such fields: without them vLLM knows
        # no bias of the routers, and does not start.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4_moe": BODY | ROUTED | {"num_nextn_predict_layers": 0},
    "gpt_oss": BODY | {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def random_model(family: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model whose routes and next tokens depend on the context: weights wider than at initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model.to(dtype).eval()


def add_mtp_layer(folder: Path) -> None:
    """Add one layer for multi-token prediction to a checkpoint: a copy of the last layer, and what leads to it."""
    config = json.loads((folder / "config.json").read_text())
    last, added = (f"model.layers.{config['num_hidden_layers'] - offset}." for offset in (1, 0))
    weights = load_file(folder / "model.safetensors")
    layer = {name.replace(last, added): tensor.clone() for name, tensor in weights.items() if name.startswith(last)}
    norm, head = weights["model.norm.weight"], weights["lm_head.weight"]
    layer |= {f"{added}{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    layer |= {
        f"{added}shared_head.head.weight": head.clone(),
        f"{added}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{added}eh_proj.weight": torch.eye(len(norm), dtype=norm.dtype).repeat(1, 2),
    }
    save_file(layer, folder / "mtp.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
