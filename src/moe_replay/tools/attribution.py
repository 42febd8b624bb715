"""The passes of an attribution: scoring the samples of an engine with a trainer, natively and with replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moe_replay.engines.session import NOT_SAMPLED, Session
from moe_replay.records import FinishReason, MicroBatch, Sample, Trajectory
from moe_replay.replay.controller import RouterReplay
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Routing, apply_routing, keep_rollout_routes
from moe_replay.train.backends.logprobs import sampled_logprobs, scored_logits
from moe_replay.train.learn.batches import divide, make_micro_batch
from moe_replay.train.rollout.groups import check_versions
from moe_replay.verification.agreement import route_agreement, same_experts
from moe_replay.verification.attribution import (
    AGAIN,
    EXTREME,
    HISTOGRAM_EDGES,
    NATIVE,
    R2,
    R3,
    AlignmentSummary,
    Attribution,
    AttributionError,
    Differences,
    PassScores,
    RoutingScores,
)
from moe_replay.verification.metrics import Mismatch
from moe_replay.verification.shift import SHIFTS
from moe_replay.verification.verify import VerifyReport, compare, prepared

POSITIONS = 16  # bins of positions
POINTS = 2000  # in the scatter plot


def attribute(
    model: nn.Module,
    samples: Sequence[Sample],
    *,
    replay: RouterReplay | None = None,
    temperature: float = 1.0,
    tokens_per_micro_batch: int = 8192,
    packed: bool = True,
    labels: Mapping[str, str] | None = None,
) -> Attribution:
    """Score samples with a Transformers model natively, natively again, with R2 and with R3.

    replay        controller of the model, if already attached
    temperature   of sampling; top-p and top-k must have been off
    packed        pack sequences into one row, as the trainer does; otherwise one per row, padded on the right
    labels        engine, model and so on, for the heading of the report

    Example:
        result = attribute(model, [sample for group in engine.generate(prompts, params) for sample in group])
        print(result)
        assert not failures(result)
    """
    if not temperature > 0:
        raise AttributionError("greedy samples have no log-probs to compare", expected="> 0", found=temperature)
    if not any(len(sample.completion_ids) for sample in samples):
        raise AttributionError("no sampled tokens to compare", found=f"{len(samples)} samples")
    trajectories = [_scored(sample, number) for number, sample in enumerate(samples)]
    with prepared(model, replay) as controller:
        parts = [
            _four_passes(model, controller, batch, temperature)
            for batch in _micro_batches(model, trajectories, tokens_per_micro_batch, packed)
        ]
    return _attribution([sample.trace for sample in samples], parts, labels)


def attribute_traces(
    model: nn.Module,
    traces: Sequence[RouteTrace],
    *,
    tokens_per_micro_batch: int = 8192,
    packed: bool = True,
    labels: Mapping[str, str] | None = None,
) -> Attribution:
    """Compare routes alone, without log-probs, with the native routes of a Transformers model, in one pass."""
    if not traces:
        raise AttributionError("no traces to compare")
    trajectories = [_unscored(trace, number) for number, trace in enumerate(traces)]
    with prepared(model, None) as controller:
        parts = [
            _native_pass(model, controller, batch)
            for batch in _micro_batches(model, trajectories, tokens_per_micro_batch, packed)
        ]
    return _attribution(traces, parts, labels)


# ---- passes ----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """One micro-batch: log-probs (N,) of the rollout and of each pass, and native routes of a pass."""

    places: np.ndarray  # (N, 2): number of the sequence and position in it of each log-prob
    rollout: Tensor
    logprobs: dict[str, Tensor]
    # for each pass, the trace of each sequence by its number; for R3, the routers' own choice
    routes: dict[str, dict[int, RouteTrace]]


def _micro_batches(
    model: nn.Module, trajectories: Sequence[Trajectory], budget: int, packed: bool
) -> Iterator[MicroBatch]:
    device = next(model.parameters()).device
    (bins,) = divide([len(trajectory) for trajectory in trajectories], 1, budget, packed=packed)
    for numbers in bins:
        chosen = [trajectories[number] for number in numbers]
        lengths = [len(trajectory) for trajectory in chosen]
        layout = TokenLayout.packed(lengths) if packed else TokenLayout.padded(lengths)
        yield make_micro_batch(chosen, [0.0] * len(chosen), layout, device)


def _four_passes(model: nn.Module, replay: RouterReplay, batch: MicroBatch, temperature: float) -> _Part:
    def run(routing: Routing) -> Tensor:
        return _pass(model, replay, batch, routing, temperature)

    native = run(Routing("record"))
    again = run(Routing("native", observe=True))
    native_again = batch.native_routes[0]
    with_r2 = run(Routing("replay", "recorded"))
    keep_rollout_routes(batch, [replay.layers])
    with_r3 = run(Routing("replay", "rollout", observe=True))
    return _Part(
        _places(batch),
        batch.rollout_logprobs.cpu(),
        {NATIVE: native, AGAIN: again, R2: with_r2, R3: with_r3},
        {
            NATIVE: _by_number(batch.recorded_routes[0], batch),
            AGAIN: _by_number(native_again, batch),
            R3: _by_number(batch.native_routes[0], batch),
        },
    )


def _native_pass(model: nn.Module, replay: RouterReplay, batch: MicroBatch) -> _Part:
    _pass(model, replay, batch, Routing("record"), 1.0)
    recorded = _by_number(batch.recorded_routes[0], batch)
    return _Part(_places(batch), batch.rollout_logprobs.cpu(), {}, {NATIVE: recorded})


def _places(batch: MicroBatch) -> np.ndarray:
    """Return (N, 2): number of the sequence and position of each sampled token, in the order of its log-probs."""
    positions = [1 + np.flatnonzero(trajectory.sampled[1:]) for trajectory in batch.trajectories]
    numbers = np.repeat([trajectory.row for trajectory in batch.trajectories], [len(part) for part in positions])
    return np.stack([numbers, np.concatenate(positions)], 1)


def _pass(model: nn.Module, replay: RouterReplay, batch: MicroBatch, routing: Routing, temperature: float) -> Tensor:
    """Return log-probs of the sampled tokens, (N,), on the CPU."""
    with apply_routing(replay, batch, 0, routing):
        logits = scored_logits(model, batch, temperature)
    return sampled_logprobs(logits.log_softmax(-1), batch).cpu()


def _by_number(routes: RouteBatch, batch: MicroBatch) -> dict[int, RouteTrace]:
    traces = routes.to_traces([trajectory.token_ids for trajectory in batch.trajectories], batch.layout)
    return {trajectory.row: trace for trajectory, trace in zip(batch.trajectories, traces, strict=True)}


def _scored(sample: Sample, number: int) -> Trajectory:
    session = Session(sample.prompt_ids.tolist())
    session.absorb(sample)
    trajectory = replace(session.finish(), row=number, group=number)
    check_versions(trajectory)
    return trajectory


def _unscored(trace: RouteTrace, number: int) -> Trajectory:
    return Trajectory(
        row=number,
        group=number,
        token_ids=trace.token_ids,
        logprobs=np.zeros(len(trace), np.float32),
        versions=np.full(len(trace), NOT_SAMPLED),
        trace=trace,
        finish_reason=FinishReason.STOP,
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _attribution(
    recorded: Sequence[RouteTrace], parts: Sequence[_Part], labels: Mapping[str, str] | None
) -> Attribution:
    rollout = torch.cat([part.rollout for part in parts])
    logprobs = {name: torch.cat([part.logprobs[name] for part in parts]) for name in parts[0].logprobs}
    routes: dict[str, list[RouteTrace]] = {}
    for name in parts[0].routes:
        by_number = {number: trace for part in parts for number, trace in part.routes[name].items()}
        routes[name] = [by_number[number] for number in range(len(recorded))]
    shown = np.unique(np.linspace(0, len(rollout) - 1, POINTS).astype(np.int64))
    return Attribution(
        samples=len(recorded),
        tokens=sum(map(len, recorded)),
        scored=len(rollout),
        passes={name: _scores(rollout, scored, logprobs[NATIVE], name) for name, scored in logprobs.items()},
        routing=_routing(recorded, routes),
        alignment=_alignment(compare(routes[NATIVE], recorded)),
        scatter={
            name: tuple((round(a, 6), round(b, 6)) for a, b in torch.stack([rollout, scored], 1)[shown].tolist())
            for name, scored in logprobs.items()
            if name in (NATIVE, R3)
        },
        differences=_differences(
            recorded,
            routes[NATIVE],
            (rollout != logprobs.get(NATIVE, rollout)).numpy(),
            np.concatenate([part.places for part in parts]),
        ),
        labels=dict(labels or {}),
    )


def _differences(
    recorded: Sequence[RouteTrace], native: Sequence[RouteTrace], is_unequal: np.ndarray, places: np.ndarray
) -> Differences:
    """Return what differs bit for bit; `is_unequal` (N,) says it of log-probs, at `places` (N, 2)."""
    layout = TokenLayout.packed([len(trace) for trace in recorded])
    ours, theirs = (RouteBatch.from_traces(traces, layout) for traces in (native, recorded))
    slots, tokens = (ours.valid & theirs.valid & ~same_experts(ours, theirs)).numpy().nonzero()  # layer by layer
    first_route = None
    if len(slots):
        sample = int(np.searchsorted(layout.starts, tokens[0], side="right")) - 1
        first_route = ours.layers[slots[0]], sample, int(tokens[0] - layout.starts[sample])
    return Differences(
        routes=len(slots),
        logprobs=int(is_unequal.sum()),
        first_route=first_route,
        first_logprob=min(((int(sample), int(token)) for sample, token in places[is_unequal]), default=None),
    )


def _scores(rollout: Tensor, scored: Tensor, native: Tensor, name: str) -> PassScores:
    difference = (scored - rollout).double().numpy()
    places = np.searchsorted(HISTOGRAM_EDGES, difference)
    return PassScores(
        mismatch=Mismatch.between(rollout, scored).summary(),
        extreme={limit: int((np.abs(difference) > np.log(limit)).sum()) for limit in EXTREME},
        histogram=tuple(np.bincount(places, minlength=len(HISTOGRAM_EDGES) + 1).tolist()),
        own={} if name == NATIVE else Mismatch.between(native, scored).summary(),
    )


def _routing(recorded: Sequence[RouteTrace], routes: Mapping[str, list[RouteTrace]]) -> RoutingScores:
    layout = TokenLayout.packed([len(trace) for trace in recorded])
    theirs = RouteBatch.from_traces(recorded, layout)
    chosen = {name: RouteBatch.from_traces(traces, layout) for name, traces in routes.items()}
    ours = chosen[NATIVE]
    covered = (ours.valid & theirs.valid).numpy()  # (L, tokens)
    agrees = same_experts(ours, theirs).numpy() & covered
    unknown = (float("nan"),) * len(ours.layers)

    position = np.concatenate([np.arange(len(trace)) for trace in recorded])
    longest = max(map(len, recorded))
    edges = np.unique(np.linspace(0, longest, min(POSITIONS, longest) + 1).astype(np.int64))
    place = np.searchsorted(edges, position, side="right") - 1
    differing = (covered & ~agrees).sum(0)[covered.any(0)]
    return RoutingScores(
        layers=ours.layers,
        compared=tuple(covered.sum(1).tolist()),
        agreement=tuple(route_agreement(ours, theirs).tolist()),
        noise=tuple(route_agreement(ours, chosen[AGAIN]).tolist()) if AGAIN in chosen else unknown,
        router_alone=tuple(route_agreement(chosen[R3], theirs).tolist()) if R3 in chosen else unknown,
        position_edges=tuple(edges.tolist()),
        by_position=tuple(
            tuple(_rates(place, agrees[slot], covered[slot], len(edges) - 1)) for slot in range(len(ours.layers))
        ),
        differing=tuple(np.bincount(differing, minlength=len(ours.layers) + 1).tolist()),
    )


def _rates(place: np.ndarray, agrees: np.ndarray, covered: np.ndarray, count: int) -> Iterator[float]:
    """Yield for each of `count` bins the fraction of covered tokens that agree; NaN for an empty bin."""
    hits, tokens = (np.bincount(place[mask], minlength=count).tolist() for mask in (agrees, covered))
    return (hit / all_ if all_ else float("nan") for hit, all_ in zip(hits, tokens, strict=True))


def _alignment(report: VerifyReport) -> AlignmentSummary:
    return AlignmentSummary(
        **asdict(report.verdict),
        covered=report.covered,
        notes=report.notes,
        shifts=SHIFTS,
        above_chance=tuple(tuple(row) for row in report.table.pooled().tolist()),
    )
