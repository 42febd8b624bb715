"""Tiny Megatron-Core models, whole and partitioned, and what the whole one makes of recorded routes.

Everything here runs on a rank. The whole model runs each sequence alone, without padding, so that nothing a layout
does to tokens can be done to both sides of a comparison. Routes are recorded before the routers' weights are moved,
and replayed after.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.replay.adapters.megatron_layout import layout_for

PRELOADED = [
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "torch._dynamo",
    "moe_replay.megatron.cpu",
    "moe_replay.replay.adapters.megatron_layout",
]

VOCABULARY = 64
HUGE = 1e6
LEARNING_RATE = 1e6  # so that a step is large beside the weights, and rounding small beside the step
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
    etp: int | None = None  # as many as tp
    packed: bool = False
    overlap: bool = False
    optimizer: str | None = None  # "sharded": the distributed optimizer, "whole": the plain one
    varying: bool = False  # each micro-batch has a width of its own
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        return self.size // (self.tp * self.pp * self.cp)

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
    config = make_config(variant)
    model = make_chunk(config, plain_attention=True)
    replay = mr.attach(model)
    traces = [recorded_alone(model, replay, sequences(number, varying)) for number in range(micro_batches)]
    move_routers(model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
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
        gradients.append({name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    share = torch.cat(flipped).float().mean().item()
    assert share > 0.5, f"only {share:.0%} of the routes would be others natively"
    moved = [recorded_alone(model, replay, sequences(number, varying)) for number in range(micro_batches)]
    outcome = {
        "weights": weights,
        "traces": [[trace.to_bytes() for trace in of_batch] for of_batch in traces],
        "moved traces": [[trace.to_bytes() for trace in of_batch] for of_batch in moved],
        "losses": losses,
        "gradients": gradients,
    }
    torch.save(outcome, path)
    return losses


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
    differs = (native.experts.sort(-1).values != batch.experts.sort(-1).values).any(-1)
    return differs[batch.valid]


def scale_inner_losses(scale: float) -> None:
    """What Megatron's schedules tell the losses that layers compute by themselves."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
    MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))


# ---- the partitioned model ------------------------------------------------------------------------------------------


def global_name(name: str, chunk: nn.Module, experts_here: int) -> str:
    """The name that a parameter of a chunk has in the whole model."""
    from megatron.core import parallel_state

    def layer(match: re.Match) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        first = parallel_state.get_expert_model_parallel_rank() * experts_here
        return f"local_experts.{int(match[1]) + first}."

    name = re.sub(r"decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def shard_of(name: str, whole: Tensor, shape: torch.Size) -> Tensor:
    """This rank's part of a parameter of the whole model, or of its gradient."""
    from megatron.core import parallel_state as ps

    if whole.shape == shape:
        return whole
    if "local_experts" in name:
        rank, size = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    else:
        rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    if "linear_fc1" in name:  # gate and up projection are each cut
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    (dim,) = (i for i in range(whole.dim()) if whole.shape[i] != shape[i])
    return whole.chunk(size, dim)[rank]


class Partition:
    """This rank's chunks of a model, with the weights of the whole one, wrapped as in training, and attached."""

    def __init__(self, case: Case, reference: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.module import Float16Module

        enable()
        start(case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp)
        self.case = case
        self.reference = reference
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.config = make_config(case.variant, **case.parallel_settings())
        stages = [None] if case.vpp is None else range(case.vpp)
        plain = case.packed or case.cp > 1
        self.chunks = [make_chunk(self.config, stage, plain) for stage in stages]
        self.parameters = [
            (name, parameter)
            for chunk in self.chunks
            for local, parameter in chunk.named_parameters()
            for name in [global_name(local, chunk, self.config.num_moe_experts // case.ep)]
        ]
        for name, parameter in self.parameters:
            parameter.data.copy_(shard_of(name, reference["weights"][name], parameter.shape))
        inner = [Float16Module(self.config, chunk) for chunk in self.chunks] if self.config.bf16 else self.chunks
        self.models = [self._distributed(chunk) for chunk in inner]
        self.optimizer = self._optimizer() if case.optimizer else None
        self._connect()
        self.replay = mr.attach(self.models)

    def _distributed(self, model: nn.Module) -> nn.Module:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.case.overlap,
            overlap_param_gather=self.case.overlap and self.case.optimizer == "sharded",
            use_distributed_optimizer=self.case.optimizer == "sharded",
        )
        return DistributedDataParallel(self.config, settings, model)

    def _optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE * HUGE,
            adam_eps=HUGE,  # beside which gradients vanish: a step is the gradient times the learning rate
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self.case.optimizer == "sharded",
            overlap_param_gather=self.case.overlap and self.case.optimizer == "sharded",
        )
        return get_megatron_optimizer(settings, self.models)

    def _connect(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.config.finalize_model_grads_func = finalize_model_grads
        if self.case.overlap:
            self.config.no_sync_func = [model.no_sync for model in self.models]
            self.config.grad_sync_func = [model.start_grad_sync for model in self.models]
            if self.case.vpp is None:
                self.config.no_sync_func = self.models[0].no_sync
                self.config.grad_sync_func = self.models[0].start_grad_sync

    # ---- micro-batches ----------------------------------------------------------------------------------------------

    def numbers(self) -> range:
        """The micro-batches of this data-parallel rank."""
        return range(self.dp_rank * MICRO_BATCHES, (self.dp_rank + 1) * MICRO_BATCHES)

    def traces(self, number: int) -> list[mr.RouteTrace]:
        return [mr.RouteTrace.from_bytes(data) for data in self.reference["traces"][number]]

    def inputs(self, number: int) -> tuple[mr.TokenLayout, dict[str, Any]]:
        token_ids = sequences(number, self.case.varying)
        layout = case_layout(self.case, self.config, [len(ids) for ids in token_ids])
        inputs: dict[str, Any] = fed(layout, token_ids)
        if self.case.packed:
            inputs["packed_seq_params"] = packed_params([width * self.case.cp for width in layout.segments])
        return layout, inputs

    def forward_step(self, numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Any]:
        """One forward of one chunk, as Megatron's schedules call it."""
        number = next(numbers)
        layout, inputs = self.inputs(number)
        batch = mr.RouteBatch.from_traces(self.traces(number), layout, self.replay.layers_of(model))
        with self.replay.replay(batch):
            output = model(**inputs)
        return output, lambda losses: self.loss(losses, inputs["loss_mask"], layout.num_tokens)

    def loss(self, losses: Tensor, mask: Tensor, total: int) -> tuple[Tensor, dict[str, Tensor]]:
        """This context-parallel rank's part of the micro-batch's loss."""
        part = (losses.float() * mask).sum() / total
        return part, {"loss": part.detach().clone()}

    def run(self, forward_only: bool = False) -> list[float]:
        """All micro-batches, forward and backward: the losses, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
        iterators = [iter(self.numbers()) for _ in self.models]
        width = 3 * WIDTH if self.case.packed else WIDTH
        results = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iterators if self.case.vpp else iterators[0],
            model=self.models if self.case.vpp else self.models[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=width,
            micro_batch_size=1 if self.case.packed else len(LENGTHS),
            forward_only=forward_only,
        )
        return [result["loss"].item() for result in results]

    # ---- comparing --------------------------------------------------------------------------------------------------

    def expected_gradient(self, name: str) -> Tensor:
        """Of the mean loss over all micro-batches of all data-parallel ranks."""
        count = MICRO_BATCHES * self.case.dp
        return sum(self.reference["gradients"][number][name] for number in range(count)) / count

    def gradients(self) -> list[Tensor]:
        """Of each parameter: what the optimizer takes off it, where there is one, as each rank may hold a part only."""
        if self.optimizer is None:
            return [parameter.main_grad.float() for _, parameter in self.parameters]
        before = [parameter.detach().float().clone() for _, parameter in self.parameters]
        stepped, _, _ = self.optimizer.step()
        assert stepped
        if self.case.overlap:
            for model in self.models:
                model.start_param_sync(force_sync=True)
        after = [parameter.detach().float() for _, parameter in self.parameters]
        return [(old - new) / LEARNING_RATE for old, new in zip(before, after, strict=True)]

    def distance(self) -> tuple[float, str]:
        """The largest relative difference of a parameter's gradient, and the name of that parameter."""
        worst = (0.0, "")
        for (name, parameter), found in zip(self.parameters, self.gradients(), strict=True):
            expected = shard_of(name, self.expected_gradient(name), parameter.shape)
            assert expected.norm() > 0, f"no token has a say in {name}"
            worst = max(worst, (((found - expected).norm() / expected.norm()).item(), name))
        return worst


def run_case(case: Case, path: str) -> dict[str, Any]:
    """On each rank: the layout's losses, and how far its gradients are from those of the whole model."""
    reference = torch.load(path, weights_only=True)
    partition = Partition(case, reference)
    losses = partition.run()
    worst, name = partition.distance()
    return {"dp": partition.dp_rank, "losses": losses, "worst": worst, "name": name, "layers": partition.replay.layers}
