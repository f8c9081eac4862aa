"""`holdfast chaos` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.cli.main import main
from holdfast.verify.checkers import check
from holdfast.verify.history import Given, History

LIMIT_S = 150.0
PAUSED = """
name = "paused"
network = "single"
seconds = 100

[[fault]]
at = "1s"
do = "pause"
on = "main"
for = "90s"
"""
KILLED = """
name = "killed"
network = "single"
seconds = 5

[[fault]]
at = "2s"
do = "kill"
on = "main"
for = "500ms"

[[fault]]
at = "3s"
do = "pause"
on = "client"
for = "500ms"
"""
COMMAND = [sys.executable, "-m", "holdfast.cli.main", "chaos"]


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_user_scenario_runs_from_start_to_verdict(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(KILLED)
    done = subprocess.run(
        [*COMMAND, "mine.toml", "--json", "-", "--history", "history"],
        capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["scenario"] == "killed"
    assert "2.000s kill main for 0.500s" in done.stderr
    assert "killed: ok" in done.stderr
    assert "Traceback" not in done.stderr
    history = History.read(tmp_path / "history")
    assert [verdict.checker for verdict in check(history)] == [
        v["checker"] for v in report["verdicts"]
    ]
    assert len(list(history.of(Given))) > 10


@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_scenario_leaves_no_process_behind(
    tmp_path: Path, by: signal.Signals
) -> None:
    """Not even a paused process, and not even if the harness is killed."""
    (tmp_path / "paused.toml").write_text(PAUSED)
    running = subprocess.Popen(
        [*COMMAND, "paused.toml"], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=ignore_interrupts,
    )  # fmt: skip
    started: list[psutil.Process] = []
    try:
        assert running.stdout is not None
        line = ""
        while "pause main" not in line:
            line = running.stdout.readline()
            assert line, "the scenario ended before the pause"
        started = psutil.Process(running.pid).children(recursive=True)
        wait_for(lambda: len([p for p in started if state(p) == psutil.STATUS_STOPPED]) > 1)
        running.send_signal(by)
        assert running.wait(timeout=60) == (130 if by == signal.SIGINT else -signal.SIGKILL)
        wait_for(lambda: not [p for p in started if state(p) != psutil.STATUS_ZOMBIE])
    finally:
        for process in (running, *started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        running.communicate()


def ignore_interrupts() -> None:
    """As a shell does for background processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def state(process: psutil.Process) -> str:
    """The status of a process. A terminated process counts as a zombie, waited for or not."""
    with suppress(psutil.NoSuchProcess):
        status: str = process.status()
        return status
    return psutil.STATUS_ZOMBIE


def wait_for(test: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not test():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "there is no scenario 'nope'; there are: cut, kill"),
        (["nope.toml"], "nope.toml cannot be read: No such file"),
        (["simulated.toml"], "torn works only in the simulator; faults for real processes: kill"),
        (["network.toml"], "network 'ring' is not one of single, chain"),
    ],
)
def test_an_invalid_scenario_is_reported_in_one_line(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    torn = '[[fault]]\nat = "1s"\ndo = "torn"\non = "main"\nfor = "1s"\nvalue = 3\n'
    (tmp_path / "simulated.toml").write_text(f'network = "single"\nseconds = 5\n{torn}')
    (tmp_path / "network.toml").write_text('network = "ring"\nseconds = 5\n')
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_chaos_without_a_scenario_lists_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos"]) == 0
    output = capsys.readouterr().out
    assert "replace" in output and "one-way" in output
