"""Generated reasoning problems with worked steps: arithmetic, small programs, word problems.

    12+7-5+30=        12+7=19;19-5=14;14+30=44;#44
    a=7;b=4;3*(a+b;b+2)?a     a=11,b=6;a=17,b=8;a=25,b=10;#25
    sam has 12. gets 9. loses 4. doubles it.      12+9=21;21-4=17;17*2=34;#34

The reward looks at the number after the last `#` alone. One token is one character.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_replay.demo.model import END, PAD, UNKNOWN, character_tokenizer
from moe_replay.utils.misc import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=;:,.?#() "
TOKENS = (PAD, END, UNKNOWN, *CHARACTERS)
VOCABULARY = 64
HELD_OUT_EVERY = 16
NAMES = ("sam", "ann", "leo", "mia", "tom", "eva")
LARGEST = 999


class Problem(NamedTuple):
    """A question, the steps that answer it, and the answer."""

    prompt: str
    steps: tuple[str, ...]
    solution: str

    @property
    def worked(self) -> str:
        """What the model learns to write."""
        return "".join(f"{step};" for step in self.steps) + f"#{self.solution}"

    @property
    def length(self) -> int:
        """Tokens of the prompt, the working, the answer and the end."""
        return len(self.prompt) + len(self.worked) + 1

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept for evaluation: decided by the text, so that no two parts of the data share one."""
        return sum(place * ord(letter) for place, letter in enumerate(self.prompt, 1)) % HELD_OUT_EVERY == 0

    def row(self) -> dict[str, str]:
        """As a row of a data set."""
        return {"prompt": self.prompt, "solution": self.solution}


def arithmetic(random: Random, steps: int) -> Problem:
    """Additions and subtractions from left to right."""
    total = random.randint(1, 99)
    text, worked = str(total), []
    for _ in range(steps):
        term, sign = random.randint(1, 99), random.choice("+-")
        if sign == "-" and term > total:
            sign = "+"
        after = total + term if sign == "+" else total - term
        text += f"{sign}{term}"
        worked.append(f"{total}{sign}{term}={after}")
        total = after
    return Problem(f"{text}=", tuple(worked), str(total))


def program(random: Random, steps: int) -> Problem:
    """A loop over two variables, whose values are written down after each turn."""
    a, b, more = random.randint(1, 50), random.randint(1, 20), random.randint(1, 9)
    text = f"a={a};b={b};{steps}*(a+b;b+{more})?a"
    worked = []
    for _ in range(steps):
        a, b = a + b, b + more
        worked.append(f"a={a},b={b}")
    return Problem(text, tuple(worked), str(a))


def story(random: Random, steps: int) -> Problem:
    """What somebody has after some events."""
    total = random.randint(5, 50)
    text, worked = f"{random.choice(NAMES)} has {total}.", []
    for _ in range(steps):
        term, event = random.randint(2, 40), random.choice(("gets", "loses", "doubles"))
        if (event == "loses" and term > total) or (event == "doubles" and 2 * total > LARGEST):
            event = "gets"
        if event == "doubles":
            text, change, after = f"{text} doubles it.", "*2", 2 * total
        else:
            sign = "+" if event == "gets" else "-"
            text, change = f"{text} {event} {term}.", f"{sign}{term}"
            after = total + term if event == "gets" else total - term
        worked.append(f"{total}{change}={after}")
        total = after
    return Problem(text, tuple(worked), str(total))


KINDS = (arithmetic, program, story)


def problems(
    random: Random, steps: tuple[int, int], *, held_out: bool, kinds: Sequence[Callable[[Random, int], Problem]] = KINDS
) -> Iterator[Problem]:
    """Yield problems without end, of `steps[0]` to `steps[1]` steps; held-out ones only, or none of them."""
    while True:
        problem = random.choice(kinds)(random, random.randint(*steps))
        if problem.is_held_out == held_out:
            yield problem


def rows(count: int, lessons: Iterator[Problem]) -> list[dict[str, str]]:
    """Return that many different problems as rows of a data set."""
    different: dict[str, Problem] = {}
    for problem in lessons:
        different[problem.prompt] = problem
        if len(different) == count:
            break
    return [problem.row() for problem in different.values()]


def exact(prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the number after the last # is the solution, else 0."""
    answers = [text_of(completion).rpartition("#") for completion in completions]
    return [float(bool(mark) and text == truth) for (_, mark, text), truth in zip(answers, solution, strict=True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; `save_pretrained` writes it beside a model."""
    return character_tokenizer(TOKENS, pad=PAD, end=END, unknown=UNKNOWN)
