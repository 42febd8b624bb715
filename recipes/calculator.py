"""The tool of qwen3-30b-a3b-tools.toml."""

from __future__ import annotations

from fractions import Fraction


def calculate(left: str, sign: str, right: str) -> str:
    """Compute with two numbers, exactly.

    Args:
        left: The first number, such as 17, 0.25 or 3/4.
        sign: One of + - * /.
        right: The second number.
    """
    first, second = Fraction(left), Fraction(right)
    if sign == "/":
        return str(first / second) if second else "division by zero"
    return str({"+": first + second, "-": first - second, "*": first * second}[sign])
