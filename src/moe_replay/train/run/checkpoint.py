"""Checkpoints of a run: complete or not there, and enough to go on bit for bit.

    checkpoints/
      step-00000050/
        policy/                    what `Backend.save` writes: weights and optimizer
        rng/rank-00000.safetensors states of the random generators of each rank
        hf/                        optional: the weights as a folder that Transformers and vLLM load
        trainer.json               step, weight version, place in the data, and what must be the same to go on

A checkpoint is written under a hidden name, flushed to the disk and renamed, so a folder with a plain name is complete.
Old ones are renamed to a hidden name before they are deleted. What a killed run leaves hidden is deleted by the next.
All ranks call every method; the folder must be one that all ranks see.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_replay.distributed.ranks import from_rank_0, raise_on_all_ranks, rank, world_size
from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.checkpoint import write_folder
from moe_replay.routes.topology import MoeTopology
from moe_replay.train.run import rng
from moe_replay.utils.files import flush, flush_tree, sizes, write_whole

FORMAT = 1
logger = logging.getLogger(__name__)


class CheckpointError(MoeReplayError):
    """A checkpoint that cannot be written, or that this run cannot go on from."""


class Policy(Protocol):
    """The part of a `Backend` that is kept."""

    topology: MoeTopology

    @property
    def device(self) -> torch.device: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the loop stands.

    step       steps that are done
    version    weight version that the engine has, or is about to get
    data       `PromptStream.state`
    counters   what else the loop counts over steps
    seconds    of training, over all starts of the run
    """

    step: int
    version: int
    data: dict[str, int]
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one run, of which the newest `keep` stay.

    settings   of the run, by name: a checkpoint that was made with others is refused
    """

    def __init__(self, folder: Path, *, keep: int = 2, settings: Mapping[str, Any] | None = None) -> None:
        if keep < 1:
            raise CheckpointError("no checkpoint would stay", expected="keep >= 1", found=keep)
        self.folder = folder
        self._keep = keep
        self._settings = json.loads(json.dumps(dict(settings or {})))  # as it will be read
        self._held: int | None = None  # the step whose state is both here and in memory
        from_rank_0(self._prepare, "preparing the folder of checkpoints")
        with raise_on_all_ranks("looking for the folder of checkpoints"):
            if not folder.is_dir():
                raise CheckpointError(
                    f"rank {rank()} does not see {folder}", remedy="Put the run on a file system that all ranks share"
                )

    # ---- what is there ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        named = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in named if match and (self.folder / match[0] / "trainer.json").is_file())

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def check_room(self, policy: Policy, export_like: Path | None = None) -> None:
        """Raise unless there is room for all checkpoints that will be there at once; call it before training."""
        each = policy.state_bytes()
        if export_like is not None:
            each += sum(file.stat().st_size for file in export_like.glob("*.safetensors"))
        from_rank_0(lambda: self._check_room(each), "looking for room for checkpoints")

    def _check_room(self, each: int) -> str:
        try:
            write_whole(self.folder / ".writable", "")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written to {self.folder}: {error}") from error
        needed = (self._keep + 1) * each - sum(sizes(self.folder).values())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise CheckpointError(
                f"no room for checkpoints in {self.folder}",
                expected=f"{needed / 1e9:.2f} GB for {self._keep} checkpoints and the one being written",
                found=f"{free / 1e9:.2f} GB",
                remedy="Free some, keep fewer (checkpoint.keep), or leave out the export (checkpoint.export)",
            )
        return ""

    # ---- writing ----------------------------------------------------------------------------------------------------

    def save(self, policy: Policy, state: TrainerState, export_like: Path | None = None) -> Path:
        """Write a checkpoint, with an export for Transformers where a folder to be like is given.

        The old ones are deleted when the new one is complete, and stay when it fails.
        """
        target = self.path(state.step)
        if state.step == self._held:
            return target  # nothing has happened since
        began = time.monotonic()
        with _Staged(self, state.step) as staged:
            from_rank_0(lambda: _begin(staged, target), "beginning a checkpoint")
            with raise_on_all_ranks("writing a checkpoint"):
                policy.save(_made(staged / "policy"))
                rng.save(_made(staged / "rng"), policy.device)
                if export_like is not None:
                    write_folder(policy.weights(), staged / "hf", export_like)
            from_rank_0(lambda: self._write_record(policy, state, staged), "writing trainer.json")
            with raise_on_all_ranks("flushing a checkpoint to the disk"):
                if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once on each machine
                    flush_tree(staged)
            from_rank_0(lambda: _publish(staged, target), "renaming a checkpoint")
        self._held = state.step
        from_rank_0(self._remove_old, "deleting old checkpoints")
        logger.info("saved %s in %.1f s", target, time.monotonic() - began)
        return target

    def _write_record(self, policy: Policy, state: TrainerState, staged: Path) -> str:
        from moe_replay.version import __version__

        record = {
            "format": FORMAT,
            "state": asdict(state),
            "same": self._must_be_same(policy),
            "versions": {"moe_replay": __version__, "torch": torch.__version__},
            "files": {name: size for name, size in sizes(staged).items() if not name.startswith("hf/")},
        }
        write_whole(staged / "trainer.json", json.dumps(record, indent=1) + "\n")
        return ""

    def _must_be_same(self, policy: Policy) -> dict[str, Any]:
        return {
            "world_size": world_size(),
            "device": policy.device.type,
            "routers": _in_words(policy.topology),
            **self._settings,
        }

    # ---- reading ----------------------------------------------------------------------------------------------------

    def restore(self, policy: Policy) -> TrainerState | None:
        """Go on from the newest checkpoint, random generators included; None where there is none."""
        newest = from_rank_0(lambda: "".join(map(str, self.steps()[-1:])), "looking for checkpoints")
        if not newest:
            return None
        folder = self.path(int(newest))
        with raise_on_all_ranks("reading a checkpoint"):
            state = self._checked(folder, policy)
        with raise_on_all_ranks("loading a checkpoint"):
            policy.load(folder / "policy")
            rng.load(folder / "rng", policy.device)
        self._held = state.step
        logger.info("going on from %s", folder)
        return state

    def _checked(self, folder: Path, policy: Policy) -> TrainerState:
        record = json.loads((folder / "trainer.json").read_text())
        if record.get("format") != FORMAT:
            raise CheckpointError(f"{folder} is of another format", expected=FORMAT, found=record.get("format"))
        now, then = self._must_be_same(policy), record["same"]
        if different := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
            raise CheckpointError(
                f"{folder} was made by another kind of run",
                expected=", ".join(f"{name} {now.get(name)}" for name in different),
                found=", ".join(f"{name} {then.get(name)}" for name in different),
                remedy="Set it back to go on, or begin a new run (another output) whose model.path is an hf folder",
            )
        present = sizes(folder)
        if damaged := sorted(name for name, size in record["files"].items() if present.get(name) != size):
            raise CheckpointError(
                f"{folder} is damaged: {len(damaged)} files are missing or of another size, the first is {damaged[0]}",
                expected=f"{record['files'][damaged[0]]} bytes",
                found=present.get(damaged[0]),
                remedy="Delete that folder to go on from the checkpoint before it",
            )
        return TrainerState(**record["state"])

    # ---- what is deleted --------------------------------------------------------------------------------------------

    def _prepare(self) -> str:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"no folder can be made for checkpoints: {error}") from error
        self._sweep()
        return ""

    def _remove_old(self) -> str:
        for step in self.steps()[: -self._keep]:
            old = self.path(step)
            old.rename(_hidden(old, "old"))
        self._sweep()
        return ""

    def _sweep(self) -> None:
        """Delete what is hidden; what is still in use (on network file systems) is tried again next time."""
        for path in self.folder.glob(".step-*"):
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("%s cannot be deleted yet: %s", path, error)


class _Staged:
    """The hidden folder in which a checkpoint is written; if that fails it is deleted, and the error says so."""

    def __init__(self, checkpoints: Checkpoints, step: int) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._path = _hidden(checkpoints.path(step), "partial")

    def __enter__(self) -> Path:
        return self._path

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            return
        if rank() == 0:
            shutil.rmtree(self._path, ignore_errors=True)
        if not isinstance(error, (KeyboardInterrupt, SystemExit)):
            kept = self._checkpoints.steps()
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written: {type(error).__name__}: {error}",
                found=f"{shutil.disk_usage(self._checkpoints.folder).free / 1e9:.2f} GB free",
                remedy=f"What was written of it is deleted; the checkpoint of step {kept[-1]} is kept"
                if kept
                else "What was written of it is deleted; there is no other checkpoint",
            ) from error


# ---- parts ----------------------------------------------------------------------------------------------------------


def _hidden(path: Path, why: str) -> Path:
    return path.with_name(f".{path.name}.{why}")


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _begin(staged: Path, target: Path) -> str:
    if target.exists():
        raise CheckpointError(f"{target} is there already", remedy="Go on from it with restore, or delete it")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    return ""


def _publish(staged: Path, target: Path) -> str:
    staged.rename(target)
    flush(target.parent)
    return ""


def _in_words(topology: MoeTopology) -> str:
    kinds = sorted({f"top {moe.top_k} of {moe.num_experts}" for moe in topology.moe_layers})
    routers = f"{len(topology.layers)} in {topology.num_layers} layers, {' and '.join(kinds)}"
    return f"{topology.model_type} {routers}".strip()
