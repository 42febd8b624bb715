"""`moe-replay convert`: the recipe for a command of ms-swift or verl."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moe_replay.errors import MissingExtraError
from moe_replay.utils.exit_status import EXIT_CODES, ExitStatus

INTRODUCTION = """\
usage: moe-replay convert {swift,verl} {SCRIPT, 'COMMAND' or its options}

Print the recipe (TOML) for a training command of ms-swift or verl, with a comment for every option without a
counterpart. Nothing of the script is run: its variables are filled in from its own assignments.

  moe-replay convert swift train.sh > recipe.toml
  moe-replay convert swift megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B ...
  moe-replay convert verl actor_rollout_ref.actor.router_replay.mode=R3 ...
  moe-replay train recipe.toml --dry-run
"""


@dataclass(frozen=True)
class ConvertCommand:
    """Print the recipe for a training command of ms-swift or verl."""

    trainer: str = ""
    """swift or verl."""
    words: tuple[str, ...] = ()
    """A script, or a command."""

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> ConvertCommand:
        """Parse without tyro: the options are those of the other trainer."""
        return cls(trainer=arguments[0] if arguments else "", words=tuple(arguments[1:]))

    def __call__(self) -> None:
        """Print the recipe; the status is 1 where our configuration does not accept it yet."""
        if not self.words or self.trainer in ("-h", "--help") or self.words[0] in ("-h", "--help"):
            print(f"{INTRODUCTION}\n{EXIT_CODES}", end="")
            return
        try:
            from moe_replay.tools.convert import convert
        except ImportError as missing:
            raise MissingExtraError(
                f"converting needs {missing.name}", remedy="pip install 'moe-replay[train]'"
            ) from missing
        recipe, problems = convert(self.trainer, self.words)
        print(recipe, end="")
        for problem in problems:
            print(f"not valid yet: {problem}", file=sys.stderr)
        if problems:
            sys.exit(ExitStatus.CHECK_FAILED)
