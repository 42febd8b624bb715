"""Frozen parameters of a model on one rank that are not sharded: taken out before, put back after."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Owner(NamedTuple):
    """Place of a frozen parameter: a module, its name there, and its full name."""

    module: nn.Module
    leaf: str
    name: str


Frozen = list[tuple[list[Owner], nn.Parameter]]
"""Parameters of a model on the meta device, each with its owners: a tied one has several."""


def take_out(model: nn.Module) -> Frozen:
    """Remove the frozen parameters from a model on the meta device, before it is sharded."""
    owners: dict[int, tuple[list[Owner], nn.Parameter]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                owner = Owner(module, leaf, f"{path}.{leaf}".lstrip("."))
                owners.setdefault(id(parameter), ([], parameter))[0].append(owner)
                module._parameters[leaf] = None
    return list(owners.values())


def put_back(owners: list[Owner], values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values, requires_grad=False)
    for owner in owners:
        owner.module._parameters[owner.leaf] = parameter
    return parameter
