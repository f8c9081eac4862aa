"""One SparkContext per node, two sessions on it.

The sessions differ only in code generation. For a few thousand rows, compiling a plan
costs more than interpreting it; for many rows, compiling is faster. Results are the same to the
bit, because the arithmetic does not depend on the plan.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pyspark import SparkConf, SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from holdfast.config import Options
from holdfast.errors import SetupError
from holdfast.spark_settings import LOOPBACK, SQL, STATIC


class JobRows(NamedTuple):
    """Limits of the sizes of jobs, by the rows that they may read."""

    #: From here on, jobs are large enough for code generation.
    compiled: int = 50_000
    #: From here on, jobs have more than one task, so that they are planned in every step.
    distributed: int = 500_000
    #: From this many earlier rows on, a join selects them by key. Fewer are read as they are.
    selected: int = 4_096


JOB_ROWS = JobRows()

#: No Java class is generated and compiled: neither for a stage nor for a projection.
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
#: Longest wait for the end of a killed JVM, in seconds.
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Sessions:
    #: `small` interprets plans, for small jobs; `large` uses code generation, for all others.
    small: SparkSession
    large: SparkSession
    #: Number of tasks that can run in parallel.
    cores: int
    #: Whether the executors are in this process.
    is_local: bool

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
        is_local = options.master.startswith("local")
        if is_local:
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            os.environ["PYSPARK_PYTHON"] = sys.executable
        # The executors of a cluster may have their Python elsewhere.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        conf = {
            **STATIC,
            **(LOOPBACK if is_local else {}),
            "spark.master": options.master,
            "spark.app.name": name,
            "spark.driver.memory": options.memory,
            # Larger results are computed in smaller steps. Spark holds a result several times.
            "spark.driver.maxResultSize": str(min(1 << 30, options.memory_bytes // 8)),
            "spark.executor.memory": options.executor_memory,
            "spark.driver.extraJavaOptions": (
                f"-Xms{options.memory} -XX:+UseParallelGC -XX:+ExitOnOutOfMemoryError "
                f"{options.java_options}".strip()
            ),
            "spark.pyspark.python": os.environ["PYSPARK_PYTHON"],
            "spark.log.level": "ERROR",
            **options.spark,
        }
        with nullcontext() if os.environ.get("HOLDFAST_DEBUG") else _output_to(jvm_log):
            active = _launched(SparkConf().setAll(list(conf.items())))
        active.sparkContext.setLogLevel("OFF")
        if not is_local:
            active.sparkContext.addPyFile(_package())
        logging.getLogger("py4j").setLevel(logging.WARNING)
        for query_errors in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            # These loggers write Spark's stack traces to stderr. Holdfast reports the errors.
            PySparkLogger.getLogger(query_errors).setLevel(logging.CRITICAL)
    cores = max(1, int(active.sparkContext.defaultParallelism))
    # Large jobs use all cores of the cluster; the results do not depend on the number of tasks.
    tasks = options.spark.get("spark.sql.shuffle.partitions", str(max(2, cores)))
    return Sessions(
        small=_session(active, _INTERPRETED, tasks),
        large=_session(active, {"spark.sql.codegen.wholeStage": "true"}, tasks),
        cores=cores,
        is_local=re.match(r"local(\[|$)", str(active.sparkContext.master)) is not None,
    )


def _package() -> str:
    """A zip file of this package, which executors on other machines import. It is deleted when the
    process exits."""
    source = Path(__file__).parents[1]
    folder = tempfile.mkdtemp(prefix="holdfast-package-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "holdfast.zip")
    with zipfile.ZipFile(path, "w") as file:
        for module in sorted(source.rglob("*.py")):
            file.write(module, str(Path(source.name) / module.relative_to(source)))
    return path


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


def _session(base: SparkSession, settings: dict[str, str], tasks: str) -> SparkSession:
    session = base.newSession()
    for key, value in {**SQL, "spark.sql.shuffle.partitions": tasks, **settings}.items():
        session.conf.set(key, value)
    return session
