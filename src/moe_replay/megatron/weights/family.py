"""`Family`: weight map and Megatron-Core settings of a `model_type`, and the rules and settings that families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_replay.megatron.weights.tensor_slices import GateUp, GroupedQkv, Plain, Rule, Stacked, WeightMapError
from moe_replay.routes.topology import MoeTopology

Rules = Mapping[str, Rule]

LAYER = "decoder.layers.{layer}."
EXPERT = LAYER + "mlp.experts.local_experts.{expert}."
HF_LAYER = "model.layers.{layer}."
ADD_A_FAMILY = "docs/megatron.md explains how to add a family"


@dataclass(frozen=True)
class Family:
    """A model family (one `model_type`): how its models are built and where their weights are stored."""

    rules: Rules  # Megatron-Core parameter -> rule, for checkpoints with one tensor per expert
    fused_rules: Rules  # rules that replace them for checkpoints with all experts of a layer in one tensor
    # Transformers config -> settings of a `TransformerConfig`; refuses models Megatron-Core cannot compute
    settings: Callable[[Any], dict[str, Any]]
    # Transformers config -> arguments of a `GPTModel` that differ from those of other families
    arguments: Callable[[Any], dict[str, Any]] = lambda hf: {}
    # (layer spec, config) -> the layer spec of this family
    adapt_spec: Callable[[Any, Any], Any] = lambda spec, config: spec
    after_build: Callable[[Any], None] = lambda chunk: None  # changes a built chunk in place, where a layer spec cannot
    # config.json -> pattern of checkpoint tensors that are not part of the model
    extra_tensors: Callable[[Mapping[str, Any]], re.Pattern[str] | None] = lambda config: None
    local_layers: bool = False  # do not use Transformer Engine's layers, even where it is installed

    def rules_for(self, *, fused: bool, tied: bool) -> Rules:
        """Return the rules for a checkpoint with fused experts or not, and with tied embeddings or not."""
        rules = {**self.rules, **(self.fused_rules if fused else {})}
        if tied:
            rules["output_layer.weight"] = rules["embedding.word_embeddings.weight"]
        return rules


# ---- shared rules ----------------------------------------------------------------------------------------------------


def decoder_rules() -> dict[str, Rule]:
    """Embeddings, norms and the output projection."""
    return {
        "embedding.word_embeddings.weight": Plain("model.embed_tokens.weight"),
        LAYER + "input_layernorm.weight": Plain(HF_LAYER + "input_layernorm.weight"),
        LAYER + "pre_mlp_layernorm.weight": Plain(HF_LAYER + "post_attention_layernorm.weight"),
        "decoder.final_layernorm.weight": Plain("model.norm.weight"),
        "output_layer.weight": Plain("lm_head.weight"),
    }


def attention_rules() -> dict[str, Rule]:
    """Grouped-query attention, whose projections may have biases."""
    inside = HF_LAYER + "self_attn."
    rules: dict[str, Rule] = {}
    for part in ("weight", "bias"):
        query, key, value = (f"{inside}{name}_proj.{part}" for name in "qkv")
        rules[LAYER + f"self_attention.linear_qkv.{part}"] = GroupedQkv(query, key, value)
        rules[LAYER + f"self_attention.linear_proj.{part}"] = Plain(f"{inside}o_proj.{part}")
    return rules


def query_key_norm_rules() -> dict[str, Rule]:
    return {
        LAYER + f"self_attention.{part}_layernorm.weight": Plain(HF_LAYER + f"self_attn.{part}_norm.weight")
        for part in ("q", "k")
    }


def mlp_rules(
    here: str, there: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Rule]:
    """A gated MLP: dense layer, expert or shared expert."""
    return {
        f"{here}linear_fc1.weight": GateUp(f"{there}{gate}.weight", f"{there}{up}.weight"),
        f"{here}linear_fc2.weight": Plain(f"{there}{down}.weight"),
    }


def dense_mlp_rules() -> dict[str, Rule]:
    return mlp_rules(LAYER + "mlp.", HF_LAYER + "mlp.")


def router_rule(there: str = "mlp.gate.weight") -> dict[str, Rule]:
    return {LAYER + "mlp.router.weight": Plain(HF_LAYER + there)}


def expert_rules() -> dict[str, Rule]:
    """Router and experts, one tensor per expert."""
    return {**router_rule(), **mlp_rules(EXPERT, HF_LAYER + "mlp.experts.{expert}.")}


def fused_expert_rules() -> dict[str, Rule]:
    """Router and experts in the layout of Transformers 5: (E, 2F, H) and (E, H, F)."""
    inside = HF_LAYER + "mlp.experts."
    return {
        **router_rule(),
        EXPERT + "linear_fc1.weight": Stacked(GateUp(inside + "gate_up_proj")),
        EXPERT + "linear_fc2.weight": Stacked(Plain(inside + "down_proj")),
    }


def gated_shared_expert_rules() -> dict[str, Rule]:
    """A shared expert whose output is weighted by a gate."""
    return {
        **mlp_rules(LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_expert."),
        LAYER + "mlp.shared_experts.gate_weight": Plain(HF_LAYER + "mlp.shared_expert_gate.weight"),
    }


# ---- shared settings -------------------------------------------------------------------------------------------------


def decoder_settings(hf: Any, *, qkv_bias: bool = False) -> dict[str, Any]:
    """A pre-norm decoder with gated MLPs and experts; refuses other activations.

    qkv_bias   query, key and value projections have a bias, the output projection has none; False: refuse configs
               with attention biases
    """
    from torch.nn.functional import silu

    topology = MoeTopology.from_config(hf)
    require(hf, "hidden_act", "silu")
    if not qkv_bias:
        require(hf, "attention_bias", False, None)
    return {
        "num_layers": topology.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
        "num_moe_experts": topology.num_experts,
        "moe_router_topk": topology.top_k,
        "moe_layer_freq": [int(layer in topology.layers) for layer in range(topology.num_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def attention_settings(hf: Any) -> dict[str, Any]:
    """Causal grouped-query attention with unscaled rotary embeddings; refuses anything else."""
    if getattr(hf, "sliding_window", None) != 0:  # Qwen2-MoE writes 0 for none
        require(hf, "sliding_window", None)
    kind = rope_parameters(hf).get("rope_type", "default")
    if kind != "default":
        raise WeightMapError(
            f"scaled rotary embeddings of {hf.model_type} are not supported",
            expected="rope_type 'default'",
            found=repr(kind),
        )
    return {
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
    }


def softmax_router_settings(normalized: bool) -> dict[str, Any]:
    """Softmax, then top-k; `normalized` gates equal a softmax over the top-k alone."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def softmax_moe_settings(hf: Any, *, expert_size: int, normalized: bool, qkv_bias: bool = False) -> dict[str, Any]:
    """A decoder with grouped-query attention and softmax-routed experts.

    expert_size   hidden size of an expert
    normalized    the gate weights of a token sum to one
    qkv_bias      as in `decoder_settings`
    """
    return {
        **decoder_settings(hf, qkv_bias=qkv_bias),
        **attention_settings(hf),
        **softmax_router_settings(normalized),
        "moe_ffn_hidden_size": expert_size,
    }


def gated_shared_expert_settings(hf: Any) -> dict[str, Any]:
    return {
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def rope_parameters(hf: Any) -> dict[str, Any]:
    """Return the rotary settings of a config of Transformers 4 or 5."""
    if parameters := getattr(hf, "rope_parameters", None):
        return dict(parameters)
    scaling = getattr(hf, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = getattr(hf, "partial_rotary_factor", None)
    factor = {} if partial is None else {"partial_rotary_factor": partial}
    return {**scaling, **factor, "rope_theta": hf.rope_theta, "rope_type": kind}


def require(hf: Any, name: str, *allowed: object) -> None:
    """Raise unless a setting is absent or has an allowed value."""
    value = getattr(hf, name, allowed[0])
    if value not in allowed:
        raise WeightMapError(
            f"this {hf.model_type} has a setting that Megatron-Core does not support",
            expected=f"{name} {' or '.join(map(repr, allowed))}",
            found=repr(value),
        )
