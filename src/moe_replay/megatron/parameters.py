"""Parameters of layers that Megatron-Core does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_replay.utils.device import accelerator


def new_parameter(config: Any, *shape: int, partition_dim: int | None = None) -> nn.Parameter:
    """Return zeros in the dtype and on the device of a `TransformerConfig`.

    partition_dim   along which the tensor-parallel ranks have a shard each; None: all have the same
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    device = "cpu" if config.use_cpu_initialization else accelerator()
    parameter = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))
    if partition_dim is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=partition_dim, stride=1)
    return parameter
