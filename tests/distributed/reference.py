"""What one process makes of a micro-batch, and how far from it other processes are.

One process runs each sequence alone, with no padding and no sharding, so that nothing a rank does to its tokens can be
done to both sides of a comparison. Routes are recorded before the routers' weights are moved, and replayed after.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import moe_replay as mr
from moe_replay.replay import RouterReplay
from tests.routers.families import VOCABULARY, tiny_model

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
IGNORED = -100  # a label that cross_entropy leaves out


class Outcome(NamedTuple):
    """The loss of each micro-batch, and the gradient of every parameter over all of them."""

    losses: list[float]
    gradients: dict[str, Tensor]


# ---- micro-batches -------------------------------------------------------------------------------------------------


def sequences(seed: int) -> list[np.ndarray]:
    """The token ids of one micro-batch: three sequences of different lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length) for length in random.permutation([5, 9, 12])]


def fed(layout: mr.TokenLayout, token_ids: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Arguments of a model's forward, cut and padded as the layout says."""
    positions = [np.arange(len(ids)) for ids in token_ids]
    return {
        "input_ids": torch.from_numpy(layout.fed_token_ids(token_ids, pad=0)).long(),
        "position_ids": torch.from_numpy(layout.fed_token_ids(positions, pad=0)).long(),
        "attention_mask": torch.from_numpy(layout.fed >= 0).long(),
        "use_cache": False,
    }


def loss_of(logits: Tensor, layout: mr.TokenLayout, token_ids: Sequence[np.ndarray], total: int) -> Tensor:
    """Cross entropy of the next tokens that this layout holds, over the `total` of the micro-batch.

    The last token of a sequence is asked for its first, so that every token has a say.
    """
    following = layout.fed_token_ids([np.roll(ids, -1) for ids in token_ids], pad=IGNORED)
    labels = torch.from_numpy(following).long().flatten()
    return nn.functional.cross_entropy(logits.double().flatten(0, 1), labels, reduction="sum") / total


# ---- the models ----------------------------------------------------------------------------------------------------


def move_routers(replay: RouterReplay, seed: int = 1) -> None:
    """Change the router weights, sharded or not, so far that native routing changes for most tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in replay.sites.values():
            for parameter in site.module.parameters():
                noise = 0.5 * torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
                parameter.add_(noise.to(parameter.dtype))


def moved_model(family: str, **changes: Any) -> nn.Module:
    """A tiny model whose routers have moved since the traces of `recorded_traces`, in training mode."""
    model = tiny_model(family, **changes)
    replay = mr.attach(model)
    move_routers(replay)
    replay.detach()
    return model.train()


@functools.cache
def recorded_traces(family: str, seed: int) -> list[mr.RouteTrace]:
    """The routes of one micro-batch before the routers moved, every token covered."""
    model = tiny_model(family)
    replay = mr.attach(model)
    traces = []
    for ids in sequences(seed):
        alone = mr.TokenLayout.padded([len(ids)])
        with torch.no_grad(), replay.record() as recording:
            model(**fed(alone, [ids]))
        traces.extend(recording.traces(alone, [ids]))
    return traces


@functools.cache
def traces_as_sampled(family: str, seed: int) -> list[mr.RouteTrace]:
    """The same routes as a rollout has them: the last token of a sequence was sampled and never routed."""
    return [trace[:-1].append_tokens(trace.token_ids[-1:]) for trace in recorded_traces(family, seed)]


def packed_for_travel(traces: Iterable[Sequence[mr.RouteTrace]]) -> list[list[bytes]]:
    """The traces of several micro-batches as a rank gets them."""
    return [[trace.to_bytes() for trace in micro_batch] for micro_batch in traces]


def unpacked(micro_batch: Iterable[bytes]) -> list[mr.RouteTrace]:
    """The traces of one micro-batch, from what travelled."""
    return [mr.RouteTrace.from_bytes(data) for data in micro_batch]


@functools.cache
def replayed_alone(family: str, seed: int) -> Outcome:
    """One process replays the routes of one micro-batch with the moved routers. Most tokens would go elsewhere."""
    model = moved_model(family)
    replay = mr.attach(model)
    token_ids, loss, flipped, rows = sequences(seed), 0.0, 0, 0
    total = sum(map(len, token_ids))
    for ids, trace in zip(token_ids, traces_as_sampled(family, seed), strict=True):
        alone = mr.TokenLayout.padded([len(ids)])
        batch = mr.RouteBatch.from_traces([trace], alone)
        with replay.replay(batch, observe=True) as replaying:
            own_loss = loss_of(model(**fed(alone, [ids])).logits, alone, [ids], total)
        own_loss.backward()
        loss += own_loss.item()
        differs = (replaying.native().experts.sort(-1).values != batch.experts.sort(-1).values).any(-1)
        flipped += int((differs & batch.valid).sum())
        rows += int(batch.valid.sum())
    assert flipped > rows / 2, f"{family}: only {flipped} of {rows} routes would be others natively"
    return Outcome([loss], full_gradients(model))


def mean_of(outcomes: Sequence[Outcome], ranks: int) -> Outcome:
    """What data parallel ranks have together: all losses, and the sum of the gradients over the number of ranks."""
    names = outcomes[0].gradients
    gradients = {name: sum(o.gradients[name] for o in outcomes) / ranks for name in names}
    return Outcome([loss for o in outcomes for loss in o.losses], gradients)


# ---- comparing -----------------------------------------------------------------------------------------------------


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every parameter, by the name it has in the plain model. A collective where sharded."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().float().clone()
    return gradients


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and the name of that parameter."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected), ""


def check_same(found: Outcome, expected: Outcome) -> None:
    """Raise unless losses and gradients are those of one process."""
    apart = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    worst, name = distance(found.gradients, expected.gradients)
    assert apart <= LOSS_TOLERANCE, f"losses {found.losses}, of one process {expected.losses}"
    assert worst <= GRADIENT_TOLERANCE, f"the gradient of {name} is {worst:.1e} from that of one process"
