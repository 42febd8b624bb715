"""The weights as vLLM's transfer engines take them: who hands over which layer, and vLLM's own view of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch

from moe_replay.errors import EngineError
from moe_replay.rollout.vllm import layer_shares
from moe_replay.rollout.vllm.layer_shares import LayerShares, holders, partition
from moe_replay.rollout.weights.source import Group, IteratorSource, TensorInfo

TENSORS = {
    "model.embed_tokens.weight": torch.zeros(4, 2),
    **{
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": torch.full((3, 2), layer)
        for layer in range(5)
        for expert in range(2)
    },
    "model.norm.weight": torch.ones(2),
    "lm_head.weight": torch.ones(4, 2),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 64, 200])
@pytest.mark.parametrize("groups", [1, 2, 7, 50])
def test_no_rank_is_without_a_group_and_rank_0_has_the_last_one(groups: int, ranks: int) -> None:
    found = holders(groups, ranks)
    assert len(found) == groups
    assert all(found)
    assert {rank for of_group in found for rank in of_group} == set(range(ranks))
    if groups > 1:
        assert found[-1] == (0,)
        firsts = [min(of_group) for of_group in found[:-1]]
        assert firsts == sorted(firsts), "consecutive layers lie on consecutive ranks"


def test_groups_are_those_of_vllm() -> None:
    base = pytest.importorskip("vllm.distributed.weight_transfer.base", reason="vLLM is not installed here")
    assert partition(list(TENSORS)) == base.layerwise_groups(list(TENSORS))


def test_names_out_of_order_are_refused() -> None:
    first, *rest = TENSORS
    with pytest.raises(EngineError, match=r"not together.*found model\.layers\.0"):
        partition([first, *rest[2:], *rest[:2]])


def test_it_has_the_methods_of_vllm_s_sources() -> None:
    base = pytest.importorskip("vllm.distributed.weight_transfer.base", reason="vLLM is not installed here")
    methods = {name for name, value in vars(base.WeightSource).items() if inspect.isfunction(value)}
    assert methods == {"metadata", "__iter__", "held_names", "groups", "iter_groups"}
    for name in methods:
        theirs, own = (inspect.signature(getattr(kind, name)) for kind in (base.WeightSource, LayerShares))
        assert list(theirs.parameters) == list(own.parameters)
    fields = base.ParamMeta("a", torch.float32, (1,))
    info = LayerShares(IteratorSource(TENSORS.items)).metadata()[0]
    assert all(hasattr(info, name) for name in vars(fields))


class Recorded:
    """A source that says who received each group."""

    def __init__(self) -> None:
        self.received: list[set[int]] = []

    def metadata(self) -> Sequence[TensorInfo]:
        return [TensorInfo.of(name, tensor) for name, tensor in TENSORS.items()]

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        for names in partition(list(TENSORS)):
            self.received.append(set(receivers))
            yield [(name, TENSORS[name]) for name in names] if layer_shares.rank() in receivers else []


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("reads", [True, False])
def test_every_rank_takes_part_in_every_group(monkeypatch: pytest.MonkeyPatch, rank: int, reads: bool) -> None:
    monkeypatch.setattr(layer_shares, "rank", lambda: rank)
    monkeypatch.setattr(layer_shares, "world_size", lambda: 3)
    source = Recorded()
    shares = LayerShares(source)
    for _ in range(2):  # a second update
        source.received.clear()
        shares.use(source)
        if reads:
            groups = shares.iter_groups()
            found = [next(groups) for _ in shares.groups()]
            assert [name for names, _ in found for name in names] == list(shares.held_names())
        shares.finish()
        assert source.received == [set(of_group) for of_group in holders(7, 3)]


def test_a_source_with_other_tensors_than_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = IteratorSource(TENSORS.items)
    shares = LayerShares(source)
    less = {name: tensor for name, tensor in TENSORS.items() if "layers.2" not in name}
    shares.use(IteratorSource(less.items))
    with pytest.raises(EngineError, match=r"other tensors.*layers\.2.*layers\.3"):
        list(shares.iter_groups())
