"""`verify` and `compare`: whether routes belong to these tokens and layers, and the cause if they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import nn

from moe_replay.errors import AlignmentError
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.device import to_device
from moe_replay.utils.misc import evaluating
from moe_replay.verification.alignment_verdict import FLOOR, Cause, Verdict, judge, listed
from moe_replay.verification.causes import Evidence, explain, spread
from moe_replay.verification.shift import HERE, ShiftTable, shift_table
from moe_replay.verification.wrong_rows import RowScores, affected_parts, misrouted_rows, row_scores

ROWS_IN_TABLE = 4096  # more rows sharpen no verdict
WHOLE = 0.9  # of the covered rows: then all of them are wrong


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Result of `verify`.

    verdict   aligned, misaligned and by what, or unclear
    table     agreement by shift of layers and tokens
    covered   fraction of (token, layer) pairs that have a replayed route: the others cannot be judged
    notes     samples and layers without routes, which are no fault by themselves
    """

    verdict: Verdict
    table: ShiftTable
    covered: float
    notes: tuple[str, ...] = ()

    @property
    def aligned(self) -> bool:
        """Whether the routes are shown to be aligned."""
        return self.verdict.aligned

    @property
    def layer_agreement(self) -> dict[int, float]:
        """For each decoder layer, the mean overlap of native and replayed routes."""
        return dict(zip(self.table.layers, self.table.agreement[:, HERE, HERE].tolist(), strict=True))

    def raise_if_misaligned(self) -> None:
        """Raise an `AlignmentError` that names what is wrong; nothing where the evidence is too little."""
        self.verdict.raise_if_misaligned()

    def __str__(self) -> str:
        rates = [rate for rate in self.layer_agreement.values() if not np.isnan(rate)]
        overall = f", native agreement {np.mean(rates):.1%} (least {min(rates):.1%})" if rates else ""
        head = f"{self.verdict}\n{self.covered:.1%} of routes recorded{overall}"
        return "\n".join([head, *self.notes, str(self.table)])


def compare(native: Sequence[RouteTrace], replayed: Sequence[RouteTrace], *, width: int | None = None) -> VerifyReport:
    """Compare what a model chooses natively with the routes it would replay, sample by sample.

    native     what the trainer's model chose, one trace a sample; what is not covered is not compared
    replayed   the traces that would be replayed, of the same tokens
    width      columns of the micro-batch, where the samples were padded to more than the longest
    """
    lengths = _checked_lengths(native, replayed)
    layout = TokenLayout.packed(lengths)
    ours, theirs = RouteBatch.from_traces(native, layout), RouteBatch.from_traces(replayed, layout)
    theirs = replace(theirs, valid=theirs.valid & ours.valid)
    covered = theirs.valid.any(0).numpy()
    table = shift_table(ours, theirs, layout, rows=spread(np.flatnonzero(covered), ROWS_IN_TABLE))
    verdict = judge(table)
    if not covered.any():
        detail = "no sample has a single recorded route"
        verdict = Verdict(status="misaligned", cause=Cause.NOTHING_RECORDED, detail=detail)
    else:
        scores = row_scores(ours, theirs, torch.from_numpy(table.chance[:, HERE]))
        lost = np.flatnonzero(misrouted_rows(ours, theirs, scores, layout.starts))
        wrong_layers = verdict.layers or ours.layers
        evidence = Evidence(
            native=ours,
            replayed=theirs,
            starts=layout.starts,
            chance=table.chance[:, HERE],
            rows=np.flatnonzero(covered),
            slots=np.array([ours.layers.index(layer) for layer in wrong_layers]),
            width=width,
        )
        if verdict.status == "misaligned" or len(lost):
            some_rows = len(wrong_layers) == len(ours.layers) and _only_these(lost, scores, evidence.rows)
            verdict = _better(verdict, explain(replace(evidence, rows=lost) if some_rows else evidence))
        elif affected := affected_parts(evidence, layout):
            verdict = explain(replace(evidence, rows=affected.rows, slots=affected.slots))
    fraction = float(theirs.valid.float().mean()) if theirs.valid.numel() else 0.0
    return VerifyReport(verdict=verdict, table=table, covered=fraction, notes=tuple(_gaps(replayed)))


def _only_these(lost: np.ndarray, scores: RowScores, covered: np.ndarray) -> bool:
    """Return whether the other covered rows agree. Where all are wrong, it may be certain for a few only."""
    rest = np.setdiff1d(covered, lost)
    if not len(lost) or len(lost) > WHOLE * len(covered):
        return False
    return float(scores.agreement.numpy()[rest].sum()) > FLOOR * float(scores.max_agreement.numpy()[rest].sum())


def _better(shown: Verdict, explained: Verdict) -> Verdict:
    """Return the better of two verdicts: only the table shows a shift of both layers and tokens."""
    both = bool(shown.layer_shift and shown.token_shift)
    unexplained = explained.cause in (Cause.OTHER_TOKENS, Cause.OTHER_ROUTERS)
    return shown if both or (unexplained and shown.cause in (Cause.LAYER_SHIFT, Cause.TOKEN_SHIFT)) else explained


def _checked_lengths(native: Sequence[RouteTrace], replayed: Sequence[RouteTrace]) -> list[int]:
    if len(native) != len(replayed) or not native:
        raise AlignmentError("another number of samples", expected=len(native) or "at least one", found=len(replayed))
    for sample, (ours, theirs) in enumerate(zip(native, replayed, strict=True)):
        if (ours.layers, ours.top_k) != (theirs.layers, theirs.top_k):
            raise AlignmentError(
                "routes of other routers than the model has",
                sample=sample,
                expected=f"layers {list(ours.layers)}, top {ours.top_k}",
                found=f"layers {list(theirs.layers)}, top {theirs.top_k}",
                remedy="Layers are named by decoder index, dense ones counted",
            )
        if not np.array_equal(ours.token_ids, theirs.token_ids):
            raise AlignmentError(
                "routes of other tokens than the model was fed",
                sample=sample,
                expected=f"{len(ours)} tokens {ours.token_ids[:4].tolist()}...",
                found=f"{len(theirs)} tokens {theirs.token_ids[:4].tolist()}...",
                remedy="Truncate a trace where its tokens are truncated: trace[:length]",
            )
    return [len(trace) for trace in native]


def _gaps(traces: Sequence[RouteTrace]) -> Iterator[str]:
    """Describe tokens at the end of samples, and layers, without routes; the last token never has one."""
    cut = []
    for sample, trace in enumerate(traces):
        covered = np.flatnonzero(trace.valid.any(1))
        end = int(covered[-1]) + 1 if len(covered) else 0
        if end < len(trace) - 1:
            cut.append(f"from token {end} of {len(trace)} on in sample {sample}")
    if cut:
        yield f"truncated traces, unless nothing was sampled there: no routes {listed(cut)}"
    silent = ~np.any([trace.valid.any(0) for trace in traces], axis=0)
    if silent.any():
        yield f"no routes in layer {listed(np.array(traces[0].layers)[silent].tolist())}"


class HasTrace(Protocol):
    """Anything that holds the routes of one sequence, such as a rollout's `Sample`."""

    @property
    def trace(self) -> RouteTrace: ...


@contextmanager
def prepared(model: nn.Module, replay: RouterReplay | None) -> Iterator[RouterReplay]:
    """Attach to the model if necessary, in eval mode and without gradients; restore both afterwards."""
    controller = attach(model) if replay is None else replay
    try:
        with evaluating(model), torch.no_grad():
            yield controller
    finally:
        if replay is None:
            controller.detach()


def verify(
    model: nn.Module,
    samples: Sequence[RouteTrace | HasTrace],
    *,
    replay: RouterReplay | None = None,
    batch_size: int = 8,
) -> VerifyReport:
    """Route the samples' tokens natively with a Transformers model, and compare the samples' routes with that.

    replay       the controller of the model, if it is attached already
    batch_size   samples that go through the model together, padded on the right

    Example:
        report = mr.verify(model, samples)
        print(report)
        report.raise_if_misaligned()
    """
    traces = [sample if isinstance(sample, RouteTrace) else sample.trace for sample in samples]
    native: list[RouteTrace] = []
    with prepared(model, replay) as controller:
        for index, trace in enumerate(traces):
            if trace.layers != controller.topology.layers:
                raise AlignmentError(
                    "the routes were recorded for other decoder layers than this model has",
                    sample=index,
                    expected=f"layers {list(controller.topology.layers)}",
                    found=f"layers {list(trace.layers)}",
                    remedy="Layers are named by decoder index, dense ones counted; a layer the engine cannot capture "
                    "is declared with trace.with_uncaptured_layers([...])",
                )
        for first in range(0, len(traces), batch_size):
            ids = [trace.token_ids for trace in traces[first : first + batch_size]]
            native += _native_routes(model, controller, ids)
    return compare(native, traces)


def _native_routes(model: nn.Module, replay: RouterReplay, token_ids: list[np.ndarray]) -> list[RouteTrace]:
    layout = TokenLayout.padded([len(ids) for ids in token_ids])
    device = next(model.parameters()).device
    fed = to_device(layout.fed_token_ids(token_ids, pad=0), device).long()
    mask = to_device(layout.fed != PADDING, device).long()
    with replay.record() as recording:
        model(input_ids=fed, attention_mask=mask)
    return recording.traces(layout, [ids.tolist() for ids in token_ids])
