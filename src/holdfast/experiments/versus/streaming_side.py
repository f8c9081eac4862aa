"""The side of Structured Streaming: the same queries, one file or several files per batch.

All files exist before the start, and `availableNow` takes `maxFilesPerTrigger` of them per batch,
so polling, idle time and the listing of a growing folder are not counted. Neither side calls fsync.

The time of a result runs from the start of its batch to the file that a consumer can read. A window
is emitted by the batch after the one that moves the watermark past its end; only the batch that
emits it is counted, not the buckets for which it waits (`emitting` has the numbers of these
batches). All of this favors Structured Streaming.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from holdfast.clock import now_us
from holdfast.experiments.versus.workload import WITHIN_MS, Buckets, Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LEFT_SCHEMA = "ts timestamp, src string, bytes bigint"
RIGHT_SCHEMA = "ts timestamp, src string, level bigint"

#: Writes the result of a batch, and returns whether it has rows.
Sink = Callable[["DataFrame", int], bool]


def result_of(kind: str, sides: list[DataFrame]) -> DataFrame:
    """The query as Structured Streaming expresses it."""
    from pyspark.sql import functions as F

    left = sides[0]
    match kind:
        case "tumbling" | "sliding":
            window = (
                F.window("ts", "1 second")
                if kind == "tumbling"
                else F.window("ts", "10 seconds", "1 second")
            )
            return (
                left.withWatermark("ts", "0 seconds")
                .groupBy(window.alias("w"), "src")
                .agg(F.count("*").alias("n"), F.sum("bytes").alias("bytes"))
                .select(F.col("w.start").alias("start"), "src", "n", "bytes")
            )
        case "join":
            l, r = (  # noqa: E741
                side.withWatermark("ts", "0 seconds").alias(name)
                for side, name in zip(sides, ("l", "r"), strict=True)
            )
            near = F.expr(
                f"l.src = r.src AND r.ts >= l.ts - interval {WITHIN_MS} milliseconds "
                f"AND r.ts <= l.ts + interval {WITHIN_MS} milliseconds"
            )
            return l.join(r, near).select("l.ts", "l.src", "l.bytes", "r.level")
        case "stateless":
            large = left.filter("bytes % 10 != 0")
            return large.selectExpr("ts", "src", "bytes", "bytes / 1024.0D AS kb")
    raise ValueError(f"no query of kind {kind!r}")


def arrow_sink(out: Path) -> Sink:
    """Collect a result and write one Parquet file, named by the batch and renamed into place, so
    that a repeated batch replaces its own output. For small results faster than the file sink of
    Spark, which writes a manifest."""

    def write(batch: DataFrame, number: int) -> bool:
        table = batch.toArrow()
        if table.num_rows:
            pq.write_table(table, out / f".{number}")
            os.replace(out / f".{number}", out / f"batch-{number:06d}.parquet")
        return bool(table.num_rows)

    return write


def run_query(
    spark: SparkSession,
    query: Query,
    buckets: Buckets,
    *,
    result: Callable[[list[DataFrame]], DataFrame] | None = None,
    sink: Callable[[Path], Sink] | None = arrow_sink,
) -> dict[str, Any]:
    """Run a query and read the times that Spark reports. `sink=None`: Spark's own file sink, whose
    tasks write large results in parallel."""
    with tempfile.TemporaryDirectory(prefix="holdfast-versus-") as folder:
        root, out = Path(folder), Path(folder) / "out"
        out.mkdir()
        sides = _sources(spark, query, buckets, root)
        frame = result(sides) if result else result_of(query.kind, sides)
        writer = frame.writeStream.outputMode("append")
        writer = writer.option("checkpointLocation", str(root / "checkpoint"))
        readable_us: dict[int, int] = {}
        if sink is None:
            writer = writer.format("parquet").option("path", str(out))
        else:
            write = sink(out)

            def write_batch(batch: DataFrame, number: int) -> None:
                if write(batch, number):
                    readable_us[number] = now_us()

            writer = writer.foreachBatch(write_batch)
        running = writer.trigger(availableNow=True).start()
        running.awaitTermination()
        # A batch without rows only drops old state after the last file and is not counted.
        batches = [batch for batch in running.recentProgress if batch["numInputRows"] > 0]
        rows_out = sum(pq.read_metadata(file).num_rows for file in sorted(out.glob("*.parquet")))
    expected = len(query.ranges())
    if len(batches) != expected:
        raise RuntimeError(f"{query.name}: expected {expected} batches, found {len(batches)}")
    measured = batches[-query.steps :]
    durations = [batch["durationMs"] for batch in measured]
    step_ms = [float(duration["triggerExecution"]) for duration in durations]
    began_s = [datetime.fromisoformat(batch["timestamp"]).timestamp() for batch in measured]
    if sink is None:
        due = [True] * len(measured)
        after = ("commitOffsets", "commitBatch")
        readable_ms = [
            took - sum(duration.get(part, 0) for part in after)
            for took, duration in zip(step_ms, durations, strict=True)
        ]
    else:
        due = [batch["batchId"] in readable_us for batch in measured]
        readable_ms = [
            readable_us.get(batch["batchId"], 0) / 1_000 - 1_000 * at_s
            for batch, at_s in zip(measured, began_s, strict=True)
        ]
    seconds = began_s[-1] + step_ms[-1] / 1_000 - began_s[0]
    return {
        "step_ms": step_ms,
        "due_ms": [ms for ms, is_due in zip(readable_ms, due, strict=True) if is_due],
        "rows_per_s": query.rows * query.group * query.steps / seconds,
        "rows_out": rows_out,
        "emitting": [batch["batchId"] for batch in measured if batch["batchId"] in readable_us],
    }


def _sources(spark: SparkSession, query: Query, buckets: Buckets, root: Path) -> list[DataFrame]:
    """Streams over folders with links to the files of the query, one folder per side."""
    schemas = (LEFT_SCHEMA, RIGHT_SCHEMA)[: 2 if query.kind == "join" else 1]
    folders = [root / f"in-{number}" for number in range(len(schemas))]
    for folder in folders:
        folder.mkdir()
    steps = [] if not query.prefill else [buckets.prefill(query)]
    first = query.start + query.prefill
    steps += [buckets.sides(query, b) for b in range(first, query.start + query.buckets)]
    for files in steps:
        for folder, file in zip(folders, files, strict=True):
            try:
                os.link(file, folder / file.name)
            except OSError:
                shutil.copy2(file, folder / file.name)
    return [
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", query.group)
        .parquet(str(folder))
        for schema, folder in zip(schemas, folders, strict=True)
    ]
