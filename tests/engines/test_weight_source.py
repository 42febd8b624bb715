"""Sources of weights: groups of one layer, what they are made of, and who receives them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_replay.weights.source import TensorInfo, tensors_of
from tests.support.weight_sources import IteratorSource, layer_prefix

TENSORS = {
    "model.embed_tokens.weight": torch.zeros(4, 2),
    "model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(3, 2, dtype=torch.bfloat16),
    "model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(3, 2, dtype=torch.bfloat16),
    "model.layers.1.mlp.gate.weight": torch.ones(2),
    "model.norm.weight": torch.ones(2),
    "lm_head.weight": torch.ones(4, 2),
}


def read() -> Iterator[tuple[str, Tensor]]:
    yield from TENSORS.items()


def test_a_group_has_the_consecutive_tensors_of_one_layer() -> None:
    groups = [[name for name, _ in group] for group in IteratorSource(read).groups()]
    names = list(TENSORS)
    assert groups == [names[:1], names[1:3], names[3:4], names[4:]]


def test_a_layer_is_named_by_the_first_number() -> None:
    assert layer_prefix("model.layers.3.mlp.experts.7.up_proj.weight") == "model.layers.3"
    assert layer_prefix("lm_head.weight") == ""


def test_metadata_describes_the_tensors_in_their_order_and_every_pass_starts_anew() -> None:
    source = IteratorSource(read)
    infos = source.metadata()
    assert [info.name for info in infos] == list(TENSORS)
    assert infos[1] == TensorInfo("model.layers.0.mlp.experts.0.up_proj.weight", torch.bfloat16, (3, 2))
    assert sum(info.nbytes for info in infos) == sum(tensor.nbytes for tensor in TENSORS.values())
    assert dict(tensors_of(source)).keys() == dict(tensors_of(source)).keys() == TENSORS.keys()


def test_ranks_that_receive_nothing_get_as_many_empty_groups() -> None:
    assert list(IteratorSource(read).groups(receivers=(1,))) == [[], [], [], []]
