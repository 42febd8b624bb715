"""Routers, pipeline chunks and row order as the controller sees them, whatever library the model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import nn

from moe_replay.errors import AlignmentError

if TYPE_CHECKING:
    from moe_replay.replay.passes import ActivePass
    from moe_replay.routes.layout import TokenLayout


@dataclass(frozen=True, slots=True)
class RouterSite:
    """One router of a live model.

    layer        global decoder index (see `MoeTopology` for models that route twice in one layer)
    name         path of `module` inside the model
    module       the module in whose forward the choice of experts is made
    num_experts  columns of the scores that the choice is made from
    top_k        experts chosen for each token
    num_groups   groups that the experts are divided into before the choice; 0: no group-limited routing
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


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A model, or one pipeline chunk of it: what a trainer calls as a whole. It may have no routers.

    entry_modules  modules whose forward starts and ends a forward of the chunk
    sites          its routers
    """

    entry_modules: tuple[nn.Module, ...]
    sites: tuple[RouterSite, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers of its routers."""
        return tuple(site.layer for site in self.sites)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How a model flattens the tokens (B, W) that it is fed into rows: what the token ids themselves cannot show.

    order           row by row of the batch, or sequence-major as Megatron's [s, b, h]
    sequence_shard  (rank, size) of the columns that its routers see; None where it is not known
    """

    order: Literal["batch", "sequence"] = "batch"
    sequence_shard: tuple[int, int] | None = None

    def check(self, layout: TokenLayout) -> None:
        """Raise unless the layout flattens in the same way."""
        if layout.order != self.order and 1 not in layout.fed.shape:
            raise AlignmentError(
                "the model flattens its tokens in another order than the layout",
                expected=f"{self.order}-major",
                found=f"{layout.order}-major",
                remedy="End the layout with .sequence_major() for Megatron-Core, and leave it out for Transformers",
            )
        shard = layout.sequence_shard or (0, 1)
        if self.sequence_shard not in (None, shard):
            raise AlignmentError(
                "the routers of this rank see another part of the columns than the layout",
                expected=f"sequence parallel (rank, size) {self.sequence_shard}",
                found=shard,
                remedy="Use layout.sequence_parallel(tensor parallel rank, size) where sequence_parallel is on",
            )


class RouterHook(Protocol):
    """A hook on one router, through which the active pass records or sets its choice of experts."""

    def remove(self) -> None:
        """Restore the router as it was."""
        ...


class RouterHookFactory(Protocol):
    """Makes the hooks of one kind of router."""

    def __call__(self, site: RouterSite, active: ActivePass) -> RouterHook: ...

    def is_installed(self, module: nn.Module) -> bool:
        """Return whether a router has a hook already."""
        ...
