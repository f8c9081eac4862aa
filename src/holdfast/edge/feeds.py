"""Feeds push rows into a source: generators, file replays, Structured Streaming.

An application declares a feed together with its source. The application is therefore complete in
one file and runs the same under `holdfast run`, in a test and on a cluster.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from holdfast.clock import monotonic_us
from holdfast.edge.row_conversion import fit
from holdfast.edge.source import Source
from holdfast.edge.table_files import read_table
from holdfast.errors import InputError, StorageDenied, StorageFull
from holdfast.model.operators import Source as SourceOperator
from holdfast.model.schema import arrow_schema
from holdfast.storage.rows import runs, times_us

_log = logging.getLogger("holdfast.feeds")
#: A generator skips a longer gap, caused by a suspended process, a clock step or a paused source.
GAP_US = 10_000_000
#: Tokens of a replay: the prefix of the last pushed bucket; the token of the rows without a time,
#: which are pushed first.
REPLAYED, TIMELESS = "replayed-", "replayed"


@dataclass(frozen=True, slots=True)
class Generate:
    """`fn(number, from_us, to_us)` returns the rows of one tick of live time: a table or dict.

    The feed drives the clock of the source: after each tick, the rows up to that time are complete.
    """

    fn: Callable[[int, int, int], Any]
    every_ms: int = 50
    clock: ClassVar[str] = "live"

    def problem(self, op: SourceOperator) -> str | None:
        return None if callable(self.fn) else "Generate needs a function(number, from_us, to_us)"

    def run(self, source: Source, stop: threading.Event) -> None:
        number, since = 0, source.now_us()
        if not _done(partial(source.start, since), source, stop):
            return
        while not stop.is_set():
            # Wake at ticks, and exactly at the end of a bucket.
            now = source.now_us()
            ends = (now // source.width_us + 1) * source.width_us
            if stop.wait(min(self.every_ms * 1_000, ends - now) / 1e6 + 0.0002):
                return
            until = source.now_us()
            if since < ends <= until:
                until = ends
            if until - since > GAP_US:
                _log.warning(
                    "source %s: its clock advanced %.1f s at once (suspended process, clock step, "
                    "or paused source); no rows were generated for this gap",
                    source.name, (until - since) / 1e6,
                )  # fmt: skip
                since = until - self.every_ms * 1_000
            if until > since:
                rows = self.fn(number, since, until)
                if not _done(partial(source.push, rows), source, stop):
                    return
                number, since = number + 1, until
            if not _done(partial(source.advance, until), source, stop):
                return


@dataclass(frozen=True, slots=True)
class Replay:
    """Rows of a CSV, JSON-lines or Parquet file, in the order of their time column.

    `speed` 1.0 is the original speed, 10.0 ten times faster, None as fast as possible.
    `timezone` is the zone of times that are written without a zone, such as "UTC".
    """

    path: str
    speed: float | None = None
    timezone: str | None = None
    clock: ClassVar[str] = "manual"

    def problem(self, op: SourceOperator) -> str | None:
        if not os.path.exists(self.path):
            return f"file {self.path} does not exist"
        if self.speed is not None and self.speed <= 0:
            return f"expected a positive speed, or None for maximum speed, found speed={self.speed}"
        try:
            read_table(self.path, arrow_schema(op.schema), self.timezone, head=True)
        except InputError as err:
            return str(err)
        return None

    def run(self, source: Source, stop: threading.Event) -> None:
        table = read_table(self.path, source.schema, self.timezone)
        table = fit(table, source.schema, source.name)
        column = table.column(source.op.time)
        done = source.log.info(source.name).complete_upto if source.opened else None
        if source.token is None and done is None:
            # The source counts them and writes them to the dead letters.
            timeless = partial(source.push, table.filter(column.is_null()), token=TIMELESS)
            if not _done(timeless, source, stop):
                return
        table = table.filter(column.is_valid()).sort_by(source.op.time)
        times = times_us(table, source.op.time)
        if not len(times):
            _done(source.end, source, stop)
            return
        if not _done(partial(source.start, int(times[0])), source, stop):
            return
        pushed = _replayed(source.token)
        began_us, origin_us = monotonic_us(), None
        for bucket, lo, hi in runs(times // source.width_us):
            if done is not None and bucket <= done:
                continue  # replayed before a restart
            end_us = (bucket + 1) * source.width_us
            if origin_us is None:
                origin_us = int(times[lo])
            if self.speed is not None:
                due_us = began_us + (end_us - origin_us) / self.speed
                if stop.wait(max(0.0, (due_us - monotonic_us()) / 1e6)):
                    return
            if stop.is_set():
                return
            # The token prevents a duplicate push: a run that stops before the bucket closes makes
            # the rows durable, and the next run skips them.
            if pushed is None or bucket > pushed:
                rows = partial(source.push, table.slice(lo, hi - lo), token=f"{REPLAYED}{bucket}")
                if not _done(rows, source, stop):
                    return
            if not _done(partial(source.advance, end_us), source, stop):
                return
        _done(source.end, source, stop)


@dataclass(frozen=True, slots=True)
class ReadStream:
    """Any Structured Streaming DataFrame, returned by `fn(spark)`. Each micro-batch is durable in
    the source before Spark commits it. A batch that Spark repeats is recognised and skipped.

    Buckets close by the times of the rows. Rows that waited while no run was active, or that are
    years old, are therefore not late, unless the source was idle before (`idle`).
    """

    fn: Callable[[Any], Any]
    checkpoint: str | None = None
    clock: ClassVar[str] = "data"

    def problem(self, op: SourceOperator) -> str | None:
        return None if callable(self.fn) else "ReadStream needs a function(spark) -> DataFrame"

    def run(self, source: Source, stop: threading.Event) -> None:
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
        checkpoint = self.checkpoint or os.path.join(str(source.log.root), "read-stream")

        started: Future[str] = Future()

        def take(batch: Any, number: int) -> None:
            query = started.result()
            if not _is_new(query, number, source, checkpoint):
                return
            # A retry uses the same token, so the rows are taken once. While consumers are too far
            # behind, closing buckets blocks, and so does Spark.
            token = f"{query}/{number}"
            push = partial(source.push, batch.toArrow(), token=token, flush=True)
            if not (_done(push, source, stop) and _done(source.tick, source, stop)):
                raise InputError(
                    f"source {source.name!r}: the run stopped before batch {number} was durable; "
                    "Spark repeats the batch after a restart"
                )

        query = (
            self.fn(spark)
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        started.set_result(str(query.id))
        try:
            idle = False
            while not stop.wait(0.1) and query.isActive:
                idle = _waits(query.status, idle)
                if not idle:
                    source.working()
            error = query.exception()
            if error is not None:
                raise InputError(f"source {source.name!r}: the readStream query failed: {error}")
        finally:
            query.stop()


def _is_new(query: str, number: int, source: Source, checkpoint: str) -> bool:
    """Whether the source does not have a batch yet. Spark repeats at most the last batch, unless
    the folder of its checkpoint is another one."""
    last_query, _, last = (source.token or "").rpartition("/")
    if last and query != last_query:
        _log.warning(
            "source %s: Spark's checkpoint %s is not the one of the last batch: Spark starts where "
            "the function of the feed says, and may repeat or skip rows", source.name, checkpoint,
        )  # fmt: skip
    if not last or query != last_query or number > int(last):
        return True
    if number < int(last):
        raise InputError(
            f"source {source.name!r}: Spark repeats batch {number}, but the source has batches up "
            f"to {last}: Spark's checkpoint {checkpoint} is an older copy. Restore its newest "
            "copy. If you delete it, Spark starts where the function of the feed says (for example "
            "startingOffsets), and repeats or skips rows"
        )
    return False


def _replayed(token: str | None) -> int | None:
    """The last bucket that a replay has pushed durably."""
    number = "" if token is None else token.removeprefix(REPLAYED)
    return int(number) if number.removeprefix("-").isdigit() and number != token else None


def _waits(status: Mapping[str, Any], before: bool) -> bool:
    """Whether Spark has polled for rows and found none since its last batch. Startup, planning and
    a running batch do not count. Spark polls repeatedly, so `before` carries the last answer."""
    if status["isDataAvailable"]:
        return False
    return before or status["message"] == "Waiting for data to arrive"


def run_feed(source: Source, stop: threading.Event) -> None:
    """Run the feed of a source, until the source ends or is retired."""
    if source.ended:
        return
    try:
        source.op.feed.run(source, stop)
    except InputError:
        if not source.ended:
            raise


def run_clock(source: Source, stop: threading.Event) -> None:
    """Close the buckets of a source as time passes."""
    while _done(source.tick, source, stop):
        if stop.wait(source.due_in_us() / 1e6 + 0.0002):
            return


def _done(action: Callable[[], None], source: Source, stop: threading.Event) -> bool:
    """Retry an idempotent action until the storage accepts it; false if stopped before."""
    warned = False
    while True:
        try:
            action()
            return True
        except (StorageFull, StorageDenied) as err:
            if not warned:
                _log.warning(
                    "source %s is paused and retries until the rows are taken: %s", source.name, err
                )
                warned = True
            pause_s = err.retry_us / 1e6
        if stop.wait(pause_s):
            return False
