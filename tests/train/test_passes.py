"""Several passes over the samples of a rollout, and epochs over the data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from moe_replay.tools.dry_run import dry_run
from moe_replay.train.config.file import load_config
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import ReplayConfig
from moe_replay.train.learn.replay_mode import plan_replay
from moe_replay.train.loop import train
from moe_replay.train.setup.inputs import steps_of_epochs

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]


# ---- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_every_pass_has_the_same_old_log_probs_and_routes(config: Config, metrics_of: Metrics, mode: str) -> None:
    """The ratio is exactly 1 in the first of the updates, which the run checks, and not in those of later passes."""
    lines = {}
    for passes in (1, 3):
        algorithm = {"updates_per_rollout": 1, "num_iterations": passes}
        folder = train(config(f"{passes}", steps=2, replay={"mode": mode}, algorithm=algorithm))
        lines[passes] = metrics_of(folder)
        assert optimizer_steps(folder, step=2) == 2 * passes
    once, thrice = lines[1], lines[3]
    assert [line["mismatch/old_vs_train/k3_kl"] for line in once] == [0, 0]
    assert all(line["mismatch/old_vs_train/k3_kl"] > 0 for line in thrice)
    assert once[0]["mismatch/rollout_vs_old/k3_kl"] == thrice[0]["mismatch/rollout_vs_old/k3_kl"]
    assert once[0]["loss/lr"] == thrice[0]["loss/lr"]


def test_passes_over_mini_batches_come_one_after_the_other(config: Config) -> None:
    from moe_replay.train.backends.base import UpdateResult
    from moe_replay.train.learn.learner import Learner

    class Counting:
        """A backend that notes what it is given."""

        seen: list[object] = []  # noqa: RUF012
        device = torch.device("cpu")

        def update(self, batches: Any, loss: Any, routing: Any, lr: float) -> UpdateResult:
            self.seen.append(batches[0])
            return UpdateResult(2.0, applied=True)

    backend = Counting()
    learner = Learner(config(algorithm={"updates_per_rollout": 2, "num_iterations": 2}), backend)  # type: ignore[arg-type]
    reported: list[tuple[int, int]] = []
    first, second = SimpleNamespace(is_dummy=True), SimpleNamespace(is_dummy=True)
    found = learner.update([[first], [second]], None, 1, lambda *done: reported.append(done))  # type: ignore[arg-type, list-item]
    assert backend.seen == [first, second, first, second]
    assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert found["loss/grad_norm"] == 2.0


@pytest.mark.parametrize(("mode", "scored"), [("off", 1), ("r2", 1), ("r3", 2)])
@pytest.mark.parametrize("source", ["always", "auto"])
def test_a_comparison_without_replay_takes_one_more_pass_at_most(
    config: Config, mode: str, scored: int, source: str
) -> None:
    """None where old log-probs are native already. A step has the work of four passes: scoring, forward, backward."""
    from moe_replay.train.learn.learner import Learner

    class Counting:
        """A backend that counts passes over the batch, as a stage without log-probs."""

        passes = 0
        device = torch.device("cpu")

        def score(self, batches: Any, routing: Any) -> list[None]:
            self.passes += 1
            return [None] * len(batches)

    backend = Counting()
    made = config(replay={"mode": mode, "observe": False}, algorithm={"old_logprobs": source})
    learner = Learner(made, backend)  # type: ignore[arg-type]
    learner.score([[SimpleNamespace(old_logprobs=None, is_dummy=True)]], None, 1, compare=True)  # type: ignore[arg-type, list-item]
    assert backend.passes == scored - (source == "auto")  # the update itself is the other pass
    assert (scored - 1) / 4 / ReplayConfig().score_native_every < 0.05


def test_the_choice_of_replay_counts_passes(config: Config) -> None:
    modes = [
        plan_replay(config(replay={"mode": "auto"}, algorithm={"updates_per_rollout": 1, "num_iterations": n})).mode
        for n in (1, 2, 4)
    ]
    assert modes == ["off", "r2", "r3"]


def optimizer_steps(folder: Path, step: int) -> int:
    from safetensors.torch import load_file

    saved = load_file(folder / f"checkpoints/step-{step:08d}/policy/rank-00000.safetensors")
    (count,) = {int(value) for name, value in saved.items() if name.endswith(".step")}
    assert all(torch.isfinite(value).all() for value in saved.values())
    return count


# ---- epochs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ten_prompts(tmp_path: Path) -> str:
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "solution": str(2 * i)}) + "\n" for i in range(10)))
    return str(path)


def test_epochs_are_counted_in_steps(config: Config, metrics_of: Metrics, ten_prompts: str) -> None:
    made = config(steps=1, data={"path": ten_prompts, "epochs": 1.5}, optim={"schedule": "linear"})
    folder = train(made)
    lines = metrics_of(folder)
    assert [line["data/epoch"] for line in lines] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    assert [line["loss/lr"] for line in lines] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert tomllib.loads((folder / "config.toml").read_text())["steps"] == 4
    train(load_config(folder / "config.toml"))
    assert metrics_of(folder) == lines  # nothing is left to do


def test_a_part_of_an_epoch_is_counted_exactly(config: Config) -> None:
    made = config(data={"epochs": 1.1}, rollout={"prompts_per_step": 1})
    assert steps_of_epochs(made, 100) == 110  # 1.1 * 100 is 110.00000000000001


def test_the_dry_run_counts_the_steps_of_epochs(config: Config, ten_prompts: str) -> None:
    made = config(data={"path": ten_prompts, "epochs": 2}, algorithm={"num_iterations": 3})
    assert "3 passes of 2 updates of 8; 5 steps: 2 epochs of 10 rows" in dry_run(made).report


def test_steps_that_epochs_replace_are_named(
    config: Config, ten_prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(steps=7, data={"path": ten_prompts, "epochs": 0.4})
    assert "1 step: 0.4 epochs of 10 rows; data.epochs replaces steps = 7" in dry_run(made).report
    folder = train(made)
    assert "1 step: 0.4 epochs of 10 prompts; data.epochs replaces steps = 7" in capsys.readouterr().out
    assert (
        "replaces" not in dry_run(load_config(folder / "config.toml")).report
    )  # which has the number that was counted


def test_a_warm_up_longer_than_the_epochs_is_refused(config: Config, ten_prompts: str) -> None:
    made = config(data={"path": ten_prompts, "epochs": 1}, optim={"warmup_steps": 4})
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps.*at most steps = 3.*1 of 10 prompts"):
        train(made)
