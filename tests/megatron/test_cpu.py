"""Megatron-Core on a CPU: off unless asked for, refused beside CUDA, every patch needed, and right attention."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_replay as mr
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.megatron import without_transformer_engine
from moe_replay.megatron.cpu import PATCHES
from tests.distributed import harness
from tests.distributed.megatron_models import (
    FULL,
    PRELOADED,
    Case,
    enable,
    make_chunk,
    make_config,
    packed_params,
    start,
)
from tests.distributed.megatron_partition import Partition
from tests.distributed.test_megatron_layouts import ALLTOALL, reference
from tests.models import tiny_qwen3_moe

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.distributed
harness.PRELOADED.extend(PRELOADED)

TOUCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Stream"),
    (torch.cuda, "stream"),
    (torch, "zeros"),
    (torch, "ones"),
    (torch, "tensor"),
    (torch.Tensor, "cuda"),
    (torch.Tensor, "type"),
]


# ---- off unless asked for -------------------------------------------------------------------------------------------


def test_importing_changes_nothing() -> None:
    code = (
        "import torch\n"
        "before = torch.cuda.current_device, torch.zeros, torch.Tensor.cuda\n"
        "import sys, moe_replay, moe_replay.megatron.cpu\n"
        "assert before == (torch.cuda.current_device, torch.zeros, torch.Tensor.cuda)\n"
        "assert 'megatron' not in sys.modules\n"
    )
    run_alone(code)


@pytest.mark.whole_runs
def test_transformers_works_beside_it(tmp_path: Path) -> None:
    """Imported after it, and loading on "meta", where a factory that is not the real one would make CPU tensors."""
    model = tiny_qwen3_moe()
    model.save_pretrained(tmp_path)
    ids = torch.arange(1, 9)[None]
    torch.save(model(ids).logits.detach(), tmp_path / "logits.pt")
    code = (
        "import sys, torch\n"
        "from moe_replay.megatron import cpu as megatron_cpu\n"
        "megatron_cpu.enable()\n"
        "from transformers import AutoModelForCausalLM\n"
        "with torch.device('meta'):\n"
        "    made = torch.zeros(2), torch.ones(2), torch.tensor([2])\n"
        "assert {one.device.type for one in made} == {'meta'}\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "expected = torch.load(sys.argv[1] + '/logits.pt', weights_only=True)\n"
        "assert torch.equal(model(torch.arange(1, 9)[None]).logits, expected)\n"
    )
    run_alone(code, str(tmp_path))


def run_alone(code: str, *arguments: str) -> None:
    """In an interpreter of its own, which must end well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_everything_is_taken_back() -> None:
    before = [getattr(owner, name) for owner, name in TOUCHED]
    with megatron_cpu.enabled():
        assert [getattr(owner, name) for owner, name in TOUCHED] != before
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().type() == "torch.cuda.FloatTensor"
    assert [getattr(owner, name) for owner, name in TOUCHED] == before
    assert torch.ones(2).type() == "torch.FloatTensor"
    assert torch._dynamo.config.disable is False


def test_refused_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    before = [getattr(owner, name) for owner, name in TOUCHED]
    with (
        pytest.raises(mr.errors.ReplayStateError, match="where CUDA is available: found 8 devices"),
        megatron_cpu.enabled(),
    ):
        pass
    assert [getattr(owner, name) for owner, name in TOUCHED] == before


def test_a_missing_megatron_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(mr.errors.MissingExtraError, match=r"moe-replay\[megatron\]"), megatron_cpu.enabled():
        pass


def test_every_patch_says_why_and_until_when() -> None:
    for patch in PATCHES:
        assert ".py" in patch.upstream
        assert patch.until.startswith("when ")
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


# ---- every patch is needed ------------------------------------------------------------------------------------------

GATING = "gating without Transformer Engine"
TINY: dict[str, Case] = {
    "current device": Case(1),
    "factories": Case(1),
    "random state": Case(1),
    GATING: Case(1),
    "streams": Case(1, settings=ALLTOALL),
    "Tensor.cuda": Case(2, cp=2),
    "synchronize": Case(2, pp=2),
    "splits as numbers": Case(2, ep=2, settings=ALLTOALL),
    "norm of a sequence shard": Case(2, tp=2),
    "checkpoint without fp8": Case(
        1, settings={"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    ),
    "type names": Case(1, "bf16", optimizer="whole"),
    "latent attention without Transformer Engine": Case(1, "mla"),
}


def fails_without(name: str, case: Case, path: str, attached: bool = False) -> str:
    """What happens without one of the patches, on a rank of its own."""
    undo = ExitStack()
    for patch in PATCHES:
        if patch.name != name:
            patch.apply(undo)
    megatron_cpu.enable = lambda: None  # the patches are in place
    try:
        if name == GATING and not attached:
            start()
            ids = torch.ones((1, 4), dtype=torch.long)
            make_chunk(make_config())(ids, ids, None, labels=ids)
        partition = Partition(case, torch.load(path, weights_only=True))
        partition.run()
        partition.distance()
    except (AssertionError, AttributeError, NameError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", TINY)
def test_megatron_fails_without(name: str) -> None:
    case = TINY[name]
    path, _ = reference(case.variant)
    for message in harness.run_ranks(case.size, fails_without, name, case, path):
        assert message


def test_an_attached_model_routes_without_transformer_engine() -> None:
    """As on a GPU, where nobody calls `megatron_cpu.enable`: `attach` sets the name that routers read."""
    path, _ = reference()
    assert harness.run_ranks(1, fails_without, GATING, TINY[GATING], path, True) == [""]


def test_local_layers_are_patched_beside_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []
    patches = [patch._replace(apply=lambda _, name=patch.name: applied.append(name)) for patch in PATCHES]
    monkeypatch.setattr(without_transformer_engine, "TRANSFORMER_ENGINE_PATCHES", patches)
    monkeypatch.setattr(without_transformer_engine, "find_spec", lambda name: name)
    without_transformer_engine.enable.__wrapped__()
    assert applied == ["norm of a sequence shard"]


def test_each_patch_is_shown_to_be_needed() -> None:
    """But the compiler, without which everything works, in a minute more."""
    assert {patch.name for patch in PATCHES} - TINY.keys() == {"no compiler"}


# ---- the attention --------------------------------------------------------------------------------------------------


def attention_outcomes() -> dict[str, float]:
    """How far the plain attention is from Megatron's own, and packed sequences from padded ones."""
    enable()
    start()
    found = {}
    for variant in ("hybrid", "presoftmax"):  # and grouped queries
        models = []
        for plain in (False, True):
            torch.manual_seed(3)
            models.append(make_chunk(make_config(variant), plain_attention=plain))
        ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
        positions = torch.arange(12).expand_as(ids)
        own, plain = (model(ids, positions, None, labels=ids) for model in models)
        found[f"{variant} as Megatron"] = (own - plain).abs().max().item()
        row = {"input_ids": ids.reshape(1, -1), "labels": ids.reshape(1, -1)}
        packed = models[1](
            position_ids=positions.reshape(1, -1), attention_mask=None, packed_seq_params=packed_params([12, 12]), **row
        )
        found[f"{variant} packed as padded"] = (packed.view(2, 12) - plain).abs().max().item()
    return found


def test_the_plain_attention_is_megatrons() -> None:
    (found,) = harness.run_ranks(1, attention_outcomes)
    assert len(found) == 4
    assert max(found.values()) < 2e-6, found


def test_dropout_is_refused() -> None:
    config: Any = type("Config", (), {"attention_dropout": 0.1, "kv_channels": 8, "context_parallel_size": 1})
    with pytest.raises(mr.errors.UnsupportedRouterError, match="attention_dropout"):
        megatron_cpu.PlainCoreAttention(config, 1, None, "self")


def runs_compiled_code() -> bool:
    enable()
    start()
    import torch._dynamo

    model = make_chunk(make_config("deepseek", **FULL))  # its router has a function that Megatron compiles
    ids = torch.ones((1, 4), dtype=torch.long)
    torch._dynamo.utils.counters.clear()
    model(ids, ids, None, labels=ids).mean().backward()
    return bool(torch._dynamo.utils.counters["frames"])


def test_nothing_is_compiled() -> None:
    assert harness.run_ranks(1, runs_compiled_code) == [False]
    assert not dist.is_initialized()
