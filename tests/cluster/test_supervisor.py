"""How the supervisor handles host processes that fail. A shell script replaces the host, because
only the exit of the process matters here."""

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
    """A supervised host in a folder. `script` sets what its next process does."""

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

    def until(self, event: str, test: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not test():
            assert time.monotonic() < deadline_s, event
            time.sleep(0.01)

    def runs(self) -> bool:
        pid = self.host.pid
        return pid is not None and os.path.exists(f"/proc/{pid}") and self.host.condition is None


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    story = Story(tmp_path, monkeypatch)
    yield story
    story.host.stop()


def test_an_error_that_a_restart_cannot_fix_is_reported_and_waits_for_an_operator(
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
    assert story.host.restarts == 1, "the restart was requested"


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
    story.until("retried automatically", lambda: story.host.condition is not None
                and story.host.condition.retry_at is None)  # fmt: skip
    story.host.progressed(7)
    story.host.progressed(8)
    assert story.runs()


def test_a_host_starts_although_its_log_file_cannot_be_opened(story: Story) -> None:
    """A file replaces the folder, so every open fails, as on a read-only disk."""
    story.host.start()
    story.until("started", story.runs)
    away = story.nodes.with_name("away")
    story.nodes.rename(away)
    story.nodes.touch()
    story.host.kill()
    story.until("started without a log", lambda: story.host.restarts == 1)
    story.script(f"echo 'error: nodes: Read-only' >&2; exit {EXIT_CODES['storage']}")
    story.host.kill()
    story.until("last words are recorded", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and condition.kind == "storage"
    assert "nodes: Read-only" in condition.reason
    story.nodes.unlink()
    away.rename(story.nodes)
    story.script("exec sleep 60")
    before = story.host.restarts
    story.until("retried automatically", lambda: story.host.restarts > before)
    story.host.progressed(7)
    story.host.progressed(8)
    story.until("healthy", story.runs)


def test_a_process_that_cannot_be_started_is_retried(story: Story) -> None:
    os.unlink(sys.executable)
    story.host.start()
    condition = story.host.condition
    assert condition is not None and "start failed" in condition.reason
    story.script("exec sleep 60")
    story.until("started", lambda: story.host.pid is not None)
    assert story.host.condition is not None and not story.host.condition.out


def test_only_the_last_words_of_the_current_process_are_reported(story: Story) -> None:
    story.nodes.mkdir()
    (story.nodes / "main.log").write_text("error: of yesterday\n")
    story.script(f"exit {EXIT_CODES['refused']}")
    story.host.start()
    story.until("quarantined", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and "yesterday" not in condition.reason


def test_a_requested_kill_leads_to_a_restart_and_is_no_failure(story: Story) -> None:
    story.host.start()
    for number in (1, 2, 3):
        story.host.kill()
        story.until("restarted", lambda number=number: story.host.restarts == number)
    assert story.runs() and story.ended == ["main"] * 3


def test_end_at_once_also_kills_processes_that_ignore_sigterm(story: Story) -> None:
    story.script("trap '' TERM; while true; do sleep 60; done")
    story.host.start()
    pid = story.host.pid
    assert pid is not None
    story.host.end_at_once()
    story.until("killed", lambda: not os.path.exists(f"/proc/{pid}"))
    assert story.host.pids == [pid], "the process is not restarted"


def test_a_hung_host_is_reported_killed_and_restarted(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "REPORT_US", 1_000_000)
    monkeypatch.setattr(watchdog, "KILL_US", 3_000_000)
    story.host.start()
    story.until("started", story.runs)
    story.host.heard()
    story.host.pause()
    pid = story.host.pid
    story.until("reported as silent", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and not condition.out
    status = condition.status(monotonic_us(), "main")
    assert status.state == "silent" and status.kind == "hung"
    assert status.text.startswith("silent (killed in ") and "s unless it responds)" in status.text
    assert (
        f"(pid {pid} exists, state stopped)" in status.reason
        and "no heartbeat for" in status.reason
    )
    story.until("killed and restarted", lambda: story.host.restarts == 1)
    condition = story.host.condition
    assert condition is not None and condition.kind == "hung" and "was killed" in condition.reason
    story.host.heard()
    story.host.progressed(7)
    story.host.progressed(7)
    assert story.runs(), "the host has reached its previous position"


def test_a_host_that_does_not_exit_on_request_is_killed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.5)
    story.host.start()
    story.until("started", story.runs)
    story.host.pause()
    story.host.end()
    story.until("restarted", lambda: story.host.restarts == 1)
    assert story.runs() and story.ended == ["main"]


def test_the_condition_of_a_killed_process_names_the_signal_and_no_log_line(story: Story) -> None:
    story.script("echo 'node main is healthy again'; exec sleep 60")
    story.host.start()
    story.until("started", story.runs)
    story.host.progressed(7)
    pid = story.host.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    story.until("condition is set", lambda: story.host.condition is not None)
    condition = story.host.condition
    assert condition is not None and condition.kind == "killed"
    assert "SIGKILL: `kill -9`, or the kernel's out-of-memory killer" in condition.reason
    assert "healthy again" not in condition.reason and "report it" not in condition.remedy
    story.until("restarted", lambda: story.host.restarts == 1)
    story.host.progressed(7)
    assert story.runs(), "the condition ends when the host has reached its previous position"
