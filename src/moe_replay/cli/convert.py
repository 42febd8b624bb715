"""`moe-replay convert`: a recipe from a command of ms-swift, verl or SkyRL; a trace file from dumped verl batches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_replay.errors import EXIT_CODES, ExitStatus, needs_extra

INTRODUCTION = """\
usage: moe-replay convert {swift,verl,skyrl} {COMMAND | FILE}
       moe-replay convert routes DUMP ... --model MODEL --output FILE [--weight-version N]

Print the recipe (TOML) for a training command of ms-swift, verl or SkyRL. Its header lists what was changed and lost;
status 1 if model, data, sampling, reward, environment, loss, optimizer or replay mode are missing or not the same.
FILE holds one command line, or the options as YAML (.yaml, .yml). For a launch script with variables, put
`moe-replay convert swift` in front of its training command and run it: the shell expands them.

  moe-replay convert swift megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B ... > recipe.toml
  moe-replay convert verl actor_rollout_ref.actor.router_replay.mode=R3 ...
  moe-replay convert verl outputs/run/.hydra/overrides.yaml
  moe-replay train recipe.toml --dry-run

`routes` converts dumped verl batches (.pt, .npz or .parquet with routed_experts, input_ids and attention_mask) to a
trace file for `inspect` and `verify --traces`. Only tensors are read; code in a dump is never run.

  moe-replay convert routes step-12.pt --model Qwen/Qwen3-30B-A3B --output step-12.mrt
"""


@dataclass(frozen=True)
class ConvertCommand:
    """Print the recipe for a training command of ms-swift, verl or SkyRL."""

    source: str = ""
    words: tuple[str, ...] = ()

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> ConvertCommand:
        """Parse without tyro: the options are those of the other trainer."""
        return cls(source=arguments[0] if arguments else "", words=tuple(arguments[1:]))

    def __call__(self) -> None:
        """Print the recipe; exit with 1 if it is not the run of the command, or not valid."""
        if not self.words or self.source in ("-h", "--help") or self.words[0] in ("-h", "--help"):
            print(f"{INTRODUCTION}\n{EXIT_CODES}", end="")
            return
        if self.source == "routes":
            self._convert_routes()
            return
        with needs_extra("converting needs {}", "train"):
            from moe_replay.tools.convert import convert
        recipe, problems = convert(self.source, self.words)
        print(recipe, end="")
        for problem in problems:
            print(f"not the same run yet: {problem}", file=sys.stderr)
        if problems:
            sys.exit(ExitStatus.CHECK_FAILED)

    def _convert_routes(self) -> None:
        parser = argparse.ArgumentParser("moe-replay convert routes", add_help=False)
        parser.add_argument("dumps", nargs="+", type=Path)
        parser.add_argument("--model", required=True)
        parser.add_argument("--output", required=True, type=Path)
        parser.add_argument("--weight-version", type=int, default=0)
        options = parser.parse_args(self.words)
        from moe_replay.interop.route_dumps import convert_dumps
        from moe_replay.routes.topology import MoeTopology
        from moe_replay.weights.model_folder import read_config

        topology = MoeTopology.from_config(read_config(options.model))
        count = convert_dumps(options.dumps, topology, options.output, options.weight_version)
        print(f"{options.output}: {count} traces from {len(options.dumps)} dump{'s' * (len(options.dumps) != 1)}")
