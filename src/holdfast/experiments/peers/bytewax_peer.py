"""Windowed count and sum on Bytewax, run by the interpreter of its own environment.

`arrow` is the form of an expert: one item is a row group, and Arrow aggregates it inside a step, so
Bytewax carries few large items. `rows` is the form of the first attempt: one item is a row, and
`fold_window` of Bytewax keeps the windows. Both keep a recovery store with a snapshot every second.

The job is one JSON argument. The last line of the output is a JSON object: when the result of each
window was readable (form `rows`: when the source had read each bucket) as the number of buckets and
CLOCK_MONOTONIC in seconds, and the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import bytewax.operators.windowing as win
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

JOB: dict[str, Any] = json.loads(sys.argv[1])
IN, OUT = Path(JOB["folder"]), Path(JOB["work"]) / "out"
WINDOW_BUCKETS = 10
PARTS = 2
#: The clock of Bytewax adds the time since a key's last row to its event time. A short wait closes
#: windows early when rows come more slowly than in real time, and drops rows as late.
WAIT = timedelta(seconds=60)
ALIGN_TO = datetime(2026, 1, 1, tzinfo=UTC)
#: Rows of one item list in the form `rows`; Bytewax handles a list at a time between steps.
BATCH_ROWS = 5_000
#: Number of buckets done, and when.
done_at: dict[int, float] = {}


class RowGroups(StatefulSourcePartition[Any, int]):
    """One row group of every bucket, in order; the position is the number of the next bucket."""

    def __init__(self, part: int, resume: int | None) -> None:
        self.part, self.bucket = part, resume or 0
        self.rows: list[tuple[str, tuple[datetime, int]]] = []

    def next_batch(self) -> Iterable[Any]:
        if self.rows:
            batch, self.rows = self.rows[:BATCH_ROWS], self.rows[BATCH_ROWS:]
            return batch
        if self.bucket == JOB["buckets"]:
            raise StopIteration
        file = IN / f"bucket-{self.bucket:06d}.parquet"
        if not file.exists():
            return []
        bucket, self.bucket = self.bucket, self.bucket + 1
        if JOB["form"] == "rows" and bucket:
            done_at[bucket] = time.monotonic()  # of the part that is read last
        group = pq.ParquetFile(file).read_row_group(self.part, use_threads=False)
        if JOB["form"] == "arrow":
            return [(bucket, group)]
        # Bytewax accepts only `datetime.UTC`, and Arrow gives another object for the same zone.
        times = [at.replace(tzinfo=UTC) for at in group["ts"].to_pylist()]
        values = zip(times, group["bytes"].to_pylist(), strict=True)
        self.rows = list(zip(group["src"].to_pylist(), values, strict=True))
        return []

    def next_awake(self) -> datetime | None:
        if self.rows or (IN / f"bucket-{self.bucket:06d}.parquet").exists():
            return None
        return datetime.fromtimestamp(time.clock_gettime(time.CLOCK_REALTIME) + 0.001, UTC)

    def snapshot(self) -> int:
        return self.bucket


class Buckets(FixedPartitionedSource[Any, int]):
    def list_parts(self) -> list[str]:
        return [str(part) for part in range(PARTS)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> RowGroups:
        return RowGroups(int(for_part), resume_state)


def aggregate(table: pa.Table, counted: bool) -> pa.Table:
    count = ("n", "sum") if counted else ([], "count_all")
    found = table.group_by("src", use_threads=False).aggregate([count, ("bytes", "sum")])
    n, total = found.column_names.index("n_sum" if counted else "count_all"), "bytes_sum"
    return pa.table({"src": found["src"], "n": found.column(n), "bytes": found[total]})


def close_windows(
    state: dict[int, list[pa.Table]] | None, item: tuple[int, pa.Table]
) -> tuple[dict[int, list[pa.Table]], list[tuple[int, pa.Table]]]:
    """Collect the parts of a window; combine them when the last one is there."""
    bucket, part = item
    window, state = bucket // WINDOW_BUCKETS, state or {}
    parts = [*state.pop(window, []), part]
    if len(parts) < WINDOW_BUCKETS * PARTS:
        return {**state, window: parts}, []
    return state, [(window, aggregate(pa.concat_tables(parts), True))]


class ParquetWindows(StatelessSinkPartition[Any]):
    """One file for each window, readable when it has its name."""

    def write_batch(self, items: list[Any]) -> None:
        for _key, (window, table) in items:
            pq.write_table(table, OUT / f".{window}")
            os.replace(OUT / f".{window}", OUT / f"window-{window:06d}.parquet")
            done_at[(window + 1) * WINDOW_BUCKETS] = time.monotonic()


class CsvRows(StatelessSinkPartition[Any]):
    """Rows of any windows, as they come; readable when a batch is written."""

    def __init__(self, worker: int) -> None:
        self.file = open(OUT / f"worker-{worker}.csv", "wb")  # noqa: SIM115

    def write_batch(self, items: list[Any]) -> None:
        src, found = zip(*items, strict=True)
        window, folded = zip(*found, strict=True)
        n, total = zip(*folded, strict=True)
        table = pa.table({"window": window, "src": src, "n": n, "bytes": total})
        pacsv.write_csv(table, self.file, pacsv.WriteOptions(include_header=False))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Results(DynamicSink[Any]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Any:
        return ParquetWindows() if JOB["form"] == "arrow" else CsvRows(worker_index)


flow = Dataflow("peer")
buckets = op.input("in", flow, Buckets())
if JOB["form"] == "arrow":
    partial = op.map("aggregate", buckets, lambda item: (item[0], aggregate(item[1], False)))
    keyed = op.key_on("key", partial, lambda _item: "all")
    results = op.stateful_flat_map("close", keyed, close_windows)
else:
    clock = win.EventClock(
        lambda row: row[0],
        wait_for_system_duration=WAIT,
        # The rows are of the past: their windows would be checked again and again by system time.
        to_system_utc=lambda _at: None,
    )
    tumbling = win.TumblingWindower(length=timedelta(seconds=1), align_to=ALIGN_TO)
    windowed = win.fold_window(
        "window", buckets, clock, tumbling, lambda: (0, 0),
        lambda folded, row: (folded[0] + 1, folded[1] + row[1]),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
    )  # fmt: skip
    results = windowed.down
op.output("out", results, Results())

store = Path(JOB["work"]) / "recovery"
store.mkdir(parents=True)
OUT.mkdir(parents=True)
init_db_dir(store, PARTS)
cluster_main(
    flow, [], 0, worker_count_per_proc=PARTS, epoch_interval=timedelta(seconds=1),
    recovery_config=RecoveryConfig(store),
)  # fmt: skip
versions = {name: importlib.metadata.version(name) for name in ("bytewax", "pyarrow")}
print(json.dumps({"done_at": sorted(done_at.items()), "versions": versions}), flush=True)
