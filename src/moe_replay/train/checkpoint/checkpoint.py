"""Checkpoints of a run: each is complete or absent, and sufficient to resume bit for bit.

    checkpoints/
      step-00000050/
        policy/                    written by `Backend.stage`: weights and optimizer
        rng/rank-00000.safetensors random generator states of each rank
        hf/                        optional: the weights as a folder that Transformers and vLLM load
        adapter/                   optional, with LoRA: the adapter as a folder that PEFT and vLLM load
        trainer.json               step, weight version, position in the data, and settings that must not change
        manifest.json              size and digest of every file, see manifest.py

A checkpoint is written under a hidden name, flushed to disk and renamed, so a folder with a plain name is complete.
Old ones are renamed to a hidden name before they are deleted. The next run deletes hidden leftovers of a killed one.
Before loading, files are compared with their digests. A damaged checkpoint is renamed to `step-00000050.damaged`, and
the previous one is used.
All methods are collective; the folder must be on a file system that all ranks share.

Writing happens in the calling thread or in the background while training continues. Each rank writes, flushes and
digests its own files; when all have finished, rank 0 makes the checkpoint valid. Background threads use their own
process group, so they do not disturb the collectives of training.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_replay.distributed.collectives import PATIENCE
from moe_replay.distributed.ranks import (
    OtherRankError,
    all_gather_json,
    from_rank_0,
    raise_on_all_ranks,
    rank,
    world_size,
)
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.megatron.weights.checkpoint import stage_folder
from moe_replay.routes.topology import MoeTopology
from moe_replay.train.backends.base import Backend
from moe_replay.train.checkpoint import manifest, rng
from moe_replay.train.checkpoint.manifest import ADAPTER, EXPORT, RECORD, Entries
from moe_replay.utils.files import Write, flush, sizes, write_whole
from moe_replay.utils.misc import StatusCallback, one_line
from moe_replay.weights.lora_adapter import stage_adapter

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig


class CheckpointError(MoeReplayError):
    """A checkpoint cannot be written, or this run cannot resume from it."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint could not be written, e.g. because the disk is full."""

    exit_status = ExitStatus.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The state of the training loop.

    step       last completed step
    version    weight version of the engine, once it has been synced
    data       `PromptStream.state`
    counters   other counts that the loop keeps across steps
    seconds    of training, over all sessions of the run
    """

    step: int
    version: int
    data: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def lost(self) -> str:
        """Description of what the checkpoint does not hold, for a message; empty if it holds everything."""
        if self.counters.get("optimizer", 1.0):
            return ""
        return (
            " without the optimizer's state, which the checkpoint does not have (checkpoint.optimizer = false): "
            "the moments of AdamW start at zero, so this is not the same run as one that was never stopped"
        )


def describe_routers(topology: MoeTopology) -> str:
    """Return how many routers a model has and what they choose from."""
    kinds = sorted({f"top {moe.top_k} of {moe.num_experts}" for moe in topology.moe_layers})
    routers = f"{len(topology.layers)} in {topology.num_layers} layers, {' and '.join(kinds)}"
    return f"{topology.model_type} {routers}".strip()


class WriterLostError(CheckpointError):
    """A rank ended while all ranks were writing a checkpoint."""


CLOSE_S = 600.0
"""Seconds that a failed run waits for a checkpoint being written."""

Commit = Callable[[Entries], None]
"""Called on rank 0 with the entries of all files once every rank has written its own."""
Gather = Callable[[Any], list[Any]]
"""Value of this rank, as JSON has it -> values of all ranks."""


class WriterGroup:
    """The process group of the threads that write checkpoints. Made by all ranks."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if world_size() > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""
        try:
            return all_gather_json(value, self._group)  # type: ignore[arg-type]
        except RuntimeError as error:  # gloo's; errors in writing files are values
            raise WriterLostError("another rank ended while the checkpoint was being written") from error

    def close(self) -> None:
        """Destroy the group; the caller has made sure that no thread uses it."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)  # type: ignore[arg-type]
        self._group = None


class Writing:
    """A checkpoint that is being written.

    folder   exists already
    writes   subfolder -> what writes to it on this rank
    """

    def __init__(self, folder: Path, writes: Mapping[str, Write], commit: Commit) -> None:
        self.folder = folder
        self._writes = dict(writes)
        self._commit = commit
        self._ended: Future[None] | None = None  # once the thread of `start` runs

    def run(self, gather: Gather = all_gather_json) -> None:
        """Write everything; if that fails on one rank, raise on all."""
        entries: Entries = {}
        with _raised_on_all_ranks(gather):
            entries = self._write_own()
        self._writes = {}  # what was copied to host memory is free
        by_rank = gather(entries)
        with _raised_on_all_ranks(gather):
            if rank() == 0:
                self._commit({name: entry for of_rank in by_rank for name, entry in of_rank.items()})

    def start(self, gather: Gather) -> None:
        """Do in a thread what `run` does."""
        ended: Future[None] = Future()

        def run() -> None:
            try:
                self.run(gather)
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        threading.Thread(target=run, name=f"writing {self.folder.name}", daemon=True).start()
        self._ended = ended

    def join(self, limit_s: float | None = None) -> bool:
        """Wait for the thread of `start`; raise what it raised. Return whether none runs any more."""
        if self._ended is not None:
            if not wait([self._ended], limit_s).done:
                return False
            self._ended.result()
        return True

    def _write_own(self) -> Entries:
        files = [file for name, write in self._writes.items() for file in write(self.folder / name)]
        for file in files:
            flush(file)
        return manifest.measure(self.folder, [file.relative_to(self.folder).as_posix() for file in files])


@contextmanager
def _raised_on_all_ranks(gather: Gather) -> Iterator[None]:
    """Raise an error of this rank's block, or one that names a rank that has one; what ends the process passes."""
    try:
        yield
    except Exception as error:
        gather(f"{type(error).__name__}: {error}")
        raise
    for other_rank, report in enumerate(gather("")):
        if report:
            raise OtherRankError(f"writing a checkpoint failed on rank {other_rank}: {report}")


FORMAT = 3
DAMAGED = ".damaged"
logger = logging.getLogger(__name__)

FIXED: dict[str, tuple[str, ...]] = {
    "model": ("path", "dtype", "base_dtype", "lora_rank", "lora_alpha", "lora_target_modules"),
    "backend": ("kind",),
    "data": ("path", "max_prompt_length", "shuffle"),
}


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes, by name; all others may."""
    settings = config.model_dump(mode="json")
    named = {f"{section}.{name}": settings[section][name] for section, names in FIXED.items() for name in names}
    return {"seed": settings["seed"], **named}


class Checkpoints:
    """The checkpoints of one run; the newest `keep` are retained.

    settings   of the run, by name; a checkpoint that was written with other values is refused
    merge      an export of a policy with an adapter has the merged weights too, not the adapter alone
    asynchronous   write in a thread, from copies in host memory
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        settings: Mapping[str, Any] | None = None,
        merge: bool = True,
        asynchronous: bool = False,
    ) -> None:
        if keep < 1:
            raise CheckpointError("no checkpoint would be retained", expected="keep >= 1", found=keep)
        self.folder = folder
        self._keep = keep
        self._merge = merge
        self._settings = json.loads(json.dumps(dict(settings or {})))  # as it will be read back
        self._current: int | None = None  # the step whose state is both on disk, or on its way, and in memory
        self._writing: Writing | None = None
        self._waited_s: float | None = None  # since `metrics` was called
        from_rank_0(self._prepare, "preparing the checkpoint folder")
        with raise_on_all_ranks("looking for the checkpoint folder"):
            if not folder.is_dir():
                raise CheckpointError(
                    f"rank {rank()} cannot see {folder}", remedy="Put the run on a file system that all ranks share"
                )
        self._group = WriterGroup() if asynchronous else None

    @classmethod
    def of(cls, config: TrainConfig, folder: Path) -> Checkpoints:
        section, merge = config.checkpoint, config.model.lora_merge
        settings = fixed_settings(config)
        return cls(folder, keep=section.keep, settings=settings, merge=merge, asynchronous=section.asynchronous)

    def require_equal(self, **facts: Any) -> None:
        """Add facts besides the settings that must be unchanged to resume, e.g. which data is drawn from."""
        self._settings |= json.loads(json.dumps(facts))

    # ---- listing ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return [step for step in self._named_steps() if (self.path(step) / RECORD).is_file()]

    def _named_steps(self) -> list[int]:
        """Return the steps that there is a folder of, damaged or not, oldest first."""
        named = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in named if match)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, which need not exist."""
        return self.folder / f"step-{step:08d}"

    def check_room(self, policy: Backend, export_like: Path | None = None) -> None:
        """Raise unless all checkpoints that will exist together fit on the disk; call it before training."""
        checkpoint_bytes = policy.state_bytes()
        if export_like is not None and self._merge:
            checkpoint_bytes += sum(tensor.nbytes for tensor in policy.weight_source().metadata())
        from_rank_0(lambda: self._check_room(checkpoint_bytes), "checking the disk space for checkpoints")

    def _check_room(self, checkpoint_bytes: int) -> None:
        try:
            write_whole(self.folder / ".writable", "")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {self.folder}: {error}") from error
        replaced = sum(size for name, size in sizes(self.folder).items() if DAMAGED not in name)
        needed = (self._keep + 1) * checkpoint_bytes - replaced
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"not enough disk space for checkpoints in {self.folder}",
                expected=f"{needed / 1e9:.2f} GB for {self._keep} checkpoints and the one being written",
                found=f"{free / 1e9:.2f} GB free",
                remedy="Free some space, keep fewer (checkpoint.keep), or disable the export (checkpoint.export)",
            )

    # ---- writing ----------------------------------------------------------------------------------------------------

    def save(self, policy: Backend, state: TrainerState, export_like: Path | None = None) -> Path:
        """Write a checkpoint, with an export for Transformers if there is a model folder whose config it can copy.

        Asynchronous: return once everything is in host memory; what fails later is raised by the next `save` or `wait`.
        Old checkpoints are deleted once the new one is complete, and retained if it fails.
        """
        target = self.path(state.step)
        if state.step == self._current:
            return target  # no step since it was written
        began = time.monotonic()
        self.wait()
        with self._staged(state.step) as staged:
            from_rank_0(lambda: _begin(staged, target), "creating a checkpoint")
            with raise_on_all_ranks("copying the policy for a checkpoint"):
                writes = {"policy": policy.stage(), "rng": rng.stage(policy.device)}
            if export_like is not None:
                writes |= self._export(policy, staged, export_like)
            record = self._record(policy, state)
        writing = Writing(staged, writes, lambda entries: self._commit(staged, target, record, entries, began))
        self._current, self._writing = state.step, writing
        if self._group is None:
            self.wait()
        else:
            writing.start(self._group.gather)
        self._waited_s = (self._waited_s or 0.0) + time.monotonic() - began
        return target

    @contextmanager
    def _staged(self, step: int) -> Iterator[Path]:
        """Yield the hidden folder that a checkpoint is written to; deleted if that fails, which the error reports."""
        staged = _hidden(self.path(step), "partial")
        try:
            yield staged
        except BaseException as error:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            if isinstance(error, (KeyboardInterrupt, SystemExit, WriterLostError)):
                raise
            raise CheckpointWriteError(
                f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}",
                found=f"{shutil.disk_usage(self.folder).free / 1e9:.2f} GB free",
                remedy=f"The partial checkpoint is deleted; {self._kept_in_words()}",
            ) from error

    def _kept_in_words(self) -> str:
        kept = self.steps()
        return f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no other checkpoint"

    def metrics(self) -> dict[str, float]:
        """Return the seconds that `save` took since the last call, if it was called."""
        waited_s, self._waited_s = self._waited_s, None
        return {} if waited_s is None else {"time/save": waited_s}

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise if it could not be. All ranks call it."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step, self._current = self._current, None
        assert step is not None
        with self._staged(step):
            if self._group is None:
                writing.run()
            else:
                writing.join()
        self._current = step

    def settle(self) -> bool:
        """Give a checkpoint that is being written the time to become complete; return whether its thread has ended."""
        from safetensors import SafetensorError  # a full disk, where it writes

        try:
            return self._writing is None or self._writing.join(CLOSE_S)
        except WriterLostError as error:  # the run reports the lost rank itself
            logger.warning("the last checkpoint is incomplete and will be deleted: %s", error)
            return True
        except (MoeReplayError, OSError, RuntimeError, ValueError, SafetensorError) as error:
            logger.error("the last checkpoint could not be written: %s; %s", one_line(error), self._kept_in_words())
            return True

    def close(self) -> None:
        """Settle what is being written, and end the process group of writers."""
        if self.settle() and self._group is not None:
            self._group.close()

    def _commit(self, staged: Path, target: Path, record: str, entries: manifest.Entries, began: float) -> None:
        """Make a checkpoint valid whose files are all on the disk, and delete old ones."""
        write_whole(staged / RECORD, record)
        manifest.write(staged, {**entries, **manifest.measure(staged, [RECORD])})
        for folder in (path for path in staged.rglob("*") if path.is_dir()):
            flush(folder)
        flush(staged)
        _publish(staged, target)
        self._remove_old()
        logger.info("saved %s in %.1f s", target, time.monotonic() - began)

    def _export(self, policy: Backend, staged: Path, like: Path) -> dict[str, Write]:
        """Return what writes the exports. Asynchronous: their tensors are in host memory, a share on each rank."""
        writes: dict[str, Write] = {}
        adapter = policy.adapter()
        if adapter is not None:
            writes[ADAPTER] = stage_adapter(adapter, str(like), here=rank() == 0)
        if adapter is None or self._merge:
            folder = staged / EXPORT if self._group is None else None
            writes[EXPORT] = stage_folder(policy.weight_source(), like, folder)
        return writes

    def _record(self, policy: Backend, state: TrainerState) -> str:
        from moe_replay.version import __version__

        record = {
            "format": FORMAT,
            "state": asdict(state),
            "same": self._invariants(policy),
            "versions": {"moe_replay": __version__, "torch": torch.__version__},
        }
        return json.dumps(record, indent=1) + "\n"

    def _invariants(self, policy: Backend) -> dict[str, Any]:
        return {"device": policy.device.type, "routers": describe_routers(policy.topology), **self._settings}

    # ---- reading ----------------------------------------------------------------------------------------------------

    def restore(self, policy: Backend, status: StatusCallback | None = None) -> TrainerState | None:
        """Load the newest undamaged checkpoint, random generators included; return None if there is no checkpoint.

        Damaged ones are renamed; each is reported to `status`, as a line of text, and logged.
        """
        steps = from_rank_0(self._named_steps, "looking for checkpoints")
        damage: dict[int, str] = {}
        for step in reversed(steps):
            # An export is not needed to resume, and may have been deleted.
            if cause := manifest.damage_on_all_ranks(self.path(step), ignore=(f"{EXPORT}/", f"{ADAPTER}/")):
                damage[step] = cause
            else:
                state = self._load(self.path(step), policy)
                self._put_aside(damage, step, status)
                return state
        if damage:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged",
                found="; ".join(f"step {step}: {cause}" for step, cause in damage.items()),
                remedy="Put the files back from a copy, or start a new run in another output",
            )
        return None

    def _load(self, folder: Path, policy: Backend) -> TrainerState:
        with raise_on_all_ranks("reading a checkpoint"):
            state = self._read_state(folder, policy)
        with raise_on_all_ranks("loading a checkpoint"):
            policy.load(folder / "policy")
            rng.load(folder / "rng", policy.device)
        self._current = state.step
        logger.info("resumed from %s", folder)
        return state

    def _read_state(self, folder: Path, policy: Backend) -> TrainerState:
        record = json.loads((folder / RECORD).read_text())
        if record.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has another format",
                expected=FORMAT,
                found=record.get("format"),
                remedy=f"Start a new run whose model.path is the {EXPORT} folder in it",
            )
        now, then = self._invariants(policy), record["same"]
        if different := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
            raise CheckpointError(
                f"{folder} was written by a run with other settings",
                expected=", ".join(f"{name} {now.get(name)}" for name in different),
                found=", ".join(f"{name} {then.get(name)}" for name in different),
                remedy="Restore what differs to resume, or start a new run in another output from the hf folder",
            )
        state = TrainerState(**record["state"])
        if folder != self.path(state.step):
            raise CheckpointError(
                f"{folder} has the checkpoint of another step",
                expected=f"a folder named {self.path(state.step).name}",
                found=folder.name,
                remedy="Give the folder its name back: it says which step the run resumes after",
            )
        return state

    def _put_aside(self, damage: Mapping[int, str], used: int, status: StatusCallback | None) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again, and report each."""

        def rename() -> list[str]:
            names = []
            for path in map(self.path, damage):
                names.append(_unused(path.with_name(f"{path.name}{DAMAGED}")).name)
                path.rename(path.with_name(names[-1]))
            return names

        names = from_rank_0(rename, "renaming damaged checkpoints")
        for (step, cause), name in zip(damage.items(), names, strict=True):
            line = f"the checkpoint of step {step} is damaged ({cause}), now named {name}: resuming from step {used}"
            logger.warning("%s", line)
            if status is not None:
                status(f"WARNING: {line}")

    # ---- deleting ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the checkpoint folder cannot be created: {error}") from error
        self._sweep()

    def _remove_old(self) -> None:
        for step in self.steps()[: -self._keep]:
            old = self.path(step)
            old.rename(_hidden(old, "old"))
        self._sweep()

    def _sweep(self) -> None:
        """Delete hidden folders; those still in use (on network file systems) are tried again next time."""
        for path in self.folder.glob(".step-*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s could not be deleted yet: %s", path, error)


# ---- helpers -------------------------------------------------------------------------------------------------------


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def _unused(path: Path) -> Path:
    """Return a path that does not exist: this one, or one with a number."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not path.exists() else next(candidate for candidate in numbered if not candidate.exists())


def _begin(staged: Path, target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} already exists", remedy="Resume from it with restore, or delete it")
    shutil.rmtree(staged, ignore_errors=True)
    for folder in (staged, staged / "policy", staged / "rng"):
        folder.mkdir()


def _publish(staged: Path, target: Path) -> None:
    staged.rename(target)
    flush(target.parent)
