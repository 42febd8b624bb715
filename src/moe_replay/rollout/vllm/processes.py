"""vLLM's processes: in their own group, so that Ctrl-C does not reach them, and ended with the process they serve.

The engine core and its workers are started by vLLM. A core that is spawned imports this module for its executor, before
it waits for the process that started it; one that is forked first runs ours in the executor. In the workers that is the
extension (worker.py).
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from moe_replay.rollout.vllm.arguments import on_cpu
from moe_replay.rollout.vllm.console import leave_out_what_means_nothing, note_failures
from moe_replay.utils.processes import KilledWithThis, end_with_parent, leave_process_group
from moe_replay.utils.signals import SIGNALS


class OwnGroupUniProcExecutor(UniProcExecutor):
    """One worker, in the process of the engine core."""

    def _init_executor(self) -> None:
        note_failures()
        _detach()
        super()._init_executor()


class OwnGroupMultiprocExecutor(MultiprocExecutor):
    """Workers in separate processes, started by the engine core."""

    def _init_executor(self) -> None:
        note_failures()
        _detach()
        super()._init_executor()


# A process that has counted its GPUs, but not used them, cannot be forked: vLLM forks it all the same.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_PARENT = "MOE_REPLAY_ENGINE_PARENT"
_MARK = "MOE_REPLAY_ENGINE_MARK"
_VARIANTS: dict[Any, Any] = {
    UniProcExecutor: OwnGroupUniProcExecutor,
    MultiprocExecutor: OwnGroupMultiprocExecutor,
}


def start_llm(arguments: Any) -> tuple[Any, Callable[[], None]]:
    """Start vLLM from its engine arguments. Executors other than the two above (Ray) are used as they are.

    Also return what is called before it is closed.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    leave_out_what_means_nothing()
    if not on_cpu():
        os.environ.setdefault(_START_METHOD, "spawn")
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    executor = Executor.get_class(config)
    with ExitStack() as undo:
        if config.parallel_config.data_parallel_size > 1:
            undo.enter_context(_guarded())
        with _prepared():
            llm: Any = AsyncLLM(
                vllm_config=config,
                executor_class=_VARIANTS.get(executor, executor),
                log_requests=arguments.enable_log_requests,
                log_stats=not arguments.disable_log_stats,
                usage_context=UsageContext.ENGINE_CONTEXT,
            )
        coordinator = getattr(llm.engine_core.resources, "coordinator", None)
        if coordinator is not None:
            undo.callback(coordinator.proc.kill)  # it began with signals blocked, and would let vLLM wait for its end
        return llm, undo.pop_all().close


@contextmanager
def _guarded() -> Iterator[None]:
    """Have vLLM's process between replicas end with this one: it runs nothing of ours that could see to it."""
    mark = secrets.token_hex(8)
    guard = KilledWithThis(f"{_MARK}={mark}")
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(_MARK, None)
        guard.close()


@contextmanager
def _prepared() -> Iterator[None]:
    """Let processes that this thread starts know their parent, and begin with the signals blocked until `_detach`."""
    resource_tracker.ensure_running()  # it would unblock them
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_PARENT, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _end_with_announced_parent() -> None:
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and int(parent) != os.getpid():
        leave_process_group()
        end_with_parent(int(parent))


def _detach() -> None:
    """Separate the engine core from the process that started it, except for its end."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # vLLM runs in the process itself
    os.environ.pop(_PARENT, None)  # after a fork: the workers have another one
    signal.set_wakeup_fd(-1)  # after a fork it is the parent's
    leave_process_group()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops those that came in meanwhile
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    if parent.pid is not None:
        end_with_parent(parent.pid)


_end_with_announced_parent()  # where vLLM has spawned the process that imports this
leave_out_what_means_nothing()
note_failures()
