"""Files of many traces: reading one without the others, files that were never finished, and every kind of damage."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from moe_replay.errors import TraceFormatError
from moe_replay.routes.codec import Limits
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import FILE_HEAD, TraceFile, TraceWriter, recover_traces


def make_trace(tokens: int, num_experts: int = 16, seed: int = 0) -> RouteTrace:
    rng = np.random.default_rng(seed)
    experts = (rng.integers(0, num_experts, (tokens, 3, 1)) + np.array([0, 5, 3])) % num_experts
    return RouteTrace(rng.integers(0, 1000, tokens), experts, [1, 2, 4], num_experts=num_experts)


TRACES = [make_trace(5, seed=1), make_trace(0, seed=2), make_trace(7, 300, seed=3), make_trace(2, seed=4)]
SIZES = [len(trace.to_bytes()) for trace in TRACES]


def write(path: Path, traces: list[RouteTrace]) -> Path:
    with TraceWriter(path) as writer:
        for trace in traces:
            writer.append(trace)
    return path


def read_all(path: Path) -> list[RouteTrace]:
    with TraceFile(path) as file:
        return list(file)


# ---- whole files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(len(TRACES) + 1))
def test_what_is_written_is_read(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "a.mrt", TRACES[:count])
    with TraceFile(path) as file:
        assert len(file) == count
        assert list(file) == TRACES[:count]
        assert [file[i - count] for i in range(count)] == TRACES[:count]
        for outside in (count, -count - 1):
            with pytest.raises(IndexError, match=f"has {count} traces, there is no number {outside}"):
                file[outside]


def test_the_file_is_its_records_and_an_index(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.mrt", TRACES).read_bytes()
    offsets = [16, *(16 + int(size) for size in np.cumsum(SIZES))]
    index = struct.pack("<5Q", *offsets)
    crc = zlib.crc32(index + struct.pack("<Q", 4))
    tail = struct.pack("<QII", 4, crc, 0) + b"\x89MRE\r\n\x1a\n"
    head = b"\x89MRF\r\n\x1a\n\x01\x00" + bytes(6)
    assert raw == head + b"".join(trace.to_bytes() for trace in TRACES) + index + tail


def test_a_trace_of_more_parts_than_one_write_takes(tmp_path: Path) -> None:
    tokens = 512 * 1100
    trace = RouteTrace(np.zeros(tokens, int), np.arange(tokens).reshape(-1, 1, 1) % 200, [0], num_experts=256)
    assert read_all(write(tmp_path / "a.mrt", [trace, trace])) == [trace, trace]


@pytest.mark.parametrize("num_experts", [128, 384])
def test_a_part_needs_only_its_bytes(tmp_path: Path, num_experts: int) -> None:
    traces = [make_trace(1500, num_experts, seed) for seed in range(3)]
    path = write(tmp_path / "a.mrt", traces)
    raw = bytearray(path.read_bytes())
    record = len(traces[0].to_bytes())
    block = 512 * 9 // 8 * (8 if num_experts == 128 else 9)
    middle_payload = 16 + 2 * record - (1500 * 9 // 64 + 1) * 8 * (8 if num_experts == 128 else 9)
    raw[16 + 100] ^= 1  # the first trace
    raw[middle_payload + 10] ^= 1  # the first block of the second
    raw[middle_payload + 2 * block + 10] ^= 1  # and its last
    path.write_bytes(raw)
    with TraceFile(path) as file:
        assert file[2] == traces[2]
        assert file.read(1, tokens=slice(512, 1024)) == traces[1][512:1024]
        assert file.read(1, slice(-900, 700), [2, 4]) == traces[1][600:700].select_layers([2, 4])
        for tokens in (slice(511, 600), slice(1000, 1025), slice(None)):
            with pytest.raises(TraceFormatError, match=r"block \d is corrupted"):
                file.read(1, tokens)
        with pytest.raises(TraceFormatError, match="corrupted"):
            file.read(0, tokens=slice(0, 1))


def test_an_error_names_file_sample_and_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrt", TRACES)
    raw = bytearray(path.read_bytes())
    raw[16 + SIZES[0] + SIZES[1] + 70] ^= 1
    path.write_bytes(raw)
    place = 16 + SIZES[0] + SIZES[1] + 56
    with TraceFile(path) as file, pytest.raises(TraceFormatError) as caught:
        list(file)
    assert str(caught.value).startswith(
        f"{path}: sections_crc at byte {place}: corrupted [sample 2]: expected checksum"
    )
    assert caught.value.sample == 2


def test_limits_reach_the_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrt", TRACES)
    with TraceFile(path, limits=Limits(tokens=6)) as file:
        assert file[0] == TRACES[0]
        with pytest.raises(TraceFormatError, match=r"num_tokens at byte \d+: out of range \[sample 2\]"):
            file[2]


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.mrt"
    with TraceWriter(path) as writer:
        writer.append(TRACES[0])
        assert len(writer) == 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.mrt.partial"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.mrt"]
    writer.close()
    assert read_all(path) == TRACES[:1]
    with pytest.raises(ValueError, match="closed file"):
        writer.append(TRACES[1])


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.mrt", TRACES)
    with pytest.raises(FileExistsError, match="exists already"):
        TraceWriter(path)
    (tmp_path / "b.mrt.partial").write_bytes(b"somebody is writing")
    with pytest.raises(FileExistsError, match="running, or died"):
        TraceWriter(tmp_path / "b.mrt")
    with monkeypatch.context() as race, pytest.raises(FileExistsError):  # another writer began a moment ago
        race.setattr(Path, "exists", lambda self: False)
        TraceWriter(tmp_path / "b.mrt")
    assert read_all(path) == TRACES
    assert (tmp_path / "b.mrt.partial").read_bytes() == b"somebody is writing"


def test_a_block_that_raises_leaves_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mrt"
    with pytest.raises(KeyboardInterrupt), TraceWriter(path) as writer:
        writer.append(TRACES[0])
        writer.append(TRACES[2])
        raise KeyboardInterrupt
    assert not path.exists()
    with pytest.raises(TraceFormatError, match="found 2 whole records and no index"):
        TraceFile(writer.partial)
    assert recover_traces(writer.partial, tmp_path / "saved.mrt") == 2
    assert read_all(tmp_path / "saved.mrt") == [TRACES[0], TRACES[2]]


def test_a_trace_that_is_refused_or_half_written_is_not_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mrt"
    pwritev = os.pwritev

    def full_disk(fd: int, parts: list[memoryview], offset: int) -> int:
        pwritev(fd, [memoryview(b"".join(parts)[:-1])], offset)
        raise OSError("no space left")

    with TraceWriter(path, limits=Limits(tokens=600)) as writer:
        writer.append(TRACES[0])
        with pytest.raises(TraceFormatError, match="num_tokens"):
            writer.append(make_trace(601))
        monkeypatch.setattr(os, "pwritev", full_disk)
        with pytest.raises(OSError, match="no space left"):
            writer.append(make_trace(600))
        monkeypatch.setattr(os, "pwritev", pwritev)
        writer.append(TRACES[2])
    assert read_all(path) == [TRACES[0], TRACES[2]]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev

    def slow_disk(fd: int, parts: list[memoryview], offset: int) -> int:
        return pwritev(fd, [memoryview(b"".join(parts)[:100])], offset)

    monkeypatch.setattr(os, "pwritev", slow_disk)
    traces = [*TRACES, make_trace(1100)]
    assert read_all(write(tmp_path / "a.mrt", traces)) == traces


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    path = write(tmp_path / "a.mrt", TRACES)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))
    assert read_all(path) == TRACES


# ---- damage ---------------------------------------------------------------------------------------------------------


def test_every_change_of_one_byte_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrt", [make_trace(1)])
    raw = path.read_bytes()
    for position in range(len(raw)):
        for change in (1, 128, 255):
            harmed = bytearray(raw)
            harmed[position] ^= change
            path.write_bytes(harmed)
            with pytest.raises(TraceFormatError):
                read_all(path)


def test_every_truncation_is_refused_counted_and_recovered(tmp_path: Path) -> None:
    raw = write(tmp_path / "a.mrt", TRACES).read_bytes()
    ends = 16 + np.cumsum(SIZES)
    cut, saved = tmp_path / "cut.mrt", tmp_path / "saved.mrt"
    for size in range(len(FILE_HEAD), len(raw)):
        cut.write_bytes(raw[:size])
        whole = int((ends <= size).sum())
        with pytest.raises(TraceFormatError) as caught:
            TraceFile(cut)
        assert f"found {whole} whole records and no index" in str(caught.value)
        assert "recover_traces(damaged, target)" in str(caught.value)
        if size % 64 == 0:
            assert recover_traces(cut, saved) == whole
            assert read_all(saved) == TRACES[:whole]
            saved.unlink()


@pytest.mark.parametrize("size", range(len(FILE_HEAD)))
def test_less_than_a_head_is_no_file_of_traces(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.mrt"
    path.write_bytes(FILE_HEAD[:size])
    with pytest.raises(TraceFormatError, match="head at byte 0: not a file of route traces"):
        TraceFile(path)
    with pytest.raises(TraceFormatError, match="head at byte 0: not a file of route traces"):
        recover_traces(path, tmp_path / "saved.mrt")
    assert not list(tmp_path.glob("saved*"))


def test_a_lone_blob_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mrt"
    path.write_bytes(TRACES[0].to_bytes())
    with pytest.raises(TraceFormatError, match="not a file of route traces"):
        TraceFile(path)


def test_recovery_stops_at_the_first_harmed_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrt", TRACES)
    raw = bytearray(path.read_bytes())
    raw[16 + SIZES[0] + SIZES[1] + SIZES[2] - 1] ^= 1  # payload of the third
    path.write_bytes(raw)
    assert recover_traces(path, tmp_path / "saved.mrt") == 2
    assert read_all(tmp_path / "saved.mrt") == TRACES[:2]


def sealed(offsets: list[int], count: int, reserved: int = 0) -> bytes:
    index = struct.pack(f"<{len(offsets)}Q", *offsets)
    crc = zlib.crc32(index + struct.pack("<Q", count))
    return index + struct.pack("<QII", count, crc, reserved) + b"\x89MRE\r\n\x1a\n"


INDEX_LIES = {
    "gap": ([24, 16 + SIZES[0], 16 + SIZES[0] + SIZES[1]], 2, 0, "wrong offsets: expected increasing from 16"),
    "backwards": ([16, 8, 16 + SIZES[0] + SIZES[1]], 2, 0, "wrong offsets: expected increasing from 16"),
    "short": ([16, 16 + SIZES[0]], 1, 0, "wrong offsets: expected increasing from 16 to"),
    "beyond": ([16, 2**64 - 1], 1, 0, "wrong offsets: expected increasing from 16 to"),
    "too many": ([16], 2**64 - 1, 0, "number of records at byte .* too many"),
    "count": ([16, 16 + SIZES[0], 16 + SIZES[0] + SIZES[1]], 1, 0, "index at byte .* corrupted"),
    "reserved": ([16, 16 + SIZES[0], 16 + SIZES[0] + SIZES[1]], 2, 1, "reserved at byte .* wrong value"),
    "boundary": ([16, 80, 16 + SIZES[0] + SIZES[1]], 2, 0, r"the blob is cut off \[sample 0\]"),
    "merged": ([16, 16 + SIZES[0] + SIZES[1]], 1, 0, r"bytes after the end of the blob \[sample 0\]"),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    offsets, count, reserved, message = INDEX_LIES[lie]
    path = tmp_path / "a.mrt"
    records = b"".join(trace.to_bytes() for trace in TRACES[:2])
    path.write_bytes(FILE_HEAD + records + sealed(offsets, count, reserved))
    with pytest.raises(TraceFormatError, match=message):
        read_all(path)


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrt", TRACES)
    with TraceFile(path) as file:
        os.truncate(path, 16 + SIZES[0] + 100)
        assert file[0] == TRACES[0]
        with pytest.raises(TraceFormatError, match=r"it has become shorter \[sample 3\]"):
            file[3]


def test_a_closed_file_is_not_read(tmp_path: Path) -> None:
    with TraceFile(write(tmp_path / "a.mrt", TRACES)) as file:
        trace = file[0]
    file.close()
    assert trace == TRACES[0]
    with pytest.raises(ValueError, match="closed file"):
        file[0]
