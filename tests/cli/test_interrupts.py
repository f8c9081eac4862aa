"""Ctrl-C at any moment stops a command and all processes that it started. No JVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import holdfast as hf
from holdfast.cli.interrupts import INTERRUPTED
from holdfast.cluster.supervisor import END_S

APP = """
import holdfast as hf
net = hf.Network("good")
s = net.source("s", "ts timestamp, x long", time="ts")
net.output("out", s.filter("x > 0"))
"""
LIMIT_S = 60.0


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_commands_import_no_slow_modules() -> None:
    code = "import sys, holdfast.cli.main as cli; cli._parser(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert not {"numpy", "pandas", "pyarrow", "pyspark", "rich"} & set(done.stdout.split())


def test_every_public_name_exists() -> None:
    assert set(hf.__all__) == set(hf._MODULE_OF) and set(hf.__all__) <= set(dir(hf))
    for name in hf.__all__:
        assert getattr(hf, name).__name__ == name


class Spark:
    """Scripts replace Java and the JVM; the JVM script never reports its port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, folder / "started"
        (folder / "app.py").write_text(APP)
        os.mkfifo(self._started)
        executable(folder / "java/bin/java", """echo 'openjdk version "17.0.1"'""")
        submit = f"echo $$ > {self._started}\nsleep {LIMIT_S:.0f}"
        executable(folder / "spark/bin/spark-submit", submit)

    def begin(self, *argv: str) -> subprocess.Popen[str]:
        homes = {"JAVA_HOME": f"{self._folder}/java", "SPARK_HOME": f"{self._folder}/spark"}
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", *argv], cwd=self._folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **homes},
        )  # fmt: skip

    def pid(self) -> int:
        """The pid of the JVM, once the JVM has started."""
        return int(self._started.read_text())


@pytest.fixture
def spark(tmp_path: Path) -> Spark:
    return Spark(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_of_spark_leaves_no_process_behind(
    spark: Spark, number: signal.Signals
) -> None:
    command = spark.begin("check", "app.py")
    pid = spark.pid()
    command.send_signal(number)
    out, err = command.communicate(timeout=LIMIT_S)
    assert command.returncode == INTERRUPTED, err
    assert "Traceback" not in err and len((out + err).splitlines()) <= 1
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("deployment", ["local", "processes"])
def test_an_interrupted_start_of_a_run_stops_all_processes_at_once_with_a_message(
    spark: Spark, deployment: str
) -> None:
    command = spark.begin("run", "app.py", "--deployment", deployment)
    pid = spark.pid()
    began = time.monotonic()
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began < END_S, "the command waited for hosts that were starting"
    assert command.returncode == INTERRUPTED, err
    hosts = "hosts main (Spark)" if deployment == "processes" else "Spark"
    assert err.splitlines() == [
        f"starting {hosts} ...", "stopping (press Ctrl-C again to end at once)"
    ]  # fmt: skip
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_second_interrupt_kills_all_processes_and_exits(tmp_path: Path) -> None:
    """The second interrupt arrives during the slow stop that the first one has begun."""
    script = """
import os, signal
from pathlib import Path
from holdfast.cli.interrupts import Interrupts
with Interrupts(lambda: Path("killed").touch()):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == INTERRUPTED and done.stdout == ""
    assert done.stderr == "stopping (press Ctrl-C again to end at once)\n"
    assert (tmp_path / "killed").exists()


def test_a_second_run_on_a_storage_is_refused_before_spark_is_started(
    spark: Spark, tmp_path: Path
) -> None:
    first = spark.begin("run", "app.py", "--storage", "data")
    spark.pid()
    second = spark.begin("run", "app.py", "--storage", "data")
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 2 and f"is in use by process {first.pid}" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=LIMIT_S)
