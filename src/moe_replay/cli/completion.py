"""`moe-replay completion`: tyro's shell completion for all commands and for the keys of a recipe."""

from __future__ import annotations

import functools
import io
import operator
from contextlib import redirect_stdout, suppress
from dataclasses import make_dataclass
from typing import Annotated, Any, Literal


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a shell completion script for commands, options and recipe keys.

    bash: eval "$(moe-replay completion bash)" in ~/.bashrc.
    zsh: eval "$(moe-replay completion zsh)" in ~/.zshrc, after compinit.
    fish: moe-replay completion fish | source in ~/.config/fish/config.fish.

    Args:
        shell: Shell that will run the script.
    """
    import tyro

    from moe_replay.cli.main import COMMANDS

    commands = {name: source.load() for name, source in COMMANDS.items()} | _without_tyro()
    subcommands = [Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()]
    app: Any = functools.reduce(operator.or_, subcommands)
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):  # tyro exits after printing
        tyro.cli(app, prog="moe-replay", args=["--tyro-print-completion", shell])
    # Positional arguments are files, which tyro does not complete: bash does where there is nothing else.
    print(script.getvalue().replace("complete -F", "complete -o default -F"), end="")


def _without_tyro() -> dict[str, Any]:
    """Return the signatures of the commands that parse their own arguments."""
    import tyro

    from moe_replay.train.config.sections import Sections

    switches = [(name, bool, False) for name in ("dry_run", "tiny", "schema")]
    return {
        "train": make_dataclass("Train", [("config", Annotated[Sections, tyro.conf.arg(name="")]), *switches]),
        "convert": make_dataclass("Convert", []),
    }
