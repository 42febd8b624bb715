"""Reward functions that tests run in processes; importing them needs neither torch nor pytest."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

COLUMN = {
    "bytes": b"\0\xff",
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "number": np.float32(0.1).item(),
    "when": [date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 6), timedelta(1, 2, 3)],
    "decimal": Decimal("0.10"),
    "text": "\ud800\n\0",
    "none": None,
}


HANGING_FOLDER = "MOE_REPLAY_TEST_HANGING"
"""Variable with a folder in which a process that is about to hang leaves a file with its number."""


def say_that_it_hangs() -> None:
    if folder := os.environ.get(HANGING_FOLDER):
        Path(folder, str(os.getpid())).touch()


def backtrack(text: str) -> None:
    """Hang in C code if a text has b after many a."""
    if text.endswith("ab"):
        say_that_it_hangs()
    re.match("(a+)+$", text)


def lengths(completions: list[str], level: list[int] | None = None, **_: Any) -> list[float | None]:
    """The length of a completion; None for an empty one."""
    return [float(len(text)) or None for text in completions]


def ranks(completions: list[str], **_: Any) -> list[float]:
    """The rank of a completion in its group, by length; hangs as `backtrack` does."""
    order = sorted(range(len(completions)), key=lambda place: len(completions[place]))
    for text in completions:
        backtrack(text)
    return [float(order.index(place)) for place in range(len(completions))]


async def waiting(completions: list[str], **_: Any) -> list[float]:
    """A coroutine function, as those that call a server."""
    await asyncio.sleep(0)
    return [1.0 for _ in completions]


def together_only(completions: list[str], **_: Any) -> list[float]:
    """Needs the whole group, with which it hangs."""
    if len(completions) == 1:
        raise IndexError("a single completion")
    say_that_it_hangs()
    threading.Event().wait()
    return []


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """verl's signature; hangs as `backtrack` does."""
    backtrack(solution_str)
    return float(solution_str == ground_truth)


def kinds(completions: list[str], completion_ids: list[list[int]], column: list[Any], **_: Any) -> list[float]:
    """Whether a column and the token ids are what they were."""
    return [
        float(repr(value) == repr(COLUMN) and ids == [7, 8]) for value, ids in zip(column, completion_ids, strict=True)
    ]


def process_ids(completions: list[str], **_: Any) -> list[float]:
    """The process that scores."""
    return [float(os.getpid()) for _ in completions]


def closing_descriptors(completions: list, **_: Any) -> list[float]:
    os.closerange(3, 4096)
    return [1.0 for _ in completions]


class Odd(BaseException):
    """What nobody catches."""


def ending(completions: list[str], **_: Any) -> list[float]:
    """Ends as the completion says."""
    kind = completions[0]
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), 9)
    if kind == "child":
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        threading.Event().wait()
    if kind == "many":
        return [1.0, 2.0, 3.0]
    raise {
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "CancelledError": asyncio.CancelledError(),
        "GeneratorExit": GeneratorExit(),
        "Odd": Odd("odd"),
        "KeyError": KeyError("ground truth"),
    }[kind]
