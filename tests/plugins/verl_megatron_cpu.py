"""The Megatron engine of the released verl on a CPU: its forward and backward on a plain GPTModel.

Bridge, optimizer and checkpoints of the engine are left out, and the log-probs of a vocabulary are torch's, since none
of them runs without a GPU. Everything that routes pass through is verl's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import moe_replay as mr
from moe_replay.interop import to_verl
from tests.plugins import verl_cpu
from tests.plugins.verl_cpu import EXPERTS, PROMPT, RESPONSE, TOP_K, Rollout

LAYERS = 6


def model_and_config(**settings: Any) -> tuple[Any, Any]:
    """Six layers, the first of them dense; whole, or the part of this rank."""
    chunks, config = chunks_and_config(**settings)
    return chunks[0], config


def chunks_and_config(
    layers: int = LAYERS,
    *,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    stages: int = 1,
    virtual: int | None = None,
    experts: int = EXPERTS,
) -> tuple[list[Any], Any]:
    """A model whose first layer is dense: the chunks of this rank, and their config."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_replay.megatron import cpu

    parallel = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual,
    }
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**parallel)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        **cpu.SETTINGS,
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=experts,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=32,
        moe_layer_freq=[0] + [1] * (layers - 1),
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=stages > 1,
        sequence_parallel=tensor > 1,
        **parallel,
    )
    return [_chunk(config, stage if virtual else None) for stage in range(virtual or 1)], config


def _chunk(config: Any, virtual_stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from moe_replay.megatron import cpu

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual_stage)
    cpu.use_plain_attention(spec)
    where = {"ignore_virtual": virtual_stage is None, "vp_stage": virtual_stage}
    model = GPTModel(
        config,
        spec,
        vocab_size=256,
        max_sequence_length=128,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=False,
        vp_stage=virtual_stage,
    )
    for name, parameter in model.named_parameters():
        if "router.weight" in name:
            parameter.data.mul_(40)
        if "word_embeddings" in name:
            parameter.data.mul_(20)
    return model


def open_megatron() -> None:
    """verl's patches of Megatron-Core, as its engine applies them; before a model is built."""
    verl_cpu.on_cpu()
    from moe_replay.megatron import cpu

    cpu.enable()
    from verl.utils.megatron import router_replay_patch, router_replay_utils
    from verl.workers.engine.megatron import transformer_impl

    router_replay_utils.device_name = "cpu"
    router_replay_patch.apply_router_replay_patch()
    transformer_impl.vocab_parallel_log_probs_from_logits = _log_probs


def _log_probs(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits)
    return torch.log_softmax(whole.float(), -1).gather(-1, label[..., None])[..., 0]


def make_engine(model: Any, config: Any, mode: str = "R3", *, padded: bool = False, plugin: bool = True) -> Any:
    """An engine of the class that verl's registry has, for a model or for the chunks of this rank."""
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine import EngineRegistry

    if plugin:
        import moe_replay.integrations.verl  # noqa: F401  as external_lib loads it

    kind = EngineRegistry._engines["language_model"]["megatron"]["cuda"]
    engine = kind.__new__(kind)
    engine.engine_config = SimpleNamespace(
        context_parallel_size=config.context_parallel_size,
        dynamic_context_parallel=False,
        use_remove_padding=not padded,
        pad_bshd_to_minibatch_max=False,
        use_fused_kernels=False,
        pad_to_length=False,
        pad_to_length_bucket=None,
        router_replay=EngineRouterReplayConfig(mode=mode),
        entropy_from_logits_with_chunking=False,
    )
    engine.model_config = SimpleNamespace(
        model_type="language_model",
        hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.tf_config, engine.module = config, model if isinstance(model, list) else [model]
    engine.enable_routing_replay, engine.mini_layer_topk_idx_list = True, []
    return engine


def with_routes_of(model: Any, rollout: Rollout, noise: float = 0.0) -> Rollout:
    """The rollout with routes of a Megatron model, whose routers are perturbed."""
    with perturbed_routers(model, noise):
        return _with_own_routes(model, rollout)


@contextmanager
def perturbed_routers(model: Any, noise: float) -> Iterator[None]:
    """Let the routers of a model choose otherwise."""
    routers = {name: p for name, p in model.named_parameters() if "router.weight" in name}
    kept = {name: parameter.data.clone() for name, parameter in routers.items()}
    generator = torch.Generator().manual_seed(5)
    for parameter in routers.values():
        parameter.data += noise * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    try:
        yield
    finally:
        for name, parameter in routers.items():
            parameter.data.copy_(kept[name])


def _with_own_routes(model: Any, rollout: Rollout) -> Rollout:
    replay = mr.attach(model)
    rollout.topology = replay.topology
    rollout.routed_experts = torch.zeros(len(rollout.ids), PROMPT + RESPONSE, LAYERS, TOP_K, dtype=torch.int16)
    for row, (ids, mask) in enumerate(zip(rollout.ids, rollout.mask, strict=True)):
        tokens, (places,) = ids[mask.bool()], mask.nonzero(as_tuple=True)
        count = len(tokens)
        causal = torch.ones(1, 1, count, count, dtype=torch.bool).triu(1)
        with torch.no_grad(), replay.record() as recording:
            model(tokens[None], torch.arange(count)[None], causal)
        layout = mr.TokenLayout.packed([count]).sequence_major()
        (trace,) = recording.traces(layout, [tokens.tolist()])
        rollout.routed_experts[row, places[:-1]] = to_verl([trace], replay.topology).values()[:-1]
    replay.detach()
    return rollout


def batch(rollout: Rollout, routed_experts: torch.Tensor | None, **further: Any) -> Any:
    from verl.utils import tensordict_utils

    data = rollout.batch(routed_experts, **further)
    tensordict_utils.assign_non_tensor(data, enable_routing_replay=True)
    data["temperature"] = torch.ones(len(rollout.ids))
    return data


def _forget_replay() -> None:
    """Let verl's replay start from nothing, also after a stop."""
    from verl.utils.megatron.router_replay_patch import RouterReplay

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()


def forward(engine: Any, data: Any) -> Any:
    _forget_replay()
    with torch.no_grad():
        return engine.forward_backward_batch(data, None, forward_only=True)


def update(engine: Any, data: Any) -> Any:
    """Forward and backward."""
    _forget_replay()
    for chunk in engine.module:
        chunk.zero_grad()
    return engine.forward_backward_batch(data, verl_cpu.loss, forward_only=False)
