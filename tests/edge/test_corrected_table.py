"""A table that always holds the best there is, whoever is restarted meanwhile. No JVM."""

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
    """The sink, and an application that feeds it."""

    def __init__(self, root: Path, stream: Stream) -> None:
        self.sink = CorrectedTable(str(root / "table"))
        self.fed_by = Restarting(root, stream)

    def takes(self) -> Held:
        for table, info in self.fed_by.app.gets():
            self.sink(table, info)
        return self.holds()

    def dies_after(self, calls: int) -> None:
        """In the middle of a delivery: the sink was called so often, then the process died."""
        given = self.fed_by.app.gets()
        for _ in range(calls):
            self.sink(*next(given))
        self.fed_by.restarts()

    def holds(self) -> Held:
        found = self.sink.read()
        if not found.num_rows:
            return []
        return list(zip(*(found[c].to_pylist() for c in ("value", "_stability")), strict=True))

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


def test_it_holds_stable_buckets_and_tentative_ones_until_they_are_corrected(
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


def test_one_bucket_is_one_file(stream: Stream, table: Table) -> None:
    stream.stable(1, 0, 1)
    stream.tentative(2, 3, 2, 3)
    table.takes()
    stream.stable(2, 2)
    table.takes()
    assert len(os.listdir(table.sink.folder)) == 4


def test_a_correction_replaces_the_file_in_one_move(stream: Stream, table: Table) -> None:
    """Whoever reads the old file goes on reading the old rows, all of them."""
    stream.tentative(0, 1, 1)
    table.takes()
    with open(table.file(1), "rb") as reads:
        stream.stable(1, 1)
        table.takes()
        assert pq.read_table(reads)["value"].to_pylist() == [-1]
    assert table.holds() == [(1, "STABLE")]
    assert os.listdir(table.sink.folder) == [os.path.basename(table.file(1))]


def test_a_file_that_a_crash_left_half_written_is_no_part_of_the_table(
    stream: Stream, table: Table
) -> None:
    stream.stable(1, 1)
    table.takes()
    Path(f"{table.file(1)}.tmp").write_bytes(b"PAR1 and no more")
    assert table.holds() == [(1, "STABLE")]


def test_restarted_in_a_failure_it_equals_the_ideal_once_all_is_stable(
    stream: Stream, table: Table
) -> None:
    """Tentative rows of before the restart do not stay for ever."""
    stream.stable(0, 0)
    stream.tentative(1, 4, 1, 2, 3, 4)
    table.takes()
    table.fed_by.restarts()
    stream.stable(3, 1)  # 2 and 3 are empty, and were not before
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (-4, "TENTATIVE")]
    stream.stable(5, 5)
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (5, "STABLE")]


def test_restarted_when_the_failure_is_over_already_it_equals_the_ideal_too(
    stream: Stream, table: Table
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 3, 1, 2, 3)
    table.takes()
    stream.stable(3, 2)
    table.fed_by.restarts()
    assert table.takes() == [(0, "STABLE"), (2, "STABLE")]


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_killed_anywhere_in_a_correction_it_equals_the_ideal_in_the_end(
    stream: Stream, table: Table, calls: int
) -> None:
    stream.stable(0, 0)
    stream.tentative(1, 4, 1, 2, 3, 4)
    table.takes()
    stream.stable(4, 1, 4)  # 2 and 3 are empty
    table.dies_after(calls)
    assert table.takes() == [(0, "STABLE"), (1, "STABLE"), (4, "STABLE")]


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_killed_while_it_was_given_what_is_tentative(
    stream: Stream, table: Table, calls: int
) -> None:
    stream.tentative(0, 2, 0, 1, 2)
    table.dies_after(calls)
    stream.stable(2, 1)
    assert table.takes() == [(1, "STABLE")]


def test_a_table_that_lost_all_its_rows_is_empty(stream: Stream, table: Table) -> None:
    stream.tentative(0, 0, 0)
    table.takes()
    stream.stable(0)
    assert table.takes() == []
