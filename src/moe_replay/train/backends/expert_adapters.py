"""LoRA adapters of fused experts, computed beside the experts by grouped GEMMs over the same rows.

PEFT adds the product of an adapter to the weights of all experts of a layer, in every forward, and autograd keeps the
sum: as many operations and bytes as the layer has weights. Here rows go through both factors of their expert, which
costs what the rank costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

ALIGNMENT = 16
"""Bytes that the rows of a grouped GEMM's operands are multiples of."""


def move_adapters(model: nn.Module) -> None:
    """Have the experts of a model apply their adapters, in place of PEFT's wrappers around them.

    Each module of experts gets `expert_adapters`: the wrapper of each adapted parameter, by its name.
    """
    for wrapper in _wrappers(model):
        if wrapper.num_experts > 1 and "forward" not in vars(wrapper):
            experts = wrapper.get_base_layer()
            wrapper.forward = wrapper.base_layer.__call__
            experts.expert_adapters = {**getattr(experts, "expert_adapters", {}), wrapper.parameter_name: wrapper}


def _wrappers(model: nn.Module) -> Iterator[Any]:
    try:
        from peft.tuners.lora import ParamWrapper
    except ImportError:
        return
    yield from (module for module in model.modules() if isinstance(module, ParamWrapper))


def with_adapter(
    projected: Tensor, experts: Any, name: str, rows: Tensor, offsets: Tensor, shard: slice = slice(None)
) -> Tensor:
    """Add to rows, projected by a parameter of experts, what its adapter makes of them; unchanged if it has none.

    projected   (R, out)
    rows        (R, in), ordered by expert
    offsets     (E,) int32: the end of each expert's rows
    shard       experts that `offsets` are of
    """
    from transformers.integrations.moe import _grouped_linear

    wrapper = getattr(experts, "expert_adapters", {}).get(name)
    if wrapper is None or wrapper.disable_adapters:
        return projected
    (adapter,) = wrapper.active_adapters
    down, up = wrapper.lora_A[adapter].weight.to(rows.dtype), wrapper.lora_B[adapter].weight.to(rows.dtype)
    down = down.view(wrapper.num_experts, -1, down.shape[-1])[shard]  # (E, r, in)
    padding = -down.shape[1] % (ALIGNMENT // rows.element_size())
    down, up = pad(down, (0, 0, 0, padding)), _by_expert(up, wrapper.num_experts, padding)[shard]  # (E, out, r)
    inner = _grouped_linear(rows, down, offsets)
    return torch.add(projected, _grouped_linear(inner, up, offsets), alpha=wrapper.scaling[adapter])


@torch.library.custom_op("moe_replay::by_expert", mutates_args=())
def _by_expert(up: Tensor, num_experts: int, padding: int) -> Tensor:
    """Return (out, r * E) with the experts last as (E, out, r + padding), contiguous.

    An operator, since a compiler leaves out the copy, and grouped GEMMs refuse the layout without it.
    """
    return pad(up.view(up.shape[0], -1, num_experts).permute(2, 0, 1), (0, padding)).contiguous()


@_by_expert.register_fake
def _(up: Tensor, num_experts: int, padding: int) -> Tensor:
    return up.new_empty(num_experts, up.shape[0], up.shape[1] // num_experts + padding)


def _keep_padding(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    ctx.padding = inputs[2]


def _by_expert_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    rank = grad.shape[2] - ctx.padding
    return grad[:, :, :rank].permute(1, 2, 0).reshape(grad.shape[1], -1), None, None


_by_expert.register_autograd(_by_expert_backward, setup_context=_keep_padding)
