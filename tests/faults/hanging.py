"""What users write and runs hang or are killed in; each says so first."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

HELD_BY = "MOE_REPLAY_TEST_HELD_BY"


def reward(completions: list[str], **_: Any) -> list[float]:
    """Never returns."""
    print("hanging", flush=True)
    threading.Event().wait()
    return [0.0 for _ in completions]


async def environment(episode: Any) -> None:
    """Never returns."""
    print("hanging", flush=True)
    await asyncio.Event().wait()


def announced(completions: list[str], **_: Any) -> list[float]:
    """Says that a step is being sampled."""
    print("rewarding", flush=True)
    return [float(len(completion)) for completion in completions]


def held(completions: list[str], **_: Any) -> list[float]:
    """Waits while there is the file that the variable `HELD_BY` names, and says so."""
    file = Path(os.environ[HELD_BY])
    if file.exists():
        print("held", flush=True)
    while file.exists():
        time.sleep(0.01)
    return [float(len(completion)) for completion in completions]
