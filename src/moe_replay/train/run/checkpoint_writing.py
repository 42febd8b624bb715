"""A checkpoint on its way from host memory to the disk: at once, or in a thread while training continues.

Each rank writes, flushes and digests its own files. When all have finished, rank 0 makes the checkpoint valid.
Ranks agree over a process group that only these threads use, so training's own collectives are not disturbed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather
from moe_replay.distributed.control import PATIENCE
from moe_replay.distributed.ranks import OtherRankError, all_gather_text, rank, world_size
from moe_replay.train.run import manifest
from moe_replay.train.run.manifest import Entries
from moe_replay.utils.files import Write, flush

CLOSE_S = 600.0
"""Seconds that a run which ends with an error waits for a checkpoint that is being written."""

Commit = Callable[[Entries], None]
"""Called on rank 0 with the entries of all files once every rank has written its own."""
Gather = Callable[[str], list[str]]
"""Text of this rank -> texts of all ranks."""


class WriterGroup:
    """The process group of the threads that write checkpoints. Made by all ranks."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if world_size() > 1 else None

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in rank order."""
        if self._group is None:
            return [text]
        gathered = all_gather(np.frombuffer(text.encode(), np.uint8), self._group)  # type: ignore[arg-type]
        return [part.tobytes().decode() for part in gathered]

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
        self._thread: threading.Thread | None = None
        self._caught = _Caught()

    def run(self, gather: Gather = all_gather_text) -> None:
        """Write everything; if that fails on one rank, raise on all."""
        entries: Entries = {}
        caught = _Caught()
        with caught:
            entries = self._write_own()
        self._writes = {}  # what was copied to host memory is free
        reports = [json.loads(text) for text in gather(json.dumps([caught.report, entries]))]
        caught.raise_on_all_ranks([report for report, _ in reports])
        with caught:
            if rank() == 0:
                self._commit({name: entry for _, of_rank in reports for name, entry in of_rank.items()})
        caught.raise_on_all_ranks(gather(caught.report))

    def start(self, gather: Gather) -> None:
        """Do in a thread what `run` does."""

        def run() -> None:
            with self._caught:
                self.run(gather)

        self._thread = threading.Thread(target=run, name=f"writing {self.folder.name}", daemon=True)
        self._thread.start()

    def join(self, limit_s: float | None = None) -> bool:
        """Wait for the thread; raise what it raised. Return whether it has ended."""
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return False
        if self._caught.error is not None:
            raise self._caught.error
        return True

    def _write_own(self) -> Entries:
        files = [file for name, write in self._writes.items() for file in write(self.folder / name)]
        for file in files:
            flush(file)
        return manifest.measure(self.folder, [file.relative_to(self.folder).as_posix() for file in files])


class _Caught:
    """Keeps an error of the block for later; what ends the process passes."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True

    @property
    def report(self) -> str:
        """The error in a line; empty if there is none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def raise_on_all_ranks(self, reports: list[str]) -> None:
        """Raise the error of this rank, or one that names a rank that has one."""
        if self.error is not None:
            raise self.error
        for number, report in enumerate(reports):
            if report:
                raise OtherRankError(f"writing a checkpoint failed on rank {number}: {report}")
