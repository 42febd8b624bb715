"""Expert and data parallelism in vLLM on CPUs, which lacks three things that its other platforms have.

Its kernels take expert ids for those of the rank's own experts, and read beyond them where they are not; its
communication has no all-gather of different sizes, by which replicas exchange tokens, and none of whole numbers over a
tensor-parallel group, by which its capture of routes joins the parts of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ParallelExperts:
    """Experts of a rank that has some of them, and tokens of all replicas. Mixed into vLLM's worker on CPU."""

    model_runner: Any

    def init_device(self) -> None:
        """Join the process groups, and let replicas gather tokens."""
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
        """Load the model, and have each layer compute with the experts of this rank alone."""
        super().load_model(**options)  # type: ignore[misc]
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is None or getattr(module, "expert_map", None) is None:
                continue
            if not hasattr(method, "_init_moe_kernel"):
                raise NotImplementedError("on CPU, experts of other ranks are left out of unquantised models only")
            method.experts_cls = _local(method.experts_cls)  # of the kernels of later updates too
            method._init_moe_kernel(module)


class LocalExperts:
    """Mixed into vLLM's experts on CPU: those of other ranks add nothing."""

    def apply(self, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **rest: Any) -> None:
        """Compute with the experts of this rank; the sum over ranks is the layer's output.

        topk_ids     (T, K), of all experts
        expert_map   (E,), the number of each expert on this rank, -1 on others
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
    """Return each tensor with the rows of all ranks, in their order; `sizes` are the rows of each rank."""
    if dim != 0 or sizes is None:
        raise NotImplementedError("rows of known numbers only")
    if isinstance(tensors, list):
        return [all_gather_sizes(group, tensor, dim, sizes) for tensor in tensors]
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def all_gather_any(of_floats: Callable[[Tensor, int], Tensor], group: Any, tensor: Tensor, dim: int = -1) -> Tensor:
    """Return the tensors of all ranks, joined along a dimension; whole numbers too, which `of_floats` cannot gather."""
    if tensor.is_floating_point():
        return of_floats(tensor, dim)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter_sizes(group: Any, tensor: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """Return this rank's rows of the sum over ranks; `sizes` are the rows of each rank."""
    if dim != 0 or sizes is None:
        raise NotImplementedError("rows of known numbers only")
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[dist.get_rank(group)]
