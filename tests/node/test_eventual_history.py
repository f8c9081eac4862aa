"""Recovery of a node with a time window and keyed state behind it (CEC): real log, real state of
keys, a small window, no Spark.

Random runs with failed steps and crashes must give the same results as a run without any of them.
The inputs are deleted as soon as the node reports that it no longer needs them.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.engine.footprints import Marked
from holdfast.engine.inputs import InputFile, Leaving, OnResults, StepResult
from holdfast.engine.keyed import FOOTPRINTS
from holdfast.engine.state import Chunk, Version, files_below, read_table, release, write_rows
from holdfast.errors import LogCorrupted, StorageFull
from holdfast.model.fragments import Path
from holdfast.storage import Boundary, Log
from tests.engine.test_footprints import ROWS, TOTALS, WIDTH_US, rows_of
from tests.node.test_eventual_checkpoints import BUCKETS, PATH, Inputs, SmallEngine, SmallNode

#: Each bucket gives the sums of the last ones.
SIZE = 5
#: The keyed operator "behind" reads the results of the window.
OPERATORS = {"one": ("a", Marked(TOTALS, WIDTH_US)), "behind": ("sums", Marked(TOTALS, WIDTH_US))}


@dataclass
class Released(Inputs):
    """Inputs that were released must not be read."""

    released_upto: int = -1

    def rows(self, stream: str, lo: int, hi: int) -> list[pa.Table]:
        assert lo > self.released_upto, f"{stream} from {lo}, released up to {self.released_upto}"
        return super().rows(stream, lo, hi)


@dataclass
class WithSums:
    """Inputs, and the rows of the window of a step."""

    inputs: Released
    sums: list[pa.Table] = field(default_factory=list)

    def rows(self, stream: str, lo: int, hi: int) -> list[pa.Table]:
        return self.sums if stream == "sums" else self.inputs.rows(stream, lo, hi)

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        return self.inputs.files(stream, lo, hi)


def buckets_of(table: pa.Table) -> np.ndarray[Any, Any]:
    return table["ts"].cast(pa.int64()).to_numpy() // WIDTH_US


def summed(rows: pa.Table, bucket: int) -> pa.Table:
    """The sum of each key, at the end of a bucket."""
    sums = rows.group_by("k", use_threads=False).aggregate([("x", "sum")])
    times = pa.repeat((bucket + 1) * WIDTH_US - 1, sums.num_rows).cast(pa.int64())
    return pa.table([times.cast(ROWS.field("ts").type), sums["k"], sums["x_sum"]], schema=ROWS)


def raw_from(panes: Sequence[Chunk], lo: int) -> int:
    """The first bucket that is not in panes, of those that windows need from bucket `lo` on."""
    return max([0, lo + 1 - SIZE, *(chunk.hi + 1 for chunk in panes)])


class HistoryEngine(SmallEngine):
    """Also has a window over stream "b", which folds rows under the same conditions as `Step`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: set[str] = set()
        self.folds = 0

    def run(
        self, path: Path, version: Version, lo: int, hi: int, inputs: Any, *,
        on_results: OnResults, leaving: Leaving,
    ) -> StepResult:  # fmt: skip
        panes, edges = version.panes.get("w", ()), version.edges.get("behind:0", ())
        given = WithSums(inputs)
        if version.replays_upto is not None:
            assert hi <= version.replays_upto
            stored = [rows for chunk in edges for rows in self._between(chunk, lo, hi)]
            given.sums = [rows for rows in stored if rows.num_rows]
            result = super().run(
                path, version, lo, hi, given, on_results=on_results, leaving=leaving
            )
            after = replace(result.version, panes=version.panes, edges=version.edges)
            needs_from = min(hi + 1, raw_from(panes, hi + 1))
            return replace(result, version=replace(after, needs_from=needs_from))
        raw = inputs.rows("b", raw_from(panes, lo), hi)
        rows = pa.concat_tables([ROWS.empty_table(), *raw, *map(self._read, panes)])
        at = buckets_of(rows)
        sums = [
            summed(rows.filter(pa.array((at > bucket - SIZE) & (at <= bucket))), bucket)
            for bucket in range(lo, hi + 1)
        ]
        given.sums = [table for table in sums if table.num_rows]
        made = set(self.made)
        if given.sums:
            edges = (*edges, self._write(pa.concat_tables(given.sums), "edge", lo, hi))
        history = replace(
            version, bucket=hi, panes={"w": panes}, edges={"behind:0": edges}, shards={}
        )

        def with_history(results: Any) -> None:
            leaving.history = history
            on_results({**results, "w": pa.concat_tables([ROWS.empty_table(), *given.sums])})

        try:
            result = super().run(
                path, version, lo, hi, given, on_results=with_history, leaving=leaving
            )
        except StorageFull:
            release(self.folder, (), undone := self.made - made)
            self.made -= undone
            raise
        panes = tuple(chunk for chunk in panes if chunk.hi > hi + 1 - SIZE)
        edges = tuple(chunk for chunk in edges if chunk.hi > leaving.wanted.since)
        first = raw_from(panes, hi + 1)
        if leaving.folds or hi - first >= 3:
            self.folds += leaving.folds
            new = pa.concat_tables([ROWS.empty_table(), *inputs.rows("b", first, hi)])
            panes = (*panes, self._write(new, "panes", first, hi))
        if len(panes) > 2:
            merged = self._write(pa.concat_tables(map(self._read, panes)), "panes", panes[0].lo, hi)
            panes = (merged,)
        after = replace(
            result.version, panes={"w": panes}, edges={"behind:0": edges},
            needs_from=min(hi + 1, raw_from(panes, hi + 1)),
        )  # fmt: skip
        return replace(result, version=after)

    def _between(self, chunk: Chunk, lo: int, hi: int) -> list[pa.Table]:
        if chunk.hi < lo or chunk.lo > hi:
            return []
        rows = self._read(chunk)
        at = buckets_of(rows)
        return [rows.filter(pa.array((at >= lo) & (at <= hi)))]

    def _read(self, chunk: Chunk) -> pa.Table:
        return read_table(os.path.join(self.folder, chunk.file), chunk.crc).cast(ROWS)

    def _write(self, rows: pa.Table, name: str, lo: int, hi: int) -> Chunk:
        file = f"{PATH.name}/{name}.{lo}-{hi}.{uuid.uuid4().hex[:8]}.parquet"
        self.made.add(file)
        crc = write_rows(rows, os.path.join(self.folder, file))
        return Chunk(file, lo, hi, rows.num_rows, crc=crc)


class HistoryNode(SmallNode):
    engine: HistoryEngine
    inputs: Released

    def make_engine(self) -> HistoryEngine:
        return HistoryEngine(self.root / "state", self.operators)

    def run(self, hi: int) -> None:
        super().run(hi)
        durable = self.eventual.durable(PATH)
        self.inputs.released_upto = durable.needs_from - 1
        release(self.engine.folder, [self.version, durable], self.engine.made)

    def crash(self) -> None:
        self.log.close()
        self.start()
        folder = self.engine.folder
        files = {file for file in files_below(folder) if not file.startswith(FOOTPRINTS)}
        release(folder, [self.version], files)  # as `Engine.recovered`
        self.engine.made = files


def given(seed: int) -> tuple[np.random.Generator, Released]:
    rng, inputs = np.random.default_rng(seed), Released()
    for bucket in range(BUCKETS):
        for stream in "ab":
            table = rows_of(rng, bucket, 6)
            if rng.random() < 0.6 and table.num_rows:
                inputs.tables[stream, bucket] = table
    return rng, inputs


def plain_results(inputs: Released, folder: Folder) -> Counter[str]:
    plain = HistoryNode(folder, replace(inputs), OPERATORS)
    for bucket in range(BUCKETS):
        plain.run(bucket)
    return plain.results


LIMITS: list[dict[str, int]] = [{}, {"recovery_rows": 40}, {"recovery_entries": 10}]


@pytest.mark.parametrize("seed", range(24))
def test_crashes_and_failed_steps_change_no_result(seed: int, tmp_path: Folder) -> None:
    rng, inputs = given(seed)
    expected = plain_results(inputs, tmp_path / "plain")
    node = HistoryNode(tmp_path / "node", inputs, OPERATORS, **LIMITS[seed % 3])
    while node.version.bucket < BUCKETS - 1:
        if rng.random() < 0.2:
            upto = node.version.replays_upto
            node.engine.error = (upto or node.version.bucket) + 1, StorageFull("full")
        try:
            node.run(min(BUCKETS - 1, node.version.bucket + int(rng.integers(1, 5))))
        except StorageFull:
            continue
        if rng.random() < 0.25:
            node.crash()
    assert node.results == expected
    assert {name.split()[0] for name in expected} == {"one", "behind", "w"}


def test_rows_are_folded_when_recovery_would_read_too_many(tmp_path: Folder) -> None:
    """The dial U, for operators that are not replayed. With a small one, every step folds what the
    step before left, so recovery reads only the rows of the last step. Upstream has to retain what
    recovery would read, and no more."""
    most = []
    for limits in {"recovery_rows": 1}, {}:
        _, inputs = given(0)
        node = HistoryNode(tmp_path / str(len(most)), inputs, {}, **limits)
        to_read = []
        for bucket in range(BUCKETS):
            node.run(bucket)
            status = node.eventual.status(PATH.name)
            assert status is not None and status["oldest"] == bucket
            to_read.append(status["rows_to_replay"])
            retained = [inputs.files(s, inputs.released_upto + 1, bucket) for s in "ab"]
            assert to_read[-1] == sum(file.rows for files in retained for file in files)
        assert (node.engine.folds > 0) == bool(limits)
        most.append(max(to_read))
    of_bucket = [sum(f.rows for s in "ab" for f in inputs.files(s, b, b)) for b in range(BUCKETS)]
    assert most[0] == max(of_bucket) < most[1]


def test_a_history_is_logged_only_when_its_files_change(tmp_path: Folder) -> None:
    _, inputs = given(0)
    inputs.tables = {at: rows for at, rows in inputs.tables.items() if at[1] < 8}
    node = HistoryNode(tmp_path, inputs, {}, recovery_rows=1)
    for bucket in range(8):
        node.run(bucket)
    for bucket in range(8, BUCKETS):
        node.run(bucket)
    ((logged, _),) = node.log.states(f"{PATH.name}+history")
    assert logged < BUCKETS - 1, "the last steps have changed no file"
    node.crash()
    assert node.version.bucket == BUCKETS - 1


def test_a_missing_file_of_the_history_is_reported(tmp_path: Folder) -> None:
    _, inputs = given(0)
    node = HistoryNode(tmp_path, inputs, {}, recovery_rows=1)
    for bucket in range(6):
        node.run(bucket)
    (file,) = {chunk.file for chunk in node.eventual.durable(PATH).panes["w"][:1]}
    os.unlink(os.path.join(node.engine.folder, file))
    with pytest.raises(LogCorrupted, match=r"is missing, a footprint of path 'out' after bucket"):
        node.crash()
    assert isinstance(node.log, Log)


@pytest.mark.parametrize("seed", range(4))
def test_results_from_before_the_first_record_are_computed_again(
    seed: int, tmp_path: Folder
) -> None:
    """The log has results up to bucket 15, from another form of recovery. After a crash in bucket
    6, rows between stateful operators are not taken for computed."""
    results = []
    for crashes in (False, True):
        _, inputs = given(seed)
        node = HistoryNode(tmp_path / str(crashes), inputs, OPERATORS, recovery_rows=40)
        node.log.append(Boundary("out", 15))
        for bucket in range(BUCKETS):
            if node.version.bucket < bucket:
                node.run(bucket)
            if crashes and bucket == 6:
                node.results.clear()
                node.crash()
                assert node.version.replays_upto in (None, 6)
            if bucket == 15:
                node.results.clear()
        results.append(node.results)
    assert results[0] == results[1] and results[0]
