"""Training with the real vLLM: both backends, every mode. One engine, behind HTTP, serves them all."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_replay.engines.server.client import RolloutClient
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed.harness import run_ranks
from tests.engines.serving import serving
from tests.real_vllm.conftest import NEEDS_VLLM
from tests.train.runs import train_on_rank

pytest.importorskip("vllm", reason=NEEDS_VLLM)

TOKEN = "only this test knows it"
# One side computes in bfloat16, so that routers differ. vLLM for 64-bit ARM is built of bfloat16 instructions, and a
# processor without them ends it by SIGILL: then it is the trainer, for which PyTorch does without them.
HAS_BFLOAT16 = platform.machine() != "aarch64" or "bf16" in Path("/proc/cpuinfo").read_text()
ENGINE_DTYPE, TRAINER_DTYPE = ("bfloat16", "float32") if HAS_BFLOAT16 else ("float32", "bfloat16")


@pytest.fixture(scope="module")
def server(demo_files: Any) -> Iterator[str]:
    """The embedded default.

    Few sequences at once: sampling takes longer than training, so new weights always come in the middle of it.
    """
    from moe_replay.engines.server.app import build_app
    from moe_replay.engines.vllm.engine import VllmEngine

    options: dict[str, Any] = {"enforce_eager": True, "max_model_len": 64, "block_size": 32, "max_num_seqs": 4}
    with (
        VllmEngine(demo_files.model, dtype=ENGINE_DTYPE, kv_cache_memory_bytes=2**26, **options) as engine,
        serving(build_app(engine, TOKEN)) as url,
    ):
        yield url


@pytest.mark.parametrize(
    ("backend", "mode"),
    with_whole_runs(
        with_thorough(itertools.product(["fsdp", "megatron"], ["off", "r2", "r3"]), [("megatron", "off")]),
        [("fsdp", "off"), ("fsdp", "r2"), ("megatron", "r2")],
    ),
)
def test_three_steps(server: str, demo_files: Any, tmp_path: Path, backend: str, mode: str) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    overrides = {
        "backend": {"kind": backend},
        "model": {"dtype": TRAINER_DTYPE},
        "replay": {"mode": mode},
        "rollout": {"engine": "rollout_server", "urls": [server], "token": TOKEN, "prompts_per_step": 8},
        "optim": {"lr": 1e-4},
        "checkpoint": {"export": mode == "r3"},
    }
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    (lines,) = run_ranks(1, train_on_rank, *arguments)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["loss/grad_norm"] > 0 for line in lines)
    assert min(line["routing/agreement"] for line in lines) < 1  # routers really differ
    with_replay, native = (
        sum(line[f"mismatch/{name}/k3_kl"] for line in lines) for name in ("rollout_vs_old", "rollout_vs_native")
    )
    if mode == "r3":  # on the same batches
        assert with_replay < native
        assert all(0.5 < line["routing/replayed_fraction"] < 1 for line in lines)  # vLLM has no route of the last token
        if backend == "megatron":  # whose dispatchers take counts of rows on a CPU too
            assert [line["batch/planned"] for line in lines] == [1.0, 1.0, 1.0]
    else:
        assert with_replay == native
    if mode == "r3":
        assert_vllm_loads(tmp_path / "run/checkpoints/step-00000003/hf", server)


@pytest.mark.whole_runs
def test_generation_runs_ahead_and_is_resumed_with_new_weights(server: str, demo_files: Any, tmp_path: Path) -> None:
    """What new weights interrupt goes on with them: every token keeps its own version and its own routes."""
    overrides = {
        "steps": 6,
        "rollout": {
            **{"engine": "rollout_server", "urls": [server], "token": TOKEN, "prompts_per_step": 8, "max_tokens": 40},
            **{"max_staleness": 2, "reproducible": False, "temperature": 2.0},  # long, since nothing likely ends it
            "check_weights": False,
        },
        "replay": {"observe": False},  # nothing that would make a training step longer than its sampling
        "optim": {"lr": 1e-4},
        "log": {"traces": 32},
    }
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    (lines,) = run_ranks(1, train_on_rank, *arguments)
    assert 1 <= max(line["completion/staleness_max"] for line in lines) <= 2
    versions = [versions_in(file) for file in sorted((tmp_path / "run/traces").iterdir())]
    assert len(versions) == 6
    assert any(len(found) > 1 for step in versions for found in step)  # a sequence of two weight versions
    for step, found in enumerate(versions, start=1):
        assert all(step - 1 - 2 <= version <= step - 1 for sequence in found for version in sequence)


def versions_in(file: Path) -> list[set[int]]:
    """The weight versions that routed the tokens of each sequence."""
    import moe_replay as mr

    with mr.TraceFile(file) as traces:
        return [set(traces[i].token_versions[:-1].tolist()) for i in range(len(traces))]


@pytest.mark.whole_runs
def test_tools_adapters_and_sleep(server: str, demo_files: Any, tmp_path: Path) -> None:
    overrides = {
        "model": {"lora_rank": 4},
        "rollout": {
            **{"engine": "rollout_server", "urls": [server], "token": TOKEN, "sleep": True, "max_tokens": 6},
            **{"environment": "tests.train.test_loop:calculator", "max_turns": 3},
        },
        "log": {"traces": 4},
    }
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    (lines,) = run_ranks(1, train_on_rank, *arguments)
    assert all(line["routing/aligned"] != 0 and line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["completion/length_max"] <= 18 for line in lines)  # the tool's tokens are not the model's
    import moe_replay as mr

    with mr.TraceFile(tmp_path / "run/traces/step-00000001.mrt") as traces:
        assert all(traces[i].valid[:-1].all() for i in range(len(traces)))  # the tool's tokens are routed, by vLLM


def assert_vllm_loads(exported: Path, server: str) -> None:
    """The files of the export, put into the running engine, give what Transformers makes of them."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = list(range(3, 30))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(exported)(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    with RolloutClient(server, token=TOKEN) as engine:
        engine.update_weights(exported, version=100)
        found = engine.prompt_logprobs(ids)
    assert np.median(np.abs(found - expected)) < 0.05  # bfloat16 on one side
