"""Engines of the real vLLM, each started once for a file of tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engines.tiny import tiny_model
from tests.real_vllm.forks import forked_engines

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # tests of other workers may run on the same cores
# The engine core computes itself, as it does on one GPU, and starts no worker: a third of the CPU time of a start.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

NEEDS_VLLM = "the real vLLM is not installed here: see requirements/test.txt"
OPTIONS: dict[str, dict[str, Any]] = {
    # Prompts longer than a step's tokens are prefilled in chunks; 40 blocks are too few for 12 long sequences at once.
    "qwen3_moe": {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 40,
        "disable_log_stats": False,
        "capture": "cross_check",  # routes of vLLM's own capture and of ours must be the same in every sample
    },
    "mixtral": {"enable_prefix_caching": False, "capture": "kv_slot"},
    "gpt_oss": {"dtype": "bfloat16", "capture": "kv_slot"},  # the only dtype of sinks in its attention on CPU
    "olmoe": {"enable_prefix_caching": False, "capture": "vllm"},
}
SHARED = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**26,
}


@pytest.fixture(scope="package", autouse=True)
def engines_are_forked() -> Iterator[None]:
    """The engines that tests start in their own process."""
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    with forked_engines():
        yield


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """The engine of a family; `tiny_model(family)` are its weights."""
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import VllmEngine

    with ExitStack() as started:

        @cache
        def start(family: str) -> VllmEngine:
            folder: Path = tmp_path_factory.mktemp(family)
            tiny_model(family).save_pretrained(folder)
            return started.enter_context(VllmEngine(folder, **SHARED | OPTIONS[family]))

        yield start
