"""How vLLM starts the process of its engine core."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from moe_replay.engines.vllm import processes
from moe_replay.errors import EngineError

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class StartedError(Exception):
    """vLLM would be started now."""


@pytest.mark.parametrize(
    ("on_cpu", "chosen", "used"), [(False, None, "spawn"), (False, "fork", "fork"), (True, None, None)]
)
def test_a_process_that_may_have_counted_its_gpus_is_not_forked(
    on_cpu: bool, chosen: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METHOD, chosen or "")
    if chosen is None:
        monkeypatch.delenv(METHOD)
    monkeypatch.setattr(processes, "on_cpu", lambda: on_cpu)

    def start(usage: object) -> None:
        assert os.environ.get(METHOD) == used
        raise StartedError

    with pytest.raises(StartedError):
        processes.start_llm(SimpleNamespace(create_engine_config=start), Path("unused"), threading.Event())


def test_an_interrupted_start_begins_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while vLLM reads its settings, which takes seconds: a core would be waited for when this process ends."""
    from vllm.v1.executor.abstract import Executor

    is_interrupted = threading.Event()
    monkeypatch.setattr(Executor, "get_class", lambda config: is_interrupted.set())
    arguments = SimpleNamespace(create_engine_config=lambda usage: SimpleNamespace())
    with pytest.raises(EngineError, match="interrupted"):
        processes.start_llm(arguments, Path("unused"), is_interrupted)
