"""Baseline of the comparison: plain Structured Streaming on the same rows and storage.

Holdfast schedules its own jobs. The claim that this costs less per step needs a fair baseline, so
the baseline has two forms that are always reported together: *untuned* is the result of ``pip
install pyspark``, *tuned* is the fastest local configuration we could find. Structured Streaming
does not cause most of the difference. Without its native library, Hadoop's local file system forks
``chmod`` for every file it creates; the tuned form uses a local file system that sets permissions
in the JVM.

A step is ``durationMs.triggerExecution`` of a batch that reads one bucket: from the search for the
file to the commit of the batch. All files exist before the start, and ``availableNow`` takes one
per batch, so polling, idle time and listing of a growing directory are not counted; a live query
has these costs too. The watermark also lags one batch, so a consumer receives a window one step
later than the step time suggests. Both choices favor the baseline, on purpose.

Neither form calls ``fsync``: Hadoop's local file system closes files and leaves flushing to the
kernel. Holdfast must run under the same policy in the comparison.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.clock import now_us

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.state import GroupState

State = Literal["hdfs", "rocksdb"]
Sink = Literal["arrow", "file"]

SEED = 20260101
#: Start of event time; a multiple of every window length, so that the first window is complete.
EPOCH_US = 1_767_225_600_000_000
SCHEMA = pa.schema(
    [("ts", pa.timestamp("us", tz="UTC")), ("src", pa.string()), ("bytes", pa.int64())]
)
_SPARK_SCHEMA = "ts timestamp, src string, bytes bigint"

_STREAMING = "spark.sql.streaming"
_PROVIDERS: dict[State, str] = {
    "hdfs": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

_NOFORK_CLASS = "holdfast.NoForkLocalFileSystem"
#: Extends LocalFileSystem because ``FileSystem.getLocal`` casts to it; writes no .crc files.
_NOFORK_SOURCE = """\
package holdfast;

import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermission;
import java.util.EnumSet;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** The local file system without the chmod and ls processes that Hadoop starts for every file. */
public class NoForkLocalFileSystem extends LocalFileSystem {
  public NoForkLocalFileSystem() {
    super(new Raw());
  }

  @Override
  public void initialize(URI name, Configuration conf) throws IOException {
    super.initialize(name, conf);
    setWriteChecksum(false);
    setVerifyChecksum(false);
  }

  static class Raw extends RawLocalFileSystem {
    private static final PosixFilePermission[] BITS = {
      PosixFilePermission.OTHERS_EXECUTE, PosixFilePermission.OTHERS_WRITE,
      PosixFilePermission.OTHERS_READ, PosixFilePermission.GROUP_EXECUTE,
      PosixFilePermission.GROUP_WRITE, PosixFilePermission.GROUP_READ,
      PosixFilePermission.OWNER_EXECUTE, PosixFilePermission.OWNER_WRITE,
      PosixFilePermission.OWNER_READ
    };

    @Override
    public void setPermission(Path p, FsPermission permission) throws IOException {
      EnumSet<PosixFilePermission> set = EnumSet.noneOf(PosixFilePermission.class);
      for (int i = 0; i < BITS.length; i++) {
        if ((permission.toShort() >> i & 1) == 1) set.add(BITS[i]);
      }
      Files.setPosixFilePermissions(pathToFile(p).toPath(), set);
    }

    /** Without owner and mode, which the default status would ask of ls when read. */
    private static FileStatus plain(FileStatus s) {
      return new FileStatus(s.getLen(), s.isDirectory(), s.getReplication(), s.getBlockSize(),
          s.getModificationTime(), s.getPath());
    }

    @Override
    public FileStatus getFileStatus(Path p) throws IOException {
      return plain(super.getFileStatus(p));
    }

    @Override
    public FileStatus[] listStatus(Path p) throws IOException {
      FileStatus[] found = super.listStatus(p);
      for (int i = 0; i < found.length; i++) found[i] = plain(found[i]);
      return found;
    }
  }
}
"""


@dataclass(frozen=True)
class StreamingResult:
    """Measurements of one query after the warm-up, by batch."""

    #: One entry per measured batch, in batch order.
    step_ms: list[float]
    #: Rows read by the measured batches.
    rows: int
    #: From the start of the first measured batch to the end of the last, including gaps.
    seconds: float
    #: Rows in the output of the whole run, including the warm-up; shows that work was done.
    rows_out: int


@dataclass(frozen=True)
class Job:
    """One configuration, given as JSON. One JVM runs one job."""

    kind: Literal["windowed", "count"] = "windowed"
    tuned: bool = True
    state: State = "rocksdb"
    rows: int = 1_000
    keys: int = 100
    steps: int = 20
    #: Warm-up batches. The JVM still gets faster after a hundred batches: tuned steps fell from
    #: 170-220 ms after 15 batches to 106-109 ms after 150. A short warm-up favors Holdfast.
    warm: int = 150
    width_us: int = 100_000
    window: str = "1 second"
    size: int = 10
    sink: Sink = "arrow"
    cores: int = 2
    #: Shuffle partitions; None uses the default of the form: one per core tuned, 200 untuned.
    partitions: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warm < 0:
            raise ValueError(f"expected steps >= 1, warm >= 0, found {self.steps}, {self.warm}")


def make_bucket(bucket: int, rows: int, keys: int, width_us: int) -> pa.Table:
    """Generate the rows of one bucket in time order, identical for every system and run."""
    rng = np.random.default_rng([SEED, bucket])
    ts = np.sort(rng.integers(0, width_us, rows)) + (EPOCH_US + bucket * width_us)
    names = pa.array([f"src-{key:06d}" for key in range(keys)])
    return pa.table(
        [
            pa.array(ts, pa.int64()).cast(SCHEMA.field("ts").type),
            names.take(pa.array(rng.integers(0, keys, rows))),
            pa.array(rng.integers(40, 1_500, rows), pa.int64()),
        ],
        schema=SCHEMA,
    )


def write_buckets(dir: str | Path, n: int, rows: int, keys: int, width_us: int) -> list[str]:
    """Write ``n`` buckets as Parquet, two row groups each so that two cores can read one file."""
    Path(dir).mkdir(parents=True, exist_ok=True)
    files = [str(Path(dir) / f"bucket-{bucket:06d}.parquet") for bucket in range(n)]
    for bucket, file in enumerate(files):
        table = make_bucket(bucket, rows, keys, width_us)
        pq.write_table(table, file, row_group_size=max(1, rows // 2 + rows % 2))
    return files


def compile_nofork(work_dir: str | Path) -> str | None:
    """Compile the file system that does not fork; None without a Java compiler."""
    import pyspark

    javac = shutil.which("javac")
    if javac is None:
        return None
    root = Path(work_dir) / "nofork"
    source = root / "src" / "holdfast" / "NoForkLocalFileSystem.java"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(_NOFORK_SOURCE)
    classes = root / "classes"
    jars = Path(pyspark.__file__).parent / "jars" / "*"
    subprocess.run(
        [javac, "-nowarn", "-cp", str(jars), "-d", str(classes), str(source)],
        check=True,
        capture_output=True,
    )
    jar = root / "nofork.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for file in sorted(classes.rglob("*.class")):
            archive.write(file, file.relative_to(classes).as_posix())
    return str(jar)


def tuned_conf(jar: str | None, cores: int = 2) -> dict[str, str]:
    """Settings of the tuned form; the session must be started with them in a fresh JVM.

    State files have no checksums (Spark 4.3 writes one more file for each), state is written as a
    changelog, and old state is removed outside the measured time. The baseline also gets the
    settings that make Holdfast's short jobs cheap.
    """
    conf = {
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.files.openCostInBytes": "65536",
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.cleaner.periodicGC.interval": "10min",
        "spark.driver.extraJavaOptions": "-Xms2g",
        f"{_STREAMING}.checkpointFileManagerClass": _FILE_MANAGER,
        f"{_STREAMING}.checkpoint.fileChecksum.enabled": "false",
        f"{_STREAMING}.noDataMicroBatches.enabled": "false",
        f"{_STREAMING}.minBatchesToRetain": "2",
        f"{_STREAMING}.stateStore.maintenanceInterval": "10min",
        f"{_STREAMING}.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        f"{_STREAMING}.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    }
    if jar is not None:
        conf["spark.driver.extraClassPath"] = jar
        conf["spark.hadoop.fs.file.impl"] = _NOFORK_CLASS
    return conf


def run_windowed(
    spark: SparkSession,
    files: list[str],
    *,
    window: str,
    width_us: int,
    state: State,
    tuned: bool,
    work_dir: str | Path,
    steps: int,
    warm: int,
    sink: Sink = "arrow",
) -> StreamingResult:
    """Count and sum per source and event-time window, one bucket per batch, append mode.

    ``tuned`` is checked against the session: settings that need a fresh JVM are easily lost, and
    the result would have the wrong label. ``width_us`` is used to check that the run is long enough
    for a window to close.
    """
    from pyspark.sql import functions as F

    manager = spark.conf.get(f"{_STREAMING}.checkpointFileManagerClass", "")
    if tuned != (manager == _FILE_MANAGER):
        raise ValueError(f"tuned={tuned}, but the file manager of the session is {manager!r}")
    length = spark.sql(f"SELECT interval '{window}' AS length").collect()[0]["length"]
    if (steps + warm) * width_us <= length.total_seconds() * 1_000_000:
        raise ValueError(f"{steps + warm} buckets of {width_us} us never close a {window} window")

    def query(rows: DataFrame) -> DataFrame:
        return (
            rows.withWatermark("ts", "0 seconds")
            .groupBy(F.window("ts", window).alias("w"), "src")
            .agg(F.count("*").alias("n"), F.sum("bytes").alias("bytes"))
            .select(F.col("w.start").alias("start"), "src", "n", "bytes")
        )

    return _run(spark, files, query, state, Path(work_dir), steps, warm, sink)


def run_count_window(
    spark: SparkSession,
    *,
    keys: int = 100_000,
    rows: int = 100_000,
    size: int = 10,
    steps: int,
    warm: int,
    work_dir: str | Path,
    state: State,
    width_us: int = 100_000,
    sink: Sink = "arrow",
) -> StreamingResult:
    """Sum and last time of every ``size`` rows of a key, a window without a built-in operator.

    In Python, Structured Streaming offers a function that is called once per key and batch, with
    the rows as pandas. The function returns early if no window is full, as in most calls.
    """

    def query(arrived: DataFrame) -> DataFrame:
        return arrived.groupBy("src").applyInPandasWithState(
            _count_windows(size),
            "src string, bytes bigint, last timestamp",
            "n int, bytes bigint",
            "append",
            "NoTimeout",
        )

    files = write_buckets(Path(work_dir) / "buckets", steps + warm, rows, keys, width_us)
    return _run(spark, files, query, state, Path(work_dir), steps, warm, sink)


def _count_windows(size: int) -> Any:
    """Return the per-key function, a closure, so that workers need not import this package."""

    def fold(
        key: tuple[str], frames: Iterator[pd.DataFrame], state: GroupState
    ) -> Iterator[pd.DataFrame]:
        import numpy as np
        import pandas as pd

        parts = list(frames)
        frame = parts[0] if len(parts) == 1 else pd.concat(parts)
        value = frame["bytes"].to_numpy()
        n, total = state.get if state.exists else (0, 0)
        if n + len(value) < size:
            state.update((n + len(value), total + int(value.sum())))
            return
        order = np.argsort(frame["ts"].to_numpy(), kind="stable")
        ends = np.arange(size - n, len(value) + 1, size)
        running = total + np.cumsum(value[order])
        full = np.diff(running[ends - 1], prepend=0)
        remaining = len(value) - int(ends[-1])
        state.update((remaining, int(running[-1] - running[ends[-1] - 1])))
        yield pd.DataFrame(
            {"src": key[0], "bytes": full, "last": frame["ts"].iloc[order[ends - 1]].to_numpy()}
        )

    return fold


def _run(
    spark: SparkSession,
    files: list[str],
    query: Any,
    state: State,
    work_dir: Path,
    steps: int,
    warm: int,
    sink: Sink,
) -> StreamingResult:
    """Run one query over the first ``warm + steps`` files and read the times that Spark reports.

    The Arrow sink collects the result of a batch and writes one Parquet file named by the batch
    number. The file is renamed into place, so that a repeated batch replaces its own output. A
    batch without results writes nothing. The file sink commits every batch to a manifest. In
    alternating runs in one warm JVM (tuned, 1,000 rows, three rounds), the Arrow sink took 96-107
    ms and the file sink 108-115 ms on hdfs state; on rocksdb neither was consistently faster
    (104-115 and 101-133 ms). The Arrow sink is therefore the default.
    """
    if len(files) < warm + steps:
        raise ValueError(f"expected {warm + steps} files, one per batch, found {len(files)}")
    arriving, out = work_dir / "in", work_dir / "out"
    arriving.mkdir(parents=True)
    out.mkdir()
    oldest = now_us() / 1e6 - len(files) - 60
    for at, file in enumerate(files[: warm + steps]):
        placed = shutil.copy(file, arriving)
        # The source takes files by modification time; the order of equal times is undefined.
        os.utime(placed, (oldest + at, oldest + at))

    spark.conf.set(f"{_STREAMING}.stateStore.providerClass", _PROVIDERS[state])
    spark.conf.set(f"{_STREAMING}.numRecentProgressUpdates", str(warm + steps + 8))
    rows = spark.readStream.schema(_SPARK_SCHEMA).option("maxFilesPerTrigger", 1)
    writer = query(rows.parquet(str(arriving))).writeStream.outputMode("append")
    writer = writer.option("checkpointLocation", str(work_dir / "checkpoint"))

    def write(batch: DataFrame, number: int) -> None:
        table = batch.toArrow()
        if table.num_rows:
            pq.write_table(table, out / f".{number}")
            os.replace(out / f".{number}", out / f"batch-{number:06d}.parquet")

    writer = (
        writer.foreachBatch(write)
        if sink == "arrow"
        else writer.format("parquet").option("path", str(out))
    )
    running = writer.trigger(availableNow=True).start()
    running.awaitTermination()
    # A batch without rows only drops old state after the last file and is not counted.
    batches = [batch for batch in running.recentProgress if batch["numInputRows"] > 0]
    if len(batches) != warm + steps:
        raise RuntimeError(f"expected {warm + steps} batches, one per file, found {len(batches)}")
    measured = batches[warm:]
    step_ms = [float(batch["durationMs"]["triggerExecution"]) for batch in measured]
    began = [datetime.fromisoformat(batch["timestamp"]).timestamp() for batch in measured]
    return StreamingResult(
        step_ms=step_ms,
        rows=sum(int(batch["numInputRows"]) for batch in measured),
        seconds=began[-1] + step_ms[-1] / 1_000 - began[0],
        rows_out=sum(pq.read_metadata(file).num_rows for file in sorted(out.glob("*.parquet"))),
    )


def _session(job: Job, jar: str | None) -> SparkSession:
    from pyspark.sql import SparkSession

    conf = {"spark.ui.enabled": "false", "spark.driver.memory": "2g"}
    conf |= tuned_conf(jar, job.cores) if job.tuned else {}
    if job.partitions is not None:
        conf["spark.sql.shuffle.partitions"] = str(job.partitions)
    builder = SparkSession.builder.master(f"local[{job.cores}]")
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run(job: Job, work_dir: Path) -> dict[str, Any]:
    """Run one job in its own JVM and return the results for output as JSON."""
    jar = compile_nofork(work_dir) if job.tuned else None
    spark = _session(job, jar)
    try:
        if job.kind == "windowed":
            total = job.warm + job.steps
            files = write_buckets(work_dir / "buckets", total, job.rows, job.keys, job.width_us)
            result = run_windowed(
                spark,
                files,
                window=job.window,
                width_us=job.width_us,
                state=job.state,
                tuned=job.tuned,
                work_dir=work_dir,
                steps=job.steps,
                warm=job.warm,
                sink=job.sink,
            )
        else:
            result = run_count_window(
                spark,
                keys=job.keys,
                rows=job.rows,
                size=job.size,
                steps=job.steps,
                warm=job.warm,
                work_dir=work_dir,
                state=job.state,
                width_us=job.width_us,
                sink=job.sink,
            )
    finally:
        spark.stop()
    return {
        "job": asdict(job),
        "no_fork": jar is not None,
        "median_ms": statistics.median(result.step_ms),
        "rows_per_s": result.rows / result.seconds,
        **asdict(result),
    }


def main() -> None:
    """Read one JSON object with the fields of ``Job`` and print one JSON line."""
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    unknown = sorted(set(options) - {field.name for field in fields(Job)})
    if unknown:
        raise SystemExit(f"unknown options: {', '.join(unknown)}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Windows are compared in UTC; a session in local time would print other values.
    os.environ["TZ"] = "UTC"
    time.tzset()
    with tempfile.TemporaryDirectory(prefix="holdfast-baseline-") as work_dir:
        print(json.dumps(run(Job(**options), Path(work_dir))), flush=True)


if __name__ == "__main__":
    main()
