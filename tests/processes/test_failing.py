"""A function that raises on every replica: no client waits for its results, in any deployment."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.model.loading import load

LIMIT_S = 180.0
APP = """
import holdfast as hf


def count(state, rows, info):
    if "bad" in rows["page"].to_pylist():
        raise ValueError("a page that is bad")
    return rows.select(["ts", "page"]), state


def clicks(number, from_us, to_us):
    return {"ts": [from_us], "page": ["bad" if number > 20 else "fine"]}


net = hf.Network("clicks", bucket="200ms")
source = net.source("clicks", "ts timestamp, page string", time="ts", feed=hf.Generate(clicks))
pages = source.stateful(count, key="page", state="n long", out="ts timestamp, page string")
net.output("pages", pages)
net.output("other", source.on("second").filter("page <> 'nothing'"))
net.protect("main", replicas=2)
"""
LINE = next(number for number, line in enumerate(APP.splitlines(), 1) if "raise " in line)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "app.py"
    file.write_text(APP)
    return file


@pytest.mark.processes
def test_holdfast_run_continues_with_other_outputs_and_exits_with_the_line_of_the_user_error(
    app: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "run", app.name, "--seconds", "15"],
        capture_output=True, text=True, cwd=app.parent, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 1, (done.stdout, done.stderr)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for text in (
        "output 'pages' gives no more results", "node 'main' failed",
        "ValueError: a page that is bad", f"{app}:{LINE} in count", "start the run again",
    ):  # fmt: skip
        assert text in error
    assert "Traceback" not in done.stderr
    shown = done.stdout.splitlines()
    failed = next(number for number, line in enumerate(shown) if "node 'main' failed" in line)
    assert any(" other bucket " in line for line in shown[failed:])  # `other` continues


@pytest.mark.processes
def test_an_output_stops_with_its_last_replica_in_a_run_with_processes(app: Path) -> None:
    options = hf.Options(memory="512m", java_options="-XX:TieredStopAtLevel=1")
    net = load(str(app))
    with hf.run(net, deployment="processes", app=str(app), options=options) as run:
        errors: queue.Queue[Exception] = queue.Queue()

        def read() -> None:
            try:
                list(run.client("pages"))
            except hf.NodeFailed as err:
                errors.put(err)

        threading.Thread(target=read, daemon=True).start()
        error = errors.get(timeout=LIMIT_S)
        assert f"{app}:{LINE} in count" in str(error)
        assert sorted(failure["node"] for failure in run.status()["failures"]) == ["main", "main@2"]
        last = run.client("other")
        assert next(iter(last))[0].num_rows  # `other` continues
        run.source("clicks").push([])  # and its source accepts rows
