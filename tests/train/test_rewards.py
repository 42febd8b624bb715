"""Rewards: TRL's signature, verl's through an adapter, and errors that name the function."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from moe_replay.errors import MissingExtraError
from moe_replay.train.rollout.rewards import (
    Reward,
    RewardError,
    accuracy,
    load_reward,
    math_equality,
    score,
    think_answer_format,
    think_format,
    total,
)
from moe_replay.utils.plugins import PluginError, requires


@pytest.fixture
def module(monkeypatch):
    """An importable module of a user's."""
    made = types.ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", made)
    return made


@pytest.mark.parametrize("name", ["sleeping_reward:score", "verl:sleeping_reward:score"])
def test_a_module_whose_import_does_not_end_is_an_error(tmp_path, monkeypatch, name):
    (tmp_path / "sleeping_reward.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"import of its module did not end within 0.2 s.*reward.timeout_s"):
        load_reward(name, timeout_s=0.2)


def test_answers_are_compared_as_mathematics():
    pytest.importorskip("math_verify", reason="needs math-verify")
    completions = ["The answer is $\\frac{1}{2}$", "it is 7", "no idea", [{"role": "assistant", "content": "$12$"}]]
    assert math_equality(["p"] * 4, completions, ["0.5", "8", "3", "12"]) == [1.0, 0.0, 0.0, 1.0]


def test_without_a_solution_there_is_no_score():
    pytest.importorskip("math_verify", reason="needs math-verify")
    assert math_equality(["p"], ["5"], [""]) == [None]


@pytest.mark.parametrize(
    ("completion", "solution", "expected"),
    [
        ("<answer>34</answer>", "34", 1.0),
        ("so 35, no: <answer> 34 </answer> or 36", "34", 1.0),
        ("<answer>35</answer> $34$", "34", 0.0),
        ("\\boxed{34}", "34", 1.0),
        ("It is $34$.", "34", 0.0),
        ("It is 34", "34", 0.0),
        ("The answer is $33$, and \\boxed{34}", "34", 1.0),
        ("<answer>34</answer>", "<answer>34</answer>", 1.0),
        ("34", "", 0.0),
        ("<answer></answer>", "34", 0.0),
    ],
)
def test_accuracy_reads_answers_as_ms_swift_does(completion, solution, expected):
    """The expected scores are those of `swift.rewards.orm.MathAccuracy` of ms-swift 4.6.0."""
    pytest.importorskip("math_verify", reason="needs math-verify")
    assert accuracy(["p"], [completion], [solution]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so</think><answer>5</answer>", 1.0),
        ("<think>so\nand so</think>\n<answer>5\n</answer>", 1.0),
        ("<think>so</think> 5", 0.0),
        ("<think>so</think><answer>5</answer>\n", 0.0),
        (" <think>so</think><answer>5</answer>", 0.0),
        ("<think>a</think> b <answer>5</answer>", 0.0),
        ("<think>a</think> b</think><answer>5</answer><answer>6</answer>", 1.0),
    ],
)
def test_format_is_that_of_ms_swift(text, expected):
    """The expected scores are those of `swift.rewards.orm.Format` of ms-swift 4.6.0."""
    assert think_answer_format(["p"], [text]) == [expected]


def test_a_reward_names_the_packages_that_it_needs(module):
    @requires("a_package_that_nobody_has")
    def mine(prompts, completions, **columns):
        return [0.0] * len(prompts)

    module.mine = mine
    with pytest.raises(MissingExtraError, match="'my_rewards:mine' needs the package a_package_that_nobody_has"):
        load_reward("my_rewards:mine")
    module.mine = requires("numpy")(mine)
    assert load_reward("my_rewards:mine").function is mine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so</think> 5", 1.0),
        ("<think>so\nand so</think>\n5", 1.0),
        ("5", 0.0),
        ("<think>so</think>", 0.0),
        ("<think>so 5", 0.0),
        ("<think>a</think><think>b</think> 5", 0.0),
        ("first <think>so</think> 5", 0.0),
    ],
)
def test_format(text, expected):
    assert think_format(["p"], [text]) == [expected]


def test_own_function_gets_all_columns(module):
    module.mine = lambda prompts, completions, level, **_: [n * len(c) for n, c in zip(level, completions, strict=True)]
    found = score([load_reward("my_rewards:mine")], ["p", "q"], ["ab", "abc"], {"level": [1, 2], "other": [0, 0]})
    assert found["my_rewards:mine"].tolist() == [2, 6]


def test_verl_function_gets_its_own_names(module):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "data_source": data_source}

    module.compute_score = compute_score
    reward = load_reward("verl:my_rewards:compute_score")
    columns = {"data_source": ["gsm8k", "gsm8k"], "reward_model": [{"ground_truth": "5"}, {"ground_truth": "6"}]}
    assert score([reward], ["p", "q"], ["5", "5"], columns)[reward.name].tolist() == [1.0, 0.0]


def test_none_is_not_scored_and_weights_add_up():
    first = Reward("first", lambda **_: [1.0, None, None])
    second = Reward("second", lambda **_: [1.0, 3.0, None], weight=0.5)
    summed = total([first, second], score([first, second], [1] * 3, ["a"] * 3, {}))
    np.testing.assert_array_equal(summed, [1.5, 1.5, np.nan])


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 10**400, -(10**5000)], ids=["inf", "nan", "big", "bigger"]
)
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    reward = Reward("wild", lambda completions, **_: [1.0, value])
    with pytest.raises(RewardError, match=r"'wild' returned a number that is not finite \[sample 1\]"):
        score([reward], ["a", "b"], ["c", "d"], {})


class MuteError(Exception):
    """Nothing can be said of it."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda **_: 1 / 0, r"reward 'bad' raised ZeroDivisionError"),
        (lambda **_: [1.0], r"one value per completion: expected a list of 2, found list of 1"),
        (lambda **_: 1.0, r"one value per completion: expected a list of 2, found float"),
        (lambda **_: [1.0, "much"], r"returned something other than a number \[sample 1\]: found 'much'"),
        (lambda **_: [1.0, np.complex64(1)], r"returned something other than a number \[sample 1\]"),
        (lambda **_: [1.0, MuteError()], r"returned something other than a number \[sample 1\]: found MuteError"),
        (lambda **_: raise_(MuteError()), r"reward 'bad' raised MuteError: MuteError"),
        (lambda **_: raise_(OSError("half a pair: \ud800")), r"reward 'bad' raised OSError: half a pair: \\ud800"),
    ],
)
def test_a_bad_reward_is_named(function, text):
    with pytest.raises(RewardError, match=text):
        score([Reward("bad", function)], ["p", "q"], ["a", "b"], {})


def test_a_reward_that_closes_descriptors_of_the_trainer_is_named() -> None:
    def closing(**_: object) -> list[float]:
        for number in open_descriptors() - before:
            os.close(number)
        return [1.0]

    before = open_descriptors()
    with pytest.raises(RewardError, match="reward 'closing' has closed file descriptors that it had not opened"):
        score([Reward("closing", closing)], ["p"], ["c"], {})


def test_a_reward_that_raises_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with pytest.raises(RewardError, match="no score"):
        score([Reward("raising", lambda **_: raise_(ValueError("no score")))], ["p"], ["c"], {})
    assert open_descriptors() == before


def open_descriptors() -> set[int]:
    listed = {int(number) for number in os.listdir("/proc/self/fd")}
    return {number for number in listed if Path(f"/proc/self/fd/{number}").exists()}  # but for that of the listing


@pytest.mark.parametrize(
    "name", ["acuracy", "my_rewards:missing", "no_such_module:f", "verl:my_rewards", "verl:my_rewards:missing"]
)
def test_an_unknown_reward_is_named(module, name):
    with pytest.raises(PluginError, match=name.removeprefix("verl:")):
        load_reward(name)


def test_an_unknown_reward_says_what_may_be_given():
    names = "accuracy, format, math_verify, think_format, or 'module:name', 'verl:module:name'"
    with pytest.raises(PluginError, match=rf"{names}.*Did you mean 'acc"):
        load_reward("acuracy")
