"""`moe-replay completion`: shell completion of commands, their options, and every key of a recipe with its values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from moe_replay.cli.recipe_keys import sections
from moe_replay.errors import EXIT_CODES, MoeReplayError

INTRODUCTION = """\
usage: moe-replay completion {bash,zsh,fish}

Print a script that completes commands, options, and the keys of `moe-replay train` with their values:

  eval "$(moe-replay completion bash)"            # in ~/.bashrc
  eval "$(moe-replay completion zsh)"             # in ~/.zshrc, after compinit
  moe-replay completion fish | source             # in ~/.config/fish/config.fish
"""

SCRIPTS = {
    "bash": """\
_moe_replay() {
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(moe-replay completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" \\
        -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _moe_replay moe-replay
""",
    "zsh": """\
_moe_replay() {
    local -a found
    found=("${(@f)$(moe-replay completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    (( ${#found[1]} )) && compadd -a found
    _files
}
compdef _moe_replay moe-replay
""",
    "fish": """\
complete -c moe-replay -a '(moe-replay completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
TRAIN_SWITCHES = ("--dry-run", "--tiny", "--schema", "--help")


@dataclass(frozen=True)
class CompletionCommand:
    """Print a script for shell completion, or the words that may follow a command line.

    commands   name -> where the command comes from; given by the caller, which has the list
    """

    words: tuple[str, ...] = ()
    commands: Mapping[str, Any] | None = None

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> CompletionCommand:
        """Parse without tyro: what follows `words` is a command line of its own."""
        return cls(tuple(arguments))

    def __call__(self) -> None:
        """Print the script, or one word a line."""
        name = self.words[0] if self.words else "--help"
        if name in ("-h", "--help"):
            print(f"{INTRODUCTION}\n{EXIT_CODES}", end="")
        elif name == "words":
            print("\n".join(self._next(self.words[1:])))
        elif name in SCRIPTS:
            print(SCRIPTS[name], end="")
        else:
            raise MoeReplayError(f"{name}: no such shell", expected=f"one of {', '.join(SCRIPTS)}")

    def _next(self, words: Sequence[str]) -> list[str]:
        """Return what the last of `words`, which may be empty, can become."""
        commands = self.commands or {}
        if len(words) < 2:
            return [*commands, "--help", "--version"]
        if words[0] not in commands:
            return []
        before, current = words[-2], words[-1]
        options = _train_options() if words[0] == "train" else _options(commands[words[0]].load())
        if not current.startswith("-") and options.get(before):
            return options[before]
        return list(options) if current.startswith("-") else []


def _train_options() -> dict[str, list[str]]:
    found = {key.option: key.values for _, _, keys in sections() for key in keys}
    return found | {switch: [] for switch in TRAIN_SWITCHES}


def _options(command: Any) -> dict[str, list[str]]:
    """Return the options of a command that tyro parses, with the values that can be listed."""
    if hasattr(command, "from_arguments"):
        return {"--help": []}
    found: dict[str, list[str]] = {"--help": []}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            found[f"--{name.replace('_', '-')}"] = _values(parameter.annotation)
    return found


def _values(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return next((values for part in get_args(kind) if (values := _values(part))), [])
