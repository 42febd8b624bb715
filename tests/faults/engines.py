"""An engine with a process of its own, which `close` ends: what is left of it when nobody calls `close`?"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from moe_replay.engines.base import Engine
from moe_replay.errors import EngineName
from moe_replay.routes.topology import MoeLayer, MoeTopology


class WithProcess(Engine):
    """Only starts and stops."""

    name = EngineName("an engine", "1")
    topology = MoeTopology(1, (MoeLayer(0, 4, 2),), "none")
    weight_version, weights_id = 0, ""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])
        print(f"engine {self._process.pid}", flush=True)

    def healthy(self) -> bool:
        return self._process.poll() is None

    def abort(self) -> None:
        print("aborted", flush=True)

    def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
        raise NotImplementedError

    def generate(self, prompts: Any, params: Any) -> Any:
        raise NotImplementedError

    prompt_logprobs = generate

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def start(request: Any) -> WithProcess:
    """Start it."""
    return WithProcess()
