"""The entry of the command `moe-replay`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from moe_replay.cli.rollout import RolloutCommand
from moe_replay.errors import MissingExtraError, MoeReplayError

COMMANDS: dict[str, Callable[..., Callable[[], None]]] = {"rollout": RolloutCommand}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand; an error that is the caller's to mend ends with its text alone."""
    try:
        import tyro
    except ImportError as missing:
        raise MissingExtraError("the command needs tyro", remedy="pip install 'moe-replay[cli]'") from missing

    try:
        command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="moe-replay", args=arguments)
        command()
    except MoeReplayError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
