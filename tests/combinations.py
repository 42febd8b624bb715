"""Combinations of settings: those that show nothing of their own beside the others are left to `make test-long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, those in `thorough` marked so; each of them must be a case.

    A case of several parameters is a tuple.
    """
    cases = list(cases)
    unknown = [case for case in thorough if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.thorough)
        if case in thorough
        else case
        for case in cases
    ]
