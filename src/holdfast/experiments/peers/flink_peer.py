"""Windowed count and sum in Flink SQL, run by the interpreter of its own environment.

The settings are those that Flink's guides recommend for throughput: object reuse, two-phase
aggregation over a window table function, heap state, one task slot for each core. The results go to
files, which Flink makes visible when a checkpoint completes (exactly once). The form `read` only
reads the rows, to show what the reader costs.

The job is one JSON argument. The last line of the output is a JSON object: when the last reader had
read each bucket, when each result file became visible (CLOCK_MONOTONIC, in seconds), and the
versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = json.loads(sys.argv[1])
IN, WORK = Path(JOB["folder"]), Path(JOB["work"])
OUT = WORK / "out"
PARALLELISM = 2
EPOCH_MS = 1_767_225_600_000
WIDTH_MS = 100
SETTINGS = {
    "parallelism.default": PARALLELISM,
    "table.local-time-zone": "UTC",
    "pipeline.object-reuse": "true",
    "table.optimizer.agg-phase-strategy": "TWO_PHASE",
    "restart-strategy.type": "none",
    "state.backend.type": "hashmap",
    "execution.checkpointing.interval": f"{JOB['checkpoint_ms']} ms",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
    "execution.checkpointing.dir": (WORK / "checkpoints").as_uri(),
    "execution.checkpointing.storage": "filesystem",
    "execution.buffer-timeout.interval": "10 ms",
    "taskmanager.memory.managed.size": "512m",
    "taskmanager.memory.network.min": "128m",
    "taskmanager.memory.network.max": "128m",
    "taskmanager.numberOfTaskSlots": PARALLELISM,
}
FLOWS = f"""
CREATE TABLE flows (
  ts TIMESTAMP_LTZ(3), src STRING, `bytes` BIGINT, WATERMARK FOR ts AS SOURCE_WATERMARK()
) WITH (
  'connector' = 'buckets', 'folder' = '{IN}', 'progress' = '{WORK / "progress"}',
  'buckets' = '{JOB["buckets"]}', 'epoch-ms' = '{EPOCH_MS}', 'width-ms' = '{WIDTH_MS}'
)"""
RESULTS = f"""
CREATE TABLE results (start_s BIGINT, src STRING, n BIGINT, `bytes` BIGINT)
WITH ('connector' = 'filesystem', 'path' = '{OUT.as_uri()}', 'format' = 'csv')"""
WINDOWED = f"""
INSERT INTO results
SELECT TIMESTAMPDIFF(SECOND, TIMESTAMP '1970-01-01 00:00:00', window_start) - {EPOCH_MS // 1000},
  src, COUNT(*), SUM(`bytes`)
FROM TABLE(TUMBLE(TABLE flows, DESCRIPTOR(ts), INTERVAL '1' SECOND))
GROUP BY window_start, window_end, src"""
NOWHERE = """
CREATE TABLE nowhere (ts TIMESTAMP_LTZ(3), src STRING, `bytes` BIGINT)
WITH ('connector' = 'blackhole')"""


def visible_files(seen: dict[str, float]) -> None:
    """Note the files that were not visible at the last call. Names of open files begin with '.'."""
    names = [name for name in os.listdir(OUT) if not name.startswith((".", "_"))]
    now = time.monotonic()
    seen.update((name, now) for name in names if name not in seen)


def buckets_read() -> list[tuple[int, float]]:
    """When the slower reader had read each bucket. A bucket that was read again after a restart
    counts with its last time."""
    parts = []
    for part in range(PARALLELISM):
        lines = (WORK / f"progress-{part}").read_text().split("\n")[:-1]
        parts.append({int(at): int(ns) / 1e9 for at, ns in (line.split() for line in lines)})
    return [(bucket, max(part[bucket] for part in parts)) for bucket in sorted(parts[0])]


def main() -> None:
    # The gateway starts the JVM of Flink with this class path.
    os.environ["HADOOP_CLASSPATH"] = JOB["classpath"]
    os.environ["JVM_ARGS"] = "-Xms2g -Xmx2g"
    os.environ["FLINK_LOG_DIR"] = str(WORK)
    from pyflink.table import EnvironmentSettings, TableEnvironment

    OUT.mkdir(parents=True)
    tables = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for key, value in SETTINGS.items():
        tables.get_config().set(key, str(value))
    tables.execute_sql(FLOWS)
    tables.execute_sql(RESULTS)
    tables.execute_sql(NOWHERE)
    reading = JOB.get("form") == "read"
    job = tables.execute_sql("INSERT INTO nowhere SELECT * FROM flows" if reading else WINDOWED)
    seen: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            visible_files(seen)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        job.wait()  # raises the failure of the job
    finally:
        done.set()
        watcher.join()
    visible_files(seen)
    read = buckets_read()
    versions = {"flink": importlib.metadata.version("apache-flink")}
    print(json.dumps({"done_at": read, "files": seen, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
