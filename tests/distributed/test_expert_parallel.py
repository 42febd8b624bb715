"""Expert parallel in the FSDP2 backend, against one process that has all experts.

The trajectories' routes are those of a model with other routers. Every element of every gradient is compared, so a
factor on the gradient of experts alone would be seen, in grids with and without a second dimension.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_replay.tools.plan.costs import plan_traffic
from moe_replay.train.backends.expert_parallel import check_experts_can_be_divided
from moe_replay.weights.model_folder import ModelError, read_config
from moe_replay.weights.model_sizes import ModelSizes
from tests.combinations import with_thorough
from tests.distributed import expert_parallel, harness, megatron_training
from tests.megatron.weights.models import saved_tensors
from tests.replay.adapters.families import available_families, tiny_model

pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")
pytest.importorskip("pydantic")

EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}
CP2 = {"context_parallel": 2}
RECOMPUTED, LORA, PACKED = {"recomputed": True}, {"lora": True}, {"packed": True}
QWEN = "qwen3_moe"

Case = tuple[int, dict[str, Any], str]
CASES: dict[str, Case] = {
    "ep2-recomputed": (2, EP2 | RECOMPUTED, QWEN),
    "ep2": (2, EP2, QWEN),
    "ep4-packed": (4, EP4 | PACKED, QWEN),
    "ep2-fsdp2": (4, EP2 | RECOMPUTED, QWEN),
    "ep4-fsdp2": (8, EP4, QWEN),
    "ep2-fsdp2-lora": (4, EP2 | LORA | RECOMPUTED, QWEN),
    "ep2-lora": (2, EP2 | LORA, QWEN),
    "ep2-biases": (2, EP2 | RECOMPUTED, "gpt_oss"),
    "ep4-biases": (4, EP4, "gpt_oss"),
    "ep2-fsdp2-groups": (4, EP2, "deepseek_v3"),
    "ep2-glm": (2, EP2, "glm4_moe"),
    "ep2-cp2-fsdp2": (8, EP2 | CP2 | RECOMPUTED, QWEN),
    "ep2-cp2-fsdp2-lora": (8, EP2 | CP2 | LORA | PACKED, QWEN),
    "ep4-cp2": (4, EP4 | CP2 | PACKED, QWEN),
}
DEFAULT = {"ep2-recomputed", "ep2-fsdp2-lora"}


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="experts-")


@functools.cache
def policy(variant: str = QWEN) -> tuple[str, bytes]:
    """The folder of a model, and trajectories."""
    folder = Path(scratch().name, variant)
    return str(folder), megatron_training.save_policy(folder, variant)


@functools.cache
def adapter(variant: str) -> dict[str, Tensor]:
    (drawn,) = harness.run_ranks(1, expert_parallel.first_adapter, policy(variant)[0])
    return drawn


def ran(size: int, settings: dict[str, Any], variant: str) -> list[dict[str, Any]]:
    given = adapter(variant) if settings.get("lora") else None
    return harness.run_ranks(size, expert_parallel.updates, *policy(variant), settings, expert_parallel.MODES, given)


@functools.cache
def one_process(variant: str, has_adapters: bool) -> dict[str, Any]:
    (outcome,) = ran(1, {"lora": has_adapters}, variant)
    return outcome


def apart(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", with_thorough(CASES, [name for name in CASES if name not in DEFAULT]))
def test_two_updates_in_each_mode_are_those_of_one_process(name: str) -> None:
    size, settings, variant = CASES[name]
    ranks, one = ran(size, settings, variant), one_process(variant, bool(settings.get("lora")))
    for mode, wanted in one.items():
        of_ranks = [rank[mode] for rank in ranks]
        check_scalars(of_ranks, wanted)
        check_tensors(of_ranks[0], wanted)
    assert abs(one["off"]["losses"][0] - one["r3"]["losses"][0]) > 1e-3, "replay changes nothing here"
    fewer = [rank["r3"]["held"] < 0.8 * one["r3"]["held"] for rank in ranks]
    assert all(fewer), "a rank holds most of the model"


def check_scalars(ranks: list[dict[str, Any]], one: dict[str, Any]) -> None:
    losses = [sum(parts) for parts in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(one["losses"], rel=1e-6, abs=1e-6)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5)
    scores = {row: values for rank in ranks for row, values in rank["scores"].items()}
    assert scores.keys() == one["scores"].keys()
    for row, values in scores.items():
        torch.testing.assert_close(values, one["scores"][row], rtol=1e-5, atol=2e-6)


def check_tensors(found: dict[str, Any], one: dict[str, Any]) -> None:
    """Gradients of both updates, and where each weight has gone."""
    assert len(found["gradients"]) == len(one["gradients"]) == 2
    for mine, its in zip(found["gradients"], one["gradients"], strict=True):
        assert mine.keys() == its.keys()
        different = {name: apart(mine[name], its[name]) for name in its if its[name].norm() > 0}
        assert max(different.values()) < 1e-5, different
    for name, weight in one["weights"].items():
        assert apart(found["weights"][name], weight) < 1e-5, name


@pytest.mark.thorough
def test_ranks_without_a_row_take_part() -> None:
    """Every token goes to the same two experts: the other ranks still have their part in every collective."""
    (one,) = harness.run_ranks(1, expert_parallel.one_sided, *policy(), {})
    ranks = harness.run_ranks(4, expert_parallel.one_sided, *policy(), EP4)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert [sum(parts) for parts in zip(*(rank["losses"] for rank in ranks), strict=True)] == pytest.approx(
        one["losses"], rel=1e-6, abs=1e-6
    )


PLANNED: list[tuple[int, dict[str, Any], str, megatron_training.Routes]] = [
    (2, EP2 | RECOMPUTED, QWEN, "recorded"),
    (2, EP2 | RECOMPUTED, QWEN, "gap"),
    (2, EP2 | RECOMPUTED, QWEN, "engine"),
    (4, EP4 | PACKED, QWEN, "recorded"),
    (2, EP2, "gpt_oss", "recorded"),
    (4, EP2 | LORA | RECOMPUTED, QWEN, "recorded"),
    (4, EP4 | PACKED, QWEN, "engine"),
    (2, EP2, "deepseek_v3", "engine"),
    (4, EP2 | LORA | RECOMPUTED, QWEN, "engine"),
    (4, EP2 | CP2 | PACKED, QWEN, "engine"),
]


@pytest.mark.parametrize(("size", "settings", "variant", "routes"), with_thorough(PLANNED, PLANNED[3:]), ids=str)
def test_counts_of_planned_rows_are_exchanged_once_in_a_pass(
    size: int, settings: dict[str, Any], variant: str, routes: megatron_training.Routes
) -> None:
    """With the results of an exchange in each layer, bit for bit. A gap on one rank leaves all to that.

    Last tokens without a route take other experts with a plan, and the GEMMs that they are in round differently.
    """
    gap, given = routes == "gap", adapter(variant) if settings.get("lora") else None
    ranks = harness.run_ranks(size, expert_parallel.planned, *policy(variant), settings, routes, given)
    for with_plans, without in ranks:
        passes = 3 if settings.get("recomputed") else 2  # scoring, forward, recomputation
        each_layer = passes * without["layers"]
        assert (without["exchanges"], without["orders"]) == (each_layer, each_layer)
        assert with_plans["exchanges"] == (2 + each_layer if gap else 2)
        assert with_plans["orders"] == (each_layer if gap else 0)
        found, expected = with_plans["values"], without["values"]
        differing = [name for name in expected if not torch.equal(found[name], expected[name])]
        if routes == "engine":
            differing = [name for name in differing if not apart(found[name], expected[name]) < 1e-5]
        assert differing == []


def test_routes_of_the_next_rank_are_refused() -> None:
    for said in harness.run_ranks(2, expert_parallel.shifted, *policy(), EP2):
        assert "than the routes belong to" in said, said


@pytest.mark.parametrize(
    ("before", "after"),
    with_thorough(
        [((2, EP2), (1, {})), ((1, {}), (2, EP2)), ((4, EP2), (4, EP4)), ((2, {}), (4, EP2))],
        [((4, EP2), (4, EP4)), ((2, {}), (4, EP2)), ((1, {}), (2, EP2))],
    ),
    ids=str,
)
def test_a_run_resumes_in_another_layout(
    tmp_path: Path, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]]
) -> None:
    saved = str(tmp_path / "saved")
    wanted = harness.run_ranks(before[0], expert_parallel.saved_between, *policy(), before[1], saved)[0]
    found = harness.run_ranks(after[0], expert_parallel.resumed, *policy(), after[1], saved)[0]
    start = saved_tensors(policy()[0])
    assert found.keys() == wanted.keys() == start.keys()
    for name, weight in wanted.items():
        assert (found[name] - weight).norm() < 1e-4 * (weight - start[name]).norm(), name


@pytest.mark.parametrize(
    ("size", "settings"),
    with_thorough(
        [(4, {}), (4, EP4 | RECOMPUTED), (4, EP2), (2, EP2), (4, RECOMPUTED)],
        [(4, EP2), (2, EP2), (4, RECOMPUTED)],
    ),
    ids=str,
)
def test_the_planned_bytes_of_a_micro_batch_are_those_that_are_moved(size: int, settings: dict[str, Any]) -> None:
    """Counted in the collectives of every rank. With one rank for each expert none is gathered."""
    folder, data = policy()
    ranks = harness.run_ranks(size, expert_parallel.traffic, folder, data, settings)
    sizes = ModelSizes.of(read_config(folder))
    planned = []
    for rank in ranks:
        config = expert_parallel.ep_config(folder, settings)
        config = config.model_copy(
            update={"batch": config.batch.model_copy(update={"tokens_per_micro_batch": rank["tokens"]})}
        )
        planned.append(plan_traffic(config, sizes, gpus=size))
        assert (rank["gathered"], rank["reduced"]) == (planned[-1].gathered, planned[-1].reduced)
    # How many rows a rank gets depends on the routes; together they get what they send.
    assert sum(rank["exchanged"] for rank in ranks) == sum(plan.exchanged for plan in planned)
    if settings == EP4 | RECOMPUTED:
        assert planned[0].gathered < 4 * 2 * sizes.total - 2 * 4 * sizes.experts


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    """On every rank, before weights are read: sizes that do not divide, and a family outside the experts interface."""
    (said,) = {*harness.run_ranks(3, expert_parallel.refusal, policy()[0], {"expert_parallel": 3})}
    assert "does not divide the experts" in said
    assert "a divisor of 8" in said
    (said,) = {*harness.run_ranks(3, expert_parallel.refusal, policy()[0], EP2)}
    assert "a multiple of 2 ranks" in said
    tiny_model("dbrx").save_pretrained(tmp_path)
    (said,) = {*harness.run_ranks(2, expert_parallel.refusal, str(tmp_path), EP2)}
    assert "the experts of dbrx cannot be divided" in said


@pytest.mark.thorough
def test_every_family_that_is_not_refused_computes_the_same() -> None:
    names = []
    for name in available_families():
        try:
            check_experts_can_be_divided(tiny_model(name), 2)
        except ModelError:
            continue
        names.append(name)
    assert len(names) > 20
    for rank in harness.run_ranks(2, expert_parallel.families, names):
        assert {name: max(apart) for name, apart in rank.items() if not max(apart) < 1e-4} == {}


@pytest.mark.thorough
def test_offloaded_weights_and_a_reference_change_nothing() -> None:
    (kept,) = {*map(str, harness.run_ranks(2, expert_parallel.offloaded, *policy(), EP2 | {"beta": 0.1}))}
    (away,) = {
        *map(str, harness.run_ranks(2, expert_parallel.offloaded, *policy(), EP2 | {"beta": 0.1, "offload": True}))
    }
    assert kept == away
