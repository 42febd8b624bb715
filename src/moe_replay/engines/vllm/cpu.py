"""vLLM on CPUs: features that its other platforms have and its CPU worker lacks.

Expert and data parallelism: its kernels take expert ids for those of the rank's own experts, and read out of bounds
where they are not; its communicator has no all-gather of different sizes, by which replicas exchange tokens, and none
of integers over a tensor-parallel group, by which vLLM's route capture joins the parts of a sequence.
LoRA: it has no kernels for experts with adapters. Weight updates: it packs experts only once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CpuLoraWithoutExperts:
    """LoRA for all modules but experts, for which vLLM's CPU kernels take no adapters. Mixed into its CPU worker.

    vLLM chooses the kernels of experts by whether LoRA is enabled at all, so the model is loaded without it.
    """

    model_runner: Any
    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """Load the model, then wrap the modules of `lora_target_modules` for adapters."""
        from vllm.config import set_current_vllm_config

        config, runner = self.vllm_config, self.model_runner
        lora_config = config.lora_config
        config.lora_config = runner.lora_config = None
        try:
            super().load_model(**options)  # type: ignore[misc]
        finally:
            config.lora_config = runner.lora_config = lora_config
        if lora_config is not None:
            with set_current_vllm_config(config):
                runner.model = runner.load_lora_model(runner.model, config, runner.device)


class ParallelExperts:
    """Expert and data parallelism. Mixed into vLLM's CPU worker."""

    model_runner: Any

    def init_device(self) -> None:
        """Join the process groups, and add the missing collectives to them."""
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group, get_tp_group

        super().init_device()  # type: ignore[misc]
        for group in (get_dp_group(), get_ep_group()):
            communicator = group.device_communicator
            if communicator is not None:
                communicator.all_gatherv = partial(all_gather_sizes, communicator.device_group)
                communicator.reduce_scatterv = partial(reduce_scatter_sizes, communicator.device_group)
        tensor = get_tp_group().device_communicator
        if tensor is not None:
            tensor.all_gather = partial(all_gather_any, tensor.all_gather, tensor.device_group)

    def load_model(self, **options: Any) -> None:
        """Load the model, and have each layer compute with the experts of this rank only."""
        super().load_model(**options)  # type: ignore[misc]
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is None or getattr(module, "expert_map", None) is None:
                continue
            if not hasattr(method, "_init_moe_kernel"):
                raise NotImplementedError("on CPU, expert parallelism is for unquantized models only")
            method.experts_cls = _local(method.experts_cls)  # also for the kernels that later updates build
            method._init_moe_kernel(module)


class LocalExperts:
    """Mixed into vLLM's experts on CPU: experts of other ranks contribute zero."""

    def apply(self, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **rest: Any) -> None:
        """Compute with the experts of this rank; the sum over ranks is the layer's output.

        topk_ids     (T, K), of all experts
        expert_map   (E,), index of each expert on this rank, -1 for those of other ranks
        """
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        super().apply(topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **rest)  # type: ignore[misc]


@cache
def _local(experts: type) -> type:
    if issubclass(experts, LocalExperts):
        return experts
    return type(experts.__name__, (LocalExperts, experts), {"__module__": __name__})


def all_gather_sizes(group: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate the rows of all ranks, in rank order; `sizes` are the rows of each rank."""
    if dim != 0 or sizes is None:
        raise NotImplementedError("only along dim 0, with known sizes")
    if isinstance(tensors, list):
        return [all_gather_sizes(group, tensor, dim, sizes) for tensor in tensors]
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def all_gather_any(gather_floats: Callable[[Tensor, int], Tensor], group: Any, tensor: Tensor, dim: int = -1) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`; integers too, which `gather_floats` cannot gather."""
    if tensor.is_floating_point():
        return gather_floats(tensor, dim)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter_sizes(group: Any, tensor: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """Return this rank's rows of the sum over ranks; `sizes` are the rows of each rank."""
    if dim != 0 or sizes is None:
        raise NotImplementedError("only along dim 0, with known sizes")
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[dist.get_rank(group)]


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM repack the experts on CPU, where it does so only when it builds their kernel.

    Otherwise it copies unpacked weights into packed memory: the right shape, and garbage in every expert.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
