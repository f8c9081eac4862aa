"""A corrected table holds the best available results, also across restarts. No JVM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from holdfast.edge.sinks import CorrectedTable
from tests.edge.test_client_tentative import Restarting, Stream

Held = list[tuple[int, str]]


class Table:
    """The sink, and a client that feeds it."""

    def __init__(self, root: Path, stream: Stream) -> None:
        self.sink = CorrectedTable(str(root / "table"))
        self.fed_by = Restarting(root, stream)

    def takes(self) -> Held:
        for table, info in self.fed_by.app.gets():
            self.sink(table, info)
        return self.holds()

    def dies_after(self, calls: int) -> None:
        """Crash in the middle of a delivery, after `calls` calls of the sink."""
        buckets = self.fed_by.app.gets()
        for _ in range(calls):
            self.sink(*next(buckets))
        self.fed_by.restarts()

    def holds(self) -> Held:
        rows = self.sink.read()
        if not rows.num_rows:
            return []
        return list(zip(*(rows[c].to_pylist() for c in ("value", "_stability")), strict=True))

    def file(self, bucket: int) -> str:
        (name,) = (n for n in os.listdir(self.sink.folder) if int(n[7:-8]) == bucket)
        return os.path.join(self.sink.folder, name)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    stream = Stream(tmp_path)
    yield stream
    stream.log.close()


@pytest.fixture
def table(tmp_path: Path, stream: Stream) -> Iterator[Table]:
    table = Table(tmp_path, stream)
    yield table
    table.fed_by.log.close()


def test_a_table_holds_stable_buckets_and_uncorrected_tentative_buckets(
    stream: Stream, table: Table
) -> None:
    stream.stable(1, 1)
    stream.tentative(2, 4, 2, 3, 4)
    failed = [(1, "STABLE"), (-2, "TENTATIVE"), (-3, "TENTATIVE"), (-4, "TENTATIVE")]
    assert table.takes() == failed
    stream.stable(3, 2)  # bucket 3 has no rows after all
    assert table.takes() == [(1, "STABLE"), (2, "STABLE"), (-4, "TENTATIVE")]
    stream.stable(5, 4, 5)
    assert table.takes() == [(bucket, "STABLE") for bucket in (1, 2, 4, 5)]


def test_each_bucket_is_one_file(stream: Stream, table: Table) -> None:
    stream.stable(1, 0, 1)
    stream.tentative(2, 3, 2, 3)
    table.takes()
    stream.stable(2, 2)
    table.takes()
    assert len(os.listdir(table.sink.folder)) == 4


def test_a_correction_replaces_the_file_atomically(stream: Stream, table: Table) -> None:
    """An open reader of the old file still reads all old rows."""
    stream.tentative(0, 1, 1)
    table.takes()
    with open(table.file(1), "rb") as old_file:
        stream.stable(1, 1)
        table.takes()
        assert pq.read_table(old_file)["value"].to_pylist() == [-1]
    assert table.holds() == [(1, "STABLE")]
    assert os.listdir(table.sink.folder) == [os.path.basename(table.file(1))]


def test_a_table_ignores_files_that_a_crash_left_incomplete(stream: Stream, table: Table) -> None:
    stream.stable(1, 1)
    table.takes()
    Path(f"{table.file(1)}.tmp").write_bytes(b"PAR1 and no more")
    assert table.holds() == [(1, "STABLE")]


def test_a_table_restarted_during_a_failure_equals_the_ideal_after_the_correction(
    stream: Stream, table: Table
) -> None:
    """Tentative rows from before the restart do not remain permanently."""
    stream.stable(0, 0)
    stream.tentative(1, 4, 1, 2, 3, 4)
    table.takes()
    table.fed_by.restarts()
    stream.stable(3, 1)  # buckets 2 and 3 are empty now
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (-4, "TENTATIVE")]
    stream.stable(5, 5)
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (5, "STABLE")]


def test_a_table_restarted_after_the_failure_equals_the_ideal(stream: Stream, table: Table) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 1, 2, 3)
    table.takes()
    stream.stable(3, 2)
    table.fed_by.restarts()
    assert table.takes() == [(0, "STABLE"), (2, "STABLE")]


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_table_killed_anywhere_in_a_correction_finally_equals_the_ideal(
    stream: Stream, table: Table, calls: int
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 4, 1, 2, 3, 4)
    table.takes()
    stream.stable(4, 1, 4)  # buckets 2 and 3 are empty
    table.dies_after(calls)
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (4, "STABLE")]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_table_killed_during_a_tentative_delivery_finally_equals_the_ideal(
    stream: Stream, table: Table, calls: int
) -> None:
    stream.tentative(0, 2, 0, 1, 2)
    table.dies_after(calls)
    stream.stable(2, 1)
    assert table.takes() == [(1, "STABLE")]


def test_a_table_whose_rows_were_all_corrected_away_is_empty(stream: Stream, table: Table) -> None:
    stream.tentative(0, 0, 0)
    table.takes()
    stream.stable(0)
    assert table.takes() == []
