"""Entry point of the command `moe-replay`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from moe_replay.cli.compare import CompareCommand
from moe_replay.cli.convert import ConvertCommand
from moe_replay.cli.doctor import DoctorCommand
from moe_replay.cli.inspect import InspectCommand
from moe_replay.cli.plan import PlanCommand
from moe_replay.cli.report import ReportCommand
from moe_replay.cli.rollout import RolloutCommand
from moe_replay.cli.train import TrainCommand
from moe_replay.cli.verify import VerifyCommand
from moe_replay.errors import MissingExtraError, MoeReplayError

COMMANDS: dict[str, Callable[..., Callable[[], None]]] = {
    "compare": CompareCommand,
    "convert": ConvertCommand,
    "doctor": DoctorCommand,
    "inspect": InspectCommand,
    "plan": PlanCommand,
    "report": ReportCommand,
    "rollout": RolloutCommand,
    "train": TrainCommand,
    "verify": VerifyCommand,
}

EXIT_S = 60.0
SILENT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand; errors that the user can fix are printed without a traceback, once for all ranks."""
    try:
        _parsed(list(sys.argv[1:] if arguments is None else arguments))()
    except MoeReplayError as error:
        rank = os.environ.get("RANK", "0")
        text = f"error: {error}" if os.environ.get("WORLD_SIZE", "1") == "1" else f"error on rank {rank}: {error}"
        if rank == "0" or not error.known_on_all_ranks:
            print(text, file=sys.stderr, flush=True)
        elif arguments is None:
            time.sleep(SILENT_S)  # torchrun ends all ranks as soon as one has ended: rank 0 is to be the first
        if arguments is None:  # this process is the command
            _end_within(EXIT_S, error.exit_status)
        ending = SystemExit(text)
        ending.code = error.exit_status
        raise ending from error


def _end_within(seconds: float, status: int) -> None:
    """End this process even if a thread that hangs, of a user's function, would keep it alive."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _parsed(words: list[str]) -> Callable[[], None]:
    if words[:1] == ["train"]:
        return TrainCommand.from_arguments(words[1:])
    if words[:1] == ["convert"]:
        return ConvertCommand.from_arguments(words[1:])
    try:
        import tyro
    except ImportError as missing:
        raise MissingExtraError("the command needs tyro", remedy="pip install 'moe-replay[cli]'") from missing
    return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="moe-replay", args=words)


if __name__ == "__main__":
    main()
