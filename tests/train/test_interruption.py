from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from moe_replay.train.output.interruption import InterruptHandler
from tests.distributed.harness import run_ranks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), InterruptHandler() as interruption:
        assert not interruption.stop_requested()
        os.kill(os.getpid(), number)
        assert interruption.stop_requested()
        assert interruption.stop_requested()
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was only noted")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_afterwards_a_signal_is_what_it_was() -> None:
    with InterruptHandler():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)


def test_in_another_thread_it_does_nothing() -> None:
    asked = []

    def work() -> None:
        with InterruptHandler() as interruption:
            asked.append(interruption.stop_requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]


def one_rank_is_interrupted() -> list[bool]:
    with InterruptHandler() as interruption:
        before = interruption.stop_requested()
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return [before, interruption.stop_requested()]


@pytest.mark.distributed
def test_all_ranks_stop_at_the_same_step() -> None:
    assert run_ranks(2, one_rank_is_interrupted) == [[False, True], [False, True]]
