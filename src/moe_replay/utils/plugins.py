"""Names in a configuration that refer to code: built in, or `module:attribute` of the user's own.

A registry is a plain mapping from name to implementation, or to the `module:attribute` it is imported from when it is
used. Adding an implementation is one file and one line in its registry.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.utils.misc import one_line
from moe_replay.utils.processes import WATCH

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class PluginError(MoeReplayError):
    """A name that is neither built in nor importable."""


def resolve(name: str, known: Mapping[str, Any], *, kind: str, key: str, forms: str = "'module:name'") -> Any:
    """Return the implementation called `name`.

    known   the registry
    kind    what is looked for, for errors: "reward"
    key     the setting that holds the name, for errors: "reward.functions"
    forms   what is accepted besides names in the registry, for errors
    """
    implementation = known.get(name, name)
    if not isinstance(implementation, str):
        return implementation
    if name not in known and not is_path(name):
        near = difflib.get_close_matches(name, known, n=1)
        raise PluginError(
            f"unknown {kind} {name!r}",
            expected=f"{key}: {', '.join(sorted(known)) or 'nothing is built in'}, or {forms}",
            remedy=f"Did you mean {near[0]!r}?" if near else None,
        )
    return import_path(implementation, kind=kind, key=key)


def requires(*packages: str) -> Callable[[Function], Function]:
    """Mark a function that needs these packages, as the attribute `requires` of a class does."""

    def mark(function: Function) -> Function:
        vars(function)["requires"] = packages
        return function

    return mark


def required_packages(implementation: Any) -> tuple[str, ...]:
    """Return the packages, by the names they are imported under, that an implementation says it needs."""
    return tuple(getattr(implementation, "requires", ()))


def check_required(implementation: Any, user: str, extra: str) -> None:
    """Raise if a package that an implementation requires is not installed.

    user    what needs it, for the error: "log.wandb"
    extra   of moe-replay that installs it; empty: the package itself is named
    """
    for package in required_packages(implementation):
        if find_spec(package) is None:
            source = f"'moe-replay[{extra}]'" if extra else package
            raise MissingExtraError(f"{user} needs the package {package}", remedy=f"pip install {source}")


def is_path(name: str) -> bool:
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def import_path(path: str, *, kind: str, key: str) -> Any:
    """Import `module:attribute`; any error that the module raises while it is imported names it."""
    module, _, attribute = path.partition(":")
    problem, remedy = f"{kind} {path!r} cannot be loaded", "Correct the module, or install what it imports"
    with user_code(f"{problem}: {module}", PluginError, remedy=remedy):
        try:
            imported = importlib.import_module(module)
            if hasattr(imported, attribute):
                return getattr(imported, attribute)
            missing = f"module {module!r} has no attribute {attribute!r}"
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # of something that the module imports
                raise
            missing = one_line(error)
    raise PluginError(
        f"{problem}: {missing}",
        expected=f"{key} = 'module:name'",
        remedy="The module must be importable where training runs, e.g. a file in the working directory",
    )


@contextmanager
def user_code(name: str, error_type: type[MoeReplayError], **details: Any) -> Iterator[None]:
    """Name the function in what it raises: any exception but ours becomes an `error_type` with these details.

    `SystemExit`, `CancelledError` and other exceptions that are no `Exception` count too, unless they come from
    outside: Ctrl-C in the main thread, or the cancellation of the task that runs the function.

    name      kind and name of the function: "reward 'tests.rewards:exact'"
    details   `sample`, `found`, `remedy`, ... of the error
    """
    try:
        yield
    except MoeReplayError:
        raise
    except BaseException as error:
        if _comes_from_outside(error):
            raise
        raise error_type(f"{name} raised {type(error).__name__}: {one_line(error)}", **details) from error


def _comes_from_outside(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if not isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and (isinstance(error, GeneratorExit) or bool(task.cancelling()))


def awaited(result: Any) -> Any:
    """Return what a user's function has returned or, of a coroutine function, what that is awaited for."""

    async def wait_for_it() -> Any:
        return await result

    return asyncio.run(wait_for_it()) if inspect.isawaitable(result) else result


def call_user_code(
    function: Callable[[], T],
    limit_s: float,
    name: str,
    error_type: type[MoeReplayError],
    *,
    too_long: str,
    **details: Any,
) -> T:
    """Return what a user's function returns; raise if it raises, exits, or takes longer than `limit_s`.

    The function runs in a separate thread that does not keep the process alive: a thread cannot be ended, so one
    that never returns is left behind.

    too_long   the remedy for a function that takes too long; others are as in `user_code`
    """
    with WATCH.waiting(limit_s):  # from before the function can take the interpreter's lock
        future = start_user_code(function, name, error_type, **details)
        wait([future], timeout=None if limit_s == math.inf else min(limit_s, threading.TIMEOUT_MAX))
    if not future.done():
        raise error_type(f"{name} did not return within {limit_s:g} s", **{**details, "remedy": too_long})
    return future.result()


def start_user_code(
    function: Callable[[], T], name: str, error_type: type[MoeReplayError], **details: Any
) -> Future[T]:
    """Start a user's function in a separate thread, which does not keep the process alive; errors as in `user_code`.

    The thread of a function that never returns is left behind. Nothing happens if the future was cancelled by then.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            with user_code(name, error_type, **details):
                value = context.run(function)
        except MoeReplayError as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
