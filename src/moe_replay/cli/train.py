"""`moe-replay train`: train a model by a recipe and the command line, or show what would happen."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_replay.cli.recipe_keys import SCHEMA, help_text
from moe_replay.errors import EXIT_CODES, ExitStatus, MissingExtraError, MoeReplayError

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig
    from moe_replay.train.engines import EngineStarter

INTRODUCTION = """\
usage: moe-replay train [RECIPE.toml] [--section.key value ...] [--tiny] [--dry-run] [--schema]

Train a mixture-of-experts model with GRPO and routing replay. A recipe is a TOML file with the sections below; what the
command line says wins over it. Without either, a tiny model that comes with the library is trained.
On several GPUs: torchrun --nproc-per-node 8 -m moe_replay.cli.main train RECIPE.toml
On a Ray cluster: moe-replay train RECIPE.toml --cluster.kind ray

  --dry-run                          Show what would happen, and check whether it can, without loading weights.
  --tiny                             Try the recipe on a CPU: its method, with the model, data, lengths, engine and
                                     sizes of the tiny model that comes with the library.
  --schema                           Print the JSON schema of a recipe, for editors.
  --help                             Show this text.
"""


@dataclass(frozen=True)
class TrainCommand:
    """Train a mixture-of-experts model with GRPO and routing replay."""

    recipe: Path | None = None
    """TOML file with the configuration."""
    overrides: tuple[str, ...] = ()
    """Settings that override the recipe: --section.key value."""
    dry_run: bool = False
    """Show what would happen, without loading weights."""
    tiny: bool = False
    """Train the embedded model by the method of the recipe."""

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> TrainCommand:
        """Parse without tyro: the options are the keys of the configuration, their defaults those of the recipe."""
        words = [word for word in arguments if word not in ("--dry-run", "--dry_run", "--tiny")]
        has_recipe = bool(words) and not words[0].startswith("-")
        return cls(
            recipe=Path(words[0]) if has_recipe else None,
            overrides=tuple(words[has_recipe:]),
            dry_run="--dry-run" in arguments or "--dry_run" in arguments,
            tiny="--tiny" in arguments,
        )

    def __call__(self) -> None:
        """Train, or print the help text or the dry run; only rank 0 prints."""
        is_rank_0 = os.environ.get("RANK", "0") == "0"
        if {"-h", "--help"} & set(self.overrides):
            if is_rank_0:
                print(f"{INTRODUCTION}\n{help_text(shutil.get_terminal_size().columns)}\n\n{EXIT_CODES}", end="")
            return
        if "--schema" in self.overrides:
            if is_rank_0:
                print(SCHEMA.read_text(encoding="utf-8"), end="")
            return
        # A `module:name` in the configuration may be a file in the working directory, as with `python -m`.
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            config = self._config()
            if self.dry_run:
                self._dry_run(config, is_rank_0)
                return
        except MoeReplayError as error:
            error.known_on_all_ranks = True  # every rank reads the same file and command line
            raise
        if config.cluster.kind == "torchrun":
            run_rank(config)
            return
        from moe_replay.cluster.driver import run_on_ray

        if status := run_on_ray(config, run_rank):
            sys.exit(status)

    def _dry_run(self, config: TrainConfig, is_rank_0: bool) -> None:
        """Print what would happen, then everything that would stop the run; the status is that of the first of it."""
        from moe_replay.tools.dry_run import dry_run, readiness

        ranks = config.cluster.ranks if config.cluster.kind == "ray" else _number_of_ranks()
        report, (memory, problems, cluster) = dry_run(config, ranks), readiness(config, ranks)
        if is_rank_0:
            print(f"{report}\n\nmemory   {memory}" + f"\ncluster  {cluster}" * bool(cluster), flush=True)
            for problem in problems:
                print(f"not ready: {problem}", file=sys.stderr)
        if problems:
            sys.exit(problems[0].exit_status)

    def _config(self) -> TrainConfig:
        try:
            from moe_replay.train.config.file import load_config
        except ImportError as missing:
            raise _missing(missing) from missing
        config = load_config(self.recipe, self.overrides, tiny=self.tiny)
        if self.recipe is None and not config.model.path and not self.tiny:
            from moe_replay.demo import RECIPE

            return load_config(RECIPE, [*_half_precision(), *self.overrides])  # what the embedded default learns with
        return config


def run_rank(config: TrainConfig, starter: EngineStarter | None = None) -> None:
    """Train on this rank, however it was started; exits with the status of an interrupted run if it is one.

    starter   starts the engines that `cluster.engines` asks for; on rank 0
    """
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0:
        _check_memory(config)
    from moe_replay.report.model_card import newest_export, write_model_card
    from moe_replay.report.run_report import write_run_report
    from moe_replay.train.loop import train
    from moe_replay.train.run.interruption import InterruptHandler

    def write_card_and_report(folder: Path) -> Path | None:
        write_model_card(folder)
        return write_run_report(folder) if config.log.report else None

    try:
        with InterruptHandler(ends_process=True) as interruption:
            folder = train(config, write_report=write_card_and_report, interruption=interruption, starter=starter)
    except KeyboardInterrupt:
        if is_rank_0:
            print("interrupted before a step began; the same command starts it again", file=sys.stderr)
        sys.exit(ExitStatus.INTERRUPTED)
    if interruption.stopped_after is not None:
        if is_rank_0:
            print(f"interrupted; to resume: moe-replay train {folder / 'config.toml'}", file=sys.stderr)
        sys.exit(ExitStatus.INTERRUPTED)
    hub = config.checkpoint
    if is_rank_0 and hub.push_to_hub and (export := newest_export(folder)) is not None:
        from moe_replay.tools.hub import push_folder

        print(f"pushed: {push_folder(export, hub.push_to_hub, private=hub.hub_private)}", flush=True)


def _check_memory(config: TrainConfig) -> None:
    """Raise if the run cannot fit into host memory; warn if it does not fit on its GPUs, by estimate."""
    from moe_replay.tools.memory_check import DoesNotFitError, HostTooSmallError, check_memory
    from moe_replay.tools.model_config import model_config

    if not config.model.path:
        return
    try:
        check_memory(config, model_config(config.model.path), _number_of_ranks() or 1)
    except HostTooSmallError:
        raise
    except DoesNotFitError as problem:
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    except MoeReplayError:
        return  # of the model or the layout: the run itself says so


def _half_precision() -> list[str]:
    """Return options for the engine of the embedded default, where the CPU has no bfloat16."""
    from moe_replay.utils.device import accelerator, cpu_has_bfloat16

    return [] if accelerator() or cpu_has_bfloat16() else ["--rollout.dtype", "float16"]


def _number_of_ranks() -> int | None:
    """Return what the launcher says; None if there is none."""
    text = os.environ.get("WORLD_SIZE")
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise MoeReplayError(
            "WORLD_SIZE is not a number of ranks", found=repr(text), remedy="Start with torchrun, or unset the variable"
        )
    return None if text is None else int(text)


def _missing(missing: ImportError) -> MissingExtraError:
    return MissingExtraError(f"training needs {missing.name}", remedy="pip install 'moe-replay[train]'")
