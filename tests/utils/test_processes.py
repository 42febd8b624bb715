"""The timer that ends a process in which a user's function hangs."""

from __future__ import annotations

import faulthandler
from typing import Any

import pytest

from moe_replay.utils.processes import HANG_GRACE_S, HangWatch


def test_the_timer_is_not_shortened_by_a_second_wait_that_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one may take its whole time, long after the second has ended."""
    timers: list[float | None] = []

    def start(seconds: float, **_: Any) -> None:
        timers.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", start)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    watch = HangWatch()
    with watch.waiting(3600.0):
        with watch.waiting(60.0):
            pass
        assert timers[0] == 3600.0 + HANG_GRACE_S
        assert timers[1] == pytest.approx(3600.0 + HANG_GRACE_S, abs=60.0)
        assert None not in timers
    with watch.waiting(60.0):
        assert timers[2:] == [None, 60.0 + HANG_GRACE_S]
