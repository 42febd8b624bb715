"""Replay on releases of Transformers between those that the other tests run on; see `make test-transformers-between`.

Releases 5.0 to 5.17 choose the experts in the sparse block, 5.18 in router classes that the models do not name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

import moe_replay as mr
from moe_replay.routes.topology import ATTENTION_ROUTER
from tests.replay.adapters.families import available_families, tiny_model

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# family -> (first release, last release, what is wrong there without us)
BROKEN_UPSTREAM = {
    "dbrx": ((5, 0), (5, 17), "its router is sized by ffn_hidden_size, its input by d_model"),
    "deepseek_ocr2_text": ((5, 0), (5, 17), "group-limited routing reads an attribute that the block does not have"),
    "deepseek_v2": ((5, 0), (5, 17), "group-limited routing reads an attribute that the block does not have"),
    "nemotron_h": ((5, 0), (5, 17), "the layers are named otherwise in the config"),
}
# family -> the same, where attach() refuses the model
REFUSED = {"axk1": ((5, 18), (5, 18), "the config names layers as sparse that the model builds dense")}

pytestmark = pytest.mark.skipif(
    not (5, 0) <= RELEASE <= (5, 18), reason="test_families_replay.py has this release; here are 5.0 to 5.18"
)


def known(table: dict[str, tuple[tuple[int, int], tuple[int, int], str]], family: str) -> str | None:
    first, last, reason = table.get(family, ((9, 9), (0, 0), ""))
    return reason if first <= RELEASE <= last else None


@pytest.mark.parametrize("family", available_families())
def test_recorded_and_foreign_routes_are_replayed(family: str) -> None:
    if reason := known(BROKEN_UPSTREAM, family):
        pytest.skip(f"Transformers {transformers.__version__}: {reason}")
    model = tiny_model(family)
    if known(REFUSED, family):
        with pytest.raises(mr.errors.UnsupportedRouterError, match="no router found"):
            mr.attach(model)
        return
    replay = mr.attach(model)
    ids = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with replay.record() as recording:
            native = model(input_ids=ids)[0]
        batch = recording.batch()
        with replay.replay(batch):
            again = model(input_ids=ids)[0]
        assert batch.num_experts is not None
        shifted = (batch.routed_experts.long() + 1) % batch.num_experts
        foreign = dataclasses.replace(batch, routed_experts=shifted.to(batch.routed_experts.dtype))
        with replay.replay(foreign, observe=True) as replaying:
            moved = model(input_ids=ids)[0]
    assert torch.equal(native, again)
    assert not torch.equal(native, moved)
    # Nothing has moved before the first router, so its native choice is the recorded one. Attention precedes the MLP.
    first = min(batch.layers, key=lambda layer: (layer % ATTENTION_ROUTER, layer < ATTENTION_ROUTER))
    chosen, _, _ = replaying.native().layer(first)
    assert torch.equal(chosen.sort(-1).values, batch.layer(first)[0].sort(-1).values)
