"""`Parallel`: the sizes of a parallel layout and the coordinates of each rank, without processes or Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe_replay.replay.adapters.megatron_layout import column_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Parallel sizes, by the short names of Megatron-Core's groups.

    tp     tensor parallel; routers see a shard of the sequence each (sequence parallel) unless `sp` is False
    cp     context parallel
    pp     pipeline stages
    vpp    model chunks of each stage
    dp     data parallel, of the dense layers
    ep     expert parallel: taken out of tp * cp * dp, not a factor of the world
    etp    tensor parallel inside an expert; None: tp
    chunk_layers   decoder layers of each of the pp * vpp chunks, in model order; None: equal
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool | None = None
    chunk_layers: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_tensor(self) -> int:
        """Ranks that one expert is sharded over."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts, in one pipeline stage."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tensor)

    @property
    def sequence_shards(self) -> int:
        """Number of sequence shards that the routers of a tensor-parallel group see."""
        return self.tp if self.sp is not False else 1

    @property
    def column_multiple(self) -> int:
        """Number that the width of a micro-batch, and each packed sequence, must be a multiple of."""
        return column_multiple(SimpleNamespace(**self.megatron_settings()))

    def megatron_settings(self) -> dict[str, Any]:
        """Return the sizes as settings of a Megatron-Core `TransformerConfig`."""
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sequence_shards > 1,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tensor,
        }

    def coordinates(self, ranks: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return tp, cp, dp, pp, and etp, ep, edp of the experts, for these ranks or all, (ranks,) each.

        The order is Megatron-Core's, "tp-cp-ep-dp-pp": tensor parallel ranks are neighbours, pipeline stages are
        farthest apart.
        """
        chosen = np.arange(self.world) if ranks is None else ranks
        dense = _unravel(chosen, {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp})
        experts = {"etp": self.expert_tensor, "ep": self.ep, "edp": self.expert_data, "pp": self.pp}
        return dense | _unravel(chosen, experts)

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """Return the decoder layers of each chunk of each pipeline stage, [stage][chunk]."""
        chunks = self.pp * self.vpp
        counts = np.array(self.chunk_layers or [num_layers // chunks] * chunks)
        ends = np.cumsum(counts)
        spans = [range(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        return [spans[stage :: self.pp] for stage in range(self.pp)]


def _unravel(ranks: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return coordinates of ranks, the first name varying fastest."""
    found = np.unravel_index(ranks, tuple(sizes.values()), order="F")
    return dict(zip(sizes, found, strict=True))
