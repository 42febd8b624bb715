"""`moe-replay plan --auto`: sizes of expert and context parallel with which a model trains on FSDP2.

Every layout is planned that divides the GPUs, the experts and the heads, and whose ranks that exchange tokens are on
one node. Of those that fit, the one without offload before those with it, then the fewest ranks that share a sequence,
then the fewest bytes moved for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moe_replay.errors import LayoutError
from moe_replay.routes.router_families import setting
from moe_replay.routes.topology import text_config
from moe_replay.tools.plan.costs import Traffic, plan_traffic
from moe_replay.tools.plan.layout import aligned, size
from moe_replay.train.config.file import toml_value
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.memory_plan import MemoryPlan, plan_memory, with_memory_used
from moe_replay.utils.misc import GIB
from moe_replay.weights.model_sizes import ModelSizes

MOST_GPUS = 64
"""Largest multiple of the available GPUs that is tried if no layout fits on them."""
SHOWN = 8


@dataclass(frozen=True)
class Layout:
    """A layout of the FSDP2 backend, and what it costs."""

    config: TrainConfig
    memory: MemoryPlan
    traffic: Traffic

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the layout changes or decides, as in a recipe."""
        backend, model = self.config.backend, self.config.model
        return {
            "backend.expert_parallel": backend.expert_parallel,
            "backend.context_parallel": backend.context_parallel,
            "backend.offload": backend.offload,
            "model.gradient_checkpointing": model.gradient_checkpointing,
            "batch.tokens_per_micro_batch": self.config.batch.tokens_per_micro_batch,
        }

    @property
    def peak(self) -> float:
        return max(self.memory.totals.values())

    @property
    def moved_per_token(self) -> float:
        """Bytes into a rank for each token that it computes."""
        return self.traffic.total * self.config.backend.context_parallel / self.config.batch.tokens_per_micro_batch

    @property
    def cost(self) -> tuple[bool, int, float]:
        return self.config.backend.offload, self.config.backend.context_parallel, self.moved_per_token


@dataclass(frozen=True)
class Proposal:
    """Layouts for a number of GPUs: the available ones, or more if none fits on those."""

    gpus: int  # for which `layouts` were planned
    available: int  # GPUs that there are
    layouts: tuple[Layout, ...]  # all that are possible, those that fit first, the best of them first

    @property
    def best(self) -> Layout | None:
        """The layout to use; None: none fits."""
        return self.layouts[0] if self.layouts and self.layouts[0].memory.fits else None

    def __str__(self) -> str:
        rows = [("ep", "cp", "offload", "recomputed", "GiB", "moved per token", "")]
        for layout in self.layouts[:SHOWN]:
            backend = layout.config.backend
            sizes = str(backend.expert_parallel), str(backend.context_parallel)
            offload, recomputed = (
                "yes" if is_on else "no" for is_on in (backend.offload, layout.config.model.gradient_checkpointing)
            )
            fits = "fits" if layout.memory.fits else "does not fit"
            rows.append((*sizes, offload, recomputed, f"{layout.peak / GIB:.1f}", size(layout.moved_per_token), fits))
        lines = [f"layouts of FSDP2 on {self.gpus} GPUs, {len(self.layouts)} in all:", *aligned(rows)]
        if self.gpus > self.available:
            lines.insert(0, f"no layout fits on {self.available} GPUs")
        if self.best is not None:
            lines += ["", *recipe_lines(self.best.settings)]
        return "\n".join(lines)


def recipe_lines(settings: dict[str, Any]) -> list[str]:
    lines, last = [], ""
    for key, value in sorted(settings.items()):
        section, _, name = key.partition(".")
        lines += [f"[{section}]"] * (section != last)
        lines.append(f"{name} = {toml_value(value)}")
        last = section
    return lines


def propose(
    config: TrainConfig, sizes: ModelSizes, model: Any, *, gpus: int, gpu_gib: float, ranks_per_node: int = 8
) -> Proposal:
    """Plan every layout of FSDP2, on more GPUs if none fits.

    config   settings that stay as they are: LoRA, engine, lengths
    model    its Transformers config, for the number of heads
    """
    config = config.model_copy(update={"backend": config.backend.model_copy(update={"kind": "fsdp"})})
    proposal = None
    for count in (gpus * 2**power for power in range(MOST_GPUS.bit_length())):
        widths = [width for width in range(1, ranks_per_node + 1) if count % width == 0]
        layouts = sorted(
            _layouts(config, sizes, text_config(model), count, gpu_gib, widths),
            key=lambda layout: (not layout.memory.fits, layout.cost if layout.memory.fits else (layout.peak,)),
        )
        proposal = proposal or Proposal(gpus, gpus, tuple(layouts))
        if layouts and layouts[0].memory.fits:
            return Proposal(count, gpus, tuple(layouts))
    assert proposal is not None
    return proposal


def _layouts(
    config: TrainConfig, sizes: ModelSizes, text: Any, gpus: int, gpu_gib: float, widths: Sequence[int]
) -> Iterator[Layout]:
    heads = setting(text, "num_attention_heads")  # of heads that are added, attention would be wasted
    for contexts in widths:
        if heads and heads % contexts:
            continue
        for experts in widths:
            for offload in (False, True):
                sizes_of_ranks = {"expert_parallel": experts, "context_parallel": contexts, "offload": offload}
                backend = config.backend.model_copy(update=sizes_of_ranks)
                batch = config.batch.model_copy(
                    update={"tokens_per_micro_batch": max(config.batch.tokens_per_micro_batch, config.max_length)}
                )
                chosen = config.model_copy(update={"backend": backend, "batch": batch})
                with suppress(LayoutError):  # experts that the size does not divide
                    chosen = with_memory_used(chosen, sizes, gpus=gpus, gpu_gib=gpu_gib)
                    memory = plan_memory(chosen, sizes, gpus=gpus, gpu_gib=gpu_gib)
                    yield Layout(chosen, memory, plan_traffic(chosen, sizes, gpus=gpus))
