"""Ctrl-C and SIGTERM: the step is finished and saved first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While open, the first signal is only noted, for the loop to ask after each step; the second one interrupts.

    with Interruption() as interruption:
        for step in ...:
            ...
            if interruption.asked(device):      # alike on all ranks
                break
    """

    def __init__(self) -> None:
        self._noted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread do this
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True

    def asked(self, device: torch.device) -> bool:
        """Whether any rank got a signal. All ranks call it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._noted
        noted = torch.tensor([int(self._noted)], device=device)
        dist.all_reduce(noted, dist.ReduceOp.MAX)
        return bool(noted)
