"""vLLM's processes: in their own process group, out of reach of Ctrl-C, and ended with the process they serve.

vLLM starts the engine core and its workers. A spawned core imports this module for its executor, before it waits for
the process that started it; in a forked core the executor is the first of our code to run. In the workers it is the
extension (worker.py).
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from moe_replay.engines.vllm.console import mute_known_warnings, note_failures
from moe_replay.engines.vllm.release import on_cpu
from moe_replay.errors import EngineError
from moe_replay.utils.processes import OrphanReaper, end_with_parent, leave_process_group
from moe_replay.utils.signals import SIGNALS


class OwnGroupUniProcExecutor(UniProcExecutor):
    """One worker, in the process of the engine core."""

    def _init_executor(self) -> None:
        note_failures()
        _detach()
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        with _temporary_files_in_folder():
            return super()._distributed_args()


class OwnGroupMultiprocExecutor(MultiprocExecutor):
    """Workers in separate processes, started by the engine core."""

    def _init_executor(self) -> None:
        note_failures()
        _detach()
        with _temporary_files_in_folder():
            super()._init_executor()


# A process that has counted its GPUs but not used them cannot be forked, and vLLM forks it nevertheless.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_PARENT = "MOE_REPLAY_ENGINE_PARENT"
_FOLDER = "MOE_REPLAY_ENGINE_FOLDER"
_MARK = "MOE_REPLAY_ENGINE_MARK"
_VARIANTS: dict[Any, Any] = {UniProcExecutor: OwnGroupUniProcExecutor, MultiprocExecutor: OwnGroupMultiprocExecutor}


def start_llm(arguments: Any, folder: Path, is_interrupted: threading.Event) -> tuple[Any, Callable[[], None]]:
    """Start vLLM from its engine arguments; return it, and a function to call before its shutdown.

    Executors other than the two above (Ray) are used as they are.

    folder           for its sockets and the store of its workers (`vllm_dist_*`), which vLLM leaves behind
    is_interrupted   no process is started once it is set: vLLM would wait for its end when this one ends
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    mute_known_warnings()
    if not on_cpu():
        os.environ.setdefault(_START_METHOD, "spawn")
    # vLLM's batch sizes for offline use: 8 times the sequences of ENGINE_CONTEXT on a GPU of 80 GB.
    config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    executor = Executor.get_class(config)
    if is_interrupted.is_set():
        raise EngineError("the start of vLLM was interrupted")
    with ExitStack() as undo:
        if config.parallel_config.data_parallel_size > 1:
            undo.enter_context(_guarded())
        with _prepared(folder):
            llm: Any = AsyncLLM(
                vllm_config=config,
                executor_class=_VARIANTS.get(executor, executor),
                log_requests=arguments.enable_log_requests,
                log_stats=not arguments.disable_log_stats,
                usage_context=UsageContext.ENGINE_CONTEXT,
            )
        coordinator = getattr(llm.engine_core.resources, "coordinator", None)
        if coordinator is not None:
            undo.callback(coordinator.proc.kill)  # it started with signals blocked, so vLLM would wait for its end
        return llm, undo.pop_all().close


@contextmanager
def _guarded() -> Iterator[None]:
    """Have vLLM's coordinator of replicas end with this process: it runs none of our code."""
    mark = secrets.token_hex(8)
    guard = OrphanReaper(f"{_MARK}={mark}")
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(_MARK, None)
        guard.close()


@contextmanager
def _prepared(folder: Path) -> Iterator[None]:
    """Tell processes that this thread starts their parent, and have them start with signals blocked until `_detach`."""
    resource_tracker.ensure_running()  # it would unblock them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ[_PARENT], os.environ[_FOLDER] = str(os.getpid()), str(folder)
    by_user = os.environ.setdefault(_SOCKETS, str(folder)) != str(folder)
    try:
        yield
    finally:
        for name in (_PARENT, _FOLDER):
            os.environ.pop(name, None)
        if not by_user:
            os.environ.pop(_SOCKETS, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _temporary_files_in_folder() -> Iterator[None]:
    """Make temporary files of this process in the folder of `start_llm`; those of processes that it forks are not."""
    before = tempfile.tempdir

    def restore() -> None:
        tempfile.tempdir = before

    os.register_at_fork(after_in_child=restore)
    tempfile.tempdir = os.environ.get(_FOLDER, before)
    try:
        yield
    finally:
        restore()


def _end_with_announced_parent() -> None:
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and int(parent) != os.getpid():
        leave_process_group()
        end_with_parent(int(parent))


def _detach() -> None:
    """Detach the engine core from the process that started it, but let it end with it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # vLLM runs in the process itself
    os.environ.pop(_PARENT, None)  # after a fork: the workers have another one
    signal.set_wakeup_fd(-1)  # after a fork it is the parent's
    leave_process_group()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # drops signals that arrived in between
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
        signal.signal(signum, signal.default_int_handler if signum is signal.SIGINT else signal.SIG_DFL)
    if parent.pid is not None:
        end_with_parent(parent.pid)


_end_with_announced_parent()  # where vLLM has spawned the process that imports this
mute_known_warnings()
note_failures()
