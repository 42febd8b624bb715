"""Training with the real SGLang on CPU: rollouts with routes, new weights after every step.

With one rank it is in test_retractions.py, where the server has room for some of the requests only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_replay.engines.sglang.client import SglangClient
from moe_replay.records import SamplingParams
from tests.engines.tiny import assert_sampled_from
from tests.real_sglang.models import sglang_model
from tests.real_sglang.server import sglang_server

pytest.importorskip("sglang", reason="the real SGLang is not installed here: see requirements/sglang-cpu.txt")


def saved(folder: Path, **changes: Any) -> Path:
    """A model with a tokenizer."""
    from moe_replay.demo.model import build_tokenizer

    sglang_model("glm4_moe", **changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def train_three_steps(url: str, model: Path, output: Path, max_tokens: int = 8) -> None:
    """The trainer computes the routes and log-probs that the server reported."""
    from moe_replay.demo.model import QUICK
    from moe_replay.demo.task import rows
    from moe_replay.train.loop import train
    from tests.train.runs import tiny_config

    data = output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(16, 0, QUICK.terms, held_out=False)))
    rollout = {"engine": "sglang_server", "urls": [url], "reproducible": False, "max_tokens": max_tokens}
    folder = train(tiny_config(model, data, output, rollout=rollout, optim={"lr": 1e-4}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:  # the same model in the same precision
        assert line["routing/agreement"] > 0.99
        assert line["mismatch/rollout_vs_old/k3_kl"] < 1e-6
        assert line["completion/staleness_max"] == 0


def test_three_steps_with_tensor_parallel(tmp_path: Path) -> None:
    """Two ranks, each with half of the heads and of every expert."""
    halves = {"num_key_value_heads": 2}
    model = saved(tmp_path / "model", **halves)
    with sglang_server(model, "--tp", "2", "--chunked-prefill-size", "64") as url:
        with SglangClient(url) as engine:
            for group in engine.generate([[1, 2, 3], list(range(1, 90))], SamplingParams(n=2, max_tokens=8)):
                for sample in group:
                    assert_sampled_from(sglang_model("glm4_moe", **halves), sample)
        train_three_steps(url, model, tmp_path / "run")
