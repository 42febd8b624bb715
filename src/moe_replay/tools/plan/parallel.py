"""Parallel sizes and the work of a step: coordinates of each rank, rows and bytes of routes, without processes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe_replay.replay.adapters.megatron_settings import column_multiple
from moe_replay.routes.codec import Shape, smallest_id_bits
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace_parts import narrowest_dtype
from moe_replay.train.trajectories.wire import record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Parallel sizes, by the short names of Megatron-Core's groups."""

    tp: int = 1  # tensor parallel; routers see a shard of the sequence each (sequence parallel) unless `sp` is False
    cp: int = 1  # context parallel
    pp: int = 1  # pipeline stages
    vpp: int = 1  # model chunks per stage
    dp: int = 1  # data parallel, of the dense layers
    ep: int = 1  # expert parallel: taken out of tp * cp * dp, not a factor of the world size
    etp: int | None = None  # tensor parallel inside an expert; None: tp
    sp: bool | None = None
    # decoder layers of each of the pp * vpp chunks, in model order; None: equal
    chunk_layers: tuple[int, ...] | None = None
    # context parallel of the FSDP2 backend: ranks have columns that follow each other, in place of zigzag
    ulysses: bool = False

    @property
    def world(self) -> int:
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
        """The width of a micro-batch is a multiple of this, that of each packed sequence too unless `ulysses`."""
        if self.ulysses:
            return self.cp
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

    def coordinates(self) -> dict[str, np.ndarray]:
        """Return tp, cp, dp, pp, and etp, ep, edp of the experts, of all ranks, (world,) each.

        The order is Megatron-Core's, "tp-cp-ep-dp-pp": tensor parallel ranks are neighbours, pipeline stages are
        farthest apart.
        """
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        experts = {"etp": self.expert_tensor, "ep": self.ep, "edp": self.expert_data, "pp": self.pp}
        return self._unravel(dense) | self._unravel(experts)

    def _unravel(self, sizes: dict[str, int]) -> dict[str, np.ndarray]:
        """Return coordinates of all ranks, the first name varying fastest."""
        coordinates = np.unravel_index(np.arange(self.world), tuple(sizes.values()), order="F")
        return dict(zip(sizes, coordinates, strict=True))

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """Return the decoder layers of each chunk of each pipeline stage, [stage][chunk]."""
        chunks = self.pp * self.vpp
        counts = np.array(self.chunk_layers or [num_layers // chunks] * chunks)
        ends = np.cumsum(counts)
        spans = [range(end - count, end) for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        return [spans[stage :: self.pp] for stage in range(self.pp)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one step; all micro-batches are assumed to be like the one described."""

    lengths: tuple[int, ...]  # tokens of each sequence of a micro-batch
    micro_batches: int = 1  # per data-parallel rank and step
    packed: bool = False  # all sequences in one row (thd), else one per row, padded on the right (sbhd)
    width: int | None = None  # input columns over all context-parallel ranks; None: the fewest possible
    prompt: int = 0  # tokens shared by the sequences of a group, sent once
    group: int = 1  # sequences per prompt

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch, without padding."""
        return sum(self.lengths)

    def segments(self, multiple: int, *, each: bool = True) -> np.ndarray:
        """Return the columns of each sequence with padding, (sequences,); in one row if packed, else one row each.

        each   packed sequences are padded one by one; False: the row is, behind the last of them
        """
        lengths = np.array(self.lengths, np.int64)
        if not self.packed:
            widest = -(-int(lengths.max()) // multiple) * multiple
            return np.full(len(lengths), max(widest, self.width or 0))
        segments = -(-lengths // multiple) * multiple if each else lengths
        segments[-1] += -int(segments.sum()) % multiple
        segments[-1] += max((self.width or 0) - int(segments.sum()), 0)
        return segments

    def input_shape(self, multiple: int, *, each: bool = True) -> tuple[int, int]:
        """Return the input shape (B, W) over all context-parallel ranks."""
        segments = self.segments(multiple, each=each)
        return (1, int(segments.sum())) if self.packed else (len(segments), int(segments[0]))

    def rows(self, parallel: Parallel) -> int:
        """Return the rows that the routers of every rank see in a micro-batch, padding included."""
        batch, width = self.input_shape(parallel.column_multiple, each=not parallel.ulysses)
        return batch * width // (parallel.cp * parallel.sequence_shards)

    def token_rows(self, parallel: Parallel) -> np.ndarray:
        """Return the rows that hold a token on each rank, (cp, sequence shards) int64.

        Zigzag, unless `ulysses`: a sequence is split into 2 * cp chunks, of which a rank holds two back to back, tokens
        first in each.
        What remains is the overlap of these two runs of columns with each sequence shard.
        """
        if parallel.ulysses:
            _, width = self.input_shape(parallel.cp, each=False)
            ends = np.array([self.tokens] if self.packed else self.lengths)
            chunk = width // parallel.cp
            return np.clip(ends - chunk * np.arange(parallel.cp)[:, None], 0, chunk).sum(1, keepdims=True)
        segments = self.segments(parallel.column_multiple)
        pieces = 2 * parallel.cp if parallel.cp > 1 else 1
        chunk = segments // pieces
        local = segments // parallel.cp
        begins = np.cumsum(local) - local if self.packed else np.zeros_like(local)
        shard = (int(local.sum()) if self.packed else int(local[0])) // parallel.sequence_shards
        edges = shard * np.arange(parallel.sequence_shards)
        counts = np.zeros((parallel.cp, parallel.sequence_shards), np.int64)
        for rank in range(parallel.cp):
            for slot, piece in enumerate(sorted({rank, pieces - 1 - rank})):
                tokens = np.clip(np.array(self.lengths) - piece * chunk, 0, chunk)
                first = (begins + slot * chunk)[:, None]
                overlap = np.minimum(first + tokens[:, None], edges + shard) - np.maximum(first, edges)
                counts[rank] += np.clip(overlap, 0, None).sum(axis=0)
        return counts


@dataclass(frozen=True, slots=True)
class RouteBytes:
    """Size of a model's routes in memory and on the wire.

    with_routes   the rollout returns routes; False: traces hold tokens only (`replay.mode = "off"`, `observe = false`)
    """

    topology: MoeTopology
    with_routes: bool = True

    def batch(self, layers: int, rows: int) -> int:
        """Return the bytes of a `RouteBatch`: ids, and one flag per row; 0 without routing layers."""
        if not layers:
            return 0
        return rows + layers * rows * self.topology.top_k * narrowest_dtype(self.topology.num_experts).itemsize

    def trace(self, tokens: int, *, whole: bool = False, layers: int | None = None) -> int:
        """Return the encoded bytes of a trace of one weight version.

        whole    the last token has a route
        layers   number of routing layers in the trace; None: all
        """
        if not self.with_routes:
            return Shape(tokens, 1, 1, 0, 1, int(tokens > 0), 1).blob_bytes
        experts = self.topology.num_experts
        id_bits = smallest_id_bits(experts)
        layers = len(self.topology.layers) if layers is None else layers
        return Shape(tokens, layers, self.topology.top_k, experts, id_bits, int(not whole), 1).blob_bytes

    def record(self, tokens: int, layers: int) -> int:
        """Return the bytes of a trajectory that a rank with `layers` routing layers fetches, without sampling masks."""
        trace = self.trace(tokens, layers=max(layers, 1))  # a trace has at least one layer
        return record_bytes(trace, tokens)

    def base64_int32(self, tokens: int) -> int:
        """Return the bytes as base64-encoded int32 over all decoder layers, the encoding of most projects."""
        return 4 * -(-4 * max(tokens - 1, 0) * self.topology.num_layers * self.topology.top_k // 3)

    def sequences(self, work: Work) -> int:
        """Return the wire bytes of one micro-batch's sequences, each prompt once per group."""
        if not work.prompt or work.group == 1:
            return sum(self.trace(length) for length in work.lengths)
        completions = sum(self.trace(length - work.prompt) for length in work.lengths)
        return completions + -(-len(work.lengths) * self.trace(work.prompt, whole=True) // work.group)
