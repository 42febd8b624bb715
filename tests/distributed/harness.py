"""Runs one function on several ranks: processes that talk to each other over gloo.

    results = run_ranks(2, on_rank, "qwen3_moe", 3)     # on_rank("qwen3_moe", 3) on ranks 0 and 1

Ranks are forked from a server process that has imported torch, Transformers and the trainer and done nothing else, so
that a rank starts in a moment and no thread is ever forked. What goes in is plain Python (traces as bytes, as they
travel between machines); what comes back is plain Python and tensors.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bfloat16 import fast_bfloat16

TIMEOUT = 600.0  # seconds, for a busy machine; a rank that is not done by then tells where it stands, and dies
FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")
PRELOADED = [
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    "torch.distributed.fsdp",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
    "numpy.ma",
    "pytest",
    "safetensors.numpy",
    "moe_replay.cli.main",
    "moe_replay.demo",
    "moe_replay.replay.adapters.transformers",
    "moe_replay.engines.server.serve",
    "moe_replay.engines.server.app",
    "moe_replay.engines.transformers",
    "moe_replay.train.backends.fsdp",
    "moe_replay.train.config.command_line",
    "moe_replay.train.config.file",
    "moe_replay.train.loop",
    "moe_replay.train.learn.losses",
    "moe_replay.train.output.sinks",
]


class RankError(AssertionError):
    """A rank failed; the message is what it wrote."""


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """`function(*args)` on each of `size` ranks, with the default process group made: what each returned."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks = [_server().Process(target=_on_rank, args=(r, size, name, timeout, function, args)) for r in range(size)]
        try:
            for process in ranks:
                process.start()
            _wait_for_all(ranks, folder, time.monotonic() + timeout + 10)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [torch.load(folder / f"{rank}.result", weights_only=True) for rank in range(size)]


def _server() -> ForkServerContext:
    return fork_server()


@functools.cache
def fork_server() -> ForkServerContext:
    """The server that processes of tests are forked from; one for all, started with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    return context


def preloaded(*more: str) -> list[str]:
    """What a server imports before it forks."""
    return [*dict.fromkeys([*PRELOADED, *more]), "tests.distributed.frozen"]


def _wait_for_all(ranks: list[ForkServerProcess], folder: Path, deadline: float) -> None:
    """Raise at the first rank that fails: what the others say then is only that it is gone."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RankError(f"ranks {sorted(running.values())} do not end\n{_logs(folder, list(running.values()))}")
        failed = [running[sentinel] for sentinel in ended if ranks[running[sentinel]].exitcode != 0]
        if failed:
            raise RankError(_logs(folder, failed))
        for sentinel in ended:
            del running[sentinel]


def _logs(folder: Path, ranks: list[int]) -> str:
    logs = {rank: folder / f"{rank}.log" for rank in ranks}
    texts = {rank: path.read_text() if path.exists() else "" for rank, path in logs.items()}
    return "\n".join(f"---- rank {rank} ----\n{text or 'wrote nothing'}" for rank, text in texts.items())


def _on_rank(rank: int, size: int, folder: str, timeout: float, function: Callable[..., Any], args: tuple) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(timeout, exit=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    with fast_bfloat16():
        result = function(*args)
    torch.save(result, f"{folder}/{rank}.result")
    dist.barrier()  # nobody leaves while another may still talk to it
    dist.destroy_process_group()
