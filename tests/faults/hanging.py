"""What users write and runs hang or are killed in; each says so first."""

from __future__ import annotations

import asyncio
import threading
from typing import Any


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
