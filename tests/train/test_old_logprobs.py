"""Old log-probs from the first update's own forward: the same run as with a pass of their own, one forward fewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from moe_replay.errors import ReplayStateError
from moe_replay.train.backends.base import Scores
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.learn.learner import PLANNED
from moe_replay.train.learn.replay_mode import plan_replay
from moe_replay.train.loop import train
from tests.combinations import with_whole_runs

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]

ONCE = {"updates_per_rollout": 1}
IN_BFLOAT16 = {"dtype": "bfloat16", "probe_tolerance": 1.0}
SEVERAL = {"updates_per_rollout": 2, "num_iterations": 2}


def trained_state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step-{step:08d}/policy/rank-00000.safetensors")


def assert_same_run(found: Path, expected: Path, step: int) -> None:
    """Weights and both moments of AdamW are equal bit for bit, and so were the gradients."""
    one, two = trained_state(found, step), trained_state(expected, step)
    assert one.keys() == two.keys()
    assert [name for name in two if not torch.equal(one[name], two[name])] == []


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Micro-batches in each scoring pass over the samples of a step."""
    passes: list[int] = []
    score = FsdpBackend.score

    def counted(self: FsdpBackend, batches: Any, *args: Any, **settings: Any) -> list[Scores | None]:
        if "temperature" not in settings:  # that of the probe
            passes.append(len(batches))
        return score(self, batches, *args, **settings)

    monkeypatch.setattr(FsdpBackend, "score", counted)
    return passes


@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_one_update_a_rollout_is_the_same_without_the_scoring_pass(
    config: Config, metrics_of: Metrics, scored: list[int], mode: str
) -> None:
    """With recomputed layers, an engine of another precision, importance correction and native scores in each step."""
    runs, passes = {}, {}
    for source in ("always", "auto"):
        algorithm = ONCE | {"old_logprobs": source, "rollout_correction": "token_mask"}
        runs[source] = train(
            config(
                source,
                steps=2,
                model={"gradient_checkpointing": True},
                rollout=IN_BFLOAT16,
                replay={"mode": mode},
                algorithm=algorithm,
            )
        )
        passes[source] = len(scored)
        scored.clear()
    assert metrics_of(runs["auto"]) == metrics_of(runs["always"])
    assert_same_run(runs["auto"], runs["always"], step=2)
    native = 2 if mode == "r3" else 0  # of score_native_every
    check = 0 if mode == "off" else 1  # of the first update, in the first step
    assert passes == {"always": 2 + native, "auto": native + check}


@pytest.mark.parametrize("mode", with_whole_runs(["off", "r2", "r3"], ["off"]))
def test_the_first_of_several_updates_is_not_scored_twice(
    config: Config, metrics_of: Metrics, scored: list[int], mode: str
) -> None:
    runs, micro_batches = {}, {}
    for source in ("always", "auto"):
        runs[source] = train(
            config(
                source,
                steps=2,
                rollout=IN_BFLOAT16,
                replay={"mode": mode, "score_native_every": 0},
                algorithm=SEVERAL | {"old_logprobs": source},
            )
        )
        micro_batches[source] = list(scored)
        scored.clear()
    assert_same_run(runs["auto"], runs["always"], step=2)
    for one, two in zip(*(metrics_of(runs[source]) for source in ("auto", "always")), strict=True):
        assert one == pytest.approx(two, rel=1e-12, abs=0, nan_ok=True)  # sums of float64 in another order
    assert len(micro_batches["always"]) == 2
    check = 0 if mode == "off" else 1
    assert len(micro_batches["auto"]) == 2 + check
    assert micro_batches["auto"][0] < micro_batches["always"][0]


@pytest.mark.parametrize("mode", with_whole_runs(["off", "r2", "r3"], ["off", "r3"]))
def test_megatron_is_the_same_without_the_scoring_pass(config: Config, metrics_of: Metrics, mode: str) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    runs = {}
    for source in ("always", "auto"):
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)  # left by an earlier backward
        runs[source] = train(
            config(
                source,
                steps=2,
                backend={"kind": "megatron"},
                model={"gradient_checkpointing": True},
                rollout=IN_BFLOAT16,
                replay={"mode": mode},
                algorithm=ONCE | {"old_logprobs": source},
            )
        )
    lines = {source: metrics_of(run) for source, run in runs.items()}
    planned = {source: [line.pop(PLANNED, None) for line in of_run] for source, of_run in lines.items()}
    assert planned["always"] == [None if mode == "off" else 1.0] * 2
    assert planned["auto"] == [1.0, 1.0 if mode == "r3" else None] or mode == "off"  # the first r2 update records
    assert lines["auto"] == lines["always"]
    assert_same_run(runs["auto"], runs["always"], step=2)


def test_reference_mask_and_adapters_are_the_same_without_the_scoring_pass(config: Config, metrics_of: Metrics) -> None:
    pytest.importorskip("peft")
    runs = [
        train(
            config(
                source,
                steps=2,
                model={"lora_rank": 4},
                rollout=IN_BFLOAT16 | {"top_p": 0.9},
                algorithm=ONCE | {"old_logprobs": source, "beta": 0.1},
            )
        )
        for source in ("auto", "always")
    ]
    assert metrics_of(runs[0]) == metrics_of(runs[1])
    assert metrics_of(runs[0])[1]["loss/reference_kl"] > 0
    assert_same_run(*runs, step=2)


@pytest.mark.parametrize("mode", with_whole_runs(["r2", "r3"], ["r2"]))
def test_a_run_that_stopped_goes_on_as_if_it_had_not(config: Config, metrics_of: Metrics, mode: str) -> None:
    """Although a process compares the forward of its first update with a scoring pass, and only that one."""
    settings: dict[str, Any] = {"replay": {"mode": mode}, "algorithm": ONCE, "rollout": IN_BFLOAT16}
    whole = train(config("whole", steps=3, **settings))
    train(config("parts", steps=1, **settings))
    parts = train(config("parts", steps=3, **settings))

    def lines(folder: Path) -> list[dict[str, Any]]:  # evidence starts again after a resume
        return [{k: v for k, v in line.items() if "evidence" not in k} for line in metrics_of(folder)]

    assert lines(parts) == lines(whole)
    assert_same_run(parts, whole, step=3)


def test_a_forward_that_depends_on_gradients_stops_the_run(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    score = FsdpBackend.score

    def off(self: FsdpBackend, batches: Any, *args: Any, **settings: Any) -> list[Any]:
        moved = 0.0 if "temperature" in settings else 1e-6  # the probe is left alone
        return [Scores(one.logprobs + moved, one.entropy) for one in score(self, batches, *args, **settings) if one]

    monkeypatch.setattr(FsdpBackend, "score", off)
    with pytest.raises(ReplayStateError, match="the first update of the step computes other log-probs"):
        train(config(steps=1, replay={"score_native_every": 0}, algorithm=ONCE))


@pytest.mark.parametrize("source", ["auto", "rollout"])
def test_the_log_probs_of_the_rollout_as_old_ones(
    config: Config, metrics_of: Metrics, scored: list[int], source: str
) -> None:
    made = config(
        steps=2,
        rollout=IN_BFLOAT16,
        replay={"score_native_every": 0},
        algorithm={"updates_per_rollout": 2, "old_logprobs": source},
    )
    lines = metrics_of(train(made))
    for line in lines:
        gap, drift = line["mismatch/rollout_vs_old/k3_kl"], line["mismatch/old_vs_train/k3_kl"]
        assert gap > 0
        assert (drift == line["mismatch/rollout_vs_train/k3_kl"]) == (source == "rollout")
        assert line["routing/aligned"] != 0
    assert min(line["routing/agreement"] for line in lines) < 1
    assert len(scored) == (1 if source == "rollout" else 3)  # one: the check of the forward


def test_what_the_rollouts_log_probs_rule_out_is_refused(config: Config) -> None:
    bypass = {"old_logprobs": "rollout"}
    with pytest.raises(ValueError, match=r"rollout_correction.*nothing to correct"):
        config(algorithm=bypass | {"rollout_correction": "token_truncate"})
    with pytest.raises(ValueError, match=r"replay\.mode: r2 records routes in the old-log-prob pass"):
        config(algorithm=bypass, replay={"mode": "r2"})
    config(algorithm=bypass | ONCE, replay={"mode": "r2"})
    plans = [plan_replay(config(algorithm=bypass | updates, replay={"mode": "auto"})) for updates in (ONCE, SEVERAL)]
    assert [(plan.mode, plan.correction) for plan in plans] == [("off", "off"), ("r3", "off")]
