"""What a family of models is: where its weights lie, and which Megatron-Core settings make the same model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.tensor_slices import GateUp, GroupedQkv, Plain, Rule, Stacked
from moe_replay.routes.topology import MoeTopology

Rules = Mapping[str, Rule]

LAYER = "decoder.layers.{layer}."
EXPERT = LAYER + "mlp.experts.local_experts.{expert}."
HF_LAYER = "model.layers.{layer}."
ADD_A_FAMILY = "docs/megatron-weights.md says how to add a family"


def unchanged(spec: Any, config: Any) -> Any:
    """The layer spec as Megatron-Core makes it."""
    return spec


def as_built(chunk: Any) -> None:
    """The chunk is right as Megatron-Core builds it."""


def nothing(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Every tensor of the checkpoint is a weight of the model."""
    return None


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    rules     parameter of Megatron-Core -> how it lies in a checkpoint with one tensor for each expert
    fused     what differs in a checkpoint that keeps the experts of a layer in one tensor
    settings  Transformers config -> settings of a `TransformerConfig`; refuses what Megatron-Core cannot do
    adapt     layer spec, config -> the spec that the family needs
    finish    does to a chunk that has been built what a spec cannot
    set_aside config.json -> names of tensors that are in checkpoints and not in the model
    """

    model_type: str
    rules: Rules
    fused: Rules
    settings: Callable[[Any], dict[str, Any]]
    adapt: Callable[[Any, Any], Any] = unchanged
    finish: Callable[[Any], None] = as_built
    set_aside: Callable[[Mapping[str, Any]], re.Pattern[str] | None] = nothing

    def rules_for(self, *, fused: bool, tied: bool) -> Rules:
        """The rules for one form of checkpoint and model."""
        rules = {**self.rules, **(self.fused if fused else {})}
        if tied:
            rules["output_layer.weight"] = rules["embedding.word_embeddings.weight"]
        return rules


# ---- rules that families share --------------------------------------------------------------------------------------


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
    """Grouped-query attention."""
    inside = HF_LAYER + "self_attn."
    return {
        LAYER + "self_attention.linear_qkv.weight": GroupedQkv(
            inside + "q_proj.weight", inside + "k_proj.weight", inside + "v_proj.weight"
        ),
        LAYER + "self_attention.linear_proj.weight": Plain(inside + "o_proj.weight"),
    }


def query_key_norm_rules() -> dict[str, Rule]:
    """Norms of queries and keys."""
    return {
        LAYER + f"self_attention.{part}_layernorm.weight": Plain(HF_LAYER + f"self_attn.{part}_norm.weight")
        for part in ("q", "k")
    }


def mlp_rules(
    here: str, there: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Rule]:
    """A gated MLP: a dense one, an expert, or shared experts."""
    return {
        f"{here}linear_fc1.weight": GateUp(f"{there}{gate}.weight", f"{there}{up}.weight"),
        f"{here}linear_fc2.weight": Plain(f"{there}{down}.weight"),
    }


def router_rule(there: str = "mlp.gate.weight") -> dict[str, Rule]:
    """The router's weight."""
    return {LAYER + "mlp.router.weight": Plain(HF_LAYER + there)}


def fused_expert_rules() -> dict[str, Rule]:
    """The experts of a layer in one tensor, as Transformers 5 holds them: (E, 2F, H) and (E, H, F)."""
    inside = HF_LAYER + "mlp.experts."
    return {
        EXPERT + "linear_fc1.weight": Stacked(GateUp(inside + "gate_up_proj")),
        EXPERT + "linear_fc2.weight": Stacked(Plain(inside + "down_proj")),
    }


# ---- settings that families share -----------------------------------------------------------------------------------


def decoder_settings(hf: Any) -> dict[str, Any]:
    """The settings of every family here: a pre-norm decoder with gated MLPs and a choice of experts."""
    from torch.nn.functional import silu

    topology = MoeTopology.from_config(hf)
    require(hf, "hidden_act", "silu")
    require(hf, "attention_bias", False, None)
    return {
        "num_layers": topology.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
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
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def attention_settings(hf: Any) -> dict[str, Any]:
    """Grouped-query attention over all earlier tokens, with plain rotary positions."""
    require(hf, "sliding_window", None)
    kind = rope_parameters(hf).get("rope_type", "default")
    if kind != "default":
        raise WeightMapError(
            f"the rotary positions of this {hf.model_type} are scaled", expected="rope_type 'default'", found=repr(kind)
        )
    return {
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
    }


def softmax_router_settings(normalized: bool) -> dict[str, Any]:
    """Softmax over all experts, then the best; `normalized` is the same as softmax over the best alone."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def rope_parameters(hf: Any) -> dict[str, Any]:
    """The rotary settings, whichever Transformers wrote the config."""
    if found := getattr(hf, "rope_parameters", None):
        return dict(found)
    scaling = getattr(hf, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**scaling, "rope_theta": hf.rope_theta, "rope_type": kind}


def require(hf: Any, name: str, *allowed: object) -> None:
    """Raise unless a setting has a value that Megatron-Core can do, or is not there."""
    found = getattr(hf, name, allowed[0])
    if found not in allowed:
        raise WeightMapError(
            f"this {hf.model_type} has a setting that its Megatron-Core model cannot have",
            expected=f"{name} {' or '.join(map(repr, allowed))}",
            found=repr(found),
        )
