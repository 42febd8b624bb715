"""`verify`: are these the routes of these tokens, in this model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from moe_replay.diagnostics.compare import VerifyReport, compare
from moe_replay.errors import AlignmentError
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.routes.trace import RouteTrace
from moe_replay.utils.eval_mode import evaluating


class HasTrace(Protocol):
    """Anything that holds the routes of one sequence, such as a rollout's `Sample`."""

    @property
    def trace(self) -> RouteTrace: ...


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
    given = [sample if isinstance(sample, RouteTrace) else sample.trace for sample in samples]
    controller = attach(model) if replay is None else replay
    try:
        for number, trace in enumerate(given):
            if trace.layers != controller.topology.layers:
                raise AlignmentError(
                    "the routes were recorded for other decoder layers than this model has",
                    sample=number,
                    expected=f"layers {list(controller.topology.layers)}",
                    found=f"layers {list(trace.layers)}",
                    remedy="Layers are named by decoder index, dense ones counted; a layer the engine cannot capture "
                    "is declared with trace.with_uncaptured_layers([...])",
                )
        native: list[RouteTrace] = []
        with evaluating(model):
            for first in range(0, len(given), batch_size):
                ids = [trace.token_ids for trace in given[first : first + batch_size]]
                native += _native_routes(model, controller, ids)
    finally:
        if replay is None:
            controller.detach()
    return compare(native, given)


def _native_routes(model: nn.Module, replay: RouterReplay, token_ids: list[np.ndarray]) -> list[RouteTrace]:
    layout = TokenLayout.padded([len(ids) for ids in token_ids])
    device = next(model.parameters()).device
    fed = torch.from_numpy(layout.fed_token_ids(token_ids, pad=0)).long().to(device)
    mask = torch.from_numpy(layout.fed != PADDING).long().to(device)
    with torch.no_grad(), replay.record() as recording:
        model(input_ids=fed, attention_mask=mask)
    return recording.traces(layout, [ids.tolist() for ids in token_ids])
