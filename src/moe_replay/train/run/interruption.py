"""Ctrl-C and SIGTERM: finish and save the current step first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptHandler:
    """While open, the first signal only sets a flag that the loop checks after each step; the second one interrupts.

    with InterruptHandler() as interrupts:
        for step in ...:
            ...
            if interrupts.stop_requested(device):      # the same on all ranks
                break
    """

    def __init__(self) -> None:
        self._received = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():  # Python allows it in no other thread
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = True

    def stop_requested(self, device: torch.device) -> bool:
        """Return whether any rank has received a signal. All ranks call it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._received
        received = torch.tensor([int(self._received)], device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return bool(received)
