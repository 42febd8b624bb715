"""The card of an exported model states how it was routed and how far rollout and trainer were apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_replay.report.model_card import newest_export, write_model_card
from tests.report.folders import write_run

LINES = [
    {
        "step": step,
        "reward/mean": step / 10,
        "routing/agreement": 0.9,
        "routing/aligned": 1,
        "mismatch/rollout_vs_old/k3_kl": 0.001,
        "mismatch/rollout_vs_old/ess": 0.98,
        "mismatch/rollout_vs_native/k3_kl": 0.004,
        "mismatch/rollout_vs_native/ess": 0.75,
    }
    for step in (1, 2, 3)
]


def with_exports(run: Path, *steps: str) -> Path:
    for step in steps:
        (run / "checkpoints" / step / "hf").mkdir(parents=True)
    return run


def test_the_card_says_mode_mismatch_and_agreement(tmp_path: Path) -> None:
    run = with_exports(write_run(tmp_path / "run", LINES), "step-00000002", "step-00000003", "step-00000004.damaged")
    card = write_model_card(run)
    assert card == run / "checkpoints/step-00000003/hf/README.md"
    text = card.read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: tiny/model\n" in text
    assert "R3: routes recorded in the rollout are replayed (as configured)." in text
    assert "| rollout against trainer, median over steps | replayed | native routing |" in text
    assert "| k3 KL per token | 0.001 | 0.004 |" in text
    assert "| effective samples | 98% | 75% |" in text
    assert "agreed with the rollout in 90% of all" in text
    assert "aligned in 3 of 3 steps" in text
    assert "for 3 steps" in text


def test_without_replay_there_is_one_column(tmp_path: Path) -> None:
    run = with_exports(write_run(tmp_path / "run", LINES, mode="off"), "step-00000003")
    card = write_model_card(run)
    assert card is not None
    assert "no routing replay" in card.read_text()
    assert "| k3 KL per token | 0.001 |\n" in card.read_text()


@pytest.mark.parametrize("model", ["/models/mine", "", "a/b/c"])
def test_only_names_on_the_hub_are_base_models(tmp_path: Path, model: str) -> None:
    run = with_exports(write_run(tmp_path / "run", LINES, model=model), "step-00000003")
    card = write_model_card(run)
    assert card is not None
    assert "base_model" not in card.read_text()


def test_without_an_export_there_is_no_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", LINES)
    assert newest_export(run) is None
    assert write_model_card(run) is None
