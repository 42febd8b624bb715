"""What one process makes of a micro-batch, and how far from it a group of ranks is.

One process runs each sequence alone, neither padded nor sharded, and its experts are held against what its routers
hand on to them, so that nothing can go wrong on both sides of a comparison alike. Routes are recorded before the
weights of the routers move, and replayed after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import moe_replay as mr
from tests.replay.adapters.families import VOCABULARY, tiny_model

LENGTHS = (5, 9, 12)  # tokens of the sequences of a micro-batch, in an order of its own
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
IGNORED = -100  # a label that cross_entropy leaves out


class Outcome(NamedTuple):
    """The loss of each micro-batch, and the gradient of every parameter over all of them."""

    losses: list[float]
    gradients: dict[str, Tensor]


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def sequences(seed: int) -> list[np.ndarray]:
    """The token ids of one micro-batch."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length) for length in random.permutation(LENGTHS)]


def forward_arguments(layout: mr.TokenLayout, token_ids: Sequence[np.ndarray]) -> dict[str, Any]:
    """What a model is fed, cut and padded as the layout says."""
    positions = [np.arange(len(ids)) for ids in token_ids]
    return {
        "input_ids": torch.from_numpy(layout.fed_token_ids(token_ids, pad=0)).long(),
        "position_ids": torch.from_numpy(layout.fed_token_ids(positions, pad=0)).long(),
        "attention_mask": torch.from_numpy(layout.fed >= 0).long(),
        "use_cache": False,
    }


def loss_of(logits: Tensor, layout: mr.TokenLayout, token_ids: Sequence[np.ndarray]) -> Tensor:
    """This layout's share of the cross entropy of a micro-batch: the shares add up to the mean over its tokens.

    The last token of a sequence is asked for the first, so that every token has a say.
    """
    following = layout.fed_token_ids([np.roll(ids, -1) for ids in token_ids], pad=IGNORED)
    labels = torch.from_numpy(following).long().flatten()
    each = nn.functional.cross_entropy(logits.double().flatten(0, 1), labels, reduction="sum")
    return each / sum(LENGTHS)


# ---- models and routes -----------------------------------------------------------------------------------------------


def move_routers(replay: mr.RouterReplay) -> None:
    """Change the weights of the routers, sharded or not, so far that most tokens would go to other experts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in replay.sites.values():
            for parameter in site.module.parameters():
                noise = 0.5 * torch.randn(parameter.shape, generator=generator)
                if isinstance(parameter, DTensor):
                    noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
                parameter.add_(noise)


def moved_model(family: str, **changes: Any) -> nn.Module:
    """A tiny model whose routers have moved since the traces were recorded, in training mode."""
    model = tiny_model(family, **changes).train()
    replay = mr.attach(model)
    move_routers(replay)
    replay.detach()
    return model


class Handed:
    """What the routers of a model hand on to the experts, whoever chose it."""

    def __init__(self, replay: mr.RouterReplay) -> None:
        self._by_layer: dict[int, Tensor] = {}
        for layer, site in replay.sites.items():
            site.module.register_forward_hook(functools.partial(self._see, layer))

    def _see(self, layer: int, module: nn.Module, args: tuple, output: tuple) -> None:
        self._by_layer[layer] = output[2]

    def experts(self) -> np.ndarray:
        """(T, L, K) of the last forward, which was of one sequence."""
        return torch.stack([self._by_layer[layer] for layer in sorted(self._by_layer)], dim=1).numpy()


@functools.cache
def recorded_traces(family: str, seed: int) -> list[mr.RouteTrace]:
    """The routes of one micro-batch before the routers moved."""
    model = tiny_model(family)
    replay = mr.attach(model)
    handed = Handed(replay)
    traces = []
    for ids in sequences(seed):
        alone = mr.TokenLayout.padded([len(ids)])
        with torch.no_grad(), replay.record() as recording:
            model(**forward_arguments(alone, [ids]))
        traces.extend(recording.traces(alone, [ids]))
        assert np.array_equal(traces[-1].routed_experts, handed.experts())
    return traces


def rollout_traces(family: str, seed: int) -> list[mr.RouteTrace]:
    """The same routes as a rollout has them: the last token of a sequence was sampled and never routed."""
    return [trace[:-1].append_tokens(trace.token_ids[-1:]) for trace in recorded_traces(family, seed)]


def to_wire(traces: Iterable[mr.RouteTrace]) -> list[bytes]:
    """Traces as they travel to a rank and back."""
    return [trace.to_bytes() for trace in traces]


def from_wire(received: Iterable[bytes]) -> list[mr.RouteTrace]:
    """Traces that have travelled."""
    return [mr.RouteTrace.from_bytes(data) for data in received]


# ---- one process -----------------------------------------------------------------------------------------------------

Traces = Callable[[str, int], list[mr.RouteTrace]]


@functools.cache
def one_process(family: str, seed: int, traces: Traces = rollout_traces, dtype: torch.dtype = torch.float32) -> Outcome:
    """Replay the routes of one micro-batch with the moved routers."""
    model = moved_model(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    replay = mr.attach(model)
    handed = Handed(replay)
    loss, moved, replayed = 0.0, 0, 0
    for trace in traces(family, seed):
        alone, ids = mr.TokenLayout.padded([len(trace)]), [trace.token_ids]
        with replay.replay(mr.RouteBatch.from_traces([trace], alone), observe=True) as replaying:
            share = loss_of(model(**forward_arguments(alone, ids)).logits, alone, ids)
        share.backward()
        loss += share.item()
        native = replaying.native().routed_experts.numpy().swapaxes(0, 1)
        assert np.array_equal(handed.experts(), np.where(trace.valid[..., None], trace.routed_experts, native))
        other = (np.sort(native) != np.sort(trace.routed_experts)).any(-1)
        moved, replayed = moved + int(other[trace.valid].sum()), replayed + int(trace.valid.sum())
    assert moved > replayed / 2, f"{family}: the routers moved so little that {replayed - moved} routes are native"
    return Outcome([loss], full_gradients(model))


def data_parallel(outcomes: Sequence[Outcome], ranks: int) -> Outcome:
    """What ranks that share micro-batches come to: every loss, and the gradients' sum over the number of ranks."""
    gradients = {
        name: torch.stack([outcome.gradients[name] for outcome in outcomes]).sum(0) / ranks
        for name in outcomes[0].gradients
    }
    return Outcome([loss for outcome in outcomes for loss in outcome.losses], gradients)


# ---- comparing -------------------------------------------------------------------------------------------------------


def backward_last_first(model: nn.Module, losses: Sequence[Tensor]) -> Outcome:
    """The backward of every micro-batch in flight, the last one first. Leaves no gradient behind."""
    for loss in reversed(losses):
        loss.backward()
    gradients = full_gradients(model)
    model.zero_grad(set_to_none=True)
    return Outcome([loss.item() for loss in losses], gradients)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every parameter, by its name in the plain model. Where sharded, all ranks must ask."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().float()
    return gradients


def differences(found: Outcome, expected: Outcome) -> tuple[float, float]:
    """The largest difference of a loss, and the largest relative difference of a parameter's gradient."""
    apart = max(abs(mine - its) for mine, its in zip(found.losses, expected.losses, strict=True))
    return apart, max(relative_differences(found.gradients, expected.gradients).values())


def relative_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By parameter."""
    assert found.keys() == expected.keys()
    return {name: ((found[name] - its).norm() / its.norm()).item() for name, its in expected.items()}


def check_same(found: Outcome, expected: Outcome) -> None:
    """Raise unless losses and gradients are those of one process."""
    loss, gradient = differences(found, expected)
    assert loss <= LOSS_TOLERANCE, f"losses {found.losses}, expected {expected.losses}"
    assert gradient <= GRADIENT_TOLERANCE, relative_differences(found.gradients, expected.gradients)


def check_other(found: Outcome, expected: Outcome) -> None:
    """Raise unless `check_same` would have noticed a difference, by far, in losses and gradients."""
    loss, gradient = differences(found, expected)
    assert loss > 100 * LOSS_TOLERANCE
    assert gradient > 1000 * GRADIENT_TOLERANCE
