"""Training with the real SGLang on CPU: rollouts with routes, new weights after every step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real_sglang.models import sglang_model
from tests.real_sglang.server import sglang_server

pytest.importorskip("sglang", reason="the real SGLang is not installed here: see requirements/sglang-cpu.txt")


def test_three_steps(tmp_path: Path) -> None:
    from moe_replay.demo.arithmetic import rows
    from moe_replay.demo.settings import QUICK
    from moe_replay.demo.tokenizer import build_tokenizer
    from moe_replay.train.loop import train
    from tests.train.runs import tiny_config

    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    sglang_model("glm4_moe").save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(16, 0, QUICK.terms, held_out=False)))
    with sglang_server(model) as url:
        rollout = {"engine": "sglang_server", "urls": [url], "reproducible": False, "max_tokens": 8}
        folder = train(tiny_config(model, data, tmp_path / "run", rollout=rollout, optim={"lr": 1e-4}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:  # the same model in the same precision
        assert line["routing/agreement"] > 0.99
        assert line["mismatch/rollout_vs_old/k3_kl"] < 1e-6
        assert line["completion/staleness_max"] == 0
