"""A real SGLang server on CPU, for as long as it is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.ports import reserved_port

STUBS = Path(__file__).parent / "stubs"
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--skip-server-warmup", "--skip-tokenizer-init"),
    *("--max-total-tokens", "4096", "--context-length", "4000"),
    *("--mem-fraction-static", "0.3", "--log-level", "warning"),
)


@contextmanager
def sglang_server(model: Path, *options: str, returns_routes: bool = True, log: Path | None = None) -> Iterator[str]:
    """The address of the server.

    log   file for what it prints; default: where the test prints
    """
    with reserved_port() as port:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *OPTIONS, *options]
        command += ["--enable-return-routed-experts"] if returns_routes else []
        path = os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        settings |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # more ranks than NUMA nodes; the stub binds no threads
        with ExitStack() as files:
            printed = files.enter_context(log.open("w")) if log else None
            server = subprocess.Popen(
                command, env=os.environ | settings, start_new_session=True, stdout=printed, stderr=printed
            )
        try:
            url = f"http://127.0.0.1:{port}"
            while server.poll() is None and not answers(url):
                time.sleep(0.5)
            if server.poll() is not None:
                raise RuntimeError(f"SGLang ended with code {server.returncode} before it served")
            yield url
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)  # on SIGTERM it looks for the reasons of a crash, for seconds
            server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).is_success
    except httpx.TransportError:
        return False
