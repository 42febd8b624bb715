"""`Work`: the micro-batches of one step, and the rows and bytes of routes they amount to on each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_replay.routes.bit_planes import smallest_id_bits
from moe_replay.routes.codec import Shape
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace_parts import narrowest_dtype
from moe_replay.tools.plan.parallel import Parallel
from moe_replay.train.trajectories.wire import record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one step; all micro-batches are assumed to look like the one described.

    lengths         tokens of each sequence of a micro-batch
    micro_batches   of each data-parallel rank in a step
    packed          all sequences in one row (thd), else one a row, padded on the right (sbhd)
    width           input columns over all context-parallel ranks; None: the fewest possible
    prompt          tokens shared by the sequences of a group, sent once
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
        """Return the columns of each sequence with padding, (sequences,); in one row if packed, else one row each."""
        lengths = np.array(self.lengths, np.int64)
        if not self.packed:
            widest = -(-int(lengths.max()) // multiple) * multiple
            return np.full(len(lengths), max(widest, self.width or 0))
        segments = -(-lengths // multiple) * multiple
        segments[-1] += max((self.width or 0) - int(segments.sum()), 0)
        return segments

    def fed_shape(self, multiple: int) -> tuple[int, int]:
        """Return the input shape (B, W) over all context-parallel ranks."""
        segments = self.segments(multiple)
        return (1, int(segments.sum())) if self.packed else (len(segments), int(segments[0]))

    def rows(self, parallel: Parallel) -> int:
        """Return the rows that the routers of every rank see in a micro-batch, padding included."""
        batch, width = self.fed_shape(parallel.column_multiple)
        return batch * width // (parallel.cp * parallel.sequence_shards)

    def token_rows(self, parallel: Parallel) -> np.ndarray:
        """Return the rows that hold a token on each rank, (cp, sequence shards) int64.

        Zigzag: a sequence is split into 2 * cp chunks, of which a rank holds two back to back, tokens first in each.
        What remains is the overlap of these two runs of columns with each sequence shard.
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
    """Sizes of routes of a model in memory and on the wire.

    travel   the rollout returns them; False: traces have tokens alone (`replay.mode = "off"`, `observe = false`)
    """

    topology: MoeTopology
    travel: bool = True

    def batch(self, layers: int, rows: int) -> int:
        """Return the bytes of a `RouteBatch`: ids, and one flag per row; 0 without routing layers."""
        if not layers:
            return 0
        return rows + layers * rows * self.topology.top_k * narrowest_dtype(self.topology.num_experts).itemsize

    def trace(self, tokens: int, *, whole: bool = False, layers: int | None = None) -> int:
        """Return the encoded bytes of a trace of one weight version; `whole`: the last token has a route.

        layers   number of layers that it has; None: all
        """
        if not self.travel:
            return Shape(tokens, 1, 1, 0, 1, int(tokens > 0), 1).blob_bytes
        experts = self.topology.num_experts
        id_bits = smallest_id_bits(experts)
        layers = len(self.topology.layers) if layers is None else layers
        return Shape(tokens, layers, self.topology.top_k, experts, id_bits, int(not whole), 1).blob_bytes

    def record(self, tokens: int, layers: int) -> int:
        """Return the bytes of a trajectory that a rank with `layers` routing layers gets, without a sampling mask."""
        return record_bytes(
            self.trace(tokens, layers=max(layers, 1)), tokens
        )  # its tokens come with one layer at least

    def base64_int32(self, tokens: int) -> int:
        """Return the bytes of base64-encoded int32 over all decoder layers, the encoding of most projects."""
        return 4 * -(-4 * max(tokens - 1, 0) * self.topology.num_layers * self.topology.top_k // 3)

    def sequences(self, work: Work) -> int:
        """Return the bytes of the sequences of one micro-batch on the wire, with each prompt once per group."""
        if not work.prompt or work.group == 1:
            return sum(self.trace(length) for length in work.lengths)
        completions = sum(self.trace(length - work.prompt) for length in work.lengths)
        return completions + -(-len(work.lengths) * self.trace(work.prompt, whole=True) // work.group)
