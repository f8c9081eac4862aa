"""Structured Streaming from end to end: files that arrive, an fsynced sink and a polling reader.

A file with the rows of a bucket is flushed and renamed into place when the bucket ends. The query
runs tuned and starts a batch as soon as there is a file. It emits a window without waiting for
another bucket as soon as the watermark has passed (`noDataMicroBatches`). The sink flushes every
result before it renames the file into place. Spark does not flush its own checkpoint files; there
is no setting for this. A reader looks for new results every 5 ms and reads them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.clock import now_us
from holdfast.errors import HoldfastError
from holdfast.experiments.versus.spark_session import STREAMING, start_session
from holdfast.experiments.versus.streaming_side import LEFT_SCHEMA, result_of
from holdfast.experiments.versus.workload import SCHEMA, WIDTH_US
from holdfast.storage.files import put_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYS = 100
POLL_S = 0.005
WINDOW_US = 1_000_000


def _put(table: pa.Table, path: Path) -> None:
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    put_file(path, out.getvalue().to_pybytes(), fsync=True)


def _bucket(bucket: int, rows: int) -> pa.Table:
    ts = bucket * WIDTH_US + np.arange(rows) * (WIDTH_US // rows)
    src = np.char.mod("src-%03d", np.arange(rows) % KEYS)
    columns = [pa.array(ts).cast(SCHEMA.field("ts").type), pa.array(src), pa.array(np.arange(rows))]
    return pa.table(columns, schema=SCHEMA)


def _feed(folder: Path, rows: int, stop: threading.Event) -> None:
    bucket = now_us() // WIDTH_US
    while not stop.is_set():
        table = _bucket(bucket, rows)  # made before the bucket ends
        time.sleep(max(0.0, ((bucket + 1) * WIDTH_US - now_us()) / 1e6))
        _put(table, folder / f"bucket-{bucket}.parquet")
        bucket += 1


def _read(folder: Path, readable_us: dict[int, int], stop: threading.Event) -> None:
    """Note when the result of each window, by its start, has been read."""
    known: set[str] = set()
    while not stop.wait(POLL_S):
        for file in sorted(folder.glob("*.parquet")):
            if file.name not in known:
                known.add(file.name)
                starts = pq.read_table(file, columns=["start"])["start"].cast(pa.int64())
                for start in starts.unique().to_pylist():
                    readable_us.setdefault(start, now_us())


def measure(jar: str | None, rows_per_bucket: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """Delay from the end of a window to its result at the reader."""
    more = {f"{STREAMING}.noDataMicroBatches.enabled": "true"}
    spark = start_session("tuned", jar, more=more)
    stop, readable_us = threading.Event(), dict[int, int]()
    with tempfile.TemporaryDirectory(prefix="holdfast-versus-") as folder:
        arriving, out = Path(folder) / "in", Path(folder) / "out"
        arriving.mkdir()
        out.mkdir()

        def write(batch: DataFrame, number: int) -> None:
            table = batch.toArrow()
            if table.num_rows:
                _put(table, out / f"batch-{number:06d}.parquet")

        rows = (
            spark.readStream.schema(LEFT_SCHEMA)
            .option("pathGlobFilter", "*.parquet")  # without files that are being written
            .parquet(str(arriving))
        )
        query = (
            result_of("tumbling", [rows]).writeStream.outputMode("append")
            .option("checkpointLocation", str(Path(folder) / "checkpoint"))
            .foreachBatch(write).start()
        )  # fmt: skip
        threads = [
            threading.Thread(target=_feed, args=(arriving, rows_per_bucket, stop), daemon=True),
            threading.Thread(target=_read, args=(out, readable_us, stop), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(warm_s)
            since_us = now_us()
            time.sleep(seconds)
            until_us = now_us()
            if not query.isActive:
                raise HoldfastError(f"the query ended: {query.exception()}")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            query.stop()
            spark.stop()
    delays = [
        (at_us - start - WINDOW_US) / 1_000
        for start, at_us in sorted(readable_us.items())
        if since_us <= at_us <= until_us
    ]
    return {"final_ms": statistics.median(delays), "final_ms_all": delays}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))), flush=True)
