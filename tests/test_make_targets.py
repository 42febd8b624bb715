"""Every test is run by some make target, and CI leaves out only those that are minutes of combinations and faults."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.conftest import MARKS_OF_OTHER_TARGETS

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE, CI = (ROOT / "Makefile").read_text(), (ROOT / ".ci/run").read_text()
MARKS = [
    line.partition(":")[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["markers"]
]
LEFT_OUT_BY_CI = {"thorough", "faults_long"}
COMBINATIONS = [set(marks) for count in range(len(MARKS) + 1) for marks in itertools.combinations(MARKS, count)]


def targets(makefile: str) -> dict[str, tuple[list[str], str]]:
    """Name of each target with a text of help -> what it needs, and its recipe."""
    found = re.findall(r"^([a-z0-9-]+):(.*?)##.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
    return {name: (needs.split(), recipe.replace("\\\n", "")) for name, needs, recipe in found}


def with_needs(makefile: str, name: str) -> list[str]:
    """The target and all that it needs, each once, as make runs them."""
    known = targets(makefile)
    order = [one for need in known[name][0] if need in known for one in with_needs(makefile, need)]
    return list(dict.fromkeys([*order, name]))


def expressions(makefile: str, name: str) -> Iterator[str]:
    """The expression over marks of each run of pytest over all tests in a recipe; an empty one selects what it may."""
    for line in targets(makefile)[name][1].splitlines():
        words = shlex.split(line.partition("-m pytest")[2].replace("$(PARALLEL)", ""))
        if "-m pytest" in line and not any(word.startswith(("tests/", "$")) for word in words):
            assert words[0::2] in ([], ["-m"]), line
            yield "".join(words[1::2])


def runs(expression: str, marks: set[str]) -> bool:
    """Whether a test with these marks is run; as tests/conftest.py and pytest decide."""
    if any(mark in marks and mark not in expression for mark in MARKS_OF_OTHER_TARGETS):
        return False
    return not expression or Expression.compile(expression).evaluate(lambda name, **_: name in marks)


def ci_target(ci: str) -> str:
    (name,) = re.findall(r"^exec make ([a-z0-9-]+) ", ci, re.MULTILINE)
    return name


def mistakes(makefile: str = MAKEFILE, ci: str = CI) -> Iterator[str]:
    """What is wrong with the targets."""
    known = targets(makefile)
    anywhere = [expression for name in known for expression in expressions(makefile, name)]
    counted = re.findall(r'pytest tests/faults -m "(.*)"', known["test-faults"][1])
    for mark in MARKS:
        if not any(runs(expression, {mark}) for expression in [*anywhere, *counted]):
            yield f"no target runs tests with the mark {mark}"
    ci_runs = [found for name in with_needs(makefile, ci_target(ci)) for found in expressions(makefile, name)]
    for marks in COMBINATIONS:
        times = sum(runs(expression, marks) for expression in ci_runs)
        if times != (0 if marks & LEFT_OUT_BY_CI else 1):
            yield f"CI runs tests with the marks {sorted(marks)} {times} times"
    before_a_commit = set(with_needs(makefile, "test")) - {"test", "unit"}
    for name in sorted(before_a_commit - set(with_needs(makefile, ci_target(ci)))):
        yield f"CI does not run make {name}"


def test_every_test_is_run_by_a_target_and_by_ci_once() -> None:
    assert len(MARKS) > 4
    assert list(mistakes()) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("exec make test-all", "exec make test", "CI runs tests with the marks ['whole_runs'] 0 times"),
        ("exec make test-all", "exec make test-quick", "CI runs tests with the marks ['engine', 'slow'] 0 times"),
        ("exec make test-all", "exec make lint", "CI runs tests with the marks [] 0 times"),
        ("test-transformers-between test-megatron-in-ci", "unit", "CI does not run make test-transformers-between"),
        ("test-transformers-between test-megatron-in-ci", "unit", "CI runs tests with the marks ['slow'] 2 times"),
        ("test-all: lint types", "test-all: lint", "CI does not run make types"),
        ("-m thorough", "", "no target runs tests with the mark thorough"),
        ('"faults_long or not faults_long"', '"slow"', "no target runs tests with the mark faults_long"),
    ],
)
def test_a_mistake_is_found(old: str, new: str, found: str) -> None:
    assert old in MAKEFILE + CI
    assert found in mistakes(MAKEFILE.replace(old, new), CI.replace(old, new))


def test_a_mark_that_is_held_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tests/conftest.py, without an expression that names it."""
    monkeypatch.setattr("tests.test_make_targets.MARKS_OF_OTHER_TARGETS", (*MARKS_OF_OTHER_TARGETS, "slow"))
    assert "CI runs tests with the marks ['slow'] 0 times" in mistakes()


def test_make_test_leaves_out_further_whole_runs_alone() -> None:
    (expression,) = (found for name in with_needs(MAKEFILE, "test") for found in expressions(MAKEFILE, name))
    for marks in COMBINATIONS:
        assert runs(expression, marks) == (not marks & {*LEFT_OUT_BY_CI, "whole_runs"})


def test_the_targets_that_pages_name_exist() -> None:
    known = targets(MAKEFILE)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {name for page in pages for name in re.findall(r"(?<![\w-])`?make ([a-z0-9-]+)`", page.read_text())}
    assert len(named) > 10
    assert named <= known.keys()
