"""`moe-replay convert`: the recipe for a command of ms-swift or verl; a trace file for routes that verl has dumped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_replay.errors import EXIT_CODES, ExitStatus, MissingExtraError

INTRODUCTION = """\
usage: moe-replay convert {swift,verl} {SCRIPT, 'COMMAND' or its options}
       moe-replay convert routes DUMP ... --model MODEL --output FILE [--weight-version N]

Print the recipe (TOML) for a training command of ms-swift or verl, with a comment for every option without a
counterpart. Nothing of the script is run: its variables are filled in from its own assignments.

  moe-replay convert swift train.sh > recipe.toml
  moe-replay convert swift megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B ...
  moe-replay convert verl actor_rollout_ref.actor.router_replay.mode=R3 ...
  moe-replay train recipe.toml --dry-run

`routes` reads dumps of verl's batches (.pt, .npz, .parquet with routed_experts, input_ids and attention_mask) into a
trace file, which `inspect` and `verify --traces` take. Tensors alone are read: no code in a dump is run.

  moe-replay convert routes step-12.pt --model Qwen/Qwen3-30B-A3B --output step-12.mrt
"""


@dataclass(frozen=True)
class ConvertCommand:
    """Print the recipe for a training command of ms-swift or verl."""

    trainer: str = ""
    """swift, verl or routes."""
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
        if self.trainer == "routes":
            self._convert_routes()
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

    def _convert_routes(self) -> None:
        """Write the trace file and say what is in it."""
        parser = argparse.ArgumentParser("moe-replay convert routes", add_help=False)
        parser.add_argument("dumps", nargs="+", type=Path)
        parser.add_argument("--model", required=True)
        parser.add_argument("--output", required=True, type=Path)
        parser.add_argument("--weight-version", type=int, default=0)
        options = parser.parse_args(self.words)
        from moe_replay.routes.topology import MoeTopology
        from moe_replay.tools.convert.route_dumps import convert_dumps
        from moe_replay.tools.model_config import model_config

        topology = MoeTopology.from_config(model_config(options.model))
        count = convert_dumps(options.dumps, topology, options.output, options.weight_version)
        print(f"{options.output}: {count} traces of {len(options.dumps)} dump{'s' * (len(options.dumps) != 1)}")
