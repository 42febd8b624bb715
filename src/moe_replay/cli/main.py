"""Entry point of the `moe-replay` command."""

from __future__ import annotations

import atexit
import difflib
import functools
import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, NamedTuple

from moe_replay.errors import EXIT_CODES, ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.version import __version__


class CommandSource(NamedTuple):
    """Import location of a command, loaded on use, and its line in the help.

    A command is a function of its options, or a class whose instance has them and is called.
    """

    module: str
    name: str
    summary: str

    def load(self) -> Any:
        return getattr(import_module(f"moe_replay.cli.{self.module}"), self.name)


COMMANDS: dict[str, CommandSource] = {
    "train": CommandSource("train", "TrainCommand", "train a mixture-of-experts model with GRPO and routing replay"),
    "rollout": CommandSource("rollout", "RolloutCommand", "serve a model over HTTP and return routes with samples"),
    "verify": CommandSource("verify", "VerifyCommand", "measure the mismatch between rollout engine and trainer"),
    "doctor": CommandSource("doctor", "DoctorCommand", "check whether this machine can run routing replay"),
    "selftest": CommandSource("selftest", "SelftestCommand", "try what needs two GPUs, on this machine"),
    "cluster": CommandSource("cluster", "cluster", "show or scale a run on a Ray cluster"),
    "plan": CommandSource("plan", "PlanCommand", "check a parallel layout and its memory before a run"),
    "inspect": CommandSource("inspect", "inspect", "summarize trace files"),
    "convert": CommandSource("convert", "ConvertCommand", "convert ms-swift or verl commands to recipes"),
    "plugin": CommandSource("plugin", "plugin", "print a file that lets another trainer load this library"),
    "report": CommandSource("report", "report", "write the report of a run"),
    "compare": CommandSource("compare", "compare", "compare runs on one page"),
    "completion": CommandSource("completion", "completion", "print a shell completion script"),
}

EXIT_S = 60.0
SILENT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; user errors are printed without a traceback, once for all ranks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _ErrorHandler(is_process=arguments is None):
        if not words or words[0] in ("-h", "--help", "help"):
            print(help_text())
            sys.exit(ExitStatus.OK if words else ExitStatus.WRONG_INPUT)
        if words[0] in ("-V", "--version", "version"):
            print(f"moe-replay {__version__}")
            return
        if arguments is None and "--dry-run" in words:
            atexit.register(gc.freeze)  # the interpreter's last collection would take a fifth of the command
        _parse(words[0], words[1:])()
        sys.stdout.flush()


def help_text() -> str:
    """Return the list of commands and exit codes; imports only the standard library."""
    lines = [f"  {name:<12} {source.summary}" for name, source in COMMANDS.items()]
    return "\n".join(
        [
            "usage: moe-replay COMMAND ...",
            "",
            "Routing replay for reinforcement learning on Mixture-of-Experts language models.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --help       show this help; `moe-replay COMMAND --help` shows the options of a command",
            "  --version    show the version",
            "",
            EXIT_CODES.rstrip(),
        ]
    )


def _parse(name: str, words: list[str]) -> Callable[[], None]:
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        raise MoeReplayError(
            f"{name}: no such command",
            expected=f"one of {', '.join(COMMANDS)}",
            remedy=f"Did you mean {similar[0]}?" if similar else None,
        )
    command = COMMANDS[name].load()
    if hasattr(command, "from_arguments"):
        return command.from_arguments(words)
    try:
        import tyro
    except ImportError as missing:
        raise MissingExtraError(
            f"moe-replay {name} needs tyro", remedy="pip install 'moe-replay[cli]', or [train] or [serve] with it"
        ) from missing
    try:
        parsed = command if isinstance(command, type) else _call_later(command)
        return tyro.cli(parsed, prog=f"moe-replay {name}", args=words)
    except SystemExit as left:
        if not left.code:  # --help
            print(EXIT_CODES, end="")
            sys.stdout.flush()
        raise


def _call_later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """Return a function with the options of a command, which returns the call in place of making it."""

    @functools.wraps(command)
    def call(*args: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(command, *args, **options)

    return call


class _ErrorHandler:
    """Turns an exception into one line on stderr and an exit status.

    is_process   this process runs only the command; otherwise unexpected errors propagate
    """

    def __init__(self, is_process: bool) -> None:
        self._is_process = is_process

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, MoeReplayError):
            self._report(error)
        elif isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # The rest of the buffer would raise again at interpreter exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        elif isinstance(error, KeyboardInterrupt) and self._is_process:
            raise SystemExit(128 + signal.SIGINT) from None
        elif isinstance(error, Exception) and self._is_process:
            traceback.print_exception(error)
            raise SystemExit(ExitStatus.FAILED) from None

    def _report(self, error: MoeReplayError) -> None:
        rank = os.environ.get("RANK", "0")
        text = f"error: {error}" if os.environ.get("WORLD_SIZE", "1") == "1" else f"error on rank {rank}: {error}"
        if rank == "0" or not error.known_on_all_ranks:
            print(text, file=sys.stderr, flush=True)
        elif self._is_process:
            time.sleep(SILENT_S)  # torchrun kills all ranks when one exits: rank 0 must print first
        if self._is_process:
            _exit_within(EXIT_S, error.exit_status)
        exit_ = SystemExit(text)
        exit_.code = int(error.exit_status)
        raise exit_ from error


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout is gone, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _exit_within(seconds: float, status: int) -> None:
    """Exit even if a hanging thread of a user function would keep the process alive."""
    timer = threading.Timer(seconds, os._exit, (int(status),))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
