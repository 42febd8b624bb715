"""Every setting of the algorithm, the optimizer and the data reaches what it is about."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from moe_replay.errors import UnsupportedRouterError
from moe_replay.report.run_report import write_run_report
from moe_replay.routes.router_families import ROUTER_FAMILIES
from moe_replay.train.learn.losses import LossInputs, LossOutput, LossSettings
from moe_replay.train.loop import train
from tests.train.runs import train_on_rank

pytestmark = pytest.mark.usefixtures("fast_bfloat16")

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm": {"importance_sampling_level": "sequence"}},
    "mean over sequences": {"algorithm": {"loss_aggregation": "seq_mean_token_mean"}},
    "dr_grpo": {"algorithm": {"loss_aggregation": "seq_mean_token_sum_norm"}},
    "no division by std": {"algorithm": {"advantage": "dr_grpo"}},
    "leave one out": {"algorithm": {"advantage": "rloo"}},
    "clip low": {"algorithm": {"clip_low": 0.001}},
    "clip high": {"algorithm": {"clip_high": 0.001}},
    "two-sided clip": {"algorithm": {"delta": 1.0001}},
    "sapo": {"algorithm": {"loss": "sapo"}},
    "cispo": {"algorithm": {"loss": "cispo"}},
    "truncation": {"algorithm": {"rollout_correction": "token_truncate", "rollout_correction_high": 1.0}},
    "token mask": {
        "algorithm": {
            "rollout_correction": "token_mask",
            "rollout_correction_low": 0.999,
            "rollout_correction_high": 1.0,
        }
    },
    "sequence mask": {
        "algorithm": {
            "rollout_correction": "sequence_mask",
            "rollout_correction_low": 0.999,
            "rollout_correction_high": 1.0,
        }
    },
    "reference": {"algorithm": {"beta": 10.0}},
    "temperature": {"rollout": {"temperature": 0.5}},
    "gradient norm": {"optim": {"max_grad_norm": 1e-3}},
    "weight decay": {"optim": {"weight_decay": 0.5}},
    "warm-up": {"optim": {"warmup_steps": 2}},
    "betas": {"optim": {"betas": (0.5, 0.9)}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "seed": {"seed": 1},
}


@pytest.fixture(scope="module")
def usual(fast_bfloat16: None, demo_files: Any, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run with the usual settings, whose rollout is in bfloat16."""
    output = tmp_path_factory.mktemp("usual") / "run"
    return losses(train_on_rank(str(demo_files.model), str(demo_files.train), str(output), in_bfloat16({})))


def in_bfloat16(settings: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    return settings | {"rollout": {"dtype": "bfloat16", **settings.get("rollout", {})}, "steps": steps}


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss/total"] for line in lines]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_its_effect(name: str, demo_files: Any, tmp_path: Path, usual: list[float]) -> None:
    """Already in the first step, which makes two updates; it has no warm-up, and Adam's first update no history."""
    overrides = in_bfloat16(SETTINGS[name], steps=2 if name in ("warm-up", "betas") else 1)
    lines = train_on_rank(str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    assert losses(lines) != usual[: len(lines)]
    assert all(math.isfinite(loss) for loss in losses(lines))
    assert all(line["loss/skipped"] == 0 for line in lines)


def test_recomputation_and_sleep_change_nothing(demo_files: Any, tmp_path: Path, usual: list[float]) -> None:
    settings = {"model": {"gradient_checkpointing": True}, "rollout": {"sleep": True}}
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), in_bfloat16(settings))
    assert losses(train_on_rank(*arguments)) == usual


def tempered(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """A loss of the user's own, with a metric of its own."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    loss = -(ratio.tanh() * inputs.advantages * inputs.weights).sum()
    return LossOutput(loss, {"ratio": ratio.detach()})


def test_a_loss_of_ones_own_is_trained_with_and_its_metrics_are_logged(
    config: Config, metrics_of: Metrics, usual: list[float]
) -> None:
    algorithm = {"loss": "tests.train.test_settings:tempered", "updates_per_rollout": 1}
    lines = metrics_of(train(config(steps=2, algorithm=algorithm, rollout={"dtype": "bfloat16"})))
    assert [line["loss/ratio"] for line in lines] == [1.0, 1.0]  # on-policy, with replay
    assert "loss/clip_low" not in lines[0]
    assert losses(lines) != usual


def in_order(completions: list[str], **_: Any) -> list[float]:
    """Every group has a signal, whatever was sampled."""
    return [float(i) for i in range(len(completions))]


def test_completions_that_were_cut_off_are_filtered(config: Config, metrics_of: Metrics) -> None:
    reward = {"functions": ["tests.train.test_settings:in_order"]}
    for filtered, trained in ((False, True), (True, False)):
        made = config(
            f"filtered-{filtered}",
            steps=1,
            rollout={"max_tokens": 1},
            algorithm={"overlong_filter": filtered},
            reward=reward,
        )
        (line,) = metrics_of(train(made))
        assert line["completion/truncated"] == 1.0
        assert (line["loss/grad_norm"] > 0) == trained


def test_the_learning_rate_follows_its_schedule(config: Config, metrics_of: Metrics) -> None:
    lines = metrics_of(train(config(steps=4, optim={"lr": 1e-3, "schedule": "linear", "warmup_steps": 2})))
    assert [line["loss/lr"] for line in lines] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_conversations_are_rendered_and_scored_as_messages(config: Config, tmp_path: Path, column: str) -> None:
    data = tmp_path / "conversations.parquet"
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    rows = [{column: [{"role": "user", "content": f"{i}+{i}="}], "solution": str(2 * i)} for i in range(1, 9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    made = config(steps=1, data={"path": str(data)}, reward={"functions": ["tests.train.test_settings:of_messages"]})
    with_report = column == "messages"  # of the other it would be the same
    run = train(made, write_report=write_run_report) if with_report else train(made)
    assert (run / "report.html").is_file() == with_report


def of_messages(prompts: list, completions: list, solution: list[str], **_: Any) -> list[float]:
    """Fails unless prompts and completions are messages."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(len(completion[0]["content"])) for completion in completions]


OWN_FAMILY = ROUTER_FAMILIES["qwen3_moe"]  # under a name of the test's own


def test_a_model_of_an_unknown_type_is_trained_by_the_users_description_of_its_routers(
    config: Config, metrics_of: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = json.loads(Path(config().model.path, "config.json").read_text())["model_type"]
    family = ROUTER_FAMILIES[model_type]
    monkeypatch.setattr(sys.modules[__name__], "OWN_FAMILY", family)
    monkeypatch.delitem(ROUTER_FAMILIES, model_type)
    with pytest.raises(UnsupportedRouterError, match=model_type):
        train(config("unknown", steps=1))
    described = config("described", steps=1, model={"router_family": f"{__name__}:OWN_FAMILY"})
    assert len(metrics_of(train(described))) == 1
