"""`RouteBatch`: the routes of one micro-batch, row by row as the routers of this rank see them.

Traces are token-major, because sequences grow by tokens. Routers need one layer at a time. The one transposition
between the two is done here, together with the gather through the `TokenLayout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.routes.layout import PADDING, RowOrder, TokenLayout, compare_fed
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.device import indices_to_device, to_device

if TYPE_CHECKING:
    from moe_replay.routes.topology import MoeTopology


@dataclass(frozen=True, slots=True)
class Coverage:
    """The part of a micro-batch that follows recorded routes: counts, so that they add up over micro-batches and ranks.

    rows                rows that each router sees, padding included
    token_rows          those of them that hold a token
    replayed_in_layer   for each layer, the token rows that have a recorded route
    """

    rows: int
    token_rows: int
    replayed_in_layer: tuple[int, ...]

    @property
    def replayed(self) -> int:
        """(layer, token row) pairs that follow a recorded route."""
        return sum(self.replayed_in_layer)

    @property
    def native(self) -> int:
        """(layer, token row) pairs without a recorded route: the router chooses."""
        return self.token_rows * len(self.replayed_in_layer) - self.replayed


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RouteBatch:
    """Routes of R rows for L layers of this rank.

    layers          decoder index of each of the L slices, increasing
    routed_experts  (L, R, K) uint8, or int16 above 256 experts; where not valid, zero or that of a stand-in
    valid           (L, R) bool: False for padding and where no route was recorded; the router chooses there, unless
                    there are stand-ins
    all_valid       for each layer, whether every row is valid: known on the host, so that no device sync is needed
    source_layers   all layers of the model that the routes come from, also those of other pipeline stages
    num_experts     experts that the routes were chosen from, where known
    max_expert      the largest id of the traces, known on the host; None for what this model's own routers chose
    fed_token_ids   (B, W) int32: the token ids that belong to these routes, -1 for padding; None where unknown
    coverage        counts, where known on the host
    layout          where each row comes from, where known: to name a token in an error
    row_order       how tokens were flattened to these rows, where known
    gates           (L, R, K) current scores at these experts that the router made its gate weights of, where recorded
    stand_ins       whether all rows that are not valid hold the experts of other rows, because nothing depends on them
    """

    layers: tuple[int, ...]
    routed_experts: Tensor
    valid: Tensor
    all_valid: tuple[bool, ...]
    source_layers: tuple[int, ...]
    num_experts: int | None = None
    max_expert: int | None = None
    fed_token_ids: Tensor | None = None
    coverage: Coverage | None = None
    layout: TokenLayout | None = None
    row_order: RowOrder | None = None
    gates: Tensor | None = None
    stand_ins: bool = False

    def __post_init__(self) -> None:
        shape, slices = self.routed_experts.shape, len(self.layers)
        if len(shape) != 3 or self.valid.shape != shape[:2] or not slices == shape[0] == len(self.all_valid):
            raise AlignmentError(
                "the parts of a batch have inconsistent shapes",
                expected=f"routed_experts ({slices}, rows, top_k), valid ({slices}, rows), all_valid of {slices}",
                found=f"{tuple(shape)}, {tuple(self.valid.shape)}, {len(self.all_valid)}",
            )
        if self.routed_experts.dtype not in (torch.uint8, torch.int16) or self.valid.dtype != torch.bool:
            raise AlignmentError(
                "a batch must hold narrow ids",
                expected="routed_experts uint8 or int16, valid bool",
                found=f"{self.routed_experts.dtype}, {self.valid.dtype}",
            )
        if self.gates is not None and (self.gates.shape != shape or not self.gates.is_floating_point()):
            raise AlignmentError(
                "the gates of a batch are not those of its experts",
                expected=f"floating point of shape {tuple(shape)}",
                found=f"{self.gates.dtype} of shape {tuple(self.gates.shape)}",
            )
        if any(b <= a for a, b in pairwise(self.layers)):
            raise AlignmentError("layers must be increasing decoder indices", found=list(self.layers))

    @classmethod
    def from_traces(
        cls,
        traces: Sequence[RouteTrace],
        layout: TokenLayout,
        layers: Iterable[int] | None = None,
        *,
        source_layers: tuple[int, ...] | None = None,
        stand_ins: bool = False,
        device: torch.device | str | int = "cpu",
    ) -> RouteBatch:
        """Return the routes of a micro-batch for this rank's `layers` (None: all of the traces').

        A GPU gets the tokens as they lie in the traces and transposes them itself, and nothing waits for it.
        `source_layers` are those of the whole traces, if other layers have been left out of these already. A prefix
        that sequences share has one route: traces that differ in it are refused. With `stand_ins`, rows that are
        `layout.unused` and have no route hold the experts of other rows, if all the others have routes.
        """
        fed_token_ids = layout.fed_token_ids([trace.token_ids for trace in traces])  # checks number and lengths too
        num_experts = _check_one_model(traces)
        for sample, trace in enumerate(traces):
            trace.check_rows(sample)
        _check_one_route(traces, layout)
        layer_ids = traces[0].layers if layers is None else tuple(layers)
        indices = as_slice(traces[0].layer_indices(layer_ids))
        runs = runs_of(layout)

        dtype = np.result_type(*(trace.routed_experts.dtype for trace in traces))
        parts = [trace.routed_experts.astype(dtype, copy=False) for trace in traces]
        if (device := torch.device(device)).type == "cpu":
            words = to_layer_major([as_words(part) for part in parts], layout, runs, indices)
            routed_experts = torch.from_numpy(_signed(as_ids(words, dtype)))
        else:
            routed_experts = layer_major_on(device, parts, layout, indices)

        # Most traces cover all layers of a token or none: then one row of flags serves all layers.
        masks = [trace.valid for trace in traces]
        shared = all(mask.strides[1] == 0 for mask in masks)
        valid = to_layer_major(masks, layout, runs, slice(0, 1) if shared else indices)
        replayed = np.broadcast_to(np.count_nonzero(valid, axis=1), len(layer_ids)).tolist()
        has_stand_ins = stand_ins and _put_stand_ins(routed_experts, valid, layout)

        return cls(
            layers=layer_ids,
            routed_experts=routed_experts,
            valid=to_device(valid, device).expand(len(layer_ids), -1),
            all_valid=tuple(count == layout.num_rows for count in replayed),
            source_layers=traces[0].layers if source_layers is None else source_layers,
            num_experts=num_experts,
            max_expert=max(int(part.max(initial=0)) for part in parts),
            fed_token_ids=to_device(fed_token_ids, device),
            coverage=Coverage(layout.num_rows, layout.num_rows - layout.num_padding, tuple(replayed)),
            layout=layout,
            row_order=RowOrder.of(layout),
            stand_ins=has_stand_ins,
        )

    @classmethod
    def recorded(
        cls,
        routed_experts: Mapping[int, Tensor],
        topology: MoeTopology,
        fed_token_ids: Tensor | None = None,
        row_order: RowOrder | None = None,
        gates: Mapping[int, Tensor] | None = None,
    ) -> RouteBatch:
        """Return what the routers of this rank chose: decoder layer -> (R, K), on the device. No device sync.

        Also for routers that another framework controls: ids of any integer dtype.

        gates   decoder layer -> (R, K) floating point, where they were recorded
        """
        layers = tuple(sorted(routed_experts))
        empty = torch.zeros((0, 0, topology.top_k), dtype=torch.uint8)  # of a pipeline stage without routers
        stacked = torch.stack([routed_experts[layer] for layer in layers]) if layers else empty
        if stacked.dtype not in (torch.uint8, torch.int16):
            stacked = stacked.to(torch.uint8 if topology.num_experts <= 256 else torch.int16)
        every_row = torch.ones((1, stacked.shape[1]), dtype=torch.bool, device=stacked.device)
        return cls(
            layers=layers,
            routed_experts=stacked,
            valid=every_row.expand(len(layers), -1),
            all_valid=(True,) * len(layers),
            source_layers=topology.layers,
            num_experts=topology.num_experts,
            fed_token_ids=None if fed_token_ids is None else fed_token_ids.to(torch.int32, copy=True),
            row_order=row_order,
            gates=torch.stack([gates[layer] for layer in layers]) if gates and layers else None,
        )

    # ---- layers and devices -------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that each router sees, padding included."""
        return self.routed_experts.shape[1]

    @property
    def top_k(self) -> int:
        """Experts of one token in one layer."""
        return self.routed_experts.shape[2]

    def layer(self, layer: int) -> tuple[Tensor, Tensor, bool]:
        """Return routed_experts (R, K), valid (R,) and whether all rows are valid, for one decoder layer."""
        index = self._index(layer)
        return self.routed_experts[index], self.valid[index], self.all_valid[index]

    def layer_gates(self, layer: int) -> Tensor | None:
        """Return the recorded gates (R, K) of one decoder layer; None where none were recorded."""
        return None if self.gates is None else self.gates[self._index(layer)]

    def select_layers(self, layers: Iterable[int]) -> RouteBatch:
        """Return only these decoder layers, e.g. of one pipeline chunk; a view where they are adjacent."""
        selected_layers = tuple(layers)
        indices = [self._index(layer) for layer in selected_layers]
        selected = as_slice(indices)
        coverage = self.coverage
        if coverage is not None:
            replayed = tuple(coverage.replayed_in_layer[index] for index in indices)
            coverage = replace(coverage, replayed_in_layer=replayed)
        return replace(
            self,
            layers=selected_layers,
            routed_experts=self.routed_experts[selected],
            valid=self.valid[:1].expand(len(selected_layers), -1) if self._shares_valid else self.valid[selected],
            all_valid=tuple(self.all_valid[index] for index in indices),
            coverage=coverage,
            gates=None if self.gates is None else self.gates[selected],
        )

    def with_stand_ins(self) -> RouteBatch:
        """Return a batch in which rows with a stand-in replay it, as if it were their route."""
        if not self.stand_ins:
            return self
        valid = torch.ones_like(self.valid[:1]).expand(len(self.layers), -1)
        return replace(self, valid=valid, all_valid=(True,) * len(self.layers))

    def unshared(self, layout: TokenLayout) -> RouteBatch:
        """Return the routes of every token of every sequence, in the rows of `layout.unshared`; no device sync.

        layout   that these routes are in
        """
        if not layout.prefixes:
            return self
        rows = to_device(layout.place, self.routed_experts.device)
        return replace(self, fed_token_ids=None, coverage=None, layout=None)._mapped(lambda tensor: tensor[:, rows])

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> RouteBatch:
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RouteBatch:
        """Return the same batch in page-locked memory, so that `to(device, non_blocking=True)` is asynchronous."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    @property
    def _shares_valid(self) -> bool:
        return self.valid.stride(0) == 0

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> RouteBatch:
        """Return a batch with the same change applied to all tensors."""
        fed, gates = self.fed_token_ids, self.gates
        return replace(
            self,
            routed_experts=change(self.routed_experts),
            valid=change(self.valid[:1]).expand(len(self.layers), -1) if self._shares_valid else change(self.valid),
            fed_token_ids=None if fed is None else change(fed),
            gates=None if gates is None else change(gates),
        )

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise AlignmentError(
                "the batch has no routes for a layer of the model",
                layer=layer,
                expected=f"layers with {layer} among them",
                found=f"layers {list(self.layers)}",
                remedy="Layers are decoder indices, dense ones counted: pass this rank's to RouteBatch.from_traces",
            )
        return self.layers.index(layer)

    # ---- checks before a forward --------------------------------------------------------------------------------

    def check(self, layers: Iterable[int], num_experts: int, top_k: int) -> None:
        """Raise unless these routes fit the routers of these layers. Uses host data only: no device sync."""
        for layer in layers:
            index = self._index(layer)
            if self.top_k != top_k:
                raise AlignmentError(
                    "the routes name another number of experts per token",
                    layer=layer,
                    expected=f"top {top_k}",
                    found=f"top {self.top_k}",
                    remedy="The routes come from another model, or from one with another top-k setting",
                )
            if self.num_experts not in (None, num_experts):
                raise AlignmentError(
                    "the routes were chosen from another number of experts",
                    layer=layer,
                    expected=f"{num_experts} experts",
                    found=f"{self.num_experts} experts",
                    remedy="Capture logical expert ids; redundant (load-balanced) copies have their own ids",
                )
            if self.max_expert is not None and self.max_expert >= num_experts:
                largest = int(self.routed_experts[index].max()) if self.num_rows else 0
                if largest >= num_experts:
                    raise AlignmentError(
                        "expert id out of range", layer=layer, expected=f"0 to {num_experts - 1}", found=largest
                    )

    def check_verifiable(self) -> None:
        """Raise unless the token ids of these routes are known, and there are any."""
        if self.fed_token_ids is None:
            raise _ids_unknown()
        if (self.layout is not None and not self.layout.num_tokens) or not self.fed_token_ids.numel():
            raise AlignmentError(
                "the batch has no tokens, so nothing proves that its routes belong to what the model is fed",
                expected="at least one token",
                found=self.layout or tuple(self.fed_token_ids.shape),
                remedy="Run a micro-batch of padding alone outside replay()",
            )

    def check_fed(self, fed_ids: Tensor, mask: Tensor | None = None, *, allow_unknown: bool = False) -> int:
        """Raise unless the model is fed (B, W) the tokens that these routes belong to. One device sync.

        Padding may hold anything that is not a token: what `mask` (B, W) is zero for, or without a mask one and the
        same id. Other ids are tokens without a trace: an error, or with `allow_unknown` counted and returned. Without a
        mask, tokens of one id that fill all the padding cannot be distinguished from it.
        """
        differing, unknown = self.count_wrong(fed_ids, mask).tolist()
        if differing:
            compare_fed(self._expected_ids("cpu").numpy(), fed_ids.cpu().numpy(), self.layout)
        if unknown and not allow_unknown:
            row, column = self._unknown(fed_ids, mask).nonzero()[0].tolist()
            raise AlignmentError(
                "the model is fed tokens that no trace has: they would be routed natively",
                expected="padding where the layout has padding",
                found=f"{unknown} tokens, the first of id {int(fed_ids[row, column])} in row {row}, column {column}",
                remedy="Truncate what is fed where traces were truncated, or replay(batch, allow_unknown_tokens=True)",
            )
        return unknown

    def count_wrong(self, fed_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return how many ids (B, W) are fed in place of those of these routes, and how many have no trace: (2,).

        Without a device sync, for callers that look at it later; `check_fed` says what is wrong.
        """
        expected = self._expected_ids(fed_ids.device)
        if expected.shape != fed_ids.shape:
            compare_fed(expected.cpu().numpy(), fed_ids.cpu().numpy(), self.layout)
        differing = (expected != fed_ids) & (expected != PADDING)
        return torch.stack([differing.sum(), self._unknown(fed_ids, mask).sum()])

    def _unknown(self, fed_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return where tokens (B, W) are fed that no trace has."""
        padding = self._expected_ids(fed_ids.device) == PADDING
        return padding & (_differs_from_padding(fed_ids, padding) if mask is None else mask.to(fed_ids.device) != 0)

    def _expected_ids(self, device: torch.device | str) -> Tensor:
        if self.fed_token_ids is None:
            raise _ids_unknown()
        return self.fed_token_ids.to(device)

    # ---- back to traces -----------------------------------------------------------------------------------------

    def to_traces(
        self,
        token_ids: Sequence[np.ndarray | Sequence[int]],
        layout: TokenLayout,
        weight_version: int = 0,
        *,
        unverified: bool = False,
    ) -> list[RouteTrace]:
        """Return one trace for each sequence; tokens that no row of this rank holds are uncovered.

        Layout and ids are compared with the ids and the row order of this batch, unless `unverified`.
        """
        layout.check_sequences(token_ids)
        if layout.num_rows != self.num_rows:
            raise AlignmentError(
                "the batch has another number of rows than the layout",
                expected=f"{layout.num_rows} rows",
                found=f"{self.num_rows} rows",
                remedy="Use the layout of the rank that recorded the batch: its padding, context and sequence parallel",
            )
        if not unverified:
            self._check_claim(token_ids, layout)
        routed_experts = self.routed_experts.cpu().numpy()
        dtype = np.dtype(np.uint16 if routed_experts.dtype == np.int16 else np.uint8)
        runs = runs_of(layout)
        words = to_token_major(as_words(routed_experts.view(dtype)), layout, runs)
        valid = to_token_major(self.valid.cpu().numpy(), layout, runs)
        return [
            RouteTrace(
                ids, as_ids(sequence_words, dtype), self.layers, mask, weight_version, num_experts=self.num_experts
            )
            for ids, sequence_words, mask in zip(token_ids, words, valid, strict=True)
        ]

    def _check_claim(self, token_ids: Sequence[np.ndarray | Sequence[int]], layout: TokenLayout) -> None:
        """Raise unless these ids, laid out like this, are what the model was fed."""
        if self.fed_token_ids is None:
            raise _ids_unknown()
        if self.row_order is not None:
            self.row_order.check(RowOrder.of(layout), layout.fed.shape)
        compare_fed(layout.fed_token_ids(token_ids), self.fed_token_ids.cpu().numpy(), layout)


def _ids_unknown() -> AlignmentError:
    return AlignmentError(
        "nothing proves that the routes belong to the tokens fed: the batch does not know its token ids",
        remedy="Record with the token ids that were fed (record(fed_ids=...)), make the batch from traces, or accept "
        "it with unverified=True",
    )


def _differs_from_padding(fed_ids: Tensor, padding: Tensor) -> Tensor:
    """Return where the ids (B, W) differ from the id that padding is filled with, taken to be its smallest."""
    smallest = torch.where(padding, fed_ids, torch.iinfo(fed_ids.dtype).max).amin()
    return fed_ids != smallest


def _check_one_model(traces: Sequence[RouteTrace]) -> int | None:
    """Return the number of experts of the one model that all traces come from, where known."""
    first = traces[0]
    num_experts = first.num_experts
    for sample, trace in enumerate(traces):
        if (trace.layers, trace.top_k) != (first.layers, first.top_k):
            raise AlignmentError(
                "the traces of a micro-batch come from different routers",
                sample=sample,
                expected=f"layers {list(first.layers)}, top {first.top_k}",
                found=f"layers {list(trace.layers)}, top {trace.top_k}",
                remedy="Layers that one engine cannot capture are declared with trace.with_uncaptured_layers([...])",
            )
        if None not in (num_experts, trace.num_experts) and trace.num_experts != num_experts:
            raise AlignmentError(
                "the traces of a micro-batch were chosen from different numbers of experts",
                sample=sample,
                expected=num_experts,
                found=trace.num_experts,
            )
        num_experts = num_experts or trace.num_experts
    return num_experts


def common_routes(first: RouteTrace, second: RouteTrace, tokens: int) -> int:
    """Return how many of the first `tokens` of two traces have the same experts, in any order, in all layers."""
    ours, theirs = first.routed_experts[:tokens], second.routed_experts[:tokens]
    same = (first.valid[:tokens] == second.valid[:tokens]).all(1)
    reordered = np.flatnonzero((ours != theirs).any((1, 2)))
    same[reordered] &= (np.sort(ours[reordered]) == np.sort(theirs[reordered])).all((1, 2))
    return tokens if same.all() else int(same.argmin())


def _check_one_route(traces: Sequence[RouteTrace], layout: TokenLayout) -> None:
    for sample, (sequence, length) in enumerate(layout.prefixes):
        common = common_routes(traces[sample], traces[sequence], length)
        if common < length:
            raise AlignmentError(
                "sequences that share a prefix have different routes in it, and it can have one only",
                sample=sample,
                token=common,
                expected=f"the routes of sequence {sequence}",
                found=f"the same for {common} of {length} shared tokens",
                remedy="Share no more than the tokens whose routes are the same",
            )


def _put_stand_ins(routed_experts: Tensor, valid: np.ndarray, layout: TokenLayout) -> bool:
    """Give rows without a route the experts of others, in place, if nothing depends on them; return whether it has.

    Those of all rows with a route in turn, so that much padding loads experts as the tokens do.
    """
    has_route = valid.all(0)
    lacking, whole = np.flatnonzero(~has_route), np.flatnonzero(has_route)
    if not lacking.size or not whole.size or not layout.unused[lacking].all():
        return False
    rows, sources = indices_to_device(routed_experts.device, lacking, np.resize(whole, lacking.size))
    has_own = to_device(valid[:, lacking, None], routed_experts.device)
    routed_experts[:, rows] = torch.where(has_own, routed_experts[:, rows], routed_experts[:, sources])
    return True


def _signed(ids: np.ndarray) -> np.ndarray:
    """View ids in the type that tensors of them have: torch computes little with uint16."""
    return ids.view(np.int16) if ids.dtype == np.uint16 else ids


# ---- between token-major traces and layer-major batches --------------------------------------------------------------

TOKENS_PER_RUN = 256  # of 48 layers, top 8: read and written within the first-level cache

LayerIndex = slice | list[int]
Run = tuple[int, slice, slice]  # (sequence, its tokens, their rows)


def runs_of(layout: TokenLayout) -> list[Run]:
    """Return runs of tokens at equal distance in the rows, each short enough for the cache.

    A few for each sequence in any layout, in row order, so that memory is written in order.
    """
    step = layout.fed.shape[0] if layout.order == "sequence" else 1
    filled = np.flatnonzero(layout.rows != PADDING)
    row_of = np.full(layout.num_tokens, PADDING)
    row_of[layout.rows[filled]] = filled
    block = row_of // (TOKENS_PER_RUN * step)  # -1 for tokens of other ranks
    begins = np.ones(layout.num_tokens, bool)
    begins[1:] = (np.diff(row_of) != step) | (np.diff(block) != 0)
    begins[layout.starts[:-1][np.array(layout.lengths) > 0]] = True

    bounds = np.append(np.flatnonzero(begins), layout.num_tokens)
    first, count = bounds[:-1], np.diff(bounds)
    here = row_of[first] != PADDING
    first, count = first[here], count[here]
    in_order = np.argsort(block[first], kind="stable")
    first, count = first[in_order], count[in_order]

    sequence = np.searchsorted(layout.starts, first, side="right") - 1
    token, row = first - layout.starts[sequence], row_of[first]
    numbers = zip(*(a.tolist() for a in (sequence, token, row, count)), strict=True)
    return [(s, slice(t, t + n), slice(r, r + (n - 1) * step + 1, step)) for s, t, r, n in numbers]


def to_layer_major(
    sequences: Sequence[np.ndarray], layout: TokenLayout, runs: Sequence[Run], indices: LayerIndex
) -> np.ndarray:
    """Transpose (T, L) of each sequence to (L, R); zero in rows that hold no token."""
    layers = sequences[0][:0, indices].shape[1]
    out = np.zeros((layers, layout.num_rows), sequences[0].dtype)
    for sequence, tokens, rows in runs:
        out[:, rows] = sequences[sequence][tokens, indices].T
    return out


def layer_major_on(
    device: torch.device, sequences: Sequence[np.ndarray], layout: TokenLayout, indices: LayerIndex
) -> Tensor:
    """Transpose (T, L, K) of each sequence to (L, R, K) on a device; zero in rows that hold no token."""
    parts = [_signed(sequence)[:, indices] for sequence in sequences]
    dtype = torch.int16 if parts[0].dtype == np.int16 else torch.uint8
    tokens = torch.empty((layout.num_tokens + 1, *parts[0].shape[1:]), dtype=dtype, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=tokens[:-1].numpy())
    tokens[PADDING] = 0  # the last one, which rows of padding take
    rows = tokens.to(device, non_blocking=True)[to_device(layout.rows, device)]
    return rows.transpose(0, 1).contiguous()


def to_token_major(batch: np.ndarray, layout: TokenLayout, runs: Sequence[Run]) -> list[np.ndarray]:
    """Transpose (L, R) to (T, L) of each sequence; zero for tokens that no row holds."""
    out = [np.zeros((length, len(batch)), batch.dtype) for length in layout.lengths]
    for sequence, tokens, rows in runs:
        out[sequence][tokens] = batch[:, rows].T
    for values, (sequence, length) in zip(out, layout.prefixes, strict=False):
        values[:length] = out[sequence][:length]
    return out


def as_words(ids: np.ndarray) -> np.ndarray:
    """View ids (X, Y, K) as words (X, Y) of K ids each, so that a row of ids moves as one."""
    size = ids.shape[2] * ids.itemsize
    word = np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype((np.void, size))
    return np.ascontiguousarray(ids).view(word)[..., 0]


def as_ids(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """View words (X, Y) as ids (X, Y, K)."""
    return words.view(dtype).reshape(*words.shape, words.itemsize // dtype.itemsize)


def as_slice(indices: list[int]) -> LayerIndex:
    """Return adjacent indices as a slice, which indexes without a copy."""
    contiguous = indices == list(range(indices[0], indices[0] + len(indices))) if indices else False
    return slice(indices[0], indices[-1] + 1) if contiguous else indices
