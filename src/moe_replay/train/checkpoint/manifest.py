"""The manifest of a checkpoint: size and digest of every file, by which damage is found before anything is used.

    {"algorithm": "blake2b-128", "files": {"trainer.json": {"bytes": 812, "digest": "5f..."}, ...}, "digest": "a0..."}

The last digest is that of `files` itself, so that damage to the manifest is found as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_replay.distributed.ranks import all_gather_json, from_rank_0, raise_on_all_ranks, rank, world_size
from moe_replay.errors import MoeReplayError
from moe_replay.utils.files import write_whole

FILE, RECORD, EXPORT, ADAPTER = "manifest.json", "trainer.json", "hf", "adapter"
"""Names in the folder of a checkpoint."""
ALGORITHM = "blake2b-128"

Entries = dict[str, dict[str, Any]]
"""Relative path -> {"bytes": size, "digest": hexadecimal}."""


class DamageError(MoeReplayError):
    """A file that is missing, or is not the one that was written."""


class UnreadableError(MoeReplayError):
    """A file that may be whole, but that this process cannot read."""


# ---- on all ranks: each reads some of the files -----------------------------------------------------------------


def damage_on_all_ranks(folder: Path, ignore: tuple[str, ...]) -> str:
    """Return what is damaged in a folder, "" if nothing is; files that begin with one of `ignore` are not read."""

    def listed() -> Entries | str:
        try:
            return {name: entry for name, entry in read(folder).items() if not name.startswith(ignore)}
        except DamageError as error:
            return str(error)

    entries = from_rank_0(listed, f"reading {FILE}")
    if isinstance(entries, str):
        return entries
    damage = ""
    with raise_on_all_ranks("comparing a checkpoint with its digests"):
        try:
            check(folder, {name: entries[name] for name in _share(sorted(entries))})
        except DamageError as error:
            damage = str(error)
    return next(filter(None, all_gather_json(damage)), "")


def _share(names: list[str]) -> list[str]:
    """Return the files that this rank reads: its own, and some of those that belong to no rank."""
    numbers = [re.search(r"rank-(\d+)", name) for name in names]
    owners = [int(number[1]) if number else place for place, number in enumerate(numbers)]
    return [name for name, owner in zip(names, owners, strict=True) if owner % world_size() == rank()]


# ---- in one process --------------------------------------------------------------------------------------------------


def measure(folder: Path, names: Iterable[str]) -> Entries:
    """Return size and digest of files below a folder."""
    return {name: {"bytes": (folder / name).stat().st_size, "digest": file_digest(folder / name)} for name in names}


def write(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    files = {name: dict(entries[name]) for name in sorted(entries)}
    content = {"algorithm": ALGORITHM, "files": files, "digest": _digest_of_entries(files)}
    write_whole(folder / FILE, json.dumps(content, indent=1) + "\n")


def read(folder: Path) -> Entries:
    """Return the entries of the manifest of a folder; raise `DamageError` if it is not whole."""
    try:
        content = json.loads(_bytes(folder / FILE))
        files, algorithm, digest = content["files"], content["algorithm"], content["digest"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamageError(f"{FILE} cannot be read") from error
    if algorithm != ALGORITHM or digest != _digest_of_entries(files):
        raise DamageError(f"{FILE} has another content than was written")
    return files


def check(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `DamageError` at the first file that is missing or has another content than its entry says."""
    for name, entry in entries.items():
        path = folder / name
        try:
            file_stat = path.stat()
        except OSError as error:
            raise _damage(path, error, name) from error
        if not stat.S_ISREG(file_stat.st_mode):  # reading a pipe or a device may never end
            raise DamageError(f"{name} is not a file")
        size = file_stat.st_size
        if size != entry["bytes"]:
            raise DamageError(f"{name} has another size", expected=f"{entry['bytes']} bytes", found=f"{size} bytes")
        if file_digest(path) != entry["digest"]:
            raise DamageError(f"{name} has another content than was written")


def file_digest(path: Path) -> str:
    """Return the digest of a file, which is read piece by piece."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _new_hash).hexdigest()
    except OSError as error:
        raise _damage(path, error) from error


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise DamageError(f"{path.name} is missing")
        return path.read_bytes()
    except OSError as error:
        raise _damage(path, error) from error


def _damage(path: Path, error: OSError, name: str = "") -> MoeReplayError:
    """Return what an error in reading means: damage, or only that this process cannot read it, e.g. no permission."""
    name = name or path.name
    if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP):
        return DamageError(f"{name} is missing")
    if error.errno == errno.EIO:
        return DamageError(f"{name} cannot be read: {error.strerror}")
    return UnreadableError(f"{path} cannot be read: {error.strerror}", remedy="Make it readable for this user")


def _digest_of_entries(files: Any) -> str:
    return _new_hash(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _new_hash(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=16)
