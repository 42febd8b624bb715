"""Timers of a worker's steps, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.parts.step_timers import StepTimers, TimedSteps


class Steps:
    """The part of vLLM's worker that is timed."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(device=torch.device("cpu"))

    def execute_model(self, scheduler_output: Any) -> Any:
        return scheduler_output.answer


class Worker(TimedSteps, Steps):
    """A worker of vLLM with timers."""


def step(answer: str, preempted: set[str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        answer=answer,
        preempted_req_ids=preempted,
        total_num_scheduled_tokens=7,
        scheduled_spec_decode_tokens={"a": [5, 6], "b": [9]},
    )


def test_steps_are_timed_while_it_is_switched_on() -> None:
    worker = Worker()
    assert worker.execute_model(step("before")) == "before"
    assert worker.replay_profile(True) == {}
    assert [worker.execute_model(step(name, {"a", "b"})) for name in "xy"] == ["x", "y"]
    with worker.replay_timed("store"):
        pass
    found = worker.replay_profile(False)
    assert (found["steps"], found["preempted"], found["tokens"], found["drafts"]) == (2, 4, 14, 6)
    assert found["whole_host_ms"] >= found["forward_host_ms"] > 0
    assert found["store_host_ms"] > 0
    worker.execute_model(step("after"))
    assert worker.replay_profile(True) == {}  # nothing was measured in between


def test_a_profile_starts_from_nothing() -> None:
    worker = Worker()
    worker.replay_profile(True)
    worker.execute_model(step("x"))
    assert worker.replay_profile(True)["steps"] == 1
    assert worker.replay_profile(False).keys() == {"steps", "whole_host_ms"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_of_the_device_is_timed_by_events() -> None:
    timers = StepTimers(torch.device("cuda"))
    with timers.part("copy"):
        torch.zeros(2**20, device="cuda").copy_(torch.ones(2**20, device="cuda"))
    assert timers.report()["copy_device_ms"] > 0
