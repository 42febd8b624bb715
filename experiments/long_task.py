"""Generated programs whose working takes a thousand tokens, and the tokenizer that is trained on them.

    kavo=412 mirel=17; 84 times: kavo=(kavo+mirel)%1000 mirel=(mirel+9)%100; kavo?
    84 kavo=429 mirel=26;83 kavo=455 mirel=35;...;#880

Rewards, held-out problems and rows of data sets are those of `task.py`. Names are drawn from two thousand made-up
words, so that a vocabulary of thousands is really used; a digit is a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, product
from random import Random
from typing import TYPE_CHECKING

from experiments.task import Problem, problems
from moe_replay.demo.model import END, PAD, UNKNOWN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
WORDS = Random(0).sample(["".join(pair) for pair in product(SYLLABLES, SYLLABLES)], 2048)
EVENTS = ("gains", "loses", "doubles")
READ_BY_TOKENIZER = 10_000
"""Problems of a few steps each."""


def counters(random: Random, steps: int) -> Problem:
    """Two counters, of which one is added to the other."""
    first, second = random.sample(WORDS, 2)
    a, b, more = random.randint(1, 999), random.randint(1, 99), random.randint(1, 20)
    text = f"{first}={a} {second}={b}; {steps} times: {first}=({first}+{second})%1000 {second}=({second}+{more})%100"
    worked = []
    for left in range(steps, 0, -1):
        a, b = (a + b) % 1000, (b + more) % 100
        worked.append(f"{left} {first}={a} {second}={b}")
    return Problem(f"{text}; {first}?", tuple(worked), str(a))


def branches(random: Random, steps: int) -> Problem:
    """A number that is halved when even, and otherwise changed by a rule."""
    name, a = random.choice(WORDS), random.randint(1, 999)
    factor, more = random.choice((3, 5, 7)), random.randrange(1, 40, 2)
    text = f"{name}={a}; {steps} times: if {name} is even {name}={name}/2 else {name}=({name}*{factor}+{more})%1000"
    worked = []
    for left in range(steps, 0, -1):
        before, a = a, a // 2 if a % 2 == 0 else (a * factor + more) % 1000
        worked.append(f"{left} {name}={before} {'even' if before % 2 == 0 else 'odd'} {name}={a}")
    return Problem(f"{text}; {name}?", tuple(worked), str(a))


def rounds(random: Random, steps: int) -> Problem:
    """Events that take turns, on a stock of something."""
    owner, goods = random.sample(WORDS, 2)
    total = start = random.randint(1, 999)
    events = [(random.choice(EVENTS), random.randint(2, 99)) for _ in range(random.randint(2, 4))]
    told = " then ".join(event if event == "doubles" else f"{event} {count}" for event, count in events)
    worked = []
    for left, (event, count) in zip(range(steps, 0, -1), cycle(events), strict=False):
        change = {"gains": total + count, "loses": total - count, "doubles": 2 * total}[event]
        worked.append(f"{left} {owner} {event} {total} {goods} {change % 1000}")
        total = change % 1000
    text = f"{owner} has {start} {goods}; one a day: {told}; after {steps} days?"
    return Problem(text, tuple(worked), str(total))


KINDS = (counters, branches, rounds)


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on problems of this file; `save_pretrained` writes it beside a model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def _texts() -> Iterator[str]:
    for problem in islice(problems(Random(0), (1, 8), held_out=False, kinds=KINDS), READ_BY_TOKENIZER):
        yield problem.prompt + problem.worked
