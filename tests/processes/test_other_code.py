"""A replica that is restarted with other code, after an edit of the application (B6)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.cluster.controller import process_of
from holdfast.config import Options
from holdfast.edge.client import Client
from holdfast.model.loading import load
from holdfast.runtime.running import Run
from tests.processes.test_kill import wait_for

APP = """
import holdfast as hf
net = hf.Network("twins", bucket="200ms")
tap = net.source("tap", "ts timestamp, n long", time="ts", clock="manual")
net.output("out", tap.apply(lambda df: df.filter("n >= 0")))
net.protect(replicas=2)
"""
OPTIONS = Options(memory="768m", java_options="-XX:TieredStopAtLevel=1", master="local[1]")


@contextmanager
def flowing(run: Run, taken: list[int]) -> Iterator[Client]:
    """Push one row per bucket, and record the results in `taken`."""
    client, stop = run.client("out"), threading.Event()

    def push() -> None:
        bucket, tap = 0, run.source("tap")
        while not stop.wait(0.2):
            tap.push({"ts": [bucket * 200_000], "n": [bucket]})
            tap.advance((bucket + 1) * 200_000)
            bucket += 1

    def read() -> None:
        client.foreach_bucket(lambda table, info: taken.extend(table["n"].to_pylist()))

    threads = [threading.Thread(target=one, daemon=True) for one in (push, read)]
    for thread in threads:
        thread.start()
    try:
        yield client
    finally:
        stop.set()
        client.close()
        for thread in threads:
            thread.join(timeout=30)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_replica_with_other_code_is_refused_and_the_other_replica_continues(
    tmp_path: Path,
) -> None:
    app, storage, taken = tmp_path / "app.py", tmp_path / "storage", list[int]()
    app.write_text(APP)
    run = Run(load(str(app)), storage=str(storage), deployment="processes", options=OPTIONS,
              app=str(app))  # fmt: skip
    process = process_of("main@2")
    with run, flowing(run, taken) as client:
        wait_for("results", lambda: len(taken) > 5)
        pids = {name: one.pid for name, one in run.processes.items()}
        epoch = run.controller.epoch(process)

        app.write_text(APP.replace("n >= 0", "n >= 1"))
        restart = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", "restart", "--storage", str(storage)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert restart.returncode == 2, restart.stdout
        assert "apply-1: the code of <lambda> changed" in restart.stderr
        assert "No host was restarted" in restart.stderr
        assert {name: one.pid for name, one in run.processes.items()} == pids

        run.processes["main@2"].kill()
        wait_for("refusal", lambda: run.controller.refused("main@2") is not None)
        message = run.controller.refused("main@2") or ""
        assert "host 'main@2'" in message and "apply-1: the code of <lambda> changed" in message
        before = client.position or 0
        wait_for("results of the other replica", lambda: (client.position or 0) > before + 10)
        assert run.controller.epoch(process) == epoch, "the refused process never registered"
        assert run.processes["main"].pid == pids["main"]
        wait_for(
            "exit of the refused process",
            lambda: run.processes["main@2"].exits[-1].last_words == message,
        )

        app.write_text(APP)
        run.processes["main@2"].replace()
        wait_for("restart of the replica", lambda: run.controller.epoch("main@2") > epoch)
        assert run.controller.refused("main@2") is None
    assert taken == list(range(len(taken)))
