"""The study runs at its tiny size: problems, the model, one arm, results, every figure."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from experiments import large, long_task, results, task
from experiments.__main__ import PLANNED, STUDIES
from experiments.arms import Arm
from experiments.model import build_model, encoded, judge, language_of, pretrain
from experiments.results import Result
from experiments.runs import output_of, run_arms
from experiments.scales import TINY, TINY_LONG, Scale
from experiments.study import draw, table_text
from moe_replay.train.config.train_config import TrainConfig

ARM = Arm(mode="r3", updates=1)


# ---- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", task.KINDS)
def test_every_step_of_the_working_is_right(kind: object) -> None:
    random = Random(3)
    for steps in (1, 5, 12):
        problem = kind(random, steps)  # type: ignore[operator]
        assert len(problem.steps) == steps
        for step in problem.steps:
            for left, sign, right, total in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", step):
                assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
                    sign
                ] == int(total)
        assert re.search(r"(\d+)(,b=\d+)?$", problem.steps[-1])[1] == problem.solution  # type: ignore[index]


def test_a_program_is_worked_as_python_would_run_it() -> None:
    problem = task.program(Random(5), 7)
    a, b, turns, more = map(int, re.findall(r"\d+", problem.prompt))
    for _ in range(turns):
        a, b = a + b, b + more
    assert problem.solution == str(a)


def test_problems_to_train_on_and_held_out_ones_are_different() -> None:
    trained = {row["prompt"] for row in task.rows(200, task.problems(Random(0), (1, 2), held_out=False))}
    held_out = {row["prompt"] for row in task.rows(50, task.problems(Random(0), (1, 2), held_out=True))}
    assert len(trained) == 200
    assert not trained & held_out


def test_the_reward_is_for_the_number_after_the_last_mark() -> None:
    completions = ["1+1=2;#2", "1+1=3;#3", "2", "#1;#2", "#2 "]
    assert task.exact(["1+1="] * 5, completions, ["2"] * 5) == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_character_is_a_token() -> None:
    tokenizer = task.build_tokenizer()
    for problem in islice(task.problems(Random(0), (1, 12), held_out=False), 20):
        text = problem.prompt + problem.worked
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize("kind", long_task.KINDS)
def test_long_problems_are_worked_step_by_step(kind: object) -> None:
    for seed in range(20):
        problem = kind(Random(seed), 90)  # type: ignore[operator]
        assert [int(step.split()[0]) for step in problem.steps] == list(range(90, 0, -1))
        assert problem.solution == solved(problem.prompt)
        assert task.exact([""], [problem.worked], [problem.solution]) == [1.0]


def solved(prompt: str) -> str:
    """Solve a long problem by its text."""
    if "; one a day: " in prompt:
        owned, told, after = prompt.split("; ")
        total, events = int(owned.split()[2]), told.removeprefix("one a day: ").split(" then ")
        for day in range(int(after.split()[1])):
            name, _, count = events[day % len(events)].partition(" ")
            total = {"gains": total + int(count or 0), "loses": total - int(count or 0), "doubles": 2 * total}[
                name
            ] % 1000
        return str(total)
    begin, rule, _ = prompt.split("; ")
    values = {name: int(value) for name, value in (part.split("=") for part in begin.split())}
    times, rule = rule.split(" times: ")
    (first, *others) = values
    if others:
        more = int(re.findall(r"\+(\d+)\)%100$", rule)[0])
        for _ in range(int(times)):
            total = (values[first] + values[others[0]]) % 1000
            values = {first: total, others[0]: (values[others[0]] + more) % 100}
    else:
        factor, more = map(int, re.findall(r"\*(\d+)\+(\d+)\)%1000$", rule)[0])
        for _ in range(int(times)):
            value = values[first]
            values[first] = value // 2 if value % 2 == 0 else (value * factor + more) % 1000
    return str(values[first])


def test_the_trained_tokenizer_reads_prompts_as_in_rl_and_loses_nothing() -> None:
    language = language_of(TINY_LONG)
    assert len(language.tokenizer) == TINY_LONG.vocabulary
    for problem in islice(language.lessons(Random(0), (2, 9), held_out=True), 20):
        ids = encoded(problem, language.encode)
        assert ids[: len(language.encode(problem.prompt))] == language.tokenizer(problem.prompt)["input_ids"]
        assert language.tokenizer.decode(ids[:-1]) == problem.prompt + problem.worked
        assert ids[-1] == language.tokenizer.eos_token_id
        assert language.tokenizer.unk_token_id not in ids


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", [TINY, TINY_LONG], ids=lambda scale: scale.name)
def test_pretraining_in_two_calls_is_the_same_as_in_one(scale: Scale, tmp_path: Path) -> None:
    whole, halves, language = build_model(scale), build_model(scale), language_of(scale)
    assert pretrain(whole, scale, tmp_path / "none", "cpu", float("inf"), language)
    assert not pretrain(halves, scale, tmp_path, "cpu", 0.0, language)  # one step a call
    again = build_model(scale)
    assert pretrain(again, scale, tmp_path, "cpu", float("inf"), language)
    for name, weight in whole.state_dict().items():
        assert weight.equal(again.state_dict()[name]), name


@pytest.mark.slow
def test_routers_that_prefer_one_expert_show_it() -> None:
    model = build_model(TINY)
    even = judge(model, TINY, "cpu", language_of(TINY))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data[1:] = 0
        layer.mlp.gate.weight.data[0] *= 1e4
    uneven = judge(model, TINY, "cpu", language_of(TINY))
    assert max(uneven["routers/largest_load"]) > max(even["routers/largest_load"])  # type: ignore[call-overload]


# ---- runs and results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", [*STUDIES, *PLANNED], ids=lambda study: study.name)
def test_every_arm_is_a_valid_recipe_and_has_its_own_name(study: object) -> None:
    arms = study.arms  # type: ignore[attr-defined]
    for arm in arms:
        for device, scale in study.scales.items():  # type: ignore[attr-defined]
            TrainConfig.model_validate(arm.settings(scale, Path("data"), Path("out"), device))
    assert len({arm.name for arm in arms}) == len(set(arms)) == len(arms)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.whole_runs
def test_an_arm_is_run_once_and_its_result_says_what_it_came_from(tmp_path: Path) -> None:
    into = tmp_path / "results"
    assert run_arms([ARM], TINY, "cpu", tmp_path, into=into)
    (result,) = results.read([ARM], into)
    assert result.finished
    assert result.steps == TINY.rl_steps
    assert (result.metrics["routing/replayed_fraction"] > 0.5).all()
    assert np.isfinite(result.metrics["mismatch/rollout_vs_train/k3_kl"]).all()
    text = (into / f"{ARM.name}.json").read_text()
    assert '"torch"' in text
    assert '"digest": "sha256:' in text
    log = output_of(ARM, tmp_path) / "metrics.jsonl"
    before = log.read_bytes()
    assert run_arms([ARM], TINY, "cpu", tmp_path, into=into)  # nothing is left to do
    assert log.read_bytes() == before


def test_a_run_that_was_stopped_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "reward/mean": 0.25}\n')
    results.write(ARM, tmp_path, 3, "cpu", 1.0, tmp_path)
    (result,) = results.read([ARM], tmp_path)
    assert not result.finished
    assert result.at_end("reward/mean") == 0.25
    assert results.read([replace(ARM, seed=7)], tmp_path) == []


def result_of(arm: Arm, reward: list[float]) -> Result:
    keys = ("eval/reward", "mismatch/rollout_vs_old/k3_kl", "mismatch/rollout_vs_train/k3_kl", "routing/agreement")
    layers = [f"routing/agreement/layer_{layer:03d}" for layer in (1, 2)]
    parts = [f"time/{part}" for part in ("rollout", "score", "train", "sync", "tokens_per_second")]
    metrics = {key: np.linspace(0.1, 0.2, len(reward)) for key in (*keys, *layers, *parts)}
    return Result(arm, len(reward), len(reward), metrics | {"reward/mean": np.array(reward)})


@pytest.mark.parametrize(
    ("reward", "step"),
    [
        ([0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0, 0.0], 10),
        ([0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.6, 0.6], None),
        ([0.0, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0], None),
        ([], None),
    ],
)
def test_a_collapse_is_a_fall_below_half_of_the_best(reward: list[float], step: int | None) -> None:
    assert result_of(ARM, reward).collapsed_at() == step


@pytest.mark.slow
@pytest.mark.parametrize("study", [*STUDIES, large.STUDY], ids=lambda study: study.name)
def test_figures_and_tables_are_made_from_whatever_has_been_run(study: object, tmp_path: Path) -> None:
    arms = study.arms  # type: ignore[attr-defined]
    for chosen in (arms, arms[:1]):
        found = [result_of(arm, [0.1 * arm.seed, 0.5, 0.6]) for arm in chosen]
        drawn = draw(study, found, tmp_path).read_text()  # type: ignore[arg-type]
        assert len(drawn) > 5000
        assert draw(study, found, tmp_path).read_text() == drawn  # type: ignore[arg-type]
        rows = table_text(study.table(found)).splitlines()  # type: ignore[attr-defined]
        assert len(rows) == 2 + len({replace(arm, seed=0) for arm in chosen})


# ---- what is in the repository ---------------------------------------------------------------------------------------


def test_every_result_in_the_repository_is_of_a_finished_run_of_a_study() -> None:
    known = {result.arm.name: result for study in STUDIES for result in results.read(study.arms)}
    files = {path.stem for path in results.FOLDER.glob("*.json")} - {"model", "model-2"}
    assert files == set(known)
    assert all(result.finished for result in known.values())
    digests = {json.loads((results.FOLDER / f"{name}.json").read_text())["digest"] for name in files}
    assert len(digests) == len(files)
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in digests)


@pytest.mark.parametrize("name", ["mismatch", "edge", "precision", "collapse", "remedies", "layers", "cost"])
def test_the_document_has_the_tables_that_are_made_from_the_results(name: str) -> None:
    (study,) = (one for one in STUDIES if one.name == name)
    document = (results.FOLDER.parents[1] / "docs/lab/does-it-help.md").read_text(encoding="utf-8")
    assert table_text(study.table(results.read(study.arms))) in document
    assert (results.FOLDER.parents[1] / f"docs/images/experiments/{name}.svg").exists()
