"""Dumped verl batches (`.pt`, `.npz`, `.parquet`) to a trace file. No code in a dump is run.

A dump holds `routed_experts` and `input_ids` of a batch, and `attention_mask` if they are padded:

    torch.save({name: batch.batch[name] for name in ("routed_experts", "input_ids", "attention_mask")}, "step-12.pt")
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_replay.errors import MissingExtraError, TraceError, TraceFormatError, needs_extra
from moe_replay.interop.conventions import from_verl
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.utils.misc import one_line

ROUTES, TOKENS, MASK = "routed_experts", "input_ids", "attention_mask"
_SAVE = f'Save tensors: torch.save({{name: batch.batch[name] for name in ("{ROUTES}", "{TOKENS}", "{MASK}")}}, file)'
_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    torch.serialization.pickle.UnpicklingError,
)


def convert_dumps(files: Iterable[Path], topology: MoeTopology, output: Path, weight_version: int = 0) -> int:
    """Write the traces of all dumps to one trace file, in order; return their number."""
    try:
        writer = TraceWriter(output)
    except OSError as error:
        raise TraceFormatError(f"{output} cannot be written: {one_line(error)}", remedy="Name a new file") from error
    try:
        for file in files:
            for trace in read_dump(file, topology, weight_version):
                writer.append(trace)
        writer.close()
        return len(writer)
    finally:
        writer.abandon()  # no effect on a finished file
        writer.partial.unlink(missing_ok=True)


def read_dump(file: Path, topology: MoeTopology, weight_version: int = 0) -> list[RouteTrace]:
    if file.suffix not in READERS:
        raise TraceFormatError(f"{file}: unknown dump format", expected=f"one of {', '.join(READERS)}")
    try:
        batch = READERS[file.suffix](file)
        missing = [name for name in (ROUTES, TOKENS) if batch.get(name) is None]
        if missing:
            found = ", ".join(str(name) for name, value in batch.items() if value is not None)
            raise TraceFormatError(f"lacks {' and '.join(missing)}", found=found or "nothing", remedy=_SAVE)
        return from_verl(
            batch[ROUTES], batch[TOKENS], batch.get(MASK), topology=topology, weight_version=weight_version
        )
    except TraceError as error:
        raise TraceFormatError(f"{file}: {error.problem}", **error.facts) from error
    except MissingExtraError:
        raise
    except _UNREADABLE as error:
        raise TraceFormatError(
            f"{file} cannot be read: {one_line(error)}",
            expected="tensors only: code in a dump is never run",
            remedy=_SAVE if file.suffix == ".pt" else None,
        ) from error


def _read_pt(file: Path) -> Mapping[str, Any]:
    batch = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(batch, Mapping):
        raise TraceFormatError("not a dictionary of tensors", found=type(batch).__name__, remedy=_SAVE)
    return batch


def _read_npz(file: Path) -> Mapping[str, Any]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in (ROUTES, TOKENS, MASK) if name in arrays.files}


def _read_parquet(file: Path) -> Mapping[str, Any]:
    with needs_extra("reading parquet needs pyarrow", "train"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    try:
        table = ParquetFile(file)
        present = [name for name in (ROUTES, TOKENS) if name in table.schema_arrow.names]
        columns = table.read(columns=present).to_pydict()
    except ArrowException as error:
        raise ValueError(one_line(error)) from error
    return {name: [np.asarray(value) for value in values] for name, values in columns.items()}


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".pt": _read_pt,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
