"""Many traces in one file, any of which is read without the others. The format is in docs/trace-format.md.

Example:
    with TraceWriter("step-12.mrt") as writer:
        for trace in traces:
            writer.append(trace)
    with TraceFile("step-12.mrt") as file:
        whole, part = file[0], file.read(1, tokens=slice(100, 200), layers=[3, 4])
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from moe_replay.errors import TraceFormatError
from moe_replay.routes.codec import DEFAULT_LIMITS, HEADER_BYTES, BlobSource, Limits, read_header
from moe_replay.routes.trace import RouteTrace, encode_parts, read_blob
from moe_replay.utils.files import write_at

FILE_HEAD = b"\x89MRF\r\n\x1a\n" + struct.pack("<H6x", 1)
TAIL_MAGIC = b"\x89MRE\r\n\x1a\n"

_TAIL = struct.Struct("<QII8s")


class TraceWriter:
    """Appends traces to `path.partial`, which becomes `path` when the writer is closed without an error.

    If the `with` block raises, or the process dies, the partial file stays and `path` does not appear:
    `recover_traces` recovers the whole records in it.
    """

    def __init__(self, path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = Path(path)
        self.partial = Path(f"{self.path}.partial")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already; a file of traces is written once")
        if self.partial.exists():
            raise FileExistsError(
                f"{self.partial} exists: its writer is running, or died; recover_traces recovers its records"
            )
        self._limits = limits
        self._offsets = [len(FILE_HEAD)]
        self._file = open(self.partial, "xb", buffering=0)  # noqa: SIM115  closed by close() or abandon()
        write_at(self._file.fileno(), 0, [memoryview(FILE_HEAD)])

    def append(self, trace: RouteTrace) -> None:
        start, parts = self._offsets[-1], encode_parts(trace, limits=self._limits)
        self._offsets.append(start + write_at(self._file.fileno(), start, parts))  # if it fails, nothing was appended

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def close(self) -> None:
        """Finish the file and rename it to `path`."""
        if self._file.closed:
            return
        index = np.array(self._offsets, "<u8").tobytes()
        tail = _TAIL.pack(len(self), _index_crc(index, len(self)), 0, TAIL_MAGIC)
        end = self._offsets[-1]
        end += write_at(self._file.fileno(), end, [memoryview(index + tail)])
        self._file.truncate(end)  # an append that failed may have left more
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.partial, self.path)

    def abandon(self) -> None:
        """Stop writing and leave the partial file as it is."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


class TraceFile:
    """The traces of a finished file, read on demand: `len`, `[i]`, iteration, and `read` for parts of one."""

    def __init__(self, path: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS) -> None:
        self.path = Path(path)
        self._limits = limits
        with ExitStack() as on_failure:
            self._file = on_failure.enter_context(open(self.path, "rb", buffering=0))
            self._offsets = _read_index(self._file, limits)
            on_failure.pop_all()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> RouteTrace:
        return self.read(index)

    def __iter__(self) -> Iterator[RouteTrace]:
        return (self.read(index) for index in range(len(self)))

    def read(self, index: int, tokens: slice = slice(None), layers: Sequence[int] | None = None) -> RouteTrace:
        """Return some tokens and layers of one trace; reads its header, its sections and the blocks of those tokens."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} traces, there is no number {index}")
        number = index % len(self)
        record = _Record(self._file, self._offsets[number], self._offsets[number + 1], number)
        return read_blob(record, tokens, layers, self._limits)

    def close(self) -> None:
        """Close the file; traces read from it stay usable."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recover_traces(
    damaged: str | os.PathLike[str], target: str | os.PathLike[str], *, limits: Limits = DEFAULT_LIMITS
) -> int:
    """Write the leading whole records of an unfinished or damaged file to a new file; return their number."""
    with open(damaged, "rb", buffering=0) as file:
        records = list(_walk(file, limits))
        with TraceWriter(target, limits=limits) as writer:
            for record in records:
                try:
                    trace = read_blob(record, slice(None), None, limits)
                except TraceFormatError:
                    break
                writer.append(trace)
            return len(writer)


class _Record(BlobSource):
    """Bytes start to stop of an open file."""

    def __init__(self, file: FileIO, start: int, stop: int, number: int | None = None) -> None:
        self.prefix, self.start, self.sample = f"{file.name}: ", start, number
        self._file, self._size = file, stop - start

    def __len__(self) -> int:
        return self._size

    def take(self, start: int, stop: int) -> memoryview:
        chunks: list[bytes] = []
        while start < stop:  # one read gives 2 GiB at most
            chunks.append(os.pread(self._file.fileno(), stop - start, self.start + start))
            if not chunks[-1]:
                raise self.error("file", start, "it has become shorter", f"{stop - start} more bytes", "its end")
            start += len(chunks[-1])
        return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _whole_file(file: FileIO) -> _Record:
    whole = _Record(file, 0, os.fstat(file.fileno()).st_size)
    head = bytes(whole.take(0, min(len(FILE_HEAD), len(whole))))
    if head != FILE_HEAD:
        raise whole.error("head", 0, "not a file of route traces", FILE_HEAD.hex(" "), head.hex(" "))
    return whole


def _read_index(file: FileIO, limits: Limits) -> list[int]:
    """Return the offset of each record, and of the index after them."""
    whole = _whole_file(file)
    tail_at = len(whole) - _TAIL.size
    tail = bytes(whole.take(max(tail_at, 0), len(whole)))
    if tail_at < len(FILE_HEAD) or not tail.endswith(TAIL_MAGIC):
        records = sum(1 for _ in _walk(file, limits))
        raise TraceFormatError(
            f"{file.name}: the file was never finished, or it was cut off",
            expected=f"{TAIL_MAGIC.hex(' ')} at its end",
            found=f"{records} whole records and no index",
            remedy="recover_traces(damaged, target) recovers the whole records",
        )
    count, crc, reserved, _ = _TAIL.unpack(tail)
    index_at = tail_at - 8 * (count + 1)
    if index_at < len(FILE_HEAD):
        raise whole.error("number of records", tail_at, "too many", f"what fits {len(whole)} bytes", count)
    index = whole.take(index_at, tail_at)
    actual_crc = _index_crc(index, count)
    if actual_crc != crc:
        raise whole.error("index", index_at, "corrupted", f"checksum {crc:08x}", f"{actual_crc:08x}")
    if reserved:
        raise whole.error("reserved", tail_at + 12, "wrong value", 0, reserved)
    offsets = np.frombuffer(index, "<u8")
    if offsets[0] != len(FILE_HEAD) or offsets[-1] != index_at or (offsets[1:] <= offsets[:-1]).any():
        rule = f"increasing from {len(FILE_HEAD)} to {index_at}"
        raise whole.error("index", index_at, "wrong offsets", rule, offsets[:8].tolist())
    return offsets.tolist()


def _index_crc(index: bytes | memoryview, count: int) -> int:
    return zlib.crc32(struct.pack("<Q", count), zlib.crc32(index))


def _walk(file: FileIO, limits: Limits) -> Iterator[_Record]:
    """Yield the leading records of a file, as far as their headers are valid."""
    whole = _whole_file(file)
    start, number = len(FILE_HEAD), 0
    while len(whole) - start >= HEADER_BYTES:
        try:
            shape, _ = read_header(_Record(file, start, len(whole)), limits)
        except TraceFormatError:
            return
        if shape.blob_bytes > len(whole) - start:
            return
        yield _Record(file, start, start + shape.blob_bytes, number)
        start, number = start + shape.blob_bytes, number + 1
