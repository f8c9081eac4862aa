"""The engine reports a full disk as StorageFull, so that the step is retried. No JVM.

The full disk is simulated by a limit on the size of files.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from holdfast.engine.prepared import Prepared
from holdfast.engine.spark_errors import error_of_step
from holdfast.engine.state import Chunk, Version, export_version, files_below, write_rows
from holdfast.errors import (
    HoldfastError,
    InputError,
    LogCorrupted,
    StorageDenied,
    StorageFull,
    StorageLost,
    UserFunctionError,
)
from holdfast.model.fragments import Path as NetworkPath

ROWS = pa.table({"x": list(range(10_000))})
PATH = NetworkPath("top", (), ("in",), ("out",))


@contextmanager
def full() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STATE = "/storage/nodes/main/state"


def error_of(text: str) -> Exception:
    return error_of_step(PySparkException(text), PATH, 3, 4, STATE)


def test_rows_for_a_job_on_a_full_disk_raise_storage_full(tmp_path: Path) -> None:
    prepared = Prepared(str(tmp_path / "main"), reuse=True)
    with full(), pytest.raises(StorageFull, match="main"):
        prepared.write(ROWS, "rows")
    prepared.reset()
    assert files_below(str(tmp_path)) == set()
    assert pq.read_metadata(prepared.write(ROWS, "rows")).num_rows == ROWS.num_rows


def test_an_export_of_state_to_a_full_disk_raises_storage_full(tmp_path: Path) -> None:
    crc = write_rows(ROWS, str(tmp_path / "p/a.parquet"))
    version = Version("p", 1, panes={"w": (Chunk("p/a.parquet", 1, 1, 10_000, (), crc),)})
    with full(), pytest.raises(StorageFull, match="moved"):
        export_version(version, str(tmp_path), str(tmp_path / "moved"))


@pytest.mark.parametrize(
    "text",
    [
        "Job aborted due to stage failure\njava.io.IOException: No space left on device",
        "Python worker failed\nholdfast.errors.StorageFull: /state/x: File too large. Free some",
    ],
    ids=["Spark's own files", "our files"],
)
def test_a_full_disk_at_an_executor_raises_storage_full(text: str) -> None:
    err = error_of(text)
    assert isinstance(err, StorageFull)
    assert "path 'top', buckets 3 to 4" in str(err)


def test_a_full_disk_on_the_driver_is_recognized_by_its_errno() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert isinstance(error_of_step(full, PATH, 3, 4, STATE), StorageFull)


def test_other_spark_errors_raise_input_error() -> None:
    err = error_of("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012")
    assert type(err) is InputError
    assert str(err) == "path 'top', buckets 3 to 4: Division by zero."


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"[PATH_NOT_FOUND] Path does not exist: file:{STATE}/top.1.tmp. SQLSTATE: 42K03",
         StorageLost),
        (f"Job aborted\njava.io.FileNotFoundException: File file:{STATE}/a does not exist",
         StorageLost),
        (f"Job aborted\njava.io.IOException: Mkdirs failed to create file:{STATE}/top.tmp",
         StorageDenied),
        (f"Job aborted\njava.io.FileNotFoundException: {STATE}/a (Not a directory)",
         StorageDenied),
        (f"Job aborted\njava.io.IOException: {STATE}/a (Read-only file system)", StorageDenied),
        ("Python worker failed\nTraceback (most recent call last):\n"
         "holdfast.errors.LogCorrupted: /state/x: 7 bytes", LogCorrupted),
    ],
)  # fmt: skip
def test_lost_storage_raises_a_storage_error(text: str, kind: type) -> None:
    err = error_of(text)
    assert type(err) is kind
    assert "path 'top', buckets 3 to 4" in str(err)


def test_a_user_function_that_cannot_read_its_file_raises_user_function_error() -> None:
    trace = 'Traceback (most recent call last):\n  File "/app/mine.py", line 3, in price\n'
    err = error_of(f"Python worker failed\n{trace}FileNotFoundError: {STATE}/../prices.csv")
    assert isinstance(err, UserFunctionError) and err.location == "/app/mine.py:3 in price"


def test_errors_of_other_files_are_passed_on() -> None:
    for err in (FileNotFoundError(errno.ENOENT, "gone", "/etc/hosts"), HoldfastError("ours")):
        assert error_of_step(err, PATH, 3, 4, STATE) is err
