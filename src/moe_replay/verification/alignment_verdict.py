"""The verdict on a shift table: aligned, misaligned and by how many layers or tokens, or not enough evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from moe_replay.errors import AlignmentError
from moe_replay.verification.sequential import AlternativeKind, EvidenceHistory
from moe_replay.verification.shift import HERE, SHIFTS, ShiftTable

FLOOR = 0.25  # of `above_chance`: healthy routes are far above it (0.75 and more), foreign ones at 0
MIN_MARGIN = 0.15  # by which another shift must beat none
CERTAIN = 5.0  # standard errors
FEWEST_ROWS = 16  # effective rows that a layer is judged by


class Cause(StrEnum):
    """The fault of misaligned routes, as far as they show it."""

    NONE = "none"
    LITTLE_EVIDENCE = "not enough evidence"
    NOTHING_RECORDED = "nothing recorded"
    LAYER_SHIFT = "layer shift"
    LAYER_ORDER = "layers in another order"
    CHUNKS_REVERSED = "pipeline chunks reversed"
    TOKEN_SHIFT = "token shift"
    TRANSPOSED = "batch and sequence transposed"
    CONTEXT_PARALLEL = "context parallel order"
    OTHER_SAMPLE = "routes of another sample"
    OTHER_TOKENS = "routes of other tokens"
    OTHER_ROUTERS = "routes of other routers"
    PHYSICAL_IDS = "physical expert ids"
    EMPTY_CAPTURE = "empty capture"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether routes belong to the tokens and layers they are replayed in.

    status       aligned; misaligned; unclear: no evidence against it, and too little for it
    detail       what is wrong, in words: which layers, samples and tokens, and by how much
    layers       decoder layers that are wrong; all of them where a whole sample is
    samples      samples that are wrong, where they could be distinguished
    layer_shift, token_shift   by how much routes are late; None where no shift explains them
    """

    status: Literal["aligned", "misaligned", "unclear"]
    cause: Cause = Cause.NONE
    detail: str = ""
    layers: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    layer_shift: int | None = None
    token_shift: int | None = None

    @property
    def aligned(self) -> bool:
        """Whether the routes are shown to be aligned."""
        return self.status == "aligned"

    @property
    def metric(self) -> float:
        """For logs, as `routing/aligned`: 1 aligned, 0 misaligned, NaN unclear."""
        return {"aligned": 1.0, "misaligned": 0.0, "unclear": np.nan}[self.status]

    def __str__(self) -> str:
        return f"{self.status}: {self.detail}" if self.detail else self.status

    def raise_if_misaligned(self) -> None:
        """Raise an `AlignmentError` that names the cause, if the routes are misaligned."""
        if self.status == "misaligned":
            raise AlignmentError(
                self.detail,
                layer=listed(self.layers) if self.layers else None,
                sample=listed(self.samples) if self.samples else None,
                remedy=REMEDIES.get(self.cause),
            )


REMEDIES = {
    Cause.NOTHING_RECORDED: "Ask the engine for routes, and pass them on with every sample",
    Cause.LAYER_SHIFT: "Name the slices of a trace by decoder index; engines report dense layers too, as zeros",
    Cause.LAYER_ORDER: "Name the slices of a trace by decoder index, not by the order in which routers were built",
    Cause.CHUNKS_REVERSED: "Give each pipeline stage and virtual chunk the routes of its own decoder layers",
    Cause.TOKEN_SHIFT: "Cut, pad and resume routes together with the token ids they belong to",
    Cause.TRANSPOSED: "Say in which order the model flattens its rows: TokenLayout.sequence_major() for Megatron-Core",
    Cause.CONTEXT_PARALLEL: "Cut routes and tokens in the same way: TokenLayout.context_parallel(rank, size, style)",
    Cause.OTHER_SAMPLE: "Keep the trace in the sample it was recorded with",
    Cause.OTHER_TOKENS: "Check that routes travel with their own micro-batch, also in recomputation",
    Cause.OTHER_ROUTERS: "Check that engine and trainer hold the same weights, and whose routers are captured",
    Cause.PHYSICAL_IDS: "Capture logical ids, before the engine's load balancer maps them to copies of experts",
    Cause.EMPTY_CAPTURE: "The engine never wrote its capture buffer there; mark such rows with valid=False",
    Cause.TRUNCATED: "Mark tokens beyond the recorded ones with valid=False, or record them",
}


def judge(table: ShiftTable, history: EvidenceHistory | None = None) -> Verdict:
    """Return what the sums of a step tell: whether routes are aligned, and what explains them if not.

    history   evidence of the run's earlier steps, to which that of the table is added; without one, the table's alone
    """
    accumulated = EvidenceHistory() if history is None else history
    accumulated.add(table.log_wealth.cpu().numpy(), table.unit_counts.cpu().numpy())
    shown = _judge_step(table)
    return weighed(accumulated) if shown.status != "misaligned" and accumulated.alarming else shown


def weighed(history: EvidenceHistory) -> Verdict:
    """Return the verdict on evidence that has reached an alarm."""
    fault = history.strongest()
    rows = ("prompts", "sampled tokens", "parts of sequences")[fault.segment]
    cause, whose = _ALTERNATIVES[fault.alternative]
    routes = late(fault.shift, "token") if fault.shift else whose
    affected = f"{fault.suspects} of the {fault.units} looked at are affected; " if fault.suspects else ""
    span = "one step" if history.steps == 1 else f"{history.steps} steps"
    return Verdict(
        status="misaligned",
        cause=cause,
        detail=f"routes of {rows} are {routes}{fault.part} ({affected}evidence 1e{history.log10:.0f} over {span})",
        token_shift=fault.shift,
    )


_ALTERNATIVES = {
    AlternativeKind.SHIFTED: (Cause.TOKEN_SHIFT, "those of tokens before or after"),
    AlternativeKind.OTHER_SEQUENCE: (Cause.OTHER_SAMPLE, "those of other sequences"),
    AlternativeKind.FOREIGN: (Cause.OTHER_TOKENS, "those of other tokens"),
}


def _judge_step(table: ShiftTable) -> Verdict:
    if not table.counts[:, HERE, HERE].any():
        return Verdict(status="unclear", cause=Cause.LITTLE_EVIDENCE, detail="no row with a recorded route was seen")
    shifts = _shifts(table)
    lost = lost_slots(table)
    wrong_slots = sorted(set(lost) | {slot for slot, shift in enumerate(shifts) if shift})
    if wrong_slots:
        return _moved(table, wrong_slots, [shifts[slot] for slot in wrong_slots])
    level, deviation = _pooled(table)
    if level + CERTAIN * deviation < FLOOR:
        return _misaligned(table, range(len(table.layers)), "routes agree with native routing no better than chance")
    judged, lost_sequences = table.sequences.tolist()
    if lost_sequences:
        detail = (
            f"routes of {lost_sequences:.0f} of {judged:.0f} sequences looked at "
            "agree with native routing no better than chance"
        )
        return Verdict(status="misaligned", cause=Cause.OTHER_TOKENS, detail=detail)
    if level - CERTAIN * deviation > FLOOR:
        return Verdict(status="aligned")
    detail = f"agreement above chance is {level:.2f} +- {deviation:.2f}: look at more tokens or layers"
    return Verdict(status="unclear", cause=Cause.LITTLE_EVIDENCE, detail=detail)


def lost_slots(table: ShiftTable) -> list[int]:
    """Return layers, as indices in the table, whose routes agree no better than chance, for certain."""
    level = np.nan_to_num(table.above_chance[:, HERE, HERE], nan=1.0)
    certain = level + CERTAIN * table.deviation < FLOOR
    return np.flatnonzero(certain & (table.effective_rows >= FEWEST_ROWS)).tolist()


def _shifts(table: ShiftTable) -> list[tuple[int, int] | None]:
    """Return (layers, tokens) by which the routes of each layer are late; None unless a shift is better for certain."""
    level, ahead = table.above_chance, -table.margin  # NaN compares as False
    beats = (ahead > MIN_MARGIN) & (ahead > CERTAIN * table.margin_deviation) & (level > FLOOR)
    beats &= (table.effective_rows >= FEWEST_ROWS)[:, None, None]
    shifts: list[tuple[int, int] | None] = [None] * len(beats)
    for slot in np.flatnonzero(beats.any((1, 2))):
        row, column = np.unravel_index(np.where(beats[slot], level[slot], -1).argmax(), level.shape[1:])
        shifts[slot] = SHIFTS[row], SHIFTS[column]
    return shifts


def _moved(table: ShiftTable, wrong_slots: list[int], shifts: list[tuple[int, int] | None]) -> Verdict:
    """Return the verdict on layers that are wrong, each with the shift that explains it, if one does."""
    (shift, _), *_ = Counter(shift for shift in shifts if shift).most_common(1) or [(None, 0)]
    # A layer whose routes would stand outside the model can show no shift; most of the others must show this one.
    explained = [
        slot
        for slot, slot_shift in zip(wrong_slots, shifts, strict=True)
        if shift and (slot_shift == shift or (slot_shift is None and not 0 <= slot + shift[0] < len(table.layers)))
    ]
    if shift is None or len(explained) < 0.6 * len(wrong_slots):
        detail = "routes agree with native routing no better than chance"
        return _misaligned(table, wrong_slots, f"{detail} {_range_of_layers(table, wrong_slots)}")
    layer_shift, token_shift = shift
    distances = [late(shift, unit) for shift, unit in ((layer_shift, "layer"), (token_shift, "token")) if shift]
    return Verdict(
        status="misaligned",
        cause=Cause.LAYER_SHIFT if layer_shift else Cause.TOKEN_SHIFT,
        detail=f"routes are {' and '.join(distances)} {_range_of_layers(table, wrong_slots)}",
        layers=tuple(table.layers[slot] for slot in wrong_slots),
        layer_shift=layer_shift,
        token_shift=token_shift,
    )


def _misaligned(table: ShiftTable, wrong_slots: list[int] | range, detail: str) -> Verdict:
    layers = tuple(table.layers[slot] for slot in wrong_slots)
    return Verdict(status="misaligned", cause=Cause.OTHER_TOKENS, detail=detail, layers=layers)


def _pooled(table: ShiftTable) -> tuple[float, float]:
    """Return `above_chance` of all layers together and its standard error."""
    weight = table.counts[:, HERE, HERE] * table.information
    known = np.isfinite(table.deviation) & (weight > 0)
    if not known.any():
        return 0.0, np.inf
    weight, level = weight[known] / weight[known].sum(), table.above_chance[known, HERE, HERE]
    return float(weight @ level), float(np.sqrt((weight**2) @ (table.deviation[known] ** 2)))


def late(shift: int, unit: str) -> str:
    """Return a shift in words: "one layer late", "3 tokens early"."""
    number = {1: f"one {unit}", 2: f"two {unit}s"}.get(abs(shift), f"{abs(shift)} {unit}s")
    return f"{number} {'late' if shift > 0 else 'early'}"


def _range_of_layers(table: ShiftTable, wrong_slots: list[int]) -> str:
    """Return in words which of the layers that were looked at are wrong."""
    seen = [layer for layer, count in zip(table.layers, table.counts[:, HERE, HERE], strict=True) if count]
    return range_of_layers([table.layers[slot] for slot in wrong_slots], seen)


def range_of_layers(wrong_layers: list[int], examined: list[int]) -> str:
    """Return layers in words: "from layer 3 on", "up to layer 5", "in all layers", "in layers 2, 7"."""
    if wrong_layers == examined:
        return "in all layers" if len(examined) > 1 else f"in layer {examined[0]}"
    if wrong_layers == examined[-len(wrong_layers) :]:
        return f"from layer {wrong_layers[0]} on"
    if len(wrong_layers) > 1 and wrong_layers == examined[: len(wrong_layers)]:
        return f"up to layer {wrong_layers[-1]}"
    return f"in layer{'s' if len(wrong_layers) > 1 else ''} {listed(wrong_layers)}"


def listed(items: Sequence[object]) -> str:
    """Return the items separated by commas, shortened where they are many."""
    shown = [str(item) for item in items]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:6], "...", shown[-1]])
