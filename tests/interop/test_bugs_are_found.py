"""Bugs that frameworks had, made again in verl's tensors: each is found when they are read, or by the verifier."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_replay as mr
from moe_replay import interop
from moe_replay.interop import RouteFormatError
from moe_replay.verification.verify import verify
from tests.models import tiny_qwen3_moe

pytest.importorskip("transformers")

LENGTHS = (40, 40, 33)


@pytest.fixture(scope="module")
def batch() -> SimpleNamespace:
    """A batch as verl holds it: routes of a model with a dense first layer, none for the last token of a sample."""
    model = tiny_qwen3_moe(num_hidden_layers=6, num_experts=16, num_experts_per_tok=4)
    replay = mr.attach(model)
    layout = mr.TokenLayout.padded(LENGTHS)
    random = np.random.default_rng(0)
    ids = [random.integers(1, 97, length) for length in LENGTHS]
    fed, mask = torch.from_numpy(layout.fed_token_ids(ids, pad=0)).long(), torch.from_numpy(layout.fed >= 0).long()
    with torch.no_grad(), replay.record() as recording:
        model(input_ids=fed, attention_mask=mask)
    traces = [
        mr.RouteTrace(t.token_ids, t.routed_experts, t.layers, np.arange(len(t)) < len(t) - 1, num_experts=16)
        for t in recording.traces(layout, ids)
    ]
    routes = interop.to_verl(traces, replay.topology, mask)
    return SimpleNamespace(model=model, replay=replay, topology=replay.topology, ids=fed, mask=mask, routes=routes)


def written(routes: Tensor) -> Tensor:
    """(B, W, 1, 1): whether a row holds a route."""
    return (routes != 0).any(-1).any(-1)[..., None, None]


def shifted_by_a_dense_layer(routes: Tensor, layers: list[int]) -> Tensor:
    """verl #5037."""
    wrong = torch.zeros_like(routes)
    wrong[:, :, : len(layers)] = routes[:, :, layers]
    return wrong


def of_the_layer_before(routes: Tensor, layers: list[int]) -> Tensor:
    """verl #5452, ms-swift's Ray update: routers take the slices of other layers, all of which route."""
    wrong = routes.clone()
    wrong[:, :, layers] = routes[:, :, layers].roll(1, dims=2)
    return wrong


def a_token_late(routes: Tensor, layers: list[int]) -> Tensor:
    """verl #7106: padding shifts the rows."""
    return torch.where(written(routes), routes.roll(1, dims=1), 0)


def a_token_late_and_nothing_missing(routes: Tensor, layers: list[int]) -> Tensor:
    wrong = routes.roll(1, dims=1)
    wrong[:, 0] = routes[:, 0]
    return torch.where(written(routes), wrong, 0)


def batch_and_sequence_swapped(routes: Tensor, layers: list[int]) -> Tensor:
    """miles #3146, ms-swift's padded path."""
    wrong = routes.clone()
    wrong[:2, :39] = routes[:2, :39].transpose(0, 1).reshape_as(routes[:2, :39])
    return wrong


def physical_ids(routes: Tensor, layers: list[int]) -> Tensor:
    """vLLM #33013."""
    renamed = torch.randperm(16, generator=torch.Generator().manual_seed(1)).to(torch.int16)
    wrong = routes.clone()
    wrong[:, :, layers] = renamed[routes[:, :, layers].long()]
    return torch.where(written(routes), wrong, 0)


def never_captured(routes: Tensor, layers: list[int]) -> Tensor:
    """vLLM #33013."""
    return torch.zeros_like(routes)


def overwritten_by_a_draft(routes: Tensor, layers: list[int]) -> Tensor:
    """vLLM #48622, SGLang #26980: the router of an MTP layer wrote over the first one."""
    chosen = np.argsort(np.random.default_rng(2).random((*routes.shape[:2], 16)), axis=-1)[..., :4]
    wrong = routes.clone()
    wrong[:, :, layers[0]] = torch.from_numpy(chosen).to(torch.int16)
    return torch.where(written(routes), wrong, 0)


def of_another_sample(routes: Tensor, layers: list[int]) -> Tensor:
    return routes[[1, 0, 2]]


def test_right_routes_are_aligned(batch: SimpleNamespace) -> None:
    traces = interop.from_verl(batch.routes, batch.ids, batch.mask, topology=batch.topology)
    assert verify(batch.model, traces, replay=batch.replay).verdict.aligned


@pytest.mark.parametrize("bug", [shifted_by_a_dense_layer, a_token_late, never_captured], ids=lambda bug: bug.__name__)
def test_found_when_read(batch: SimpleNamespace, bug: Callable[[Tensor, list[int]], Tensor]) -> None:
    wrong = bug(batch.routes, list(batch.topology.layers))
    with pytest.raises(RouteFormatError):
        interop.from_verl(wrong, batch.ids, batch.mask, topology=batch.topology)


@pytest.mark.parametrize(
    "bug",
    [
        of_the_layer_before,
        a_token_late_and_nothing_missing,
        batch_and_sequence_swapped,
        physical_ids,
        overwritten_by_a_draft,
        of_another_sample,
    ],
    ids=lambda bug: bug.__name__,
)
def test_found_by_the_verifier(batch: SimpleNamespace, bug: Callable[[Tensor, list[int]], Tensor]) -> None:
    wrong = bug(batch.routes, list(batch.topology.layers))
    traces = interop.from_verl(wrong, batch.ids, batch.mask, topology=batch.topology)
    assert verify(batch.model, traces, replay=batch.replay).verdict.status == "misaligned"
