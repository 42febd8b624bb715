"""Frozen weights in 8 bits: float8_e4m3fn with a scale for each block, and the products with them.

A weight is dequantised where it is used, in the forward and again in the backward: autograd keeps the 8 bits. Scales
are powers of two, so that a weight has the same value in every dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

BLOCK = 128
"""Rows and columns of a block; where it does not divide a weight, the largest power of two that does."""
CODES = torch.float8_e4m3fn
SCALES = "_scales"
"""Behind the name of a weight in 8 bits: the buffer of its module with the scales."""


def block_shape(rows: int, columns: int) -> tuple[int, int]:
    return math.gcd(rows, BLOCK), math.gcd(columns, BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (..., rows, columns) of weights and their scales in float32, one for each block."""
    if weight.ndim > 2:  # one matrix after the other: less float32 in between
        parts = [quantise(matrix) for matrix in weight]
        return torch.stack([codes for codes, _ in parts]), torch.stack([scales for _, scales in parts])
    rows, columns = block_shape(*weight.shape)
    blocks = weight.float().view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.exp2((largest / torch.finfo(CODES).max).log2().ceil().clamp(min=-120))
    scales = torch.where(largest.isfinite(), scales, largest)
    return (blocks / scales).view(weight.shape).to(CODES), scales[:, 0, :, 0].contiguous()


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    (rows, columns), (*experts, height, width) = block_shape(*codes.shape[-2:]), codes.shape
    values = codes.to(dtype)
    blocks = values.view(*experts, height // rows, rows, width // columns, columns)
    blocks.mul_(scales.to(dtype).view(*experts, height // rows, 1, width // columns, 1))
    return values


# ---- products --------------------------------------------------------------------------------------------------------


# Operators, so that a compiler neither traces blocks nor keeps what is dequantised for the backward.
@torch.library.custom_op("moe_replay::fp8_linear", mutates_args=())
def _multiply(rows: Tensor, codes: Tensor, scales: Tensor, is_gradient: bool) -> Tensor:
    """Return rows times a weight (out, in), or gradients (..., out) of them times it."""
    weight = dequantise(codes, scales, rows.dtype)
    return rows @ weight if is_gradient else linear(rows, weight)


@_multiply.register_fake
def _(rows: Tensor, codes: Tensor, scales: Tensor, is_gradient: bool) -> Tensor:
    return rows.new_empty(*rows.shape[:-1], codes.shape[1 if is_gradient else 0])


@torch.library.custom_op("moe_replay::fp8_grouped_linear", mutates_args=())
def _multiply_groups(rows: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, is_transposed: bool) -> Tensor:
    """Return the rows (R, in) of each expert times its weight."""
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(rows, dequantise(codes, scales, rows.dtype), offsets, is_transposed=is_transposed)


@_multiply_groups.register_fake
def _(rows: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, is_transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], codes.shape[2 if is_transposed else 1])


class _Linear(Function):
    """Rows times a weight in 8 bits; the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return _multiply(rows, codes, scales, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _multiply(gradients[0], *ctx.saved_tensors, True), None, None


class Fp8Linear(nn.Linear):
    """A linear layer whose frozen weight is in 8 bits."""

    weight_scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        product = _Linear.apply(input, self.weight, self.weight_scales)
        return product if self.bias is None else product + self.bias


class _GroupedLinear(Function):
    """Rows, ordered by expert, times the weight of their expert in 8 bits; the weights have no gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(codes, scales, offsets)
        ctx.is_transposed = is_transposed
        return _multiply_groups(rows, codes, scales, offsets, is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        to_rows = _multiply_groups(gradient, *ctx.saved_tensors, not ctx.is_transposed)
        return to_rows, None, None, None, None


def grouped_linear(rows: Tensor, module: Any, name: str, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply the rows (R, in) of each expert by its weight in a parameter of a module of experts."""
    from transformers.integrations.moe import _grouped_linear

    weight, scales = getattr(module, name), getattr(module, name + SCALES, None)
    if scales is None:
        return _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)
    projected = _GroupedLinear.apply(rows, weight, scales, offsets, module.is_transposed)
    return projected if bias is None else projected + bias
