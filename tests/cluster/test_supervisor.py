"""Host processes that fail: what the supervisor does with them. A shell script stands for the host,
because only how it ends matters here."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.clock import monotonic_us
from holdfast.cluster import supervisor
from holdfast.cluster.supervisor import HostProcess
from holdfast.config import Options
from holdfast.core import watchdog
from holdfast.core.quarantine import EXIT_CODES, POLICIES

LIMIT_S = 30.0


class Story:
    """A supervised host in a folder. `script` is what its process does from now on."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.nodes, self._python = folder / "nodes", folder / "python"
        patch.setattr(sys, "executable", str(self._python))
        self.script("exec sleep 60")
        self.ended: list[str] = []
        self.host = HostProcess(
            "app.py", "main", str(folder), "127.0.0.1:1", Options(), self.ended.append
        )

    def script(self, text: str) -> None:
        self._python.write_text(f"#!/bin/sh\n{text}\n")
        self._python.chmod(0o755)

    def until(self, what: str, test: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not test():
            assert time.monotonic() < until, what
            time.sleep(0.01)

    def runs(self) -> bool:
        pid = self.host.pid
        return pid is not None and os.path.exists(f"/proc/{pid}") and self.host.condition is None


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    made = Story(tmp_path, monkeypatch)
    yield made
    made.host.stop()


def test_an_error_that_repetition_cannot_help_is_reported_and_waits_for_a_person(
    story: Story,
) -> None:
    story.script(f"echo 'error: another query' >&2; exit {EXIT_CODES['refused']}")
    story.host.start()
    story.until("quarantined", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and condition.final
    assert "another query" in condition.reason and "holdfast restart" in condition.remedy
    assert story.ended == ["main"] and story.host.restarts == 0
    story.script("exec sleep 60")
    story.host.end()
    assert story.host.restarts == 1, "it was asked for"


def test_a_crash_loop_is_reported_and_slowed_down(story: Story) -> None:
    story.script("echo 'a segmentation fault' >&2; exit 139")
    story.host.start()

    def quarantined() -> bool:
        condition = story.host.condition
        return condition is not None and condition.quarantined

    story.until("quarantined", quarantined)
    condition = story.host.condition
    assert condition is not None and not condition.final
    assert condition.failures >= POLICIES["crash"].limit
    assert "code 139" in condition.reason and "a segmentation fault" in condition.reason
    story.script("exec sleep 60")
    story.until("tried again by itself", lambda: story.host.condition is not None
                and story.host.condition.retry_at is None)  # fmt: skip
    story.host.progressed(7)
    story.host.progressed(8)
    assert story.runs()


def test_storage_that_takes_no_log_stops_nothing(story: Story) -> None:
    """A file where the folder was: every open fails, as on a read-only disk."""
    story.host.start()
    story.until("started", story.runs)
    away = story.nodes.with_name("away")
    story.nodes.rename(away)
    story.nodes.touch()
    story.host.kill()
    story.until("started without a log", lambda: story.host.restarts == 1)
    story.script(f"echo 'error: nodes: Read-only' >&2; exit {EXIT_CODES['storage']}")
    story.host.kill()
    story.until("its last words are known", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and condition.kind == "storage"
    assert "nodes: Read-only" in condition.reason
    story.nodes.unlink()
    away.rename(story.nodes)
    story.script("exec sleep 60")
    before = story.host.restarts
    story.until("tried again by itself", lambda: story.host.restarts > before)
    story.host.progressed(7)
    story.host.progressed(8)
    story.until("healthy", story.runs)


def test_a_process_that_cannot_be_started_is_tried_again(story: Story) -> None:
    os.unlink(sys.executable)
    story.host.start()
    condition = story.host.condition
    assert condition is not None and "not started" in condition.reason
    story.script("exec sleep 60")
    story.until("started", lambda: story.host.pid is not None)
    assert story.host.condition is not None and not story.host.condition.out


def test_only_the_last_words_of_this_process_count(story: Story) -> None:
    story.nodes.mkdir()
    (story.nodes / "main.log").write_text("error: of yesterday\n")
    story.script(f"exit {EXIT_CODES['refused']}")
    story.host.start()
    story.until("quarantined", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and "yesterday" not in condition.reason


def test_one_that_was_asked_to_end_comes_back_and_has_not_failed(story: Story) -> None:
    story.host.start()
    for number in (1, 2, 3):
        story.host.kill()
        story.until("restarted", lambda number=number: story.host.restarts == number)
    assert story.runs() and story.ended == ["main"] * 3


def test_processes_are_killed_at_once_also_those_that_do_not_want_to_end(story: Story) -> None:
    story.script("trap '' TERM; while true; do sleep 60; done")
    story.host.start()
    pid = story.host.pid
    assert pid is not None
    story.host.end_at_once()
    story.until("killed", lambda: not os.path.exists(f"/proc/{pid}"))
    assert story.host.pids == [pid], "and not started again"


def test_a_host_that_hangs_is_reported_killed_and_started_again(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_US", 1_000_000)
    monkeypatch.setattr(watchdog, "KILL_US", 3_000_000)
    story.host.start()
    story.until("started", story.runs)
    story.host.heard()
    story.host.pause()
    pid = story.host.pid
    story.until("silent", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and not condition.out
    told = condition.status(monotonic_us())
    assert told.state == "silent" and told.kind == "hung"
    assert f"(pid {pid} exists, state stopped)" in told.reason and "no heartbeat for" in told.reason
    story.until("killed and started again", lambda: story.host.restarts == 1)
    condition = story.host.condition
    assert condition is not None and condition.kind == "hung" and "was killed" in condition.reason
    story.host.heard()
    story.host.progressed(7)
    story.host.progressed(7)
    assert story.runs(), "it is where it was"


def test_a_host_that_does_not_end_when_it_is_asked_to_is_killed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.5)
    story.host.start()
    story.until("started", story.runs)
    story.host.pause()
    story.host.end()
    story.until("started again", lambda: story.host.restarts == 1)
    assert story.runs() and story.ended == ["main"]


def test_a_process_that_was_killed_names_the_signal_and_no_line_of_its_log(story: Story) -> None:
    story.script("echo 'node main works again'; exec sleep 60")
    story.host.start()
    story.until("started", story.runs)
    story.host.progressed(7)
    pid = story.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    story.until("known", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and condition.kind == "killed"
    assert "SIGKILL: `kill -9`, or the kernel's out-of-memory killer" in condition.reason
    assert "works again" not in condition.reason and "report it" not in condition.remedy
    story.until("started again", lambda: story.host.restarts == 1)
    story.host.progressed(7)
    assert story.runs(), "the condition ends when it is where it was"
