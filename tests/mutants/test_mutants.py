"""The list of mutants follows the code: every change still applies, and every test it names is there."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutants.run import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_applies_and_names_a_test(mutant: Mutant) -> None:
    changed = mutant.applied_to((ROOT / mutant.path).read_text())
    ast.parse(changed)  # a syntax error is noticed by every test
    assert mutant.new != mutant.old
    path, _, name = mutant.test.partition("::")
    assert name.partition("[")[0] in names_in(path)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len(MUTANTS) >= 25


def test_a_mutant_that_does_not_apply_is_an_error() -> None:
    mutant = Mutant("gone", "routes/trace.py", "no such text", "", "")
    with pytest.raises(ValueError, match="0 times instead of once"):
        mutant.applied_to((ROOT / mutant.path).read_text())
