"""Code beside the recipes."""

from __future__ import annotations

import pytest

from recipes.calculator import calculate


@pytest.mark.parametrize(
    ("left", "sign", "right", "result"),
    [
        ("17", "*", "23", "391"),
        ("1", "/", "4", "1/4"),
        ("0.5", "-", "3/4", "-1/4"),
        ("1", "/", "0", "division by zero"),
    ],
)
def test_the_calculator(left: str, sign: str, right: str, result: str) -> None:
    assert calculate(left, sign, right) == result
