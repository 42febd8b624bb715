"""Tiny random models of every MoE family of the installed Transformers, for tests.

A family is a `model_type`. Each config keeps what makes its family special: a dense first layer or interleaved dense
layers, group-limited routing, zero- or skip-experts, hybrid attention. Families that the installed release does not
have are left out of `available_families()`; `tests/routes/test_topology.py` counts them, so none is lost unnoticed.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

VOCABULARY = 64
RELEASE = int(transformers.__version__.split(".")[0])


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """The config less some settings that a family does not have."""
    return {name: value for name, value in config.items() if name not in names}


# ---- parts of a config that several families share --------------------------------------------------------------

BODY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large enough for another choice of experts to show in the output
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
SPARSE_ATTENTION = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
DELTA_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
BLOCK_SPARSE_ATTENTION = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
INTERLEAVED_ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
MLP = {"intermediate_size": 24}
EXPERT_MLP = {"moe_intermediate_size": 16}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
INKLING_ATTENTION = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 8,
}
ROUTED_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
DENSE_FIRST = {"first_k_dense_replace": 1}
DENSE_BETWEEN = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
DENSE_START = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
HEAD = {"head_dim": 8}

QWEN_MOE = BODY | MLP | EXPERT_MLP | EXPERTS
DEEPSEEK = BODY | LATENT_ATTENTION | MLP | EXPERT_MLP | ROUTED_EXPERTS | GROUPS
KIMI = without(DEEPSEEK, "q_lora_rank", "n_routed_experts") | {"num_local_experts": 8}
GLM_MOE = BODY | HEAD | MLP | EXPERT_MLP | ROUTED_EXPERTS | GROUPS
GRANITE_MOE = BODY | MLP | LOCAL_EXPERTS
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8}

# ---- families ---------------------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": BODY | HEAD | MLP | EXPERT_MLP | EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "aria_text": BODY | MLP | {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": DEEPSEEK | DENSE_BETWEEN,
    "axk2": DEEPSEEK | SPARSE_ATTENTION | DENSE_BETWEEN | {"gated_norm_rank": 4},
    "bailing_hybrid": KIMI | HEAD | DENSE_FIRST | {"layer_group_size": 2, "num_mtp_layers": 0},
    "beam": BODY | HEAD | MLP | EXPERT_MLP | {"num_experts": 8, "num_experts_per_tok": 3} | GROUPS | DENSE_START,
    "cohere2_moe": BODY
    | HEAD
    | MLP
    | EXPERTS
    | DENSE_BETWEEN
    | {"prefix_dense_intermediate_size": 24, "num_shared_experts": 1, "sliding_window": 4},
    "dbrx": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 64,
        "initializer_range": 0.2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        # release 5 sizes the experts by a second hidden_size, which release 4 refuses
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2}
        | ({"hidden_size": 32} if RELEASE >= 5 else {}),
    },
    "deepseek_ocr2_text": BODY
    | MLP
    | EXPERT_MLP
    | ROUTED_EXPERTS
    | GROUPS
    | DENSE_START
    | {"topk_method": "group_limited_greedy"},
    "deepseek_v2": DEEPSEEK | DENSE_FIRST | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK | DENSE_FIRST,
    "deepseek_v32": DEEPSEEK | SPARSE_ATTENTION | DENSE_BETWEEN,
    "deepseek_v4": BODY
    | HEAD
    | EXPERT_MLP
    | SPARSE_ATTENTION
    | ROUTED_EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "o_groups": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "sliding_window": 8,
        "partial_rotary_factor": 0.5,
        "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention"] * 2,
        "num_nextn_predict_layers": 0,
    },
    "dots1": GLM_MOE | DENSE_FIRST | {"layer_types": ["full_attention"] * 3},
    "ernie4_5_moe": BODY
    | MLP
    | EXPERT_MLP
    | {
        "num_hidden_layers": 4,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
    },
    "exaone_moe": BODY
    | HEAD
    | MLP
    | EXPERT_MLP
    | GROUPS
    | DENSE_BETWEEN
    | {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1},
    "flex_olmo": BODY | MLP | EXPERTS,
    "flint": QWEN_MOE | HEAD | SHARED_EXPERT | {"mlp_only_layers": [1], "sliding_window": 4},
    "gemma4_text": BODY
    | HEAD
    | MLP
    | EXPERT_MLP
    | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe": GLM_MOE | DENSE_FIRST,
    "glm4_moe_lite": DEEPSEEK | DENSE_BETWEEN,
    "glm4v_moe_text": GLM_MOE
    | DENSE_FIRST
    | {"head_dim": 16, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "glm5_next_text": DEEPSEEK
    | SPARSE_ATTENTION
    | DENSE_BETWEEN
    | {
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "index_kpool": 2,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
    },
    "glm_moe_dsa": DEEPSEEK | SPARSE_ATTENTION | DENSE_BETWEEN,
    "gpt_oss": BODY
    | HEAD
    | MLP
    | LOCAL_EXPERTS
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4},
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": GRANITE_MOE | {"shared_intermediate_size": 16},
    "granitemoehybrid": GRANITE_MOE
    | MAMBA
    | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
    "granitemoeshared": GRANITE_MOE | {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": BODY | HEAD | MLP | {"num_experts": 6, "moe_topk": [2, 2, 2]},
    "hy_v3": QWEN_MOE | HEAD | DENSE_BETWEEN | {"num_shared_experts": 1},
    "hy_v4": DEEPSEEK | SPARSE_ATTENTION | DENSE_BETWEEN | {"hc_mult": 2},
    "inkling2_text": BODY | HEAD | EXPERT_MLP | ROUTED_EXPERTS | INKLING_ATTENTION | {"n_layers_per_attn_res_block": 2},
    "inkling_text": BODY | HEAD | MLP | EXPERT_MLP | ROUTED_EXPERTS | DENSE_BETWEEN | INKLING_ATTENTION,
    "jamba": BODY
    | MLP
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": BODY | MLP | LOCAL_EXPERTS | {"kv_channels": 8},
    "kimi_linear": KIMI
    | DENSE_BETWEEN
    | {"linear_head_dim": 8, "linear_num_heads": 4}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "kolibri1": BODY | HEAD | EXPERT_MLP | EXPERTS | SHARED_EXPERT | {"sliding_window": 4},
    "laguna": QWEN_MOE | HEAD | SHARED_EXPERT | DENSE_BETWEEN,
    "lfm2_moe": QWEN_MOE | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": BODY
    | HEAD
    | MLP
    | LOCAL_EXPERTS
    | {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 24,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
    },
    "longcat_flash": without(BODY, "num_hidden_layers")
    | LATENT_ATTENTION
    | {
        "num_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 6,
        "zero_expert_num": 2,
        "moe_topk": 3,
    },
    "mellum": QWEN_MOE | HEAD | DENSE_BETWEEN,
    "mimo_v2_flash": without(GLM_MOE, "n_shared_experts") | DENSE_BETWEEN | {"v_head_dim": 8, "sliding_window": 4},
    "minimax": BODY
    | HEAD
    | MLP
    | LOCAL_EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "minimax_m2": BODY | HEAD | MLP | LOCAL_EXPERTS | {"rotary_dim": 8},
    "minimax_m3_vl_text": BODY
    | HEAD
    | MLP
    | LOCAL_EXPERTS
    | DENSE_BETWEEN
    | {"dense_intermediate_size": 24, "shared_intermediate_size": 16, "rotary_dim": 8, "index_n_heads": 2}
    | {"index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
    "mistral4": DEEPSEEK | DENSE_FIRST,
    "mistral_large4_text": DEEPSEEK | SPARSE_ATTENTION | DENSE_BETWEEN,
    "mixtral": BODY | MLP | LOCAL_EXPERTS,
    "muse_spark_text": BODY
    | HEAD
    | MLP
    | EXPERT_MLP
    | LOCAL_EXPERTS
    | DENSE_BETWEEN
    | {"moe_hidden_size": 16, "sliding_window": 4},
    "nemotron_h": without(GLM_MOE, "num_hidden_layers")
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "use_mamba_kernels": False,
    },
    "olmoe": BODY | MLP | EXPERTS,
    "openai_privacy_filter": BODY | HEAD | MLP | LOCAL_EXPERTS,
    "qwen2_moe": QWEN_MOE | SHARED_EXPERT | {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": QWEN_MOE | HEAD | SHARED_EXPERT | DELTA_ATTENTION,
    "qwen3_moe": QWEN_MOE | HEAD | {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen3_next": QWEN_MOE | HEAD | SHARED_EXPERT | DELTA_ATTENTION | {"mlp_only_layers": [0]},
    "qwen3_omni_moe_text": QWEN_MOE | HEAD | {"mlp_only_layers": [1]} | INTERLEAVED_ROPE,
    "qwen3_vl_moe_text": QWEN_MOE | HEAD | {"mlp_only_layers": [1]} | INTERLEAVED_ROPE,
    "qwen4_exp_text": QWEN_MOE
    | HEAD
    | SHARED_EXPERT
    | DELTA_ATTENTION
    | BLOCK_SPARSE_ATTENTION
    | {"hc_count": 2, "hc_lowrank": 4},
    "solar_open": GLM_MOE,
    "step3p5": without(GLM_MOE, "n_shared_experts", *GROUPS)
    | DENSE_BETWEEN
    | {"share_expert_dim": 16, "sliding_window": 4},
    "unlimited_ocr_text": BODY
    | MLP
    | EXPERT_MLP
    | ROUTED_EXPERTS
    | GROUPS
    | DENSE_START
    | {"topk_method": "group_limited_greedy"},
    "zaya": BODY | HEAD | EXPERT_MLP | {"num_experts": 6, "num_experts_per_tok": 1, "router_hidden_size": 8},
}

# Text models without an entry in the Auto classes: folder, config class, model class.
UNLISTED: dict[str, tuple[str, str, str]] = {
    "deepseek_ocr2_text": ("deepseek_ocr2", "DeepseekOcr2TextConfig", "DeepseekOcr2TextModel"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "step3p5": ("step3p7", "Step3p7TextConfig", "Step3p7TextModel"),
    "unlimited_ocr_text": ("unlimited_ocr", "UnlimitedOcrTextConfig", "UnlimitedOcrTextModel"),
}


@functools.cache
def available_families() -> tuple[str, ...]:
    """The families that the installed release of Transformers has."""
    listed = set(CONFIG_MAPPING)
    unlisted = {model_type for model_type, (folder, _, _) in UNLISTED.items() if folder in listed}
    return tuple(model_type for model_type in FAMILIES if model_type in listed | unlisted)


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """The family's tiny config, with some settings changed."""
    settings = FAMILIES[model_type] | changes
    if model_type in UNLISTED:
        folder, config_class, _ = UNLISTED[model_type]
        module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        return getattr(module, config_class)(**settings)
    return CONFIG_MAPPING[model_type](**settings)


def model_from_config(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """A random model: a causal LM where the family has one, else its bare text model. In eval mode, float32."""
    torch.manual_seed(seed)
    return _model_class(config)(config).eval()


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model of the family, the same for the same seed."""
    return model_from_config(tiny_config(model_type, **changes), seed)


def tiny_inputs(model_type: str, batch: int = 2, length: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward: `input_ids` (batch, length), no padding."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}


def _model_class(config: PretrainedConfig) -> Any:
    if config.model_type in UNLISTED:
        folder, _, model_class = UNLISTED[config.model_type]
        return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), model_class)
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise KeyError(f"no model class for {config.model_type}")
