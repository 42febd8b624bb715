"""The verdict of the self-test of route capture, and the choice that a router's outputs stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.engines.vllm.selftest import RouterWatch, check_routes, choice_scores
from moe_replay.errors import EngineError, EngineName
from moe_replay.routes.topology import MoeLayer, MoeTopology

TOPOLOGY = MoeTopology(4, [MoeLayer(layer, 16, 4) for layer in (1, 2, 3)])
ENGINE = EngineName("vLLM", "0.34.0")


def routes(seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    recorded = np.zeros((20, 4, 4), np.uint8)
    for layer in TOPOLOGY.layers:
        recorded[:, layer] = random.permuted(np.tile(np.arange(16), (20, 1)), axis=1)[:, :4]
    return recorded


def check(recorded: np.ndarray | None, chosen: np.ndarray, unhooked: list[str] | None = None) -> None:
    by_layer = {layer: chosen[:, layer].astype(np.int64) for layer in TOPOLOGY.layers}
    check_routes(ENGINE, recorded, by_layer, TOPOLOGY, unhooked or [], "pip install vllm")


def test_the_routes_of_the_routers_pass_in_any_order() -> None:
    check(routes()[..., ::-1], routes())


@pytest.mark.parametrize(
    ("changed", "unhooked", "named"),
    [
        (routes() * 0, [], "layers 1, 2, 3 are zero: the hook is there and is not called"),
        (routes() * 0, ["model.layers.1.mlp.experts"], r"missing or has another name, no callback in model\.layers\.1"),
        (routes()[:, [0, 2, 3, 1]], [], r"another layer order \(layer 1 holds those of layer 2"),
        (routes()[:, [1, 2, 3, 0]], [], r"another layer order \(layer 1 holds those of layer 2"),
        (np.roll(routes(), 1, axis=0), [], r"another token order \(rows late by one\)"),
        (np.roll(routes(), -1, axis=0), [], r"another token order \(rows early by one\)"),
        (routes(1), [], "neither another layer nor a neighbouring token"),
        (routes()[:7], [], r"do not cover the prompt.*found shape \(7, 4, 4\)"),
        (None, [], "found no routes"),
    ],
)
def test_what_is_wrong_is_named(changed: np.ndarray | None, unhooked: list[str], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        check(changed, routes(), unhooked)


def test_routers_that_cannot_be_read_are_an_error_and_no_success() -> None:
    with pytest.raises(EngineError, match=r"cannot be read.*layers 1, 2, 3.*enforce_eager"):
        check_routes(ENGINE, routes(), {}, TOPOLOGY, [], "pip install vllm")


def test_groups_and_correction_biases_are_part_of_the_choice() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0, 0.0, 2.0, 2.0, 2.5, 0.0]])
    assert choice_scores(logits, None, 1, 1).topk(2).indices.tolist() == [[0, 1]]
    assert choice_scores(logits, torch.tensor([0.0, -9, 0, 0, 0, 0, 9, 0]), 1, 1).topk(2).indices.tolist() == [[6, 0]]
    one_group = choice_scores(logits, None, 4, 1)
    assert one_group.isinf().sum() == 6
    assert one_group.topk(2).indices.tolist() == [[0, 1]]


class Decoder(nn.Module):
    """Two layers named as in vLLM's models; `do_not_compile` as vLLM's decorator sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(3, 8)}) for _ in range(2)])
        self.do_not_compile = False

    def forward(self, rows: torch.Tensor) -> None:
        assert self.do_not_compile
        for layer in self.layers:
            layer["gate"](rows)


def test_a_watch_reads_the_routers_of_uncompiled_code_until_it_stops() -> None:
    model, rows = Decoder(), torch.randn(5, 3)
    watch = RouterWatch(model)
    model(rows[:3])
    model(rows[3:])
    watch.stop()
    assert not model.do_not_compile
    chosen = watch.chosen({0: (8, 2, 1, 1), 1: (8, 2, 1, 1)}, 5)
    for layer, ids in chosen.items():
        assert ids == model.layers[layer]["gate"](rows).topk(2).indices.tolist()
    assert sorted(chosen) == [0, 1]
    assert watch.chosen({0: (8, 2, 1, 1)}, 6) == {}
