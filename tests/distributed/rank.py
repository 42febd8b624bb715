"""What a rank does with its share of one micro-batch, whatever cut the model or the tokens into shares."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import moe_replay as mr
from tests.distributed.reference import (
    Outcome,
    backward_last_first,
    forward_arguments,
    from_wire,
    loss_of,
    move_routers,
    to_wire,
)
from tests.replay.checkpointing import CHECKPOINTS

CHECKPOINTING = ("none", "transformers", "transformers-reentrant")


class Share(NamedTuple):
    """What a rank hands back.

    recorded   traces of the pass before the routers moved, as bytes
    replayed   after they moved, with each kind of checkpointing: losses and gradients
    native     the same without replay
    """

    recorded: list[bytes]
    replayed: dict[str, Outcome]
    native: Outcome

    @classmethod
    def received(cls, parts: tuple) -> Share:
        """A share that came back as plain tuples."""
        recorded, replayed, native = parts
        return cls(recorded, {name: Outcome(*parts) for name, parts in replayed.items()}, Outcome(*native))


def record_and_replay(model: nn.Module, layout: mr.TokenLayout, routes: list[bytes], **arguments: Any) -> tuple:
    """Record, move the routers, replay `routes` with each kind of checkpointing, route natively: a Share."""
    replay = mr.attach(model)
    traces = from_wire(routes)
    ids = [trace.token_ids for trace in traces]

    def loss() -> torch.Tensor:
        return loss_of(model(**forward_arguments(layout, ids) | arguments).logits, layout, ids)

    with torch.no_grad(), replay.record() as recording:
        loss()
    move_routers(replay)

    batch = mr.RouteBatch.from_traces(traces, layout)
    replayed = {}
    for checkpoint in CHECKPOINTING:
        if checkpoint != "none":
            CHECKPOINTS[checkpoint](model)
        with replay.replay(batch):
            replayed_loss = loss()
        replayed[checkpoint] = tuple(backward_last_first(model, [replayed_loss]))

    native = loss()
    replay.detach()
    assert torch.equal(loss(), native), "detach() left another model than attach() found"
    return to_wire(recording.traces(layout, ids)), replayed, tuple(backward_last_first(model, [native]))
