"""`moe-replay train`: train a model from a recipe and command-line overrides, or dry-run it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_replay.errors import EXIT_CODES, ExitStatus, MoeReplayError, needs_extra

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig
    from moe_replay.train.setup.engines import EngineStarter

INTRODUCTION = """\
usage: moe-replay train [RECIPE.toml] [--section.key value ...] [--tiny] [--dry-run] [--schema]

Train a mixture-of-experts model with GRPO and routing replay. A recipe is a TOML file with the settings below; options
override it. Without either, train the embedded tiny model.
Several GPUs: torchrun --nproc-per-node 8 -m moe_replay.cli.main train RECIPE.toml
Ray cluster:  moe-replay train RECIPE.toml --cluster.launcher ray

  --dry-run                          Check the recipe and print the plan of the run, without loading weights.
  --tiny                             Try the recipe on a CPU: its algorithm with the model, data, lengths, engine and
                                     batch sizes of the embedded tiny model.
  --schema                           Print the JSON schema of recipes, for editors.
  --help                             Show the settings that most runs change.
  --help-all                         Show all settings.
"""
USUAL = (
    "steps",
    "output",
    "model.path",
    "model.dtype",
    "model.lora_rank",
    "backend.kind",
    "data.path",
    "data.max_prompt_length",
    "rollout.engine",
    "rollout.urls",
    "rollout.options",
    "rollout.prompts_per_step",
    "rollout.num_generations",
    "rollout.max_tokens",
    "rollout.temperature",
    "replay.mode",
    "algorithm.updates_per_rollout",
    "optim.lr",
    "batch.tokens_per_micro_batch",
    "reward.functions",
)
"""Settings in `--help`; all are in `--help-all`."""
SCHEMA = Path(__file__).resolve().parents[1] / "train" / "config" / "recipe.schema.json"


@dataclass(frozen=True)
class TrainCommand:
    """Train a mixture-of-experts model with GRPO and routing replay."""

    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    tiny: bool = False

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> TrainCommand:
        """Parse without tyro: the options are the keys of the configuration, with defaults from the recipe."""
        words = [word for word in arguments if word not in ("--dry-run", "--dry_run", "--tiny")]
        has_recipe = bool(words) and not words[0].startswith("-")
        return cls(
            recipe=Path(words[0]) if has_recipe else None,
            overrides=tuple(words[has_recipe:]),
            dry_run="--dry-run" in arguments or "--dry_run" in arguments,
            tiny="--tiny" in arguments,
        )

    def __call__(self) -> None:
        """Train, or print the help, the schema or the dry run; only rank 0 prints."""
        is_rank_0 = os.environ.get("RANK", "0") == "0"
        if {"-h", "--help", "--help-all", "--help_all"} & set(self.overrides):
            has_all = bool({"--help-all", "--help_all"} & set(self.overrides))
            settings = help_text(shutil.get_terminal_size().columns, keys=None if has_all else USUAL)
            more = "" if has_all else "\n\n`moe-replay train --help-all` shows all settings."
            if is_rank_0:
                print(f"{INTRODUCTION}\n{settings}{more}\n\n{EXIT_CODES}", end="")
            return
        if "--schema" in self.overrides:
            if is_rank_0:
                print(SCHEMA.read_text(encoding="utf-8"), end="")
            return
        # A `module:name` in the configuration may be a file in the working directory, as with `python -m`.
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            if self.dry_run:
                with _without_garbage_collection():
                    self._dry_run(self._config(), is_rank_0)
                return
            config = self._config()
        except MoeReplayError as error:
            error.known_on_all_ranks = True  # every rank reads the same file and command line
            raise
        if config.cluster.launcher == "torchrun":
            run_rank(config)
            return
        from moe_replay.cluster.driver import run_on_ray

        if status := run_on_ray(config, run_rank):
            sys.exit(status)

    def _dry_run(self, config: TrainConfig, is_rank_0: bool) -> None:
        """Print the plan and all problems that would stop the run; exit with the status of the first problem."""
        from moe_replay.tools.dry_run import dry_run

        ranks = config.cluster.ranks if config.cluster.launcher == "ray" else _world_size()
        report, problems = dry_run(config, ranks)
        if is_rank_0:
            print(report, flush=True)
            for problem in problems:
                print(f"not ready: {problem}", file=sys.stderr)
        if problems:
            sys.exit(problems[0].exit_status)

    def _config(self) -> TrainConfig:
        with needs_extra("training needs {}", "train"):
            from moe_replay.train.config.command_line import apply_overrides
            from moe_replay.train.config.file import load_config
        named: dict[str, Any] = {}
        apply_overrides(named, self.overrides)
        if self.recipe is None and not self.tiny and not named.get("model", {}).get("path"):
            from moe_replay.demo import RECIPE

            return load_config(RECIPE, [*_half_precision(), *self.overrides])
        return load_config(self.recipe, self.overrides, tiny=self.tiny)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Leave cycles alone in a command of a few seconds: collecting them takes a sixth of its imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_rank(config: TrainConfig, starter: EngineStarter | None = None) -> None:
    """Train on this rank; exit with `INTERRUPTED` if the run was interrupted.

    starter   starts the `cluster.engines` engines; rank 0 only
    """
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0:
        _check_memory(config)
    from moe_replay.report.model_card import newest_export, write_model_card
    from moe_replay.report.run_report import write_run_report
    from moe_replay.train.loop import train
    from moe_replay.train.output.interruption import InterruptHandler

    def write_card_and_report(folder: Path) -> Path | None:
        write_model_card(folder)
        return write_run_report(folder) if config.log.report else None

    try:
        with InterruptHandler(ends_process=True) as interruption:
            folder = train(config, write_report=write_card_and_report, interruption=interruption, starter=starter)
    except KeyboardInterrupt:
        if is_rank_0:
            print("interrupted before the first step; run the same command to start again", file=sys.stderr)
        sys.exit(ExitStatus.INTERRUPTED)
    if interruption.stopped_after is not None:
        if is_rank_0:
            print(f"interrupted; to resume: moe-replay train {folder / 'config.toml'}", file=sys.stderr)
        sys.exit(ExitStatus.INTERRUPTED)
    hub = config.checkpoint
    if is_rank_0 and hub.push_to_hub and (export := newest_export(folder)) is not None:
        from moe_replay.report.model_card import push_folder

        print(f"pushed: {push_folder(export, hub.push_to_hub, private=hub.hub_private)}", flush=True)


def _check_memory(config: TrainConfig) -> None:
    """Raise if the run cannot fit into host memory; warn if it is estimated not to fit on its GPUs."""
    from moe_replay.tools.memory_check import DoesNotFitError, HostTooSmallError, check_memory
    from moe_replay.weights.model_folder import read_config

    if not config.model.path:
        return
    try:
        check_memory(config, read_config(config.model.path), _world_size() or 1)
    except HostTooSmallError:
        raise
    except DoesNotFitError as problem:
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    except MoeReplayError:
        return  # a problem of the model or the layout: the run reports it


def _half_precision() -> list[str]:
    """Return engine overrides for the embedded model on CPUs without bfloat16."""
    from moe_replay.utils.device import accelerator, cpu_has_bfloat16

    return [] if accelerator() or cpu_has_bfloat16() else ["--rollout.dtype", "float16"]


def _world_size() -> int | None:
    """Return the world size set by the launcher; None without a launcher."""
    text = os.environ.get("WORLD_SIZE")
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise MoeReplayError(
            "WORLD_SIZE is not a positive integer",
            found=repr(text),
            remedy="Use torchrun, or unset it",
        )
    return None if text is None else int(text)


def help_text(width: int, schema: Mapping[str, Any] | None = None, keys: Container[str] | None = None) -> str:
    """Return the options by section, from the packaged schema: importing the configuration would take seconds.

    keys   dotted names of the settings to show; None: all
    """
    schema = json.loads(SCHEMA.read_text(encoding="utf-8")) if schema is None else schema
    tables = {"": ("run:", schema["properties"])}
    for name, entry in schema["properties"].items():
        if "$ref" in entry:
            table = schema["$defs"][entry["$ref"].rpartition("/")[2]]
            tables[f"{name}."] = (f"{name}: {table['description']}", table["properties"])
    blocks = []
    for prefix, (title, properties) in tables.items():
        lines = [title]
        for name, entry in properties.items():
            if "x-default" in entry and (keys is None or f"{prefix}{name}" in keys):
                option = f"--{prefix}{name}".replace("_", "-")
                choices = f"{entry['x-choices']}, " if "x-choices" in entry else ""
                text = f"{entry['description']} [{choices}default {entry['x-default']}]"
                lines += textwrap.wrap(text, width, initial_indent=f"  {option:<34} ", subsequent_indent=" " * 37)
        if len(lines) > 1:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
