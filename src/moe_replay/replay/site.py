"""Routers and pipeline chunks as the controller sees them, independent of the model's library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_replay.errors import AlignmentError
from moe_replay.routes.plan import DispatchPlan, LayerPlan


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One router of a live model."""

    layer: int  # global decoder index (see `MoeTopology` for models that route twice in one layer)
    name: str  # path of `module` inside the model
    module: nn.Module  # the module in whose forward the choice of experts is made
    num_experts: int  # columns of the scores that the choice is made from
    top_k: int  # experts chosen for each token
    num_groups: int = 0  # groups that the experts are divided into before the choice; 0: no group-limited routing
    groups_kept: int = 0  # groups that survive

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__}, layer {self.layer})"


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A model, or one pipeline chunk of it: what a trainer calls as a whole. It may have no routers.

    entry_modules     modules whose forward starts and ends a forward of the chunk, from the outermost inwards
    sites             its routers
    boundary_modules  its decoder layers and the modules next to them: one takes what another returns
    """

    entry_modules: tuple[nn.Module, ...]
    sites: tuple[RouterSite, ...]
    boundary_modules: tuple[nn.Module, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers of its routers."""
        return tuple(site.layer for site in self.sites)


class PlanSlot:
    """Holder of the dispatch plan for the experts of one layer, in the pass that their router is in.

    layer         its decoder index
    num_experts   that rows are ordered by
    plan          of the forward or recomputation that runs; None: the experts order rows themselves

    Compiled code reads the tensors of the plan as its inputs. One thread at a time.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.plan: LayerPlan | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanSlot:
        return PlanSlot(self.layer, self.num_experts)

    def put(self, plan: DispatchPlan | None) -> None:
        self.plan = None if plan is None else plan.layer(self.layer)

    def take(self, shape: torch.Size) -> LayerPlan | None:
        """Return the plan for experts (T, K) of this shape."""
        plan = self.plan
        if plan is not None and plan.order.row.shape != shape:
            raise AlignmentError(
                "the experts are given other rows than their dispatch plan has",
                layer=self.layer,
                expected=tuple(plan.order.row.shape),
                found=tuple(shape),
            )
        return plan


def entry_modules(model: nn.Module, sites: Sequence[RouterSite]) -> tuple[nn.Module, ...]:
    """Return the modules from the model down to the list of decoder layers: every forward goes through one of them."""
    paths = [site.name.split(".") for site in sites]
    prefixes = [path[: next(i for i, part in enumerate(path) if part.isdigit())] for path in paths]
    common = prefixes[0]
    for prefix in prefixes:
        differing = (i for i, (a, b) in enumerate(zip(common, prefix, strict=False)) if a != b)
        common = common[: next(differing, len(common))]
    return tuple(model.get_submodule(".".join(common[:depth])) for depth in range(len(common) + 1))


def boundary_modules(model: nn.Module, sites: Sequence[RouterSite]) -> tuple[nn.Module, ...]:
    """Return the decoder layers and the modules next to them or around their list: embedding, norms, head."""
    path = entry_modules(model, sites) if sites else ()
    return tuple(child for module in path for child in module.children() if not any(child is module for module in path))


def recomputes(chunk: Chunk) -> bool:
    """Return whether layers of a chunk in training are checkpointed: by Transformers, or by a `CheckpointWrapper`."""
    around = [*chunk.entry_modules, *chunk.boundary_modules]
    inside = [child for module in (*around, *chunk.entry_modules[-1].children()) for child in module.children()]
    return any(
        module.training and (getattr(module, "gradient_checkpointing", False) or _is_checkpoint_wrapper(module))
        for module in (*around, *inside)
    )


def _is_checkpoint_wrapper(module: nn.Module) -> bool:
    return any(cls.__name__ == "CheckpointWrapper" for cls in type(module).__mro__)


def outwards(name: str) -> Iterator[str]:
    """Yield the names of the enclosing modules, from the nearest to the model itself, whose name is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name
