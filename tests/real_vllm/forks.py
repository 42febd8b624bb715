"""vLLM's processes as forks of the process that starts them: on CPU it spawns them, elsewhere it forks by default.

What is spawned imports for ten seconds of CPU what the process that starts it has imported already. Where the real
command is tested, vLLM spawns: tests/real_vllm/test_serve.py; tests/faults/test_vllm_processes.py in `make test-long`.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context
from pathlib import Path
from unittest.mock import patch

from torch.distributed import distributed_c10d

NEEDED = ("vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3_moe")


class EngineProcess(context.ForkProcess):
    """A process of vLLM, which forms a process group of its own, whatever the one that started it belongs to."""

    def run(self) -> None:
        Path("/proc/self/comm").write_text(self.name)
        gc.freeze()  # a collection would copy every page of inherited objects
        distributed_c10d._update_default_pg(None)
        super().run()


class _Forking(context.ForkContext):
    Process = EngineProcess


@contextmanager
def forked_engines() -> Iterator[None]:
    """Fork what would be spawned."""
    for name in NEEDED:
        importlib.import_module(name)
    with patch.dict(context._concrete_contexts, spawn=_Forking()):  # type: ignore[attr-defined]
        yield
