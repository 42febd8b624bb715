"""The task: sums, their working, and a split that shares no problem."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.demo.task import CHARACTERS, Problem, exact, problems, rows
from moe_replay.train.rollout.rewards import load_reward

DIGITS = st.lists(st.integers(1, 9), min_size=2, max_size=8).map(tuple)


def test_a_problem_as_text():
    problem = Problem((4, 7, 2, 9))
    assert problem.prompt == "4+7+2+9="
    assert problem.worked == "(4+7=11+2=13+9=22)22"
    assert problem.row() == {"prompt": "4+7+2+9=", "solution": "22"}


@given(DIGITS)
def test_every_line_of_the_working_is_true(terms):
    working, answer = re.fullmatch(r"\((.*)\)(\d+)", Problem(terms).worked).groups()
    total, said = int(working[0]), re.findall(r"\+(\d)=(\d+)", working)
    assert [int(term) for term, _ in said] == list(terms[1:])
    for term, claimed in said:
        total += int(term)
        assert int(claimed) == total
    assert int(answer) == total == sum(terms)
    assert set(Problem(terms).prompt + Problem(terms).worked) <= set(CHARACTERS)


@given(DIGITS)
def test_an_estimate_is_near_the_sum(terms):
    found = {int(Problem(terms).estimate(Random(seed))) - sum(terms) for seed in range(100)}
    assert found == {miss for miss in range(-3, 4) if sum(terms) + miss >= 0}


def test_training_and_evaluation_share_no_problem():
    train, held_out = ({row["prompt"] for row in rows(60, 0, (2, 3), held_out=one)} for one in (False, True))
    assert (len(train), len(held_out)) == (60, 60)
    assert not train & held_out


def test_rows_are_those_of_their_seed():
    assert rows(50, 3, (3, 4), held_out=False) == rows(50, 3, (3, 4), held_out=False)
    assert rows(50, 3, (3, 4), held_out=False) != rows(50, 4, (3, 4), held_out=False)


def test_lengths_stay_within_bounds():
    found = {len(problem.terms) for problem in islice(problems(Random(0), (3, 5), held_out=False), 100)}
    assert found == {3, 4, 5}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("13", 1), ("(4+7=11+2=13)13", 1), ("(4+7=11+2=13)14", 0), ("(4+7=11+2=13)", 0), ("113", 0), ("", 0), ("+", 0)],
)
def test_the_reward_looks_at_the_last_number(completion, reward):
    assert exact(prompts=["4+7+2="], completions=[completion], solution=["13"]) == [reward]


def test_the_reward_is_found_by_name_and_reads_messages():
    reward = load_reward("moe_replay.demo.task:exact").function
    messages = [{"role": "assistant", "content": "(4+7=11)11"}]
    assert reward(prompts=["4+7="], completions=[messages], solution=["11"]) == [1]


@given(DIGITS)
def test_both_ways_to_answer_are_rewarded(terms):
    problem = Problem(terms)
    answers = [problem.solution, problem.worked]
    assert exact(prompts=[""] * 2, completions=answers, solution=[problem.solution] * 2) == [1, 1]
