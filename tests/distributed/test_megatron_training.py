"""The Megatron-Core backend in every layout, against one process of the FSDP2 backend that trains the same folder.

The trajectories' routes are those of a model with other routers, so that natively most tokens would go elsewhere. The
first two of the model's four layers are dense: the first pipeline stage has no router. Pipeline layouts are also run
with a model whose last two are.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness, megatron_training
from tests.distributed.megatron_models import PRELOADED
from tests.megatron.weights.models import DENSE_FIRST, DENSE_LAST, edit_config, saved_tensors

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)

TP = {"tensor_parallel": 2}
EP = {"expert_parallel": 2}
PP = {"pipeline_parallel": 2}
VPP = PP | {"virtual_pipeline": 2}
CP = {"context_parallel": 2}
PACKED = {"packed": True}
SHARDED = {"distributed_optimizer": True}
BF16 = {"dtype": "bfloat16"}
GROUPED = {"megatron": {"moe_grouped_gemm": True}}
FSDP = {"kind": "fsdp"}
BALANCED = {"megatron": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}}
FULL = {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1-packed": (1, PACKED),
    "dp2": (2, {}),
    "dp2-sharded-packed": (2, SHARDED | PACKED),
    "tp2-packed": (2, TP | PACKED | FULL),
    "ep2": (2, EP),
    "ep2-grouped-sharded-packed": (2, EP | GROUPED | SHARDED | PACKED),
    "tp2-ep2-etp1": (2, TP | EP | {"expert_tensor_parallel": 1}),
    "pp2-packed": (2, PP | PACKED),
    "cp2": (2, CP),
    "cp2-packed": (2, CP | PACKED),
    "pp2-vpp2": (2, VPP | FULL),
    "tp2-pp2-ep2-packed": (4, TP | PP | EP | {"expert_tensor_parallel": 1} | PACKED | SHARDED),
}
THOROUGH = {"1-packed", "dp2", "dp2-sharded-packed", "ep2", "cp2", "tp2-packed"}  # the others have their parts
PIPELINES = [name for name, (_, settings) in LAYOUTS.items() if "pipeline_parallel" in settings]
TOLERANCE = 1e-5


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="training-")


@functools.cache
def policy(variant: str) -> tuple[str, bytes]:
    """The folder of a model, and trajectories."""
    folder = Path(scratch().name, variant)
    return str(folder), megatron_training.save_policy(folder, variant)


@functools.cache
def expected(variant: str) -> dict[str, Any]:
    """What one process makes of them with FSDP2."""
    (outcome,) = harness.run_ranks(1, megatron_training.two_updates, *policy(variant), "fsdp")
    return outcome


def on_ranks(size: int, function: Any, *args: Any, variant: str = DENSE_FIRST) -> list[Any]:
    return harness.run_ranks(size, function, *policy(variant), *args)


def close(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(wanted), rtol=tolerance, atol=tolerance)


KNOWN: list[tuple[int, dict[str, Any], megatron_training.Routes]] = [
    (2, EP | PACKED | FULL, "recorded"),
    (2, EP | CP | PACKED | FULL, "engine"),
    (1, PACKED | GROUPED, "engine"),
    (2, EP | PACKED, "gap"),
    (2, EP, "recorded"),
    (2, EP | GROUPED, "recorded"),
    (2, TP | FULL, "recorded"),
    (4, TP | PP | EP | {"expert_tensor_parallel": 1} | PACKED, "recorded"),
    (2, EP | PACKED | FULL, "engine"),
    (2, EP, "engine"),
    (2, EP | GROUPED, "engine"),
    (2, TP | PACKED | FULL, "engine"),
    (4, TP | PP | EP | {"expert_tensor_parallel": 1} | PACKED, "engine"),
    (2, EP | BALANCED, "engine"),
    (2, VPP | PACKED | FULL, "engine"),
    (4, VPP | EP, "recorded"),
]


@pytest.mark.parametrize(("size", "settings", "routes"), with_thorough(KNOWN, KNOWN[3:]), ids=str)
def test_rows_are_planned_once_for_all_layers(
    size: int, settings: dict[str, Any], routes: megatron_training.Routes
) -> None:
    """With the results of a gather and an order in each layer, bit for bit.

    A gap on one rank leaves that micro-batch to its layers, a loss of routers all whose last tokens have no route.
    """
    own = settings.get("megatron")
    passes = 3 if own == FULL["megatron"] else 2
    for known, without in on_ranks(size, megatron_training.known_counts, settings, routes):
        in_layers = passes * known["layers"] * known["batches"]
        unplanned = {"gap": 1, "engine": known["batches"] if own == BALANCED["megatron"] else 0}.get(routes, 0)
        of_plans = 2 * known["batches"] * known["chunks"]  # in scoring and in the update
        in_unplanned = passes * known["layers"] * unplanned
        exchanges = not settings.keys().isdisjoint(EP | TP)
        assert without["gathers"] - in_layers * exchanges == known["gathers"] - in_unplanned * exchanges - of_plans
        assert known["orders"] * in_layers == without["orders"] * in_unplanned
        assert bool(without["orders"]) == bool(in_layers)
        if own == GROUPED["megatron"]:  # other experts cut their rows themselves
            assert bool(known["cuts"]) == bool(without["cuts"]) == exchanges
        assert known["numbers"] == without["numbers"]
        found, unplanned_values = known["values"], without["values"]
        assert [name for name in unplanned_values if not torch.equal(found[name], unplanned_values[name])] == []


@pytest.mark.parametrize(
    "name",
    with_whole_runs(
        with_thorough([name for name in LAYOUTS if name not in PIPELINES], THOROUGH), {"ep2-grouped-sharded-packed"}
    ),
)
def test_updates_as_one_process_makes_them(name: str) -> None:
    assert_updates_as_one_process(*LAYOUTS[name])


@pytest.mark.parametrize(
    ("name", "variant"),
    with_whole_runs(
        with_thorough(
            [(name, variant) for name in PIPELINES for variant in (DENSE_FIRST, DENSE_LAST)],
            [
                *(("pp2-packed", variant) for variant in (DENSE_FIRST, DENSE_LAST)),
                *(("pp2-vpp2", DENSE_FIRST), ("tp2-pp2-ep2-packed", DENSE_LAST)),
            ],
        ),
        [("tp2-pp2-ep2-packed", DENSE_FIRST)],
    ),
)
def test_a_stage_without_routers_updates_as_one_process_does(name: str, variant: str) -> None:
    assert_updates_as_one_process(*LAYOUTS[name], variant)


OTHER_FAMILIES = [("qwen3_next", 1e-3), ("qwen3_5_moe_text", 1e-3), ("minimax_m2", TOLERANCE)]


@pytest.mark.parametrize(
    ("variant", "tolerance"), with_whole_runs([("gpt_oss", TOLERANCE), *OTHER_FAMILIES], OTHER_FAMILIES)
)
def test_updates_of_other_families_packed(variant: str, tolerance: float) -> None:
    assert_updates_as_one_process(1, PACKED, variant, tolerance)


@pytest.mark.whole_runs
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_kimi_k2_is_trained_as_deepseek_v3(kind: str, tmp_path: Path) -> None:
    published, data = policy("deepseek_v3")
    folder = tmp_path / "kimi"
    shutil.copytree(published, folder)
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "none.None"})
    (found,) = harness.run_ranks(1, megatron_training.two_updates, str(folder), data, kind, {})
    one = expected("deepseek_v3")
    assert close(found["losses"], one["losses"])
    assert close(found["norms"], one["norms"])
    check_weights(found["weights"], one["weights"], saved_tensors(published))


def assert_updates_as_one_process(
    size: int, settings: dict[str, Any], variant: str = DENSE_FIRST, tolerance: float = TOLERANCE
) -> None:
    ranks = on_ranks(size, megatron_training.two_updates, "megatron", settings, variant=variant)
    one = expected(variant)
    assert close(
        [sum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)], one["losses"], tolerance
    )
    assert all(close(rank["norms"], one["norms"], tolerance) for rank in ranks)
    assert len({tuple(rank["micro_batches"]) for rank in ranks}) == 1
    for routing in ("replayed", "native"):
        found = [row for rank in ranks for row in rank[routing]]
        assert sorted(found) == sorted(one[routing]), "each sequence has one rank that reports it"
        assert all(close(rank[routing][row], one[routing][row], tolerance) for rank in ranks for row in rank[routing])
    check_weights(ranks[0]["weights"], one["weights"], saved_tensors(policy(variant)[0]), tolerance)


MASKED = {"1": (1, {}), "tp2-packed": (2, TP | PACKED), "cp2": (2, CP)}


@pytest.mark.parametrize("name", with_whole_runs(with_thorough(MASKED, {"1"}), {"tp2-packed"}))
def test_sampling_masks_are_replayed_as_one_process_replays_them(name: str) -> None:
    size, settings = MASKED[name]
    ranks = harness.run_ranks(
        size, megatron_training.two_updates, policy(DENSE_FIRST)[0], masked_data(), "megatron", settings
    )
    one, whole = masked_expected(), expected(DENSE_FIRST)
    assert not any(close(one["replayed"][row], whole["replayed"][row]) for row in one["replayed"])
    assert all(torch.isfinite(scores).all() for scores in one["replayed"].values())
    assert all(close(rank["norms"], one["norms"]) for rank in ranks)
    found = [row for rank in ranks for row in rank["replayed"]]
    assert sorted(found) == sorted(one["replayed"])
    assert all(close(rank["replayed"][row], one["replayed"][row]) for rank in ranks for row in rank["replayed"])
    check_weights(ranks[0]["weights"], one["weights"], saved_tensors(policy(DENSE_FIRST)[0]))


@functools.cache
def masked_data() -> bytes:
    return megatron_training.with_masks(policy(DENSE_FIRST)[1])


@functools.cache
def masked_expected() -> dict[str, Any]:
    """What one process makes of trajectories with sampling masks, with FSDP2."""
    (outcome,) = harness.run_ranks(1, megatron_training.two_updates, policy(DENSE_FIRST)[0], masked_data(), "fsdp")
    return outcome


def check_weights(
    found: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    start: dict[str, torch.Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """Where each tensor has gone is compared, in units of how far it went."""
    assert found.keys() == wanted.keys() == start.keys()
    for name, begin in start.items():
        if name.endswith("e_score_correction_bias"):  # no gradient reaches it
            assert torch.equal(found[name], begin)
            continue
        moved = (wanted[name] - begin).norm()
        assert moved > 0
        assert (found[name] - wanted[name]).norm() < tolerance * moved, name


def test_the_updates_would_be_others_natively() -> None:
    one = expected(DENSE_FIRST)
    apart = torch.cat([(one["replayed"][row] - one["native"][row])[0].abs() for row in one["native"]])
    assert (apart > 1e-2).float().mean() > 0.5
    assert max(one["norms"]) > 2.0, "no gradient was clipped"
    assert one["micro_batches"][0] > 1


@pytest.mark.parametrize(
    "settings",
    with_whole_runs(
        with_thorough([TP | PACKED, VPP | BF16 | FULL, CP | EP | GROUPED], [TP | PACKED]), [CP | EP | GROUPED]
    ),
    ids=str,
)
def test_a_recorded_pass_is_replayed_bit_for_bit(settings: dict[str, Any]) -> None:
    ranks = on_ranks(2, megatron_training.first_ratios, settings)
    assert any(rank["reports_metrics"] for rank in ranks)
    for rank in ranks:
        first, second = rank["apart"]
        assert first == 0.0
        assert second > 0.0 or not rank["reports_metrics"]


@pytest.mark.parametrize(
    "settings",
    with_whole_runs(
        with_thorough(
            [TP | BF16, EP | SHARDED | BF16, VPP, EP | SHARDED, {"dtype": "float16"}, FSDP | BF16],
            [EP | SHARDED, {"dtype": "float16"}],
        ),
        [TP | BF16, VPP, FSDP | BF16],
    ),
    ids=str,
)
def test_stop_and_go_on_is_the_same_as_not_to_stop(tmp_path: Path, settings: dict[str, Any]) -> None:
    ranks = on_ranks(2, megatron_training.stop_and_go_on, settings, str(tmp_path))
    assert [rank["different"] for rank in ranks] == [[], []]
    written = [tensor for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).items()]
    size = sum(tensor.nbytes for name, tensor in written if not name.endswith(".step"))
    assert [rank["bytes"] for rank in ranks] == [size, size]
    regions = [name for name, _ in written if "[" in name]
    assert len(regions) == len(set(regions)), "what both ranks have is in the file of one"


def test_a_state_of_another_backend_is_refused(tmp_path: Path) -> None:
    for other, nothing, pickled in harness.run_ranks(
        2, megatron_training.refusals, policy(DENSE_FIRST)[0], FSDP, str(tmp_path)
    ):
        assert "expected kind fsdp, dtype None, found kind megatron, dtype float32" in other
        assert "expected layout.json, found" in nothing
        assert "pickled files, which are never read" in pickled


RESHARDED = {
    "fsdp4-fsdp2": (4, FSDP, 2, FSDP),
    "fsdp2-fsdp4": (2, FSDP, 4, FSDP),
    "tp2-pp2": (2, TP, 2, PP),
    "ep2-ep1": (2, EP, 1, {}),
    "sharded-grouped-ep2-vpp2": (2, EP | GROUPED | SHARDED, 2, VPP),
    "bf16-tp2-pp2-ep2-sharded-tp2-ep2-etp1": (
        *(4, TP | PP | EP | {"expert_tensor_parallel": 1} | SHARDED | BF16),
        *(2, TP | EP | {"expert_tensor_parallel": 1} | BF16),
    ),
}


@pytest.mark.parametrize(
    "name",
    with_whole_runs(
        with_thorough(RESHARDED, {"fsdp2-fsdp4", "fsdp4-fsdp2", "tp2-pp2", "ep2-ep1"}),
        {"bf16-tp2-pp2-ep2-sharded-tp2-ep2-etp1"},
    ),
)
def test_a_run_goes_on_with_other_ranks_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    """Weights, float32 copies and moments are those that were saved, bit for bit, and so is what is saved again."""
    before, saving, after, loading = RESHARDED[name]
    at_once = on_ranks(before, megatron_training.saved_between, saving, str(tmp_path / "saved"))[0]
    resumed = on_ranks(after, megatron_training.go_on, loading, str(tmp_path / "saved"), str(tmp_path / "again"))
    check_same_state(whole_state(tmp_path / "saved"), whole_state(tmp_path / "again"))
    tolerance = 2e-2 if "bf16" in name else TOLERANCE  # steps of another layout round differently
    check_weights(resumed[0]["weights"], at_once, saved_tensors(policy(DENSE_FIRST)[0]), tolerance)


def whole_state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the whole model that the files of all ranks hold together."""
    from moe_replay.train.backends import regions

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key, values in load_file(path).items():
            name, shape, region = regions.parse(key)
            whole = found.setdefault(name, torch.full(shape, math.nan, dtype=values.dtype))
            whole[tuple(slice(one.start, one.stop, one.step) for one in region)] = values
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def check_same_state(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


@pytest.mark.parametrize(
    "settings",
    with_whole_runs(
        with_thorough([PP | PACKED, EP | SHARDED | BF16, {"dtype": "float16"}], [PP | PACKED]), [{"dtype": "float16"}]
    ),
    ids=str,
)
def test_a_bad_gradient_changes_nothing_on_any_rank(settings: dict[str, Any]) -> None:
    for rank in on_ranks(2, megatron_training.bad_update, settings):
        assert not rank["applied"]
        assert not math.isfinite(rank["norm"])
        assert rank["different"] == []


def test_the_reference_stays_as_it_was() -> None:
    ranks = on_ranks(2, megatron_training.reference_scores, PP | PACKED)
    assert [rank["scored"] > 0 for rank in ranks] == [False, True]
    assert ranks[1]["kept"]
    assert ranks[1]["moved"]
