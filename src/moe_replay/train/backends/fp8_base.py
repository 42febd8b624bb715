"""A model with adapters whose frozen weights are in 8 bits: which are, and loading them (`model.base_dtype`)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.train.backends import experts, lora
from moe_replay.train.backends.fp8_weights import CODES, SCALES, Fp8Linear, block_shape, dequantise, quantise
from moe_replay.train.backends.frozen import Owner, put_back
from moe_replay.utils.misc import gib_or_kib

logger = logging.getLogger(__name__)

SMALLEST = 64
"""Elements of the smallest block: its scale has 4 bytes."""


class Fp8Base:
    """The frozen parameters of a model on the only rank of a trainer.

    names   of those that are kept in 8 bits, in the model without adapters (`names_in_8_bits`)
    """

    def __init__(self, names: frozenset[str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._bytes = {True: 0, False: 0}  # in 8 bits, and others

    def put_back(self, owners: list[Owner], name: str, values: Tensor) -> None:
        """Give modules their parameter.

        name     of the parameter in the model without adapters
        values   as the checkpoint has them, in the type of the computation
        """
        values = values.to(self._device, copy=True)
        if name not in self._names:
            self._bytes[False] += put_back(owners, values).nbytes
            return
        codes, scales = quantise(values)
        self._bytes[True] += put_back(owners, codes).nbytes + scales.nbytes
        for owner in owners:
            owner.module.register_buffer(owner.leaf + SCALES, scales, persistent=False)
            if type(owner.module) is nn.Linear:
                owner.module.__class__ = Fp8Linear

    def describe(self) -> str:
        return (
            f"frozen weights: {gib_or_kib(self._bytes[True])} in 8 bits ({len(self._names)} tensors), "
            f"{gib_or_kib(self._bytes[False])} as computed with"
        )


def names_in_8_bits(model: Any, router_family: str | None = None) -> frozenset[str]:
    """Return the weights of a model without adapters that are kept in 8 bits.

    Those of linear layers in decoder layers, routers and gates (of one row) excepted, and of experts that
    `experts.grouped_experts` computes.
    """
    targets = lora.find_targets(model, [lora.ALL_LINEAR], router_family)
    is_grouped = getattr(model.config, "_experts_implementation", None) in (experts.NAME, experts.REPLACED)
    grouped = dict(experts.named_experts(model)) if is_grouped else {}
    names = [f"{name}.weight" for name in targets.modules if type(model.get_submodule(name)) is nn.Linear]
    names += [name for name in targets.parameters if name.rpartition(".")[0] in grouped]
    return frozenset(name for name in names if _is_worth_it(model.get_parameter(name)))


def _is_worth_it(weight: Tensor) -> bool:
    rows, columns = block_shape(*weight.shape[-2:])
    return weight.shape[-2] > 1 and rows * columns >= SMALLEST


@torch.no_grad()
def round_weights(model: Any) -> None:
    """Give a Transformers model the values that its weights have in 8 bits, in place."""
    for name in names_in_8_bits(model):
        parameter = model.get_parameter(name)
        parameter.copy_(dequantise(*quantise(parameter), parameter.dtype))


def plain_value(module: nn.Module, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter of a model, dequantised if it is in 8 bits."""
    return dequantise(value, module.get_buffer(name + SCALES), dtype) if value.dtype == CODES else value
