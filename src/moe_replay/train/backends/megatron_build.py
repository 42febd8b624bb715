"""Builds a Megatron-Core model for training: process groups, chunks with the weights of a folder, DDP, optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from moe_replay.distributed.ranks import raise_on_all_ranks, rank
from moe_replay.errors import LayoutError, MissingExtraError, MoeReplayError, ReplayStateError
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.megatron import weights
from moe_replay.train.backends.lora import targets_of
from moe_replay.train.config.sections import BackendConfig, OptimConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import one_line
from moe_replay.utils.tested_versions import check_megatron_trainer
from moe_replay.weights.model_folder import check_finite, read_config

logger = logging.getLogger(__name__)

_HALF = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}, "float32": {}}
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Between two interleaved stages, batched messages of two chunks can be swapped.
_UNBATCHED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_SETTINGS = "Correct model.path or the settings of the section backend"
FIRST_LOSS_SCALE = 2.0**16  # of float16; Megatron's own would skip the first sixteen updates


class MegatronBuildError(MoeReplayError):
    """Settings, parallel sizes or a model that Megatron-Core does not take."""


class _Refusals:
    """Turns any exception of Megatron-Core into one error."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, (MoeReplayError, torch.OutOfMemoryError)):
            raise MegatronBuildError(f"{self._doing}: {one_line(error)}", remedy=_SETTINGS) from error


def parallel_sizes(backend: BackendConfig) -> dict[str, Any]:
    """Return the parallel sizes under Megatron-Core's names."""
    return {
        "tensor_model_parallel_size": backend.tensor_parallel,
        "pipeline_model_parallel_size": backend.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": backend.virtual_pipeline,
        "context_parallel_size": backend.context_parallel,
        "expert_model_parallel_size": backend.expert_parallel,
        "expert_tensor_parallel_size": backend.expert_tensor_parallel,
    }


def start_parallel(config: TrainConfig, device: torch.device) -> None:
    """Initialize Megatron-Core's process groups and random state."""
    if device.type == "cpu":
        megatron_cpu.enable()
    elif device.type == "npu":
        enable_mindspeed({**config.backend.megatron, **parallel_sizes(config.backend)})
    try:
        import megatron.core
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "Megatron-Core is not installed", found=missing, remedy="pip install 'moe-replay[megatron]'"
        ) from missing
    check_megatron_trainer(getattr(megatron.core, "__version__", None))
    if parallel_state.model_parallel_is_initialized():
        raise ReplayStateError(
            "Megatron-Core's process groups are initialized already, and a process has one set of them",
            remedy="Close the other backend first, or call parallel_state.destroy_model_parallel()",
        )
    with raise_on_all_ranks("dividing the ranks"), _Refusals("Megatron-Core cannot divide the ranks"):
        parallel_state.initialize_model_parallel(**parallel_sizes(config.backend), create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(config.seed)
    _mend_loss_scale()


def enable_mindspeed(settings: Mapping[str, Any]) -> None:
    """Import MindSpeed, which patches Megatron-Core for NPUs; call before creating process groups.

    settings   of the `TransformerConfig`. MindSpeed reads its own from a command line, which does not exist here, so
               its first patches assume a single device without context parallelism
    """
    try:
        from mindspeed.megatron_adaptor import repatch
    except ImportError as missing:
        raise MissingExtraError(
            "Megatron-Core on an NPU needs MindSpeed",
            found=missing,
            remedy="Install mindspeed for your version of Megatron-Core, or set backend.kind = 'fsdp'",
        ) from missing
    repatch({name: value for name, value in settings.items() if value is not None})


def _mend_loss_scale() -> None:
    """Give the scale of the routers' losses the shape (1,) that Megatron's schedules copy theirs into.

    A backward outside of the schedules, earlier in this process, leaves a scalar there, and they would fail.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if (scale := MoEAuxLossAutoScaler.main_loss_backward_scale) is not None:
        scale.resize_(1)


def recipe_for(config: TrainConfig, folder: str) -> weights.MegatronRecipe:
    """Return how to build the model of a folder on this rank; `backend.megatron` overrides everything else."""
    backend = config.backend
    own_recompute = any(name.startswith("recompute_") for name in backend.megatron)
    settings: dict[str, Any] = {
        **parallel_sizes(backend),
        **_HALF[config.model.dtype],
        "variable_seq_lengths": backend.pipeline_parallel > 1,  # micro-batches differ in width
        **(_UNBATCHED if backend.virtual_pipeline and backend.pipeline_parallel == 2 else {}),
        **(_RECOMPUTE if config.model.gradient_checkpointing is True and not own_recompute else {}),
        **backend.megatron,
    }
    with raise_on_all_ranks("configuring the model"), _Refusals("Megatron-Core does not take these settings"):
        recipe = weights.megatron_config(
            folder,
            family=backend.weight_family,
            trust_remote_code=config.model.trust_remote_code,
            transformer_engine=not config.model.lora_rank,  # adapters are of Megatron-Core's own layers, and ours
            **settings,
        )
        _check(config, recipe)
        if config.model.lora_rank:
            targets_of(read_config(folder, trust_remote_code=config.model.trust_remote_code), config.model)
    if rank() == 0:
        _warn_of_attention_backend(recipe)
    return recipe


def _warn_of_attention_backend(recipe: weights.MegatronRecipe) -> None:
    """Log that the choice of an attention kernel has no effect on layers that are not of Transformer Engine."""
    chosen = recipe.config.attention_backend.name
    if chosen != "auto" and not recipe.transformer_engine:
        logger.warning(
            "backend.megatron.attention_backend = %r has no effect: it chooses among kernels of Transformer Engine, "
            "which is not installed or not used by this model. Attention is computed by torch's own kernels",
            chosen,
        )


def _check(config: TrainConfig, recipe: weights.MegatronRecipe) -> None:
    if config.backend.expert_parallel > 1 and recipe.config.moe_token_dispatcher_type == "allgather":
        raise LayoutError(
            "the allgather dispatcher needs as many tokens on every rank, and micro-batches differ",
            expected="moe_token_dispatcher_type = 'alltoall' or 'flex'",
            found="'allgather' with expert_parallel > 1",
        )


def load_chunks(recipe: weights.MegatronRecipe, folder: str, device: torch.device, *, packed: bool) -> list[nn.Module]:
    """Return the pipeline chunks of this rank with the weights of the folder, on the device, in their compute dtype."""
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router import TopKRouter

    with raise_on_all_ranks("building the model"), _Refusals("Megatron-Core cannot build the model"):
        chunks: list[nn.Module] = [chunk.to(device) for chunk in recipe.build(packed=packed)]
    if recipe.config.bf16 or recipe.config.fp16:
        chunks = [Float16Module(recipe.config, chunk) for chunk in chunks]
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()  # before it is read: half precision would round it
    with raise_on_all_ranks("loading the model"):
        weights.load_hf(folder, chunks, family=recipe.family)
        check_finite((named for chunk in chunks for named in chunk.named_parameters()), folder)
    return chunks


def distributed(chunks: list[nn.Module], config: TrainConfig) -> list[Any]:
    """Wrap the chunks so that gradients are reduced in float32 over data-parallel ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.utils import get_model_config

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.backend.distributed_optimizer
    )
    model_config = get_model_config(chunks[0])
    model_config.finalize_model_grads_func = finalize_model_grads
    return [
        DistributedDataParallel(model_config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def make_optimizer(models: list[Any], optim: OptimConfig, *, sharded: bool) -> Any:
    """Return AdamW over all parameters, with float32 copies of half-precision weights."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    model_config = get_model_config(models[0])
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        bf16=model_config.bf16,
        fp16=model_config.fp16,
        params_dtype=model_config.params_dtype,
        initial_loss_scale=FIRST_LOSS_SCALE,
        use_distributed_optimizer=sharded,
    )
    optimizer: Any = get_megatron_optimizer(settings, models, config_overrides={}, use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            if "foreach" in group:  # torch's AdamW: foreach would hold another copy of every moment
                group["foreach"] = False
    if model_config.fp16:
        model_config.grad_scale_func = optimizer.scale_loss
    return optimizer
