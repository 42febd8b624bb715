"""Group-limited routers ask for the best inside each group, for groups, and for experts: only the last two are ours."""

from __future__ import annotations

import pytest
import torch

import moe_replay as mr
from tests.models import perturb_routers, random_ids
from tests.replay.adapters.families import tiny_model

GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
"""As many groups as there are experts in one, and as many kept as are summed in each."""
MORE_GROUPS = {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 2}
"""More groups kept than experts chosen."""


@pytest.mark.parametrize("groups", [GROUPS, MORE_GROUPS], ids=["as many as members", "more than experts"])
@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_groups_of_any_number(family, groups):
    model, ids = tiny_model(family, **groups).eval(), random_ids(2, 9, vocabulary=32)
    with torch.no_grad():
        native = model(ids).logits
        replay = mr.attach(model)
        with replay.record() as recording:
            assert torch.equal(model(ids).logits, native)
        with replay.replay(recording.batch()):
            assert torch.equal(model(ids).logits, native)
        perturb_routers(replay)
        with replay.replay(recording.batch()):
            moved = model(ids).logits
        assert not torch.equal(moved, model(ids).logits)
