"""Rewards: TRL's signature, verl's through an adapter, and errors that name the function."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from moe_replay.errors import MissingExtraError
from moe_replay.train.rewards import Reward, RewardError, accuracy, load_reward, score, think_format, total
from moe_replay.utils.plugins import PluginError, requires


@pytest.fixture
def module(monkeypatch):
    """An importable module of a user's."""
    made = types.ModuleType("my_rewards")
    monkeypatch.setitem(sys.modules, "my_rewards", made)
    return made


def test_accuracy_compares_mathematics():
    pytest.importorskip("math_verify", reason="needs math-verify")
    completions = ["The answer is $\\frac{1}{2}$", "it is 7", "no idea", [{"role": "assistant", "content": "$12$"}]]
    assert accuracy(["p"] * 4, completions, ["0.5", "8", "3", "12"]) == [1.0, 0.0, 0.0, 1.0]


def test_accuracy_does_not_score_without_a_solution():
    pytest.importorskip("math_verify", reason="needs math-verify")
    assert accuracy(["p"], ["5"], [""]) == [None]


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


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    reward = Reward("wild", lambda completions, **_: [1.0, value])
    with pytest.raises(RewardError, match=r"'wild' returned a number that is not finite \[sample 1\]"):
        score([reward], ["a", "b"], ["c", "d"], {})


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda **_: 1 / 0, r"reward 'bad' raised ZeroDivisionError"),
        (lambda **_: [1.0], r"one value per completion: expected a list of 2, found list of 1"),
        (lambda **_: 1.0, r"one value per completion: expected a list of 2, found float"),
        (lambda **_: [1.0, "much"], r"returned something other than a number \[sample 1\]: found 'much'"),
    ],
)
def test_a_bad_reward_is_named(function, text):
    with pytest.raises(RewardError, match=text):
        score([Reward("bad", function)], ["p", "q"], ["a", "b"], {})


@pytest.mark.parametrize(
    "name", ["acuracy", "my_rewards:missing", "no_such_module:f", "verl:my_rewards", "verl:my_rewards:missing"]
)
def test_an_unknown_reward_is_named(module, name):
    with pytest.raises(PluginError, match=name.removeprefix("verl:")):
        load_reward(name)


def test_an_unknown_reward_says_what_may_be_given():
    with pytest.raises(PluginError, match=r"accuracy, format, or 'module:name', 'verl:module:name'.*Did you mean 'acc"):
        load_reward("acuracy")
