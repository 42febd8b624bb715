"""Weights that are not finite are blamed on what made them so, and not on the engine or on packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from moe_replay.errors import AlignmentError, EngineAnswerError
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.learn.probe import ProbeSequence
from moe_replay.train.loop import train
from moe_replay.train.run import DivergedError
from moe_replay.train.setup import launch
from tests.models import tiny_qwen3_moe
from tests.train.runs import tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"weight_decay": 1e30}, DivergedError, r"log-probs are not finite after step 1.*lower optim\.lr"),
        ({}, (DivergedError, EngineAnswerError), r"not finite after step 1|impossible log-prob.*lower optim\.lr"),
    ],
    ids=["infinite", "huge"],
)
def test_a_learning_rate_that_is_too_high_is_said_to_be(
    demo_files: Any, tmp_path: Path, settings: dict[str, float], error: Any, text: str
) -> None:
    """Infinite weights show on the probe; huge ones may show in sampling first."""
    config = tiny_config(demo_files.model, demo_files.train, tmp_path / "run", optim={"lr": 1e30, **settings})
    with pytest.raises(error, match=text):
        train(config)


def test_log_probs_that_are_not_finite_are_not_blamed_on_packing(tmp_path: Path) -> None:
    tiny_qwen3_moe().save_pretrained(tmp_path)
    with launch.process_group(CPU):
        backend = FsdpBackend(tiny_config(tmp_path, tmp_path, tmp_path / "run"), str(tmp_path), CPU)
        with torch.no_grad():
            backend.model.model.layers[0].self_attn.o_proj.weight.to_local().fill_(float("nan"))
        probe = ProbeSequence(np.arange(3, 20, dtype=np.int32), backend)
        with pytest.raises(AlignmentError, match=r"the log-probs of the model are not finite.*16 of 16 tokens"):
            probe.check_packing(backend, tolerance=1e-4)
