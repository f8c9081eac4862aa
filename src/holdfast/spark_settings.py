"""The Spark settings of a node: those that Holdfast sets, and those that a user may add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import InputError

#: Settings of every SparkContext.
STATIC = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "5",
    # Stops the JVM for a tenth of a second, in a step.
    "spark.cleaner.periodicGC.interval": "10min",
    # Over TCP, some tasks wait 40 ms for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.locality.wait": "0",
    # Pages could change after the driver has verified a file.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
}
#: With a local master, nothing listens on other addresses.
LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
#: Settings of every session.
SQL = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    "spark.sql.classic.shuffleDependency.fileCleanup.enabled": "true",
    "spark.sql.ui.explainMode": "simple",
    # Every execution formats its plan for the Spark UI, which is disabled: keep the text short.
    "spark.sql.debug.maxToStringFields": "2",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200000",
    "spark.sql.parquet.aggregatePushdown": "false",
    # Window functions get their rows in canonical order, on which sums of doubles depend. The
    # optimizer would drop the order of rows that are joined or sorted again, and Spark would choose
    # the kind of a join, which determines the order of its results, by the sizes of files.
    "spark.sql.optimizer.excludedRules": (
        "org.apache.spark.sql.catalyst.optimizer.EliminateSorts,"
        "org.apache.spark.sql.catalyst.optimizer.RemoveRedundantSorts"
    ),
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "1000000",
}
#: Settings that are set elsewhere.
_ELSEWHERE = {
    "spark.master": "the option master (--master)",
    "spark.driver.memory": "the option memory (--memory)",
    "spark.driver.maxResultSize": "the option memory (--memory), of which it is an eighth",
    "spark.driver.extraJavaOptions": "the option java_options",
    "spark.executor.memory": "the option executor_memory",
    "spark.pyspark.python": "the environment variable PYSPARK_PYTHON",
}
#: Settings on which results, recovery or delays of Holdfast rely.
_FIXED = {
    *SQL,
    "spark.scheduler.mode",
    "spark.hadoop.parquet.page.verify-checksum.enabled",
    "spark.sql.codegen.wholeStage",
    "spark.sql.codegen.factoryMode",
    "spark.sql.parquet.outputTimestampType",
    "spark.sql.caseSensitive",
}


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """Settings from texts such as `spark.executor.cores=4` (`--conf`)."""
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--conf {text}: expected KEY=VALUE, such as spark.executor.cores=4")
        settings[name.strip()] = value.strip()
    return settings


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise InputError for settings that a user cannot add."""
    for name, value in settings.items():
        if not name.startswith("spark.") or not isinstance(value, str):
            raise InputError(
                f"spark: expected settings of Spark as text, such as "
                f"{{'spark.executor.cores': '4'}}, found {name!r}: {value!r}"
            )
        if name in _ELSEWHERE:
            raise InputError(f"spark: {name!r} is set by {_ELSEWHERE[name]}; use that instead")
        if name in _FIXED:
            raise InputError(
                f"spark: {name!r} cannot be changed, because Holdfast relies on its value; remove "
                "the setting"
            )
