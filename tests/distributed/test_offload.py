"""A trainer in host memory while the engine samples: the same run bit for bit, and nothing left on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness, megatron_training, offloading
from tests.distributed.megatron_models import PRELOADED

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)

SHARDED = {"expert_parallel": 2, "distributed_optimizer": True}
BF16 = {"dtype": "bfloat16"}
CASES = {
    "fsdp": ("fsdp", {"beta": 0.1}),
    "megatron": ("megatron", {"tensor_parallel": 2}),
    "megatron-sharded-bf16": ("megatron", SHARDED | BF16),
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    folder = tmp_path_factory.mktemp("offload") / "policy"
    return str(folder), megatron_training.save_policy(folder)


def run(policy: tuple[str, bytes], name: str, offload: bool) -> list[dict[str, Any]]:
    kind, settings = CASES[name]
    return harness.run_ranks(2, offloading.updates_in_turns, *policy, kind, settings | {"offload": offload})


@pytest.mark.parametrize("name", with_whole_runs(with_thorough(CASES, {"megatron"}), {"megatron-sharded-bf16"}))
def test_a_run_with_offload_is_the_run_without_it(policy: tuple[str, bytes], name: str) -> None:
    plain, moved = run(policy, name, offload=False), run(policy, name, offload=True)
    for one, other in zip(plain, moved, strict=True):
        assert one["losses"] == other["losses"]
        assert one["losses"][0] != one["losses"][1]
        assert all(map(torch.equal, one["logprobs"], other["logprobs"]))
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][key]) for key, tensor in one["weights"].items())
        assert all(min(held["weights"], held["optimizer"] + 1) > 0 for held in one["away"]), "nothing moves without it"
        assert one["away"][1]["optimizer"] > 0
        for held in other["away"]:
            assert held == {"weights": 0, "gradients": 0, "optimizer": 0}
        for number, held in enumerate(other["back"]):
            assert held["weights"] == one["back"][number]["weights"]
            assert held["gradients"] == 0, "between updates there are none"
            assert held["optimizer"] < max(one["back"][1]["optimizer"], 1)
    check_saved(Path(policy[0]))


def check_saved(folder: Path) -> None:
    """What was saved while optimizer state was in host memory is what was saved without."""
    for rank in range(2):
        plain, moved = (load_file(folder / f"saved-{flag}" / f"rank-{rank:05d}.safetensors") for flag in (False, True))
        assert plain.keys() == moved.keys()
        assert any("exp_avg" in key for key in plain)
        assert all(torch.equal(plain[key], moved[key]) for key in plain)
