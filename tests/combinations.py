"""Combinations of settings: those that show nothing of their own beside the others are left to other make targets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, those in `thorough` left to `make test-long`; each must be a case.

    A case of several parameters is a tuple.
    """
    return _with_mark(cases, thorough, pytest.mark.thorough)


def with_whole_runs(cases: Iterable[Any], whole_runs: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, those in `whole_runs` left to `make test-all`; each must be a case.

    The cases may have marks already: `with_whole_runs(with_thorough(...), ...)`.
    """
    return _with_mark(cases, whole_runs, pytest.mark.whole_runs)


def _with_mark(cases: Iterable[Any], marked: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    cases, marked = list(cases), list(marked)  # of what need not have a hash
    unknown = [case for case in marked if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=mark) if case in marked else case
        for case in cases
    ]
