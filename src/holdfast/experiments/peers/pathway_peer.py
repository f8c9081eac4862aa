"""Windowed count and sum on Pathway, run by the interpreter of its own environment.

`arrow` is the form of an expert: one row of Pathway is a row group, and Arrow reads and aggregates
it inside a function, so Pathway carries few large values. `rows` is the form of the first attempt:
the rows themselves and `windowby`. Both persist their input with a snapshot every second.

The job is one JSON argument. The last line of the output is a JSON object: when the result of each
window was readable (form `rows`: when the source had sent each bucket) as the number of buckets and
CLOCK_MONOTONIC in seconds, when the buckets were aggregated (form `arrow`), and the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Pathway reads the number of threads when it is imported.
os.environ.setdefault("PATHWAY_THREADS", "2")
import pathway as pw
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

JOB: dict[str, Any] = json.loads(sys.argv[1])
IN, OUT = Path(JOB["folder"]), Path(JOB["work"]) / "out"
WINDOW_BUCKETS = 10
PARTS = 2
EPOCH_US = 1_767_225_600_000_000
#: Number of buckets done, and when.
done_at: dict[int, float] = {}
#: When each part was aggregated. Pathway may take all files that exist in one batch, and then gives
#: all windows at the end.
parts_at: list[float] = []


def wait_for(bucket: int) -> Path:
    file = IN / f"bucket-{bucket:06d}.parquet"
    while not file.exists():
        time.sleep(0.001)
    return file


class Parts(pw.io.python.ConnectorSubject):
    """Names of row groups, in order; few are under way at a time."""

    def run(self) -> None:
        for bucket in range(JOB["buckets"]):
            file = str(wait_for(bucket))
            for part in range(PARTS):
                self.next(file=file, bucket=bucket, part=part)
            self.commit()


class Rows(pw.io.python.ConnectorSubject):
    def run(self) -> None:
        for bucket in range(JOB["buckets"]):
            table = pq.read_table(wait_for(bucket))
            ts = table["ts"].cast(pa.int64()).to_pylist()
            for at, src, size in zip(
                ts, table["src"].to_pylist(), table["bytes"].to_pylist(), strict=True
            ):
                self.next(ts=at - EPOCH_US, src=src, size=size)
            self.commit()
            done_at[bucket + 1] = time.monotonic()


class PartSchema(pw.Schema):
    file: str
    bucket: int
    part: int


class RowSchema(pw.Schema):
    ts: int
    src: str
    size: int


def aggregate(table: pa.Table, counted: bool) -> pa.Table:
    count = ("n", "sum") if counted else ([], "count_all")
    found = table.group_by("src", use_threads=False).aggregate([count, ("bytes", "sum")])
    n = found["n_sum" if counted else "count_all"]
    return pa.table({"src": found["src"], "n": n, "bytes": found["bytes_sum"]})


@pw.udf(deterministic=True)
def read_part(file: str, part: int) -> pw.PyObjectWrapper:
    group = pq.ParquetFile(file).read_row_group(part, use_threads=False)
    result = pw.wrap_py_object(aggregate(group, False))
    parts_at.append(time.monotonic())
    return result


def write_window(window: int, parts: tuple[Any, ...]) -> None:
    table = aggregate(pa.concat_tables([part.value for part in parts]), True)
    pq.write_table(table, OUT / f".{window}")
    os.replace(OUT / f".{window}", OUT / f"window-{window:06d}.parquet")
    done_at[(window + 1) * WINDOW_BUCKETS] = time.monotonic()


def run_arrow() -> None:
    named = pw.io.python.read(Parts(), schema=PartSchema, name="parts")
    read = named.select(
        window=pw.this.bucket // WINDOW_BUCKETS, part=read_part(pw.this.file, pw.this.part)
    )
    windows = read.groupby(pw.this.window).reduce(
        pw.this.window, n=pw.reducers.count(), parts=pw.reducers.tuple(pw.this.part)
    )
    complete = windows.filter(pw.this.n == WINDOW_BUCKETS * PARTS)

    def on_change(key: Any, row: dict[str, Any], time: int, is_addition: bool) -> None:
        if is_addition:
            write_window(row["window"], row["parts"])

    pw.io.subscribe(complete, on_change=on_change)


def run_rows() -> None:
    rows = pw.io.python.read(Rows(), schema=RowSchema, name="rows")
    windows = rows.windowby(
        pw.this.ts,
        window=pw.temporal.tumbling(duration=1_000_000),
        instance=pw.this.src,
        behavior=pw.temporal.exactly_once_behavior(),
    ).reduce(
        window=pw.this._pw_window_start // 1_000_000,
        src=pw.this._pw_instance,
        n=pw.reducers.count(),
        bytes=pw.reducers.sum(pw.this.size),
    )
    found: dict[str, list[Any]] = {"window": [], "src": [], "n": [], "bytes": []}

    def on_change(key: Any, row: dict[str, Any], time: int, is_addition: bool) -> None:
        for name, values in found.items():
            values.append(row[name])

    def on_end() -> None:
        table = pa.table(found)
        pacsv.write_csv(table, OUT / "all.csv", pacsv.WriteOptions(include_header=False))

    pw.io.subscribe(windows, on_change=on_change, on_end=on_end)


OUT.mkdir(parents=True)
run_arrow() if JOB["form"] == "arrow" else run_rows()
store = pw.persistence.Backend.filesystem(str(Path(JOB["work"]) / "persistence"))
pw.run(
    monitoring_level=pw.MonitoringLevel.NONE,
    persistence_config=pw.persistence.Config(store, snapshot_interval_ms=1_000),
)
versions = {name: importlib.metadata.version(name) for name in ("pathway", "pyarrow")}
marks = {"done_at": sorted(done_at.items()), "versions": versions}
if parts_at:
    read_at = [(number + 1, at) for number, at in enumerate(parts_at[PARTS - 1 :: PARTS])]
    marks["read_at"] = [*read_at[:-1], (JOB["buckets"], max(done_at.values()))]
print(json.dumps(marks), flush=True)
