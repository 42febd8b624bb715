"""Weights in 8 bits with a scale for each block, as DeepSeek-V3 is published; they are read as float32.

`model.layers.3.mlp.experts.7.up_proj.weight` (out, in) float8_e4m3fn is multiplied block by block with
`...weight_scale_inv` (ceil(out / 128), ceil(in / 128)) float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.tensor_slices import Shape, Slices

SUFFIX = "_scale_inv"
KEY = "quantization_config"
Block = tuple[int, int]


def block_size(config: Mapping[str, Any]) -> Block | None:
    """Return rows and columns of a block; None if a checkpoint is not quantized. Other quantization is refused."""
    settings = config.get(KEY)
    if settings is None:
        return None
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    is_fp8 = isinstance(settings, dict) and settings.get("quant_method") == "fp8"
    if not is_fp8 or not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) for n in block):
        raise WeightMapError(
            "a quantized checkpoint of this kind cannot be loaded",
            expected="no quantization, or fp8 with weight_block_size",
            found=settings,
            remedy="Convert it to bfloat16 first",
        )
    return block[0], block[1]


def scale_shape(shape: Shape, block: Block) -> Shape:
    """Return the shape of the scales of a weight."""
    return (*shape[:-2], *(-(-size // length) for size, length in zip(shape[-2:], block, strict=True)))


def blocks_of(slices: Slices, block: Block) -> Slices:
    """Return where the scales of a slice of a weight are; leading dimensions are those of the weight."""
    last = (slice(one.start // length, -(-one.stop // length)) for one, length in zip(slices[-2:], block, strict=True))
    return (*slices[:-2], *last)


def dequantized(values: Tensor, scales: Tensor, slices: Slices, block: Block) -> Tensor:
    """Return a slice of a weight in float32, from its values and the scales at `blocks_of(slices)`."""
    for dim, (one, length) in enumerate(zip(slices[-2:], block, strict=True), start=-2):
        places = torch.arange(one.start, one.stop, one.step or 1) // length - one.start // length
        scales = scales.index_select(dim, places)
    return values.float() * scales.float()
