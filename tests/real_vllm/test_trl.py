"""TRL samples with the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.test_trl_engines import WIDE, check_three_steps
from tests.integrations.trl_tiny import model
from tests.real_vllm.conftest import NEEDS_VLLM

pytest.importorskip("trl")
pytest.importorskip("vllm", reason=NEEDS_VLLM)


@pytest.mark.whole_runs
def test_vllm_samples_with_the_weights_of_the_step(tmp_path: Path) -> None:
    from moe_replay.engines.vllm.engine import VllmEngine

    policy = model(**WIDE)
    policy.save_pretrained(tmp_path / "policy")
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**26}
    with VllmEngine(tmp_path / "policy", **options) as engine:
        check_three_steps(policy, engine, tmp_path)
