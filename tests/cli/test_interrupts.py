"""Ctrl-C at any moment ends a command, and everything it started. No JVM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import holdfast as hf

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


def test_the_commands_import_nothing_that_takes_long() -> None:
    code = "import sys, holdfast.cli.main as cli; cli._parser(); print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert not {"numpy", "pandas", "pyarrow", "pyspark", "rich"} & set(told.stdout.split())


def test_every_public_name_is_there() -> None:
    assert set(hf.__all__) == set(hf._MODULE_OF) and set(hf.__all__) <= set(dir(hf))
    for name in hf.__all__:
        assert getattr(hf, name).__name__ == name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_of_spark_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A script stands for the JVM: it never says where it listens."""
    (tmp_path / "app.py").write_text(APP)
    executable(tmp_path / "java/bin/java", """echo 'openjdk version "17.0.1"'""")
    started = tmp_path / "started"
    os.mkfifo(started)
    executable(tmp_path / "spark/bin/spark-submit", f"echo $$ > {started}\nsleep {LIMIT_S:.0f}")
    command = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "check", "app.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAVA_HOME": f"{tmp_path}/java", "SPARK_HOME": f"{tmp_path}/spark"},
    )  # fmt: skip
    pid = int(started.read_text())  # when it was written
    command.send_signal(number)
    out, err = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, err
    assert "Traceback" not in err and len((out + err).splitlines()) <= 1
    assert not psutil.pid_exists(pid)
