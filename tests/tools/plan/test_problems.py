"""Layouts that cannot be are refused with every reason; those that Megatron-Core refuses are among them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from moe_replay import MoeTopology
from moe_replay.errors import LayoutError
from moe_replay.routes import MoeLayer
from moe_replay.tools.plan import Dimensions, ImpossibleLayoutError, Parallel, Work, find_problems, plan_layout

MODEL = MoeTopology(24, tuple(MoeLayer(layer, 64, 8) for layer in range(2, 24)))
SIZES = Dimensions(heads=32, key_value_heads=4, vocabulary=1024, expert_width=96)
WORK = Work(lengths=(100, 60), micro_batches=8)
GOOD = Parallel(tp=4, cp=2, pp=4, vpp=2, dp=4, ep=16, etp=2)


def reasons(parallel: Parallel, work: Work = WORK) -> list[str]:
    return [problem.problem for problem in find_problems(MODEL, parallel, work, SIZES)]


def test_a_good_layout_has_no_problems() -> None:
    assert reasons(GOOD) == []


@pytest.mark.parametrize(
    ("parallel", "work", "words"),
    [
        (
            replace(GOOD, tp=5, dp=8),
            WORK,
            ["attention heads", "key-value heads", "the vocabulary", "the ranks of a stage"],
        ),
        (replace(GOOD, tp=8, ep=8), WORK, []),
        (replace(GOOD, etp=5, dp=10), WORK, ["hidden size of an expert"]),
        (replace(GOOD, sp=False), WORK, ["tensor parallelism alone"]),
        (replace(GOOD, pp=5), WORK, ["decoder layers", "micro-batches"]),
        (replace(GOOD, pp=1), WORK, ["chunks without stages"]),
        (replace(GOOD, chunk_layers=(3,) * 7), WORK, ["chunk_layers"]),
        (replace(GOOD, chunk_layers=(3,) * 7 + (4,)), WORK, ["chunk_layers"]),
        (replace(GOOD, chunk_layers=(4, 2, 3, 3, 3, 3, 3, 3)), WORK, []),
        (GOOD, replace(WORK, micro_batches=6), ["micro-batches"]),
        (replace(GOOD, ep=48, dp=12, etp=1), WORK, ["experts cannot"]),
        (replace(GOOD, dp=3), WORK, ["the ranks of a stage"]),
        (Parallel(tp=2, etp=1), WORK, ["wrong ranks"]),
        (GOOD, replace(WORK, width=120), ["input width"]),
        (GOOD, replace(WORK, width=96), ["input width"]),
        (GOOD, replace(WORK, width=112), []),
        (GOOD, replace(WORK, prompt=60, group=2), ["the prompt"]),
        (replace(GOOD, dp=0), WORK, ["invalid size dp"]),
        (GOOD, replace(WORK, lengths=()), ["invalid size sequences"]),
        (GOOD, replace(WORK, lengths=(5, 0)), ["without tokens"]),
    ],
    ids=str,
)
def test_each_reason_is_found_and_no_other(parallel: Parallel, work: Work, words: list[str]) -> None:
    found = reasons(parallel, work)
    assert len(found) == len(words), found
    assert all(word in reason for word, reason in zip(words, found, strict=True))


def test_the_error_has_all_reasons() -> None:
    with pytest.raises(ImpossibleLayoutError, match=r"attention heads.*\n.*the vocabulary") as caught:
        plan_layout(MODEL, Parallel(tp=3), WORK, dimensions=Dimensions(heads=32, vocabulary=1024))
    assert isinstance(caught.value, LayoutError)
    assert len(caught.value.problems) == 2


def test_what_megatron_refuses_is_refused() -> None:
    transformer = pytest.importorskip("megatron.core.transformer")

    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    def accepted(parallel: Parallel) -> bool:
        sizes = {"num_layers": 24, "num_attention_heads": 32, "num_query_groups": 4, "num_moe_experts": 64}
        settings = sizes | parallel.megatron_settings() | {"pipeline_dtype": "float32"}
        try:
            config = transformer.TransformerConfig(hidden_size=64, add_bias_linear=False, **settings)
            get_num_layers_to_build(config, 0 if parallel.vpp > 1 else None, 0)
        except (AssertionError, ValueError):
            return False
        return True

    model = Dimensions(heads=32, key_value_heads=4)
    outcomes = []
    for tp in (1, 2, 3, 4, 5, 6, 8):
        for pp, vpp in ((1, 1), (2, 1), (5, 1), (2, 2), (4, 4), (3, 8), (2, 5)):
            parallel = Parallel(tp=tp, pp=pp, vpp=vpp, dp=1)
            fine = not find_problems(MODEL, parallel, Work(lengths=(8,), micro_batches=60), model)
            outcomes.append(fine)
            assert fine == accepted(parallel), parallel
    assert 0 < sum(outcomes) < len(outcomes)


def test_ten_thousand_ranks_and_every_token_once_in_each_layer() -> None:
    parallel = Parallel(tp=8, cp=4, pp=8, dp=64, ep=64, etp=1)
    plan = plan_layout(MODEL, parallel, replace(WORK, packed=True))
    assert parallel.world == 16384
    table = plan.table
    assert {len(column) for column in table.values()} == {16384}
    replayed = int((table["token_rows"] * table["routing_layers"]).sum())
    assert replayed == 64 * 160 * 22
    some = np.random.default_rng(0).integers(0, 16384, 20)
    assert [plan.rank(int(rank)).token_rows for rank in some] == table["token_rows"][some].tolist()
    with pytest.raises(IndexError, match="16384"):
        plan.rank(16384)


def test_a_plan_speaks() -> None:
    plan = plan_layout(MODEL, Parallel(tp=2, pp=2, vpp=2, dp=2, ep=4, etp=1), WORK)
    text = str(plan)
    assert "8 ranks on 1 nodes" in text
    assert "2-5 | 12-17" in text
    assert "batch_p2p_comm" in text
    told = json.loads(plan.to_json())
    assert told["parallel"]["world"] == 8
    assert told["stages"][0]["routing_layers"] == [[2, 3, 4, 5], [12, 13, 14, 15, 16, 17]]
    assert told["wire_bytes"]["step"] == plan.wire_bytes["step"]
    idle = plan_layout(MODEL, Parallel(pp=12), WORK)
    assert "stages without routers: [0]" in str(idle)
    assert idle.rank(0).batch_bytes == 0


def test_a_long_pipeline_is_abbreviated() -> None:
    deep = MoeTopology(64, tuple(MoeLayer(layer, 64, 8) for layer in range(64)))
    lines = str(plan_layout(deep, Parallel(pp=64), WORK)).splitlines()
    assert len(lines) < 40
    assert "... 40 more" in lines
