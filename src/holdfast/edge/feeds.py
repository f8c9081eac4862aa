"""Feeds bring rows to a source by themselves: generators, replays of files, Structured Streaming.

A feed is named where the source is declared, so that an application is complete in one file and
runs the same under `holdfast run`, in a test and on a cluster.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from holdfast.clock import now_us
from holdfast.edge.source import Source
from holdfast.errors import InputError, StorageDenied, StorageFull
from holdfast.storage.rows import runs, times_us

_log = logging.getLogger("holdfast.feeds")
#: A full disk is asked again after so long.
FULL_S = 1.0


@dataclass(frozen=True, slots=True)
class Generate:
    """`fn(number, from_us, to_us)` makes the rows of one tick of live time: a table or dict.

    The feed is the source's clock: what it made up to now is all there is up to now.
    """

    fn: Callable[[int, int, int], Any]
    every_ms: int = 50
    clock: ClassVar[str] = "live"

    def problem(self) -> str | None:
        return None if callable(self.fn) else "Generate wants a function(number, from_us, to_us)"

    def run(self, source: Source, stop: threading.Event) -> None:
        number, since = 0, now_us()
        if not _done(partial(source.start, since), source, stop):
            return
        while not stop.is_set():
            # Wake at ticks, and exactly where a bucket ends.
            now = now_us()
            ends = (now // source.width_us + 1) * source.width_us
            if stop.wait(min(self.every_ms * 1_000, ends - now) / 1e6 + 0.0002):
                return
            until = now_us()
            if since < ends <= until:
                until = ends
            source.push(self.fn(number, since, until))
            if not _done(partial(source.advance, until), source, stop):
                return
            number, since = number + 1, until


@dataclass(frozen=True, slots=True)
class Replay:
    """Rows of a CSV, JSON-lines or Parquet file, in the order of their time column.

    `speed` 1.0 is as fast as it happened, 10.0 ten times faster, None as fast as possible.
    """

    path: str
    speed: float | None = None
    clock: ClassVar[str] = "manual"

    def problem(self) -> str | None:
        if not os.path.exists(self.path):
            return f"there is no file {self.path}"
        if self.speed is not None and self.speed <= 0:
            return f"speed={self.speed} must be positive, or None for as fast as possible"
        return None

    def read(self, schema: pa.Schema) -> pa.Table:
        try:
            match os.path.splitext(self.path)[1].lower():
                case ".parquet":
                    table = pq.read_table(self.path)
                case ".json" | ".jsonl" | ".ndjson":
                    options = pa_json.ParseOptions(explicit_schema=schema)
                    table = pa_json.read_json(self.path, parse_options=options)
                case ".csv" | ".tsv":
                    convert = pa_csv.ConvertOptions(
                        column_types={field.name: field.type for field in schema},
                        strings_can_be_null=True,
                    )
                    split = pa_csv.ParseOptions(
                        delimiter="\t" if self.path.endswith("tsv") else ","
                    )
                    table = pa_csv.read_csv(self.path, convert_options=convert, parse_options=split)
                case other:
                    raise InputError(f"{self.path}: {other!r} is not one of .csv, .json, .parquet")
            return table
        except (pa.ArrowException, OSError, KeyError) as err:
            raise InputError(f"{self.path} cannot be read: {err}") from None

    def run(self, source: Source, stop: threading.Event) -> None:
        table = source._fit(self.read(source.schema))
        column = table.column(source.op.time)
        source.push(table.filter(column.is_null()))  # counted and kept as dead letters
        table = table.filter(column.is_valid()).sort_by(source.op.time)
        times = times_us(table, source.op.time)
        if not len(times):
            _done(source.end, source, stop)
            return
        # A push to an open stream only remembers the rows: no need, and no way, to repeat it.
        if not _done(partial(source.start, int(times[0])), source, stop):
            return
        done = source.log.info(source.name).complete_upto if source.opened else None
        began_us, origin_us = now_us(), int(times[0])
        for bucket, lo, hi in runs(times // source.width_us):
            if done is not None and bucket <= done:
                continue  # replayed before a restart
            end_us = (bucket + 1) * source.width_us
            if self.speed is not None:
                due_us = began_us + (end_us - origin_us) / self.speed
                if stop.wait(max(0.0, (due_us - now_us()) / 1e6)):
                    return
            if stop.is_set():
                return
            source.push(table.slice(lo, hi - lo))
            if not _done(partial(source.advance, end_us), source, stop):
                return
        _done(source.end, source, stop)


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Any Structured Streaming DataFrame: `fn(spark)` gives it. Each micro-batch is pushed durably
    before Spark may forget it, and a batch that Spark repeats is recognised."""

    fn: Callable[[Any], Any]
    checkpoint: str | None = None
    clock: ClassVar[str] = "wall"

    def problem(self) -> str | None:
        return None if callable(self.fn) else "ReadStream wants a function(spark) -> DataFrame"

    def run(self, source: Source, stop: threading.Event) -> None:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        checkpoint = self.checkpoint or os.path.join(str(source.log.root), "read-stream")
        if not _opened(source, stop):
            return

        def take(batch: Any, number: int) -> None:
            last = source.token
            if last is not None and number <= int(last):
                return
            # Repeated with the same token, so its rows are taken once.
            push = partial(source.push, batch.toArrow(), token=str(number), flush=True)
            if not _done(push, source, stop):
                raise InputError(f"source {source.name!r}: stopped before batch {number} was safe")

        query = (
            self.fn(spark)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        try:
            while not stop.wait(0.1) and query.isActive:
                pass
            failed = query.exception()
            if failed is not None:
                raise InputError(f"source {source.name!r}: its readStream failed: {failed}")
        finally:
            query.stop()


def tick_wall(source: Source, stop: threading.Event) -> None:
    """Close the buckets of a live source as its clock passes them."""
    if not _opened(source, stop):
        return
    while not stop.is_set():
        width_us = source.width_us
        clock_us = now_us() - source.op.grace_us
        if stop.wait((width_us - clock_us % width_us) / 1e6 + 0.0002):
            return
        if not _done(lambda: source.advance(now_us() - source.op.grace_us), source, stop):
            return


def _opened(source: Source, stop: threading.Event) -> bool:
    return _done(lambda: source.start(now_us() - source.op.grace_us), source, stop)


def _done(act: Callable[[], None], source: Source, stop: threading.Event) -> bool:
    """Do what can be repeated until the storage takes it; false if stopped before."""
    told = False
    while True:
        try:
            act()
            return True
        except (StorageFull, StorageDenied) as err:
            if not told:
                _log.warning("source %s waits for its storage: %s", source.name, err)
                told = True
        if stop.wait(FULL_S):
            return False
