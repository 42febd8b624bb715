"""vLLM's processes on the console: what they tell, and what they leave out; without vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_replay.engines.vllm.console import LEVEL, StartupProgress, engine_console, mute_known_warnings

KNOWN_WARNING = ("%s: Failed to load weights", "RotaryEmbedding")


class Records(logging.Handler):
    """Keeps what would be shown."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.shown: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.shown.append(record.getMessage())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.delenv(LEVEL, raising=False)
    handler, logger, factory = Records(), logging.getLogger("vllm"), logging.getLogRecordFactory()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logging.setLogRecordFactory(factory)


def say_all() -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.warning(*KNOWN_WARNING)
    logger.warning("the GPU is on fire")
    logger.error(*KNOWN_WARNING)


def test_warnings_that_mean_nothing_are_left_out(log: Records) -> None:
    with engine_console():
        assert os.environ[LEVEL] == "WARNING"
        mute_known_warnings()
        mute_known_warnings()
        say_all()
    assert LEVEL not in os.environ
    assert log.shown == ["the GPU is on fire", "RotaryEmbedding: Failed to load weights"]  # the error


class Wrapped:
    """Makes log records as vLLM 0.32 does."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        return self._factory(*arguments, **options)


def test_nothing_is_shown_again_after_vllm_has_configured_its_log(log: Records) -> None:
    with engine_console():
        mute_known_warnings()
    wrapper = Wrapped(logging.getLogRecordFactory())
    logging.setLogRecordFactory(wrapper)
    shown, logger = Records(), logging.getLogger("vllm")
    logger.handlers = [shown, *(one for one in logger.handlers if one is not log)]  # as dictConfig: a new handler
    with engine_console():
        mute_known_warnings()  # in a process that was forked meanwhile
    assert logging.getLogRecordFactory() is wrapper
    say_all()  # after the start
    logger.removeHandler(shown)
    assert shown.shown == ["the GPU is on fire", "RotaryEmbedding: Failed to load weights"]


def test_who_asks_for_vllms_log_gets_it(log: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    with engine_console():
        mute_known_warnings()
        say_all()
    assert os.environ[LEVEL] == "INFO"
    assert len(log.shown) == 3


class Phases:
    """The start of a worker of vLLM."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))

    def load_model(self, **options: Any) -> None:
        self.loaded = options

    def determine_available_memory(self) -> int:
        return 7

    def compile_or_warm_up_model(self) -> str:
        return "compiled"


class Worker(StartupProgress, Phases):
    """A worker that tells what it does."""


def start(worker: Worker) -> None:
    worker.load_model(load_dummy_weights=True)
    assert worker.loaded == {"load_dummy_weights": True}
    assert worker.determine_available_memory() == 7
    assert worker.compile_or_warm_up_model() == "compiled"


def test_a_start_tells_what_takes_its_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(LEVEL, raising=False)
    start(Worker(rank=0))
    assert capsys.readouterr().err == ""  # not one of ours
    with engine_console():
        start(Worker(rank=1))
        assert capsys.readouterr().err == ""
        start(Worker(rank=0))
    told = capsys.readouterr().err.splitlines()
    assert told[::2] == [
        "vLLM: loading weights",
        "vLLM: compiling and measuring memory",
        "vLLM: compiling and capturing CUDA graphs",
    ]
    assert all(": done in " in line for line in told[1::2])
