"""Advantage estimators: the formulas, and what is refused of an estimator of the user's."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.train.config.registries import ADVANTAGES
from moe_replay.train.rollout.advantages import AdvantageError, has_signal, load_advantages
from moe_replay.utils.plugins import PluginError


@given(
    rewards=st.lists(
        st.lists(st.floats(-5, 5) | st.just(float("nan")), min_size=4, max_size=4), min_size=1, max_size=5
    ).map(np.array)
)
def test_advantages_against_a_plain_loop(rewards):
    assert set(ADVANTAGES) == {"grpo", "dr_grpo", "rloo"}
    for name in ADVANTAGES:
        found = load_advantages(name)(rewards)
        for group, advantages in zip(rewards, found, strict=True):
            scored = [r for r in group if not np.isnan(r)]
            for reward, advantage in zip(group, advantages, strict=True):
                if np.isnan(reward):
                    assert advantage == 0
                    continue
                expected = reward - np.mean(scored)
                if name == "grpo":
                    expected /= (np.std(scored, ddof=1) if len(scored) > 1 else 0) + 1e-4
                elif name == "rloo" and len(scored) > 1:
                    expected = reward - (sum(scored) - reward) / (len(scored) - 1)
                assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_groups_without_signal():
    nan = float("nan")
    assert has_signal(np.array([[1.0, 1.0], [0.0, 1.0], [nan, 1.0], [nan, nan]])).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_an_estimator_of_the_user_is_checked(monkeypatch):
    nan = float("nan")
    module = types.ModuleType("my_advantages")
    module.ranks = lambda rewards: rewards.argsort(axis=1).argsort(axis=1) - 1  # also for samples that are unscored
    module.flat = lambda rewards: rewards.ravel()
    module.plain = lambda rewards: rewards - rewards.mean(axis=1, keepdims=True)
    module.broken = lambda rewards: rewards.nothing
    monkeypatch.setitem(sys.modules, "my_advantages", module)

    rewards = np.array([[3.0, 1.0, 2.0], [1.0, nan, 0.0]])
    assert load_advantages("my_advantages:ranks")(rewards).tolist() == [[1, -1, 0], [0, 0, -1]]
    for name, text in (
        (
            "flat",
            r"'my_advantages:flat' must return one advantage.*: expected shape \(2, 3\), found shape \(6,\)",
        ),
        ("plain", r"not finite \[sample 0 of group 1\]: found nan for rewards \[1.0, nan, 0.0\]"),
        ("broken", r"'my_advantages:broken' raised AttributeError.*shape \(2, 3\)"),
    ):
        with pytest.raises(AdvantageError, match=text):
            load_advantages(f"my_advantages:{name}")(rewards)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(PluginError, match=r"unknown advantage estimator 'rlo'.*Did you mean 'rloo'"):
        load_advantages("rlo")
