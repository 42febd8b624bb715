"""Entry point of the command `moe-replay`."""

from __future__ import annotations

import difflib
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
    """Import location of a command, which is loaded when it is called, and its line in the list of commands."""

    module: str
    name: str
    summary: str

    def load(self) -> Any:
        """Return the class of the command."""
        return getattr(import_module(f"moe_replay.cli.{self.module}"), self.name)


COMMANDS: dict[str, CommandSource] = {
    "train": CommandSource("train", "TrainCommand", "train a mixture-of-experts model with GRPO and routing replay"),
    "rollout": CommandSource("rollout", "RolloutCommand", "serve a model for sampling with routes, over HTTP"),
    "verify": CommandSource("verify", "VerifyCommand", "measure how far engine and trainer are apart, and why"),
    "doctor": CommandSource("doctor", "DoctorCommand", "check what routing replay can do on this machine"),
    "cluster": CommandSource(
        "cluster", "ClusterCommand", "show a run on a Ray cluster, or change its number of engines"
    ),
    "plan": CommandSource("plan", "PlanCommand", "check a parallel layout and its memory before it runs"),
    "inspect": CommandSource("inspect", "InspectCommand", "show the contents of trace files"),
    "convert": CommandSource("convert", "ConvertCommand", "commands of ms-swift or verl to recipes, dumps to traces"),
    "report": CommandSource("report", "ReportCommand", "write the report page of a run"),
    "compare": CommandSource("compare", "CompareCommand", "compare runs on one page"),
    "completion": CommandSource("completion", "CompletionCommand", "print a script for completion in bash, zsh, fish"),
}

EXIT_S = 60.0
SILENT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; errors that the user can fix are printed without a traceback, once for all ranks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _Ending(is_process=arguments is None):
        if not words or words[0] in ("-h", "--help", "help"):
            print(help_text())
            sys.exit(ExitStatus.OK if words else ExitStatus.WRONG_INPUT)
        if words[0] in ("-V", "--version", "version"):
            print(f"moe-replay {__version__}")
            return
        _parsed(words[0], words[1:])()
        sys.stdout.flush()


def help_text() -> str:
    """Return the list of commands and the exit codes; needs nothing but the standard library."""
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
            "  --help       show this text; `moe-replay COMMAND --help` shows the options of a command",
            "  --version    show the version",
            "",
            EXIT_CODES.rstrip(),
        ]
    )


def _parsed(name: str, words: list[str]) -> Callable[[], None]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise MoeReplayError(
            f"{name}: no such command",
            expected=f"one of {', '.join(COMMANDS)}",
            remedy=f"Did you mean {near[0]}?" if near else None,
        )
    command = COMMANDS[name].load()
    if name == "completion":
        return command(tuple(words), COMMANDS)
    if hasattr(command, "from_arguments"):
        return command.from_arguments(words)
    try:
        import tyro
    except ImportError as missing:
        raise MissingExtraError(
            f"moe-replay {name} needs tyro", remedy="pip install 'moe-replay[cli]', or [train] or [serve] with it"
        ) from missing
    try:
        return tyro.cli(command, prog=f"moe-replay {name}", args=words)
    except SystemExit as left:
        if not left.code:  # --help
            print(EXIT_CODES, end="")
            sys.stdout.flush()
        raise


class _Ending:
    """Turns what ends a command into one line on stderr and an exit status.

    is_process   this process is the command; otherwise unexpected errors are passed on
    """

    def __init__(self, is_process: bool) -> None:
        self._is_process = is_process

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, MoeReplayError):
            self._tell(error)
        elif isinstance(error, BrokenPipeError) and _nobody_reads():
            # What is left in the buffer would raise again when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        elif isinstance(error, KeyboardInterrupt) and self._is_process:
            raise SystemExit(128 + signal.SIGINT) from None
        elif isinstance(error, Exception) and self._is_process:
            traceback.print_exception(error)
            raise SystemExit(ExitStatus.FAILED) from None

    def _tell(self, error: MoeReplayError) -> None:
        rank = os.environ.get("RANK", "0")
        text = f"error: {error}" if os.environ.get("WORLD_SIZE", "1") == "1" else f"error on rank {rank}: {error}"
        if rank == "0" or not error.known_on_all_ranks:
            print(text, file=sys.stderr, flush=True)
        elif self._is_process:
            time.sleep(SILENT_S)  # torchrun ends all ranks as soon as one has ended: rank 0 is to be the first
        if self._is_process:
            _end_within(EXIT_S, error.exit_status)
        ending = SystemExit(text)
        ending.code = int(error.exit_status)
        raise ending from error


def _nobody_reads() -> bool:
    """Return whether the other end of standard output is closed, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return any(found & select.POLLERR for _, found in poll.poll(0))


def _end_within(seconds: float, status: int) -> None:
    """End this process even if a thread that hangs, of a user's function, would keep it alive."""
    timer = threading.Timer(seconds, os._exit, (int(status),))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
