"""Tiny Megatron-Core models, and what a whole one makes of recorded routes.

Everything here runs on a rank. The whole model runs each sequence alone, without padding, so that nothing a layout
does to tokens can be done to both sides of a comparison. Routes are recorded before the routers' weights are moved,
and replayed after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.replay.adapters.megatron_settings import layout_for

PRELOADED = [
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "torch._dynamo",
    "moe_replay.megatron.cpu",
    "moe_replay.replay.adapters.megatron_settings",
    "moe_replay.train.backends.megatron",
]

VOCABULARY = 64
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


def experts_of(variant: str) -> dict[str, Any]:
    """Setting of the models that are compared, whole and partitioned: few experts, unless they are in groups."""
    return {} if variant == "deepseek" else {"num_moe_experts": 4}


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
    etp: int | None = None  # as many as tp
    packed: bool = False
    overlap: bool = False
    optimizer: str | None = None  # "sharded": the distributed optimizer, "whole": the plain one
    varying: bool = False  # each micro-batch has a width of its own
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.size // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """Of each data-parallel rank: as many as keep four stages busy, or give every expert a token of its own."""
        return 4 if self.pp > 1 or self.variant == "top1" else 2

    def parallel_settings(self) -> dict[str, Any]:
        """The config of the partitioned model, beyond its variant."""
        interleaved = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if self.vpp and self.pp == 2 else {}
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "variable_seq_lengths": self.varying,
            **interleaved,
            **self.settings,
        }


# ---- building -------------------------------------------------------------------------------------------------------


def enable() -> None:
    """Let this process run Megatron-Core on its CPU, for good."""
    megatron_cpu.enable()
    torch.backends.mkldnn.set_flags(False)  # its bfloat16 is slow and talkative on small CPUs


def start(tp: int = 1, pp: int = 1, vpp: int | None = None, cp: int = 1, ep: int = 1, etp: int | None = None) -> None:
    """Megatron's process groups and random state, on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

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
    known = {setting.name for setting in fields(kind)}
    if "moe_enable_routing_replay" not in known:  # before 0.16
        del base["moe_enable_routing_replay"]
    return kind(**(megatron_cpu.SETTINGS | base | overrides))


def make_chunk(config: Any, vp_stage: int | None = None, plain_attention: bool = False) -> nn.Module:
    """One pipeline chunk of the model, or all of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    stage = {} if vp_stage is None else {"vp_stage": vp_stage}  # 0.12 knows no such argument
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **stage)
    if plain_attention or config.multi_latent_attention:
        megatron_cpu.use_plain_attention(spec)
    prediction = None
    if config.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not stage, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not stage, **stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=prediction,
        **stage,
    )


def make_hybrid(config: Any, pattern: str) -> nn.Module:
    """A hybrid model by its pattern of layers: attention `*` and experts `E`, each a layer of its own."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    def layer(*parts: str) -> Any:
        chosen = {part: getattr(whole, part) for part in parts}
        return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**chosen))

    whole = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False).submodules
    layers = {
        "attention_layer": layer("input_layernorm", "self_attention", "self_attn_bda"),
        "moe_layer": layer("pre_mlp_layernorm", "mlp", "mlp_bda"),
    }
    without_norm = {"post_layer_norm": False}  # that of Transformer Engine
    size, rotary = (VOCABULARY, 64), {"position_embedding_type": "rope"}
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:  # before 0.18
        from megatron.core.models.mamba import MambaModel
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        spec = ModuleSpec(MambaStack, without_norm, MambaStackSubmodules(**layers))
        return MambaModel(config, spec, *size, hybrid_override_pattern=pattern, **rotary)
    spec = ModuleSpec(HybridStack, without_norm, HybridStackSubmodules(**layers))
    return HybridModel(config, spec, *size, hybrid_layer_pattern=pattern, **rotary)


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
    width = None if case.varying else 3 * WIDTH if case.packed else WIDTH
    return layout_for(config, lengths, packed=case.packed, width=width)


# ---- the whole model ------------------------------------------------------------------------------------------------


def save_reference(path: str, variant: str, micro_batches: int, varying: bool = False) -> list[float]:
    """Record the routes of some micro-batches, move the routers, replay: weights, traces, losses, gradients."""
    enable()
    start()
    config = make_config(variant, **experts_of(variant))
    model = make_chunk(config, plain_attention=True)
    replay = mr.attach(model)
    traces = [recorded_alone(model, replay, sequences(number, varying)) for number in range(micro_batches)]
    move_routers(model)
    parameters = dict(model.named_parameters())
    weights = flat(parameters.values())
    losses, gradients, flipped = [], [], []
    for number in range(micro_batches):
        loss = 0.0
        for layout, part in reference_batches(traces[number], together=variant in BATCH_DEPENDS):
            batch = mr.RouteBatch.from_traces(part, layout)
            inputs = fed(layout, [trace.token_ids for trace in part])
            with replay.replay(batch, observe=True) as replaying:
                token_losses = model(**inputs).float()
            own_loss = (token_losses * inputs["loss_mask"]).sum() / sum(map(len, traces[number]))
            scale_inner_losses(1.0)
            own_loss.backward()
            loss += own_loss.item()
            flipped.append(differing(replaying.native(), batch))
        losses.append(loss)
        gradients.append(flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()))
        model.zero_grad(set_to_none=True)
    share = torch.cat(flipped).float().mean().item()
    assert share > 0.5, f"only {share:.0%} of the routes would be others natively"
    moved = [recorded_alone(model, replay, sequences(number, varying)) for number in range(micro_batches)]
    outcome = {
        "shapes": {name: list(parameter.shape) for name, parameter in parameters.items()},
        "weights": weights,
        "traces": [[trace.to_bytes() for trace in of_batch] for of_batch in traces],
        "moved traces": [[trace.to_bytes() for trace in of_batch] for of_batch in moved],
        "losses": losses,
        "gradients": torch.stack(gradients),
    }
    torch.save(outcome, path)
    return losses


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """One tensor of them all: hundreds take a rank longer to read than to compute with."""
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def by_name(whole: Tensor, shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """What `flat` was made of."""
    parts = whole.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def recorded_alone(model: nn.Module, replay: mr.RouterReplay, token_ids: Sequence[np.ndarray]) -> list[mr.RouteTrace]:
    """The routes of each sequence, run alone and without padding."""
    traces = []
    for ids in token_ids:
        alone = mr.TokenLayout.padded([len(ids)]).sequence_major()
        with torch.no_grad(), replay.record() as recording:
            model(**fed(alone, [ids]))
        traces.extend(recording.traces(alone, [ids]))
    return traces


def reference_batches(
    traces: list[mr.RouteTrace], together: bool
) -> Iterator[tuple[mr.TokenLayout, list[mr.RouteTrace]]]:
    if together:
        yield mr.TokenLayout.padded([len(trace) for trace in traces], WIDTH).sequence_major(), traces
        return
    for trace in traces:
        yield mr.TokenLayout.padded([len(trace)]).sequence_major(), [trace]


def differing(native: mr.RouteBatch, batch: mr.RouteBatch) -> Tensor:
    """Of the rows that have a route: whether the router would have taken other experts."""
    differs = (native.routed_experts.sort(-1).values != batch.routed_experts.sort(-1).values).any(-1)
    return differs[batch.valid]


def scale_inner_losses(scale: float) -> None:
    """What Megatron's schedules tell the losses that layers compute by themselves."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)
