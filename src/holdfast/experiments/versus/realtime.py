"""Real-time mode of Structured Streaming: long tasks and a pipelined shuffle instead of batches.

The query is the count per key in windows of 1 s, in update mode, the only one that real-time mode
has. Row i is stamped `start_us + 1_000 * i` and has key i modulo 100, so a written count identifies
the newest row that it contains. The source is LowLatencyMemoryStream, the only source in Spark's
own jars. A process that restarts adds all rows again before it starts the query, as if a durable
log had kept them. The source answers one request per row, which limits the rate.

A count is an update. It is final when the watermark has passed the end of its window, which happens
at the end of a batch (5 s at least); before, a consumer cannot know that no further row follows.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.clock import now_us
from holdfast.errors import HoldfastError
from holdfast.experiments.versus.job import answer_of, start_module
from holdfast.experiments.versus.kill import kill_group
from holdfast.experiments.versus.spark_session import start_session

KEYS = 100
ROW_US = 1_000
WINDOW_US = 1_000_000
#: The shortest batch that real-time mode allows by default.
BATCH_S = 5
#: In a value of the source, the number of its partition is stored above this bit.
_PARTITION_BIT = 40
_PARTITIONS = 2

#: A line of the sink: written at (us), window start (us), key, count.
Line = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Feed:
    """What the process does that runs the query."""

    jar: str
    #: Checkpoint, sink and time of row 0. A process that finds them continues.
    folder: str
    #: Rows arrive for this long after the first row in the sink, in seconds.
    seconds: float
    #: Rows that are added at once at the end, to measure rows per second.
    backlog: int = 0


def _start_us(folder: Path) -> int:
    """Time of row 0, a multiple of the window, the same after a restart."""
    file = folder / "start"
    if not file.exists():
        file.write_text(str((now_us() // WINDOW_US + 1) * WINDOW_US))
    return int(file.read_text())


def run_feed(feed: Feed) -> dict[str, Any]:
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    # All tasks of a real-time query run at the same time, so each needs a slot.
    spark = start_session("tuned-rocksdb", feed.jar, slots=2 * _PARTITIONS)
    jvm: Any = spark._jvm
    memory = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
    encoder = jvm.org.apache.spark.sql.Encoders.LONG()
    stream = memory.apply(spark._jsparkSession, _PARTITIONS, encoder)
    as_scala = jvm.scala.jdk.javaapi.CollectionConverters.asScala
    added, start_us = 0, _start_us(Path(feed.folder))

    def add(upto: int) -> None:
        """Add the rows up to `upto`, an even number, half of them to each partition."""
        nonlocal added
        if upto == added:
            return
        for partition in range(_PARTITIONS):
            above = partition << _PARTITION_BIT
            values = jvm.java.util.stream.LongStream.range(
                above + added // _PARTITIONS, above + upto // _PARTITIONS
            )
            stream.addData(partition, as_scala(values.boxed().toList()).toSeq())
        added = upto

    def due() -> int:
        return max(0, (now_us() - start_us) // ROW_US) // _PARTITIONS * _PARTITIONS

    mask = (1 << _PARTITION_BIT) - 1
    value = F.col("value")
    row = value.bitwiseAND(F.lit(mask)) * _PARTITIONS + F.shiftright(value, _PARTITION_BIT)
    rows = DataFrame(stream.toDF(), spark).select(row.alias("row"))
    counts = (
        rows.select(
            F.timestamp_micros(F.lit(start_us) + F.col("row") * ROW_US).alias("ts"),
            (F.col("row") % KEYS).alias("src"),
        )
        .withWatermark("ts", "0 seconds")
        .groupBy(F.window("ts", "1 second").alias("w"), "src")
        .agg(F.count("*").alias("n"))
        .select(F.unix_micros("w.start").alias("start"), "src", "n")
    )
    sink = Path(feed.folder) / "sink"
    sink.mkdir(parents=True, exist_ok=True)
    add(due())
    trigger = jvm.org.apache.spark.sql.streaming.Trigger.RealTime(f"{BATCH_S} seconds")
    query = (
        counts._jdf.writeStream()
        .foreach(jvm.holdfast.StampedRows(str(sink)))
        .outputMode("update")
        .option("checkpointLocation", str(Path(feed.folder) / "checkpoint"))
        .trigger(trigger)
        .start()
    )

    def check() -> None:
        if not query.isActive():
            raise HoldfastError(f"the real-time query ended: {query.exception()}")

    def feed_until(is_over: Callable[[], bool], limit_s: float) -> None:
        limit_us = now_us() + int(limit_s * 1e6)
        while not is_over() and now_us() < limit_us:
            check()
            add(due())
            time.sleep(0.005)

    began_us = now_us()
    try:
        feed_until(lambda: any(line[0] >= began_us for line in read_lines(sink)), 60.0)
        first_us = now_us()
        feed_until(lambda: False, feed.seconds)
        backlog_us = now_us()
        if feed.backlog:
            before = len(read_lines(sink))
            add(added + feed.backlog)
            wanted, limit_us = before + feed.backlog, now_us() + 30_000_000
            while len(read_lines(sink)) < wanted and now_us() < limit_us:
                check()
                time.sleep(0.2)
        progress = [json.loads(batch.json()) for batch in query.recentProgress()]
    finally:
        query.stop()
        spark.stop()
    return {
        "progress": progress, "start_us": start_us, "first_us": first_us, "backlog_us": backlog_us,
    }  # fmt: skip


def read_lines(sink: Path) -> list[Line]:
    """All complete lines of the sink, in the order in which they were written."""
    lines: list[Line] = []
    for file in sorted(sink.glob("*")):
        complete, _, _ = file.read_text().rpartition("\n")
        for line in complete.splitlines():
            at, start, key, n = line.split(",")
            lines.append((int(at), int(start), int(key), int(n)))
    return sorted(lines)


def update_delays_ms(lines: Iterable[Line], start_us: int) -> list[float]:
    """From the time of the newest row of each update to its line in the sink."""
    delays = []
    for at, window, key, n in lines:
        first = (window - start_us) // ROW_US  # rows of a window begin with key 0
        delays.append((at - start_us - (first + key + (n - 1) * KEYS) * ROW_US) / 1_000)
    return delays


def final_delays_ms(batches: Sequence[dict[str, Any]], windows: Iterable[int]) -> list[float]:
    """From the end of each window to the end of the batch that moves the watermark past it."""
    ends = []
    for batch in batches:
        newest = batch.get("eventTime", {}).get("max")
        if newest is None:
            continue
        end_us = _us(batch["timestamp"]) + 1_000 * batch["durationMs"]["triggerExecution"]
        ends.append((_us(newest), end_us))
    delays = []
    for start in windows:
        passed = [end_us for newest, end_us in ends if newest >= start + WINDOW_US]
        if passed:
            delays.append((min(passed) - start - WINDOW_US) / 1_000)
    return delays


def _us(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1_000_000)


def measure(jar: str, *, warm_s: float, seconds: float, backlog: int) -> dict[str, Any]:
    """Delays and rows per second without failures."""
    with tempfile.TemporaryDirectory(prefix="holdfast-realtime-") as folder:
        feed = Feed(jar, folder, warm_s + seconds, backlog)
        answer = answer_of(start_module("realtime", asdict(feed)), 240)
        lines = read_lines(Path(folder) / "sink")
    since_us, until_us = answer["first_us"] + int(warm_s * 1e6), answer["backlog_us"]
    live = [line for line in lines if since_us <= line[0] <= until_us]
    after = [line[0] for line in lines if line[0] > until_us]
    windows = range(since_us // WINDOW_US * WINDOW_US, until_us - WINDOW_US, WINDOW_US)
    final = final_delays_ms(answer["progress"], windows)
    if not live or not final or not after:
        raise HoldfastError(
            f"real-time mode: expected updates, final windows and a backlog, found {len(live)}, "
            f"{len(final)} and {len(after)}"
        )
    return {
        "update_ms": statistics.median(update_delays_ms(live, answer["start_us"])),
        "final_ms": statistics.median(final),
        "rows_per_s": len(after) / (after[-1] - until_us) * 1e6,
    }


def measure_kill(jar: str, *, warm_s: float, seconds: float) -> dict[str, Any]:
    """SIGKILL in the middle of a batch, and a restart at once."""
    with tempfile.TemporaryDirectory(prefix="holdfast-realtime-") as folder:
        sink = Path(folder) / "sink"
        process = start_module("realtime", asdict(Feed(jar, folder, 600.0)))
        try:
            limit_s = time.monotonic() + 120
            while not (sink.exists() and read_lines(sink)):
                if process.poll() is not None or time.monotonic() > limit_s:
                    raise HoldfastError("real-time mode wrote no row before its process was killed")
                time.sleep(0.1)
            # The middle of a batch: batches begin about every 5 s after the first row.
            batches = 1 + int(warm_s / BATCH_S)
            time.sleep((batches + 0.5) * BATCH_S)
        finally:
            killed_us = now_us()
            kill_group(process)
        answer_of(start_module("realtime", asdict(Feed(jar, folder, seconds + BATCH_S))), 240)
        lines = read_lines(sink)
    return kill_cost(lines, killed_us)


def kill_cost(lines: Sequence[Line], killed_us: int) -> dict[str, Any]:
    """The pause until the first new row, and the rows that were written a second time."""
    before = {line[1:] for line in lines if line[0] <= killed_us}
    new = [line for line in lines if line[0] > killed_us and line[1:] not in before]
    if not before or not new:
        raise HoldfastError("real-time mode wrote no row before or after the kill")
    return {
        "pause_after_kill_s": (new[0][0] - killed_us) / 1e6,
        "duplicates_after_kill": len(lines) - len({line[1:] for line in lines}),
    }


if __name__ == "__main__":
    print(json.dumps(run_feed(Feed(**json.loads(sys.argv[1])))), flush=True)
