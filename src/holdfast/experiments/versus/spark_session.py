"""Sessions of Structured Streaming: as installed, and tuned.

*Installed* is what ``pip install pyspark`` gives, except that there is one shuffle partition per
core: with Spark's 200, a batch takes seconds. *Tuned* is the fastest local configuration that we
found. The settings need a fresh JVM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from holdfast.experiments.versus.java_classes import NO_FORK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Form = Literal["installed", "tuned", "tuned-rocksdb"]

STREAMING = "spark.sql.streaming"
_STATE = "org.apache.spark.sql.execution.streaming.state"
HDFS = f"{_STATE}.HDFSBackedStateStoreProvider"
ROCKSDB = f"{_STATE}.RocksDBStateStoreProvider"
_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def tuned_settings(jar: str | None) -> dict[str, str]:
    """State files have no checksums (Spark 4.3 writes one more file for each), state is written as
    a changelog, and old state is removed outside the measured time. The baseline also gets the
    settings that make Holdfast's short jobs cheap."""
    settings = {
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.files.openCostInBytes": "65536",
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
        "spark.sql.ui.explainMode": "simple",
        "spark.sql.debug.maxToStringFields": "2",
        "spark.sql.maxPlanStringLength": "100",
        "spark.sql.ui.retainedExecutions": "5",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "200000",
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.locality.wait": "0",
        "spark.cleaner.periodicGC.interval": "10min",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.driver.extraJavaOptions": "-Xms2g -XX:+UseParallelGC",
        f"{STREAMING}.checkpointFileManagerClass": _FILE_MANAGER,
        f"{STREAMING}.checkpoint.fileChecksum.enabled": "false",
        f"{STREAMING}.noDataMicroBatches.enabled": "false",
        f"{STREAMING}.minBatchesToRetain": "2",
        f"{STREAMING}.stateStore.maintenanceInterval": "10min",
        f"{STREAMING}.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        f"{STREAMING}.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    }
    if jar is not None:
        settings["spark.driver.extraClassPath"] = jar
        settings["spark.hadoop.fs.file.impl"] = NO_FORK
    return settings


def start_session(
    form: Form, jar: str | None, *, slots: int = 2, more: Mapping[str, str] | None = None
) -> SparkSession:
    """Start Spark in this process, which must not have a session yet."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        f"{STREAMING}.numRecentProgressUpdates": "10000",
        f"{STREAMING}.stateStore.providerClass": ROCKSDB if form == "tuned-rocksdb" else HDFS,
        **({} if form == "installed" else tuned_settings(jar)),
        **(more or {}),
    }
    builder = SparkSession.builder.master(f"local[{slots}]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
