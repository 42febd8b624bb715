"""TRL on two processes with replay: the numbers of one process."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_ranks
from tests.integrations.foreign import foreign_rollout
from tests.integrations.trl_tiny import make, trained

pytest.importorskip("trl")
pytestmark = pytest.mark.distributed

SAMPLES = 8
MODES = ("r2", "r3")
COMPARED = (
    "loss",
    "grad_norm",
    "reward",
    "routing/agreement",
    "routing/agreement/layer_003",
    "routing/replayed_fraction",
    "mismatch/rollout_vs_train/k3_kl",
    "mismatch/old_vs_train/logprob_abs_diff/max",
    "mismatch/old_vs_train/ess",
)

Run = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def run(replay: str, ranks: int) -> Run:
    """Two updates of each batch of samples; what was logged, and the weights afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"per_device_train_batch_size": SAMPLES // ranks, "num_iterations": 2, "max_steps": 4}
        # Adam would blow rounding up, and the load-balancing loss is another one for each half of a batch.
        options |= {"gradient_accumulation_steps": 1, "optim": "sgd", "learning_rate": 0.1, "router_aux_loss_coef": 0.0}
        trainer = make(folder, replay, rollout_func=foreign_rollout, **options)
        assert trainer.accelerator.num_processes == ranks
        logged, weights = trained(trainer)
    return [{name: float(entry[name]) for name in COMPARED if name in entry} for entry in logged], weights


def on_rank() -> list[Run]:
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return [run(replay, 2) for replay in MODES]


@pytest.mark.whole_runs
def test_two_processes_are_one() -> None:
    first, second = run_ranks(2, on_rank)  # each imports TRL first
    for number, replay in enumerate(MODES):
        logged, weights = run(replay, 1)
        for name, weight in weights.items():
            torch.testing.assert_close(first[number][1][name], weight, rtol=1e-4, atol=1e-5)
            assert torch.equal(first[number][1][name], second[number][1][name])
        for found, expected in zip(first[number][0], logged, strict=True):
            assert found.keys() == expected.keys()
            assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-3, abs=1e-5)
        assert logged[1]["routing/agreement"] < 1
        assert logged[1]["mismatch/old_vs_train/ess"] < 1
