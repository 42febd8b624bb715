"""A calculator that the model calls by `<tool>17 * 23</tool>`: the environment of qwen3-30b-a3b-tools.toml."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_replay.train.episode import Episode

CALL = re.compile(r"<tool>\s*(-?\d+)\s*([-+*/])\s*(-?\d+)\s*</tool>\s*$")
ANSWER = "\n<|im_start|>user\n<result>{}</result><|im_end|>\n<|im_start|>assistant\n"
"""A user's message as the chat template of Qwen3 writes it."""


async def calculator(episode: Episode) -> None:
    """Answer calls for as long as the model makes them and turns are left."""
    while episode.can_continue and (call := CALL.search(episode.completion)):
        episode.observe(ANSWER.format(compute(*call.groups())))
        await episode.generate()


def compute(left: str, sign: str, right: str) -> str:
    """Return the exact result as text; a division by zero is said so."""
    first, second = Fraction(left), Fraction(right)
    if sign == "/":
        return str(first / second) if second else "division by zero"
    return str({"+": first + second, "-": first - second, "*": first * second}[sign])
