"""Tiny Megatron-Core models, whole and partitioned, and what the whole one makes of recorded routes.

Everything here runs on a rank. The whole model runs each sequence alone, without padding, so that nothing a layout
does to tokens can be done to both sides of a comparison. Routes are recorded before the routers' weights are moved,
and replayed after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay import megatron_cpu
from moe_replay.routers.megatron_layout import column_multiple, layout_for

PRELOADED = [
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "torch._dynamo",
    "moe_replay.megatron_cpu",
    "moe_replay.routers.megatron_layout",
]

VOCABULARY = 64
MICRO_BATCHES = 4  # of each data-parallel rank
WIDTH = 16
LENGTHS = (5, 11, 7)
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}

VARIANTS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "bf16": BF16,
    "mtp": {"mtp_num_layers": 1},
    "mla": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
        "rope_type": "rope",
    },
    "deepseek": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 32,
    },
    "presoftmax": {"moe_router_pre_softmax": True, "num_query_groups": 2},
    "top1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "every second": {"moe_layer_freq": 2},
    "first dense": {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]},
    "losses": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3},
}
BATCH_DEPENDS = {"mtp", "losses"}  # losses inside the model that count the tokens of the batch
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Case:
    """One layout to try: what is partitioned and how.

    settings  of the partitioned model alone: recomputation, dispatcher, schedule
    """

    size: int
    variant: str = "hybrid"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    packed: bool = False
    plain_attention: bool = False
    overlap: bool = False
    optimizer: str | None = None  # "sharded": the distributed optimizer, "whole": the plain one
    lengths: str = "equal"  # "varying": each micro-batch has a width of its own
    routes: str = "traces"  # "sharded": recorded on the rank itself, and never moved
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.size // (self.tp * self.pp * self.cp)


# ---- building -------------------------------------------------------------------------------------------------------


def start(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, etp: int = 1) -> None:
    """Megatron's process groups and random state, on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    megatron_cpu.enable()
    torch.backends.mkldnn.set_flags(False)  # its bfloat16 is slow and talkative on small CPUs
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)


def make_config(variant: str = "hybrid", **settings: Any) -> Any:
    """A decoder of 8 layers, some of them dense, with 8 experts, top 2."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    base = {
        "num_layers": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_layer_freq": [0, 1, 1, 0, 1, 1, 0, 1],
        "moe_enable_routing_replay": True,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_dtype": torch.float32,
    }
    overrides = VARIANTS[variant] | settings
    kind = MLATransformerConfig if overrides.get("multi_latent_attention") else TransformerConfig
    return kind(**(megatron_cpu.SETTINGS | base | overrides))


def make_chunk(config: Any, vp_stage: int | None = None, plain_attention: bool = False) -> nn.Module:
    """One pipeline chunk of the model, or all of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    if plain_attention or config.multi_latent_attention:
        megatron_cpu.use_plain_attention(spec)
    prediction = None
    if config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=prediction,
        vp_stage=vp_stage,
    )


def move_routers(model: nn.Module, seed: int = 300) -> None:
    """Change the router weights so far that native routing changes for most tokens."""
    for site in routers(model):
        generator = torch.Generator().manual_seed(seed + site.layer_number)
        noise = torch.randn(site.weight.shape, generator=generator)
        site.weight.data.add_((0.5 * noise).to(site.weight.dtype))


def routers(model: nn.Module) -> list[Any]:
    """The routers of a model, in the order of its modules."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


# ---- micro-batches --------------------------------------------------------------------------------------------------


def sequences(number: int, varying: bool = False) -> list[np.ndarray]:
    """The token ids of one micro-batch: three sequences of different lengths."""
    random = np.random.default_rng(number)
    longer = number % 3 if varying else 0
    return [random.integers(1, VOCABULARY, length + longer) for length in random.permutation(LENGTHS)]


def fed(layout: mr.TokenLayout, token_ids: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """What this rank feeds to a model."""

    def grid(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(layout.fed_token_ids(parts, pad=0)).long()

    return {
        "input_ids": grid(token_ids),
        "position_ids": grid([np.arange(len(ids)) for ids in token_ids]),
        "labels": grid([np.roll(ids, -1) for ids in token_ids]),  # the last token is asked for the first
        "loss_mask": torch.from_numpy(layout.fed >= 0).float(),
        "attention_mask": None,
    }


def packed_params(segments: Sequence[int]) -> Any:
    """Where packed sequences begin, padding included, over all context-parallel ranks."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *np.cumsum(segments)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(segments),
        max_seqlen_kv=max(segments),
    )


def case_layout(case: Case, config: Any, lengths: Sequence[int]) -> mr.TokenLayout:
    """The layout of this rank, of the same width for every micro-batch unless lengths vary."""
    if case.packed:
        multiple = max(8, column_multiple(config))
        return layout_for(config, lengths, packed=True, width=None if case.lengths == "varying" else 3 * WIDTH)
    return layout_for(config, lengths, width=None if case.lengths == "varying" else WIDTH)


def whole_segments(case: Case, config: Any, layout: mr.TokenLayout) -> list[int]:
    """The packed segments on all context-parallel ranks together."""
    return [width * config.context_parallel_size for width in layout.segments]
