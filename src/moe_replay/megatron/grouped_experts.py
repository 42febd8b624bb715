"""Experts as torch grouped GEMMs, where Transformer Engine is not installed.

Megatron-Core's `TEGroupedMLP` needs Transformer Engine, its `GroupedMLP` the package grouped_gemm, and `SequentialMLP`
loops over experts. torch has `grouped_mm` since 2.10, for GPUs and CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.errors import MissingExtraError, UnsupportedRouterError
from moe_replay.megatron.parameters import new_parameter

ROW_BYTES = 16  # alignment required by the kernels


class GroupedExperts(nn.Module):
    """The experts of this rank, one parameter per projection; equivalent to `SequentialMLP`.

    weight1   (experts, 2F, H), gate and up; F is the shard of this expert-tensor-parallel rank
    weight2   (experts, H, F)
    bias1     (experts, 2F), bias2 (experts, H), if the config has biases
    lora      adapters of `weight1` and `weight2`, by their names
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__()
        check(config)
        self.config = config
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        inner = width * (2 if config.gated_linear_unit else 1)
        hidden = config.hidden_size
        self.weight1 = self._parameter((num_local_experts, inner, hidden), 1, config.init_method)
        self.weight2 = self._parameter((num_local_experts, hidden, width), 2, config.output_layer_init_method)
        has_bias = config.add_bias_linear
        self.bias1 = self._parameter((num_local_experts, inner), 1) if has_bias else None
        self.bias2 = self._parameter((num_local_experts, hidden), None) if has_bias else None
        self.lora = nn.ModuleDict()

    def _parameter(
        self, shape: tuple[int, ...], partition_dim: int | None, initialize: Callable[[Tensor], Any] | None = None
    ) -> nn.Parameter:
        parameter = new_parameter(self.config, *shape, partition_dim=partition_dim)
        if initialize is not None and self.config.perform_initialization:
            with torch.no_grad():
                initialize(parameter)
        # Read by Megatron-Core: whether gradients are reduced over the data-parallel ranks of the dense layers
        parameter.allreduce = self.config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
        return parameter

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return the output (rows, H) of rows (rows, H), sorted by expert and weighted by `probs` (rows,)."""
        counts = tokens_per_expert.to(hidden.device)
        ends = counts.cumsum(0).to(torch.int32)
        inner = self._projected(hidden, "weight1", counts, ends)
        if self.bias1 is not None:
            inner = inner + _of_rows(self.bias1, counts, hidden)
        output = self._projected(self._activated(inner, probs), "weight2", counts, ends)
        if self.bias2 is not None:
            output = output + (_of_rows(self.bias2, counts, hidden) * probs[:, None]).to(output.dtype)
        return output, None

    def _projected(self, rows: Tensor, name: str, counts: Tensor, ends: Tensor) -> Tensor:
        projected = grouped_linear(rows, getattr(self, name), counts, ends)
        if name not in self.lora or not self.lora[name].enabled:
            return projected
        return projected + self.lora[name](rows, counts, ends)

    def _activated(self, inner: Tensor, probs: Tensor) -> Tensor:
        config = self.config
        if config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            limit = getattr(config, "activation_func_clamp_value", None)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            activated = config.activation_func(gate) * (up + getattr(config, "glu_linear_offset", 0.0))
        else:
            activated = config.activation_func(inner)
        return (activated * probs[:, None]).to(inner.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows (rows, in) of each expert by its weight: (experts, out, in).

    counts   (experts,) rows of each expert
    ends     (experts,) int32, their sums
    """
    if len(rows) == 0:  # the kernels reject empty input; the weight still gets a gradient
        return rows @ weight[0].T
    transposed = weight.transpose(-2, -1)
    if transposed.requires_grad:
        # On some GPUs the kernel does not write the gradient of an expert without rows (pytorch #172439).
        empty = (counts == 0)[:, None, None]
        transposed.register_hook(lambda gradient: gradient.masked_fill(empty, 0))
    return nn.functional.grouped_mm(rows, transposed, offs=ends)


def _of_rows(bias: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Return the bias of each row's expert, (rows, width)."""
    return bias.repeat_interleave(counts, dim=0, output_size=len(rows))


def check(config: Any) -> None:
    """Raise unless torch's grouped GEMMs support the experts of this config."""
    if not hasattr(nn.functional, "grouped_mm"):
        raise MissingExtraError(
            "moe_grouped_gemm without Transformer Engine needs torch's grouped_mm",
            expected="torch 2.10 or later",
            found=torch.__version__,
            remedy="Set moe_grouped_gemm = false, or install Transformer Engine",
        )
    recomputed = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
    unsupported = {
        "fp8": config.fp8,
        "moe_apply_probs_on_input": config.moe_apply_probs_on_input,
        "moe_latent_size": getattr(config, "moe_latent_size", None),
        "recompute_modules with 'moe_act'": "moe_act" in recomputed,
    }
    if names := [name for name, is_set in unsupported.items() if is_set]:
        raise UnsupportedRouterError(
            "torch's grouped GEMMs do not support these expert settings",
            found=", ".join(names),
            remedy="Set moe_grouped_gemm = false, or install Transformer Engine",
        )
    if not is_aligned(config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype, _shards(config)):
        raise UnsupportedRouterError(
            "the rows of the expert weights are not aligned for torch's grouped GEMMs",
            expected=f"multiples of {ROW_BYTES} bytes",
            found=f"hidden_size {config.hidden_size}, moe_ffn_hidden_size {config.moe_ffn_hidden_size} in "
            f"{_shards(config)} shards, {config.params_dtype}",
            remedy="Set moe_grouped_gemm = false",
        )


def is_aligned(hidden_size: int, expert_size: int, dtype: torch.dtype, shards: int = 1) -> bool:
    return all(width * dtype.itemsize % ROW_BYTES == 0 for width in (hidden_size, expert_size // shards))


def _shards(config: Any) -> int:
    shards = config.expert_tensor_parallel_size
    return config.tensor_model_parallel_size if shards is None else shards


def use_grouped_experts(spec: Any) -> Any:
    """Put `GroupedExperts` into every MoE layer of a layer or block spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in getattr(spec, "layer_specs", [spec]):
        parts = layer.submodules.mlp.submodules
        if hasattr(parts, "experts"):
            parts.experts = ModuleSpec(GroupedExperts)
    return spec
