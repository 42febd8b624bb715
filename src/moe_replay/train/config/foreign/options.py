"""The counterpart of another trainer's option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """An option of another trainer.

    key       our key; `rollout.options.NAME` and `backend.megatron.NAME` are entries of those tables; empty: no
              counterpart
    values    their values -> ours, where they differ; None: nothing to set. A value not listed has no counterpart
    note      why there is no counterpart, or what differs
    derived   computed from several options
    subject   what the option decides, such as "loss", if a run without it is another run; empty: nothing of that kind,
              or what `key` decides
    """

    key: str = ""
    values: Mapping[str, Any] | None = None
    note: str = ""
    derived: bool = False
    subject: str = ""


Table = Mapping[str, Option]


def same(keys: Mapping[str, str], prefix: str = "") -> dict[str, Option]:
    """Options with the same values as ours: their names, with spaces between, without the prefix -> our key."""
    return {f"{prefix}{theirs}": Option(ours) for names, ours in keys.items() for theirs in names.split()}


def derived(keys: Mapping[str, tuple[str, str]]) -> dict[str, Option]:
    """Computed options: their names, with spaces between -> (our key, how)."""
    return {
        theirs: Option(ours, note=how, derived=True) for names, (ours, how) in keys.items() for theirs in names.split()
    }


def without(reasons: Mapping[str, str]) -> dict[str, Option]:
    """Options without a counterpart or effect on what is learned: reason -> their names, with spaces between."""
    return {theirs: Option(note=reason) for reason, names in reasons.items() for theirs in names.split()}


def only(subject: str, reason: str, names: str) -> dict[str, Option]:
    """Options without a counterpart that make another run, unless they have the value here.

    names   name=value, with spaces between; a name alone has no harmless value
    """
    words = (word.partition("=") for word in names.split())
    return {
        name: Option(values=dict.fromkeys([harmless] if equals else []), note=reason, subject=subject)
        for name, equals, harmless in words
    }


def entries(table: str, names: str, prefix: str = "") -> dict[str, Option]:
    """Options that are entries of one of our tables, under the same name without the prefix."""
    return {f"{prefix}{name}": Option(f"{table}.{name}") for name in names.split()}


PARALLEL_SIZES = {
    "tensor_model_parallel_size": "backend.tensor_parallel",
    "pipeline_model_parallel_size": "backend.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "backend.virtual_pipeline",
    "context_parallel_size": "backend.context_parallel",
    "expert_model_parallel_size": "backend.expert_parallel",
    "expert_tensor_parallel_size": "backend.expert_tensor_parallel",
}
"""Megatron-Core's names of them -> our keys."""
MEGATRON_SETTINGS = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules attention_backend
    masked_softmax_fusion bias_dropout_fusion bias_activation_fusion apply_rope_fusion gradient_accumulation_fusion
    cross_entropy_loss_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling calculate_per_token_loss
    moe_router_load_balancing_type moe_router_dtype moe_token_dispatcher_type moe_enable_deepep moe_grouped_gemm
    moe_permute_fusion moe_aux_loss_coeff moe_z_loss_coeff moe_shared_expert_overlap moe_layer_recompute
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy tp_comm_overlap
    microbatch_group_size_per_vp_stage overlap_p2p_comm batch_p2p_comm account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split cp_comm_type
"""
"""Fields of Megatron-Core's TransformerConfig that other trainers expose as options."""
VLLM_SETTINGS = """
    gpu_memory_utilization tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel
    max_num_seqs max_num_batched_tokens enforce_eager disable_custom_all_reduce enable_prefix_caching
    enable_chunked_prefill quantization disable_cascade_attn seed
"""
"""Options of vLLM that other trainers expose as options."""
