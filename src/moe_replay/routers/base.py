"""What the controller needs to know of a router, whatever library the model comes from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One router of a live model.

    layer        global decoder index (see `MoeTopology` for models that route twice in one layer)
    name         path of `module` inside the model
    module       the module in whose forward the choice of experts is made
    num_experts  columns of the scores that the choice is made from
    top_k        experts chosen for each token
    num_groups   groups the experts are divided in before the choice; 0: no group-limited routing
    groups_kept  groups that survive
    """

    layer: int
    name: str
    module: nn.Module
    num_experts: int
    top_k: int
    num_groups: int = 0
    groups_kept: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({type(self.module).__name__}, layer {self.layer})"
