"""A full disk under the engine is told as such, so that the step is run again. No JVM.

The disk is a limit on the size of files, which the system takes as seriously.
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

from holdfast.engine.engine import _told
from holdfast.engine.state import Chunk, Version, export_version, files_below, write_rows
from holdfast.engine.step_inputs import put_together
from holdfast.errors import HoldfastError, InputError, StorageFull
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


def told(text: str) -> HoldfastError:
    return _told(PySparkException(text), PATH, 3, 4)


def test_files_put_together_on_a_full_disk_leave_nothing_behind(tmp_path: Path) -> None:
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    for file in files:
        write_rows(ROWS, file)
    into = str(tmp_path / "together.tmp")
    with full(), pytest.raises(StorageFull, match=r"together\.tmp"):
        put_together(files, into)
    assert files_below(str(tmp_path)) == {"a.parquet", "b.parquet"}
    put_together(files, into)
    assert pq.read_metadata(into).num_rows == 20_000


def test_state_that_is_copied_to_a_full_disk(tmp_path: Path) -> None:
    write_rows(ROWS, str(tmp_path / "p/a.parquet"))
    version = Version("p", 1, panes={"w": (Chunk("p/a.parquet", 1, 1, 10_000),)})
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
def test_a_full_disk_at_an_executor_is_no_fault_of_the_rows(text: str) -> None:
    err = told(text)
    assert isinstance(err, StorageFull)
    assert "path 'top', buckets 3 to 4" in str(err)


def test_a_full_disk_on_the_driver_is_told_by_its_number() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert isinstance(_told(full, PATH, 3, 4), StorageFull)


def test_whatever_else_fails_in_spark_is_about_the_rows() -> None:
    err = told("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012")
    assert type(err) is InputError
    assert str(err) == "path 'top', buckets 3 to 4: Division by zero."
