"""One SparkContext per node, two sessions on it.

The sessions differ only in whole-stage code generation. For a few thousand rows, compiling a plan
costs more than interpreting it; for many rows, compiling is faster. Results are the same to the
bit, because the arithmetic does not depend on the plan.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import psutil
from pyspark import SparkConf, SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from holdfast.config import Options
from holdfast.errors import SetupError

#: A job that may read at least this many rows uses code generation and more than one task. The
#: value lies between the 10,000 and the 2,000,000 rows of a closing window in
#: `experiment vs-structured-streaming`.
LARGE_JOB_ROWS = 50_000

#: Longest wait for the end of a killed JVM, in seconds.
END_S = 5.0

_STATIC = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "5",
    "spark.cleaner.periodicGC.interval": "2min",
    "spark.speculation": "false",
    "spark.dynamicAllocation.enabled": "false",
    "spark.scheduler.mode": "FAIR",
    "spark.locality.wait": "0",
    # Pages could change after the driver has verified a file.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
_SQL = {
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
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "1000000",
}


@dataclass(frozen=True, slots=True)
class Sessions:
    #: `small` interprets plans, for small jobs; `large` uses code generation, for large jobs.
    small: SparkSession
    large: SparkSession
    #: Number of tasks that can run in parallel.
    cores: int

    def stop(self) -> None:
        self.large.stop()


def java_problem() -> str | None:
    """The reason why Spark cannot start a JVM on this machine, or None. Checked before Spark
    starts, because Spark's own error is a Java stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    remedy = (
        "install Java 17 or newer (Debian: apt-get install openjdk-17-jre-headless; `make setup` "
        "does it)"
    )
    if not java or not os.path.exists(java):
        reason = f"JAVA_HOME={home} has no bin/java" if home else "there is no `java` on the PATH"
        return f"Java was not found: {reason}; {remedy}"
    try:
        process = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"Java at {java} does not run ({err}); {remedy}"
    match = re.search(r'version "(\d+)', process.stderr + process.stdout)
    if match is None or int(match[1]) < 17:
        return f"Java at {java} is too old ({match[1] if match else 'unknown'}); {remedy}"
    return None


@contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Redirect stdout and stderr to `path`. A JVM started meanwhile inherits the descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)


def start(options: Options, *, name: str = "holdfast", jvm_log: str = os.devnull) -> Sessions:
    """Start Spark, or use the active session of this process."""
    active = SparkSession.getActiveSession()
    if active is None:
        problem = java_problem()
        if problem:
            raise SetupError(problem)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        conf = {
            **_STATIC,
            "spark.master": options.master,
            "spark.app.name": name,
            "spark.driver.memory": options.memory,
            # Larger results would exhaust the heap; the step is split instead.
            "spark.driver.maxResultSize": str(options.memory_bytes // 2),
            "spark.executor.memory": options.executor_memory,
            "spark.driver.extraJavaOptions": (
                f"-Xms{options.memory} -XX:+UseParallelGC {options.java_options}".strip()
            ),
            "spark.pyspark.python": sys.executable,
            "spark.log.level": "ERROR",
        }
        with nullcontext() if os.environ.get("HOLDFAST_DEBUG") else _output_to(jvm_log):
            active = _launched(SparkConf().setAll(list(conf.items())))
        active.sparkContext.setLogLevel("OFF")
        logging.getLogger("py4j").setLevel(logging.WARNING)
        for query_errors in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            # These loggers write Spark's stack traces to stderr. Holdfast reports the errors.
            PySparkLogger.getLogger(query_errors).setLevel(logging.CRITICAL)
    cores = max(1, int(active.sparkContext.defaultParallelism))
    return Sessions(
        small=_session(active, {"spark.sql.codegen.wholeStage": "false"}),
        large=_session(active, {"spark.sql.codegen.wholeStage": "true"}),
        cores=cores,
    )


def _launched(conf: SparkConf) -> SparkSession:
    """Start Spark. If the start fails or is interrupted, the JVM is killed; otherwise the JVM would
    keep running. The previous SIGINT handler is restored: Spark's handler cancels running jobs.

    The JVM is started in a thread of its own. Python calls signal handlers in the main thread, and
    drops their exceptions while that thread forks: a Ctrl-C would be lost."""
    before = {child.pid for child in psutil.Process().children()}
    interrupt = signal.getsignal(signal.SIGINT)
    builder: Any = SparkSession.builder.config(conf=conf)
    try:
        with ThreadPoolExecutor(1) as thread:
            starting = thread.submit(SparkContext._ensure_initialized, conf=conf)
            try:
                starting.result()
            except BaseException:
                while not starting.done():  # the JVM may be about to start
                    _kill_jvm(before)
                    wait([starting], timeout=0.1)
                raise
        session: SparkSession = builder.getOrCreate()
        return session
    except BaseException:
        end_jvm(before)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)


def end_jvm(before: Collection[int] = ()) -> None:
    """Kill the Spark JVM of this process. `before`: ids of child processes that are not it."""
    for child in _kill_jvm(before):
        with suppress(psutil.Error):
            child.wait(timeout=END_S)
    SparkContext._gateway = SparkContext._jvm = None


def _kill_jvm(before: Collection[int]) -> list[psutil.Process]:
    """Kill the JVM without waiting: a thread that starts the JVM waits for its exit code."""
    killed = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.pid not in before and any("spark" in word for word in child.cmdline()):
                for process in (*child.children(recursive=True), child):
                    process.kill()
                killed.append(child)
    return killed


def _session(base: SparkSession, settings: dict[str, str]) -> SparkSession:
    session = base.newSession()
    # Large jobs use a small fixed number of tasks; the results do not depend on this number.
    for key, value in {**_SQL, "spark.sql.shuffle.partitions": "2", **settings}.items():
        session.conf.set(key, value)
    return session
