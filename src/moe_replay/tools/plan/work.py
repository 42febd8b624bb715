"""`Work`: what one step trains on, and how many rows and bytes of routes that makes on each kind of rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_replay.routes.bit_planes import smallest_id_bits
from moe_replay.routes.codec import Shape
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace_parts import narrowest_dtype
from moe_replay.tools.plan.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step. All micro-batches are taken to be like the one that is described.

    lengths         tokens of each sequence of a micro-batch
    micro_batches   of each data-parallel rank in a step
    packed          all sequences in one row (thd), else one a row, padded on the right (sbhd)
    width           columns that are fed, on all context-parallel ranks together; the least possible where None
    prompt          tokens that the sequences of a group begin with; on the wire they travel once
    group           sequences of one prompt
    """

    lengths: tuple[int, ...]
    micro_batches: int = 1
    packed: bool = False
    width: int | None = None
    prompt: int = 0
    group: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding not counted."""
        return sum(self.lengths)

    def segments(self, multiple: int) -> np.ndarray:
        """(sequences,) columns of each sequence with its padding; together one row if packed, else a row each."""
        lengths = np.array(self.lengths, np.int64)
        if not self.packed:
            widest = -(-int(lengths.max()) // multiple) * multiple
            return np.full(len(lengths), max(widest, self.width or 0))
        segments = -(-lengths // multiple) * multiple
        segments[-1] += max((self.width or 0) - int(segments.sum()), 0)
        return segments

    def fed_shape(self, multiple: int) -> tuple[int, int]:
        """(B, W): rows and columns that are fed, on all context-parallel ranks together."""
        segments = self.segments(multiple)
        return (1, int(segments.sum())) if self.packed else (len(segments), int(segments[0]))

    def rows(self, parallel: Parallel) -> int:
        """Rows that the routers of every rank see in a micro-batch, padding included."""
        batch, width = self.fed_shape(parallel.column_multiple)
        return batch * width // (parallel.cp * parallel.sequence_shards)

    def token_rows(self, parallel: Parallel) -> np.ndarray:
        """(cp, sequence shards) int64: those of the rows that hold a token, on each kind of rank.

        Zigzag: a sequence is cut in 2 * cp chunks, of which a rank holds two, one behind the other, each with its
        tokens in front. What remains is how much of these two runs of columns lies in each sequence shard.
        """
        segments = self.segments(parallel.column_multiple)
        pieces = 2 * parallel.cp if parallel.cp > 1 else 1
        chunk = segments // pieces
        local = segments // parallel.cp
        begins = np.cumsum(local) - local if self.packed else np.zeros_like(local)
        shard = (int(local.sum()) if self.packed else int(local[0])) // parallel.sequence_shards
        edges = shard * np.arange(parallel.sequence_shards)
        counts = np.zeros((parallel.cp, parallel.sequence_shards), np.int64)
        for rank in range(parallel.cp):
            for place, number in enumerate(sorted({rank, pieces - 1 - rank})):
                tokens = np.clip(np.array(self.lengths) - number * chunk, 0, chunk)
                first = (begins + place * chunk)[:, None]
                inside = np.minimum(first + tokens[:, None], edges + shard) - np.maximum(first, edges)
                counts[rank] += np.clip(inside, 0, None).sum(axis=0)
        return counts


@dataclass(frozen=True, slots=True)
class RouteBytes:
    """Sizes of the routes of a model in memory and on the wire."""

    topology: MoeTopology

    def batch(self, layers: int, rows: int) -> int:
        """A `RouteBatch` of so many layers and rows: ids, and one flag a row; nothing where nothing routes."""
        if not layers:
            return 0
        return rows + layers * rows * self.topology.top_k * narrowest_dtype(self.topology.num_experts).itemsize

    def trace(self, tokens: int, *, whole: bool = False) -> int:
        """A trace in the format of docs/trace-format.md, of one weight version; `whole`: the last token has a route."""
        experts = self.topology.num_experts
        id_bits = smallest_id_bits(experts)
        layers = len(self.topology.layers)
        return Shape(tokens, layers, self.topology.top_k, experts, id_bits, int(not whole), 1).blob_bytes

    def base64_int32(self, tokens: int) -> int:
        """The same as base64 of int32 over all decoder layers, which is how most projects send routes."""
        return 4 * -(-4 * max(tokens - 1, 0) * self.topology.num_layers * self.topology.top_k // 3)

    def sequences(self, work: Work) -> int:
        """The sequences of one micro-batch on the wire, each prompt once for its group."""
        if not work.prompt or work.group == 1:
            return sum(self.trace(length) for length in work.lengths)
        completions = sum(self.trace(length - work.prompt) for length in work.lengths)
        return completions + -(-len(work.lengths) * self.trace(work.prompt, whole=True) // work.group)
