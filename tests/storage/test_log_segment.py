"""A segment is read exactly as it was written, or the read fails."""

from __future__ import annotations

import datetime as dt
import decimal
import errno
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.errors import (
    InputError,
    LogCorrupted,
    LogError,
    ProtocolViolation,
    StorageDenied,
    StorageFull,
)
from holdfast.storage.files import storage_error
from holdfast.storage.rows import digest
from holdfast.storage.segment import read_segment, write_segment

Rows = Callable[..., pa.Table]


@pytest.mark.parametrize("fsync", [True, False])
def test_a_segment_is_read_as_it_was_written(tmp_path: Path, rows: Rows, fsync: bool) -> None:
    table, path = rows(7, 1_000), tmp_path / "s.parquet"
    file = write_segment(table, path, time="ts", fsync=fsync)
    assert (file.rows, file.checksum) == (1_000, digest(table))
    assert 7_000_000 <= file.t_max_us < 8_000_000
    assert file.size_bytes == path.stat().st_size
    assert read_segment(path, rows=file.rows, checksum=file.checksum).equals(table)
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


def test_a_segment_has_one_row_group_and_utc_timestamps_for_spark(
    tmp_path: Path, rows: Rows
) -> None:
    path = tmp_path / "s.parquet"
    write_segment(rows(1, 200_000), path, time="ts", fsync=False)
    file = pq.ParquetFile(path)
    assert file.num_row_groups == 1
    assert "isAdjustedToUTC=true, timeUnit=microseconds" in str(file.schema)


def test_every_type_is_preserved_by_a_segment(tmp_path: Path) -> None:
    values = {
        "ts": pa.array([1, 2], pa.timestamp("ms")),
        "f32": pa.array([-0.0, None], pa.float32()),
        "dec": pa.array([decimal.Decimal("-1.50"), None], pa.decimal128(5, 2)),
        "time": pa.array([dt.time(1), None], pa.time32("s")),
        "u8": pa.array([255, None], pa.uint8()),
        "u64": pa.array([2**64 - 1, None], pa.uint64()),
        "gone": pa.nulls(2),
        "dict": pa.array(["a", None]).dictionary_encode(),
        "fixed": pa.array([b"ab", None], pa.binary(2)),
        "list": pa.array([[None, [1]], None], pa.list_(pa.large_list(pa.int16()))),
        "map": pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float64())),
        "row": pa.array(
            [{"a": None, "t": 5}, None], pa.struct({"a": pa.bool_(), "t": pa.date32()})
        ),
    }
    table, path = pa.table(values), tmp_path / "s.parquet"
    file = write_segment(table, path, time="ts", fsync=False)
    assert digest(read_segment(path, rows=2, checksum=file.checksum)) == digest(table)


def test_a_flipped_bit_anywhere_is_detected_or_harmless(tmp_path: Path, rows: Rows) -> None:
    table, path = rows(3, 40), tmp_path / "s.parquet"
    file = write_segment(table, path, time="ts", fsync=False)
    good = path.read_bytes()
    detected = 0
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1 << offset % 8
        path.write_bytes(bad)
        try:
            assert read_segment(path, rows=file.rows, checksum=file.checksum).equals(table)
        except LogCorrupted:
            detected += 1
    assert detected > len(good) / 2


def test_the_digest_detects_a_flipped_bit_without_page_checksums(tmp_path: Path) -> None:
    """The page is valid Parquet, but its values have changed."""
    path = tmp_path / "s.parquet"
    table = pa.table({"ts": pa.array([1, 2], pa.timestamp("us", "UTC")), "v": [7, 2**40 + 7]})
    file = write_segment(table, path, time="ts", fsync=False)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    data = path.read_bytes()
    offset = data.index((2**40 + 7).to_bytes(8, "little"))
    path.write_bytes(data[:offset] + b"\x03" + data[offset + 1 :])
    with pytest.raises(LogCorrupted, match=r"2 rows with checksum .* restore the folder"):
        read_segment(path, rows=file.rows, checksum=file.checksum)


def test_lost_rows_truncated_files_and_missing_files_are_detected(
    tmp_path: Path, rows: Rows
) -> None:
    path = tmp_path / "s.parquet"
    file = write_segment(rows(3), path, time="ts", fsync=False)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(LogCorrupted):
            read_segment(path, rows=file.rows, checksum=file.checksum)
    write_segment(rows(3).slice(1), path, time="ts", fsync=False)
    with pytest.raises(LogCorrupted, match="found 4 rows"):
        read_segment(path, rows=file.rows, checksum=file.checksum)
    path.unlink()
    with pytest.raises(LogCorrupted, match="missing"):
        read_segment(path, rows=file.rows, checksum=file.checksum)


def test_tables_that_cannot_be_segments_are_refused(tmp_path: Path, rows: Rows) -> None:
    with pytest.raises(ProtocolViolation, match="expected a segment with rows"):
        write_segment(rows(1, 0), tmp_path / "s", time="ts", fsync=False)
    empty = pa.array([{}], pa.struct([]))
    table = pa.table({"ts": pa.array([1], pa.timestamp("us")), "e": empty})
    with pytest.raises(InputError, match="Parquet cannot hold"):
        write_segment(table, tmp_path / "s", time="ts", fsync=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_previous_file(tiny_disk: Path, rows: Rows) -> None:
    path = tiny_disk / "s.parquet"
    file = write_segment(rows(1), path, time="ts", fsync=True)
    with pytest.raises(StorageFull, match="Free some space"):
        write_segment(rows(2, 50_000), path, time="ts", fsync=True)
    assert read_segment(path, rows=5, checksum=file.checksum).equals(rows(1))
    assert [p.name for p in tiny_disk.iterdir()] == ["s.parquet"]


def test_os_errors_are_mapped_to_storage_errors() -> None:
    kinds = {
        StorageFull: [errno.ENOSPC, errno.EDQUOT, errno.EFBIG],
        StorageDenied: [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR],
        LogError: [errno.EIO, errno.EBADF],
    }
    for kind, numbers in kinds.items():
        for number in numbers:
            assert type(storage_error(OSError(number, "?"), "/x")) is kind
