"""The same application on a real standalone cluster: a master and two workers, each in a network
namespace of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests.processes.namespaces import Loopback, Namespaces, available

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
LIMIT_S = 60.0


class Started:
    """A Spark daemon; `end` terminates its complete process group."""

    def __init__(
        self, folder: Path, name: str, address: str, *command: str, namespace: str | None = None
    ) -> None:
        self.log = folder / f"{name}.log"
        env = {**os.environ, "SPARK_LOCAL_IP": address, "SPARK_HOME": str(SPARK_HOME),
               "SPARK_NO_DAEMONIZE": "1", "PYSPARK_PYTHON": sys.executable,
               "SPARK_DAEMON_JAVA_OPTS": "-Dspark.deploy.maxExecutorRetries=-1"}  # fmt: skip
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [*inside, str(SPARK_HOME / "bin" / "spark-class"), *command],
                stdout=out, stderr=out, env=env, cwd=folder, start_new_session=True,
            )  # fmt: skip

    def logged(self, pattern: str) -> str:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            match = re.search(pattern, self.log.read_text(errors="replace"))
            if match:
                return match[1]
            assert self.process.poll() is None, self.log.read_text()[-2_000:]
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} not found in the log: {self.log.read_text()[-2_000:]}")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)


@pytest.fixture
def network() -> Iterator[Namespaces | Loopback]:
    """Without root, all addresses are loopback: the test then shows less."""
    with Namespaces(2) if available() else nullcontext(Loopback(2)) as namespaces:
        yield namespaces


@pytest.fixture
def master(network: Namespaces | Loopback, tmp_path: Path) -> Iterator[str]:
    started = []
    try:
        chief = Started(
            tmp_path, "master", network.host, "org.apache.spark.deploy.master.Master",
            "--host", network.host, "--port", "0", "--webui-port", "0",
        )  # fmt: skip
        started.append(chief)
        url = chief.logged(r"Starting Spark master at (spark://[\d.]+:\d+)")
        for name, address in zip(network.names, network.addresses, strict=True):
            worker = Started(
                tmp_path, name, address, "org.apache.spark.deploy.worker.Worker",
                "--host", address, "--webui-port", "0", "--cores", "1", "--memory", "1g",
                "--work-dir", str(tmp_path / name), url, namespace=network.inside(name),
            )  # fmt: skip
            started.append(worker)
            worker.logged(r"(Successfully registered with master)")
        yield url
    finally:
        for each in started:
            each.end()


def outputs(master: str, storage: Path, host: str | None = None) -> dict[str, Any]:
    """Digests of all outputs. `host`: the address at which executors reach the driver."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.cluster_main", master, str(storage),
         *([f"spark.driver.host={host}", f"spark.driver.bindAddress={host}"] if host else [])],
        capture_output=True, text=True, timeout=280, cwd=ROOT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3_000:]
    report: dict[str, Any] = json.loads(lines[-1])
    return report


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_cluster_gives_the_same_bits_as_one_process(
    master: str, network: Namespaces | Loopback, tmp_path: Path
) -> None:
    """Loopback of the driver is not reachable from the executors."""
    on_cluster = outputs(master, tmp_path / "cluster", network.host)
    assert on_cluster["executors"] == 2
    local = outputs("local[2]", tmp_path / "local")
    assert on_cluster["outputs"] == local["outputs"]
    assert all(rows > 0 for rows, _ in local["outputs"].values())


#: Tasks run again after a failure, and slow ones twice. An executor is started again each time.
DISTURBED = (
    "spark.task.maxFailures=50", "spark.stage.maxConsecutiveAttempts=50", "spark.speculation=true",
    "spark.speculation.interval=20ms", "spark.speculation.quantile=0.25",
    "spark.speculation.multiplier=1.2", "spark.speculation.minTaskRuntime=20ms",
    "spark.executor.maxNumFailures=1000",
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_killed_and_repeated_tasks_change_nothing(
    master: str, network: Namespaces | Loopback, tmp_path: Path
) -> None:
    """A hundred runs."""
    host = [f"spark.driver.host={network.host}", f"spark.driver.bindAddress={network.host}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.killed_tasks_main", master, str(tmp_path), "100",
         *host, *DISTURBED],
        stdout=subprocess.PIPE, text=True, timeout=7_000, cwd=ROOT,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"exit code {done.returncode}; `pytest -s` shows what the runs print"
    report = json.loads(lines[-1])
    assert report["differences"] == []
    assert report["kills"]["worker"] > 50 and report["kills"]["executor"] > 3
    assert report["repeated"] > 20
