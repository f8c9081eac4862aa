"""The supervisor starts, watches, restarts and terminates host processes.

A killed host is restarted, and its nodes recover from their logs or by replay. `core.quarantine`
decides when a host is restarted and when it is quarantined. One thread per host starts the process
when a start is due, and one thread per process waits for its exit. An error from the operating
system does not terminate these threads: it counts as a failure of the host and is retried like any
other failure.

A hung host is killed and restarted when `core.watchdog` decides so, and so is a host that does not
exit on request. A suspended host can also be replaced: its successor starts in a new folder,
because the old process still holds the lock of its own folder and may resume. After resuming, the
old process detects that it was replaced, and exits.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

import psutil

from holdfast.clock import monotonic_us, now_us
from holdfast.config import Options
from holdfast.core import watchdog
from holdfast.core.quarantine import (
    Asked,
    Condition,
    Ended,
    Event,
    Failed,
    Progressed,
    Quarantine,
    Report,
    Start,
    Tick,
    kind_of,
    kind_of_exit,
    reason_of,
)
from holdfast.core.watchdog import Watchdog

_log = logging.getLogger("holdfast.supervise")
#: Pause before a process that was asked to exit is restarted.
RESTART_S = 0.1
#: A process that was asked to exit is killed after this time.
END_S = 15.0
#: Maximum interval between two checks of the host.
LOOK_S = 1.0
#: Bytes at the end of a log that are searched for the last error message.
LAST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Exit:
    """The exit of a process."""

    at_us: int
    pid: int
    code: int
    #: The process already had a successor.
    replaced: bool
    last_words: str


@dataclass(slots=True)
class _Asked:
    """A requested restart."""

    after_s: float
    before: Callable[[], None] | None = None
    #: Monotonic time at which the process is killed if it has not exited.
    by_us: int = 2**62


class HostProcess:
    """The process of a host and its successors. `ended` is called when a process has exited, before
    its restart; `reported` is called on every change of the condition."""

    def __init__(
        self,
        app: str,
        host: str,
        storage: str,
        supervisor: str,
        options: Options,
        ended: Callable[[str], None],
        reported: Callable[[str, Condition | None], None] = lambda host, condition: None,
    ) -> None:
        self.host = host
        self.restarts = 0
        self.exits: list[Exit] = []
        #: Pids of all processes that were started, in order.
        self.pids: list[int] = []
        self._app, self._supervisor, self._options = app, supervisor, options
        self._nodes = os.path.join(storage, "nodes")
        self._number = self._newest()
        self._ended, self._reported = ended, reported
        self._core, self._watchdog = Quarantine(), Watchdog()
        #: Why the watchdog killed the process.
        self._hung: str | None = None
        #: Guards the complete state; notified when a start may be due.
        self._changed = threading.Condition(threading.RLock())
        self._process: subprocess.Popen[bytes] | None = None
        #: Replaced processes that have not exited as far as known.
        self._former: list[subprocess.Popen[bytes]] = []
        self._asked: _Asked | None = None
        self._stopping = False
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def folder(self) -> str:
        """Storage of the newest instance."""
        name = f"{self.host}.{self._number}" if self._number else self.host
        return os.path.join(self._nodes, name)

    @property
    def zombies(self) -> list[int]:
        """Pids of replaced processes that still exist."""
        with self._changed:
            return [process.pid for process in self._former]

    @property
    def condition(self) -> Condition | None:
        """Why the host is unhealthy; None if the host is healthy."""
        with self._changed:
            since, kill_at = self._watchdog.last_heartbeat, self._watchdog.kill_at
            if self._watchdog.hung and since is not None and kill_at is not None:
                reason = self._silent_text(monotonic_us() - since)
                return Condition.silent(since, kill_at, reason)
            return self._core.condition

    def heard(self) -> None:
        """Record a heartbeat of the host."""
        self._listen(watchdog.HeartbeatReceived(monotonic_us()))

    def progressed(self, position: int) -> None:
        """Record the position of the slowest node of the host."""
        self._handle(Progressed(monotonic_us(), position))

    def start(self) -> None:
        self._handle(Tick(monotonic_us()))
        self._thread(self._keep, f"supervise-{self.host}")

    def kill(
        self,
        *,
        restart_after_s: float = RESTART_S,
        before_restart: Callable[[], None] | None = None,
    ) -> None:
        """SIGKILL the process and its JVM; the supervisor restarts the host."""
        with self._changed:
            if self._process is not None and self._process.poll() is None:
                self._asked = _Asked(restart_after_s, before_restart)
                _signal(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask the process to exit cleanly, and restart it. A quarantined host is restarted, too."""
        with self._changed:
            if self._process is not None and self._process.poll() is None:
                self._asked = _Asked(RESTART_S, by_us=monotonic_us() + int(1e6 * END_S))
                self._process.terminate()
                return
        self._handle(Asked(monotonic_us()))

    def pause(self) -> None:
        """Suspend the process and its JVM (SIGSTOP)."""
        with self._changed:
            if self._process is not None and self._process.poll() is None:
                _signal(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process and all replaced processes (SIGCONT)."""
        with self._changed:
            for process in (*self._former, self._process):
                if process is not None and process.poll() is None:
                    _signal(process.pid, signal.SIGCONT)

    def replace(self) -> None:
        """Start a successor although the old process may still exist, in any condition."""
        with self._changed:
            if self._process is not None and self._process.poll() is None:
                self._former.append(self._process)
            self._process = None
            self._watchdog.handle(watchdog.Stopped())
            self._number += 1
            now = monotonic_us()
            self._handle(Ended(now, again_at=now))
            self._handle(Tick(now))

    def end_at_once(self) -> None:
        """SIGKILL all processes without a restart. Takes no lock, because a signal handler calls
        this method."""
        self._stopping = True
        for process in (*self._former, self._process):
            if process is not None and process.poll() is None:
                _signal(process.pid, signal.SIGKILL)

    def ask_to_stop(self, *, at_once: bool = False) -> None:
        """Stop without a restart; returns at once. `at_once` kills the process, because it has
        nothing to shut down cleanly."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if at_once:
                self.end_at_once()
            for zombie in self._former:
                _signal(zombie.pid, signal.SIGKILL)
            if self._process is not None and self._process.poll() is None:
                _signal(self._process.pid, signal.SIGCONT)
                self._process.terminate()

    def stop(self) -> None:
        self.ask_to_stop()
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            _signal(process.pid, signal.SIGKILL)
            process.wait(timeout=END_S)
        for thread in self._threads:
            thread.join(timeout=END_S)

    # -- inside -----------------------------------------------------------------------------------

    def _newest(self) -> int:
        """Number of the newest storage folder. Older folders belong to replaced instances, and
        producers may have trimmed the rows that these would need."""
        with suppress(OSError):
            named = [name.rpartition(".") for name in os.listdir(self._nodes)]
            return max([int(n) for f, _, n in named if f == self.host and n.isdigit()] or [0])
        return 0

    def _thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [held for held in self._threads if held.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _keep(self) -> None:
        """Thread of the host: start the process when due, run the watchdog, enforce exits."""
        while True:
            with self._changed:
                due = self._core.due
                wait_s = LOOK_S if due is None else min(LOOK_S, (due - monotonic_us()) / 1e6)
                if wait_s > 0 and not self._stopping:
                    self._changed.wait(wait_s)
                if self._stopping:
                    return
            self._handle(Tick(monotonic_us()))
            self._listen(watchdog.Tick(monotonic_us()))
            self._kill_unwilling()

    def _listen(self, event: watchdog.Event) -> None:
        with self._changed:
            actions = self._watchdog.handle(event)
            pid = self.pid
            for action in actions:
                if isinstance(action, watchdog.Kill) and pid is not None:
                    self._hung = f"{self._silent_text(action.silent_us)}, and was killed"
                    _signal(pid, signal.SIGKILL)
        if any(not isinstance(action, watchdog.Kill) for action in actions):
            self._report(self.condition)

    def _kill_unwilling(self) -> None:
        """Kill a process that did not exit in time."""
        with self._changed:
            if self._asked is None or monotonic_us() < self._asked.by_us or self.pid is None:
                return
            self._asked.by_us = 2**62
            _signal(self.pid, signal.SIGKILL)
        _log.warning(
            "host %s did not exit within %.0f s, killed: pid=%s", self.host, END_S, self.pid
        )

    def _silent_text(self, us: int) -> str:
        process_state = "is gone"
        with suppress(psutil.Error):
            process_state = f"exists, state {psutil.Process(self.pid).status()}"
        return f"it has sent no heartbeat for {us / 1e6:.0f} s (pid {self.pid} {process_state})"

    def _handle(self, event: Event) -> None:
        reports: list[Report] = []
        with self._changed:
            waiting = [event]
            while waiting:
                for action in self._core.handle(waiting.pop(0)):
                    match action:
                        case Start():
                            waiting += self._spawn()
                        case Report():
                            reports.append(action)
            self._changed.notify_all()
        for report in reports:
            self._report(report.condition)

    def _report(self, condition: Condition | None) -> None:
        if condition is None:
            # As visible as the warning before.
            _log.warning("host %s is healthy again", self.host)
        else:
            status = condition.status(monotonic_us(), self.host)
            level = logging.ERROR if status.quarantined else logging.WARNING
            _log.log(level, "host %s %s", self.host, status.text)
        self._reported(self.host, condition)

    def _spawn(self) -> list[Event]:
        """Start the process; returns the resulting failure event, if any."""
        if self._stopping:
            return []
        folder = self.folder
        command = [
            sys.executable, "-m", "holdfast.cluster.host_main", self._app, self.host, folder,
            self._supervisor, json.dumps(asdict(self._options)),
        ]  # fmt: skip
        before = self._asked.before if self._asked is not None else None
        self._asked = None
        out = self._output(f"{folder}.log")
        since = 0 if out is None else out.seek(0, os.SEEK_END)
        try:
            if before is not None:
                before()
            # A separate process group, so that one signal also reaches the JVM. The same session,
            # so that the kernel terminates (SIGHUP) a suspended group if the supervisor dies.
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0
            )
        except OSError as err:
            if out is not None:
                out.close()
            return [Failed(monotonic_us(), kind_of(err), f"start failed: {reason_of(err)}")]
        self._process = process
        self._hung = None
        self._watchdog.handle(watchdog.Started(monotonic_us()))
        self.restarts += bool(self.pids)
        self.pids.append(process.pid)
        self._thread(lambda: self._watch(process, out, since), f"watch-{self.host}")
        return []

    def _output(self, path: str) -> IO[bytes] | None:
        """The log file of the process. If the disk refuses it, the process still starts, with a
        temporary file that preserves its last error message."""
        try:
            os.makedirs(self._nodes, exist_ok=True)
            return open(path, "a+b")
        except OSError as err:
            _log.warning("host %s starts without its log file: %s", self.host, reason_of(err))
        with suppress(OSError):
            return tempfile.TemporaryFile()
        return None

    def _watch(self, process: subprocess.Popen[bytes], out: IO[bytes] | None, since: int) -> None:
        code = process.wait()
        _signal(process.pid, signal.SIGKILL)  # the JVM may have survived its driver
        last_words = _last_words(out, since)
        with self._changed:
            replaced = process is not self._process
            self._former = [other for other in self._former if other is not process]
            if self._stopping:
                return
            self.exits.append(Exit(now_us(), process.pid, code, replaced, last_words))
            restart, hung = self._asked, self._hung
            if not replaced:
                self._watchdog.handle(watchdog.Stopped())
        if replaced:
            _log.info("host %s: the replaced process has exited (%s)", self.host, last_words)
            return
        self._ended(self.host)
        now = monotonic_us()
        if restart is not None:
            self._handle(Ended(now, again_at=now + int(1e6 * restart.after_s)))
        elif hung is not None:
            self._handle(Failed(now, "hung", hung))
        else:
            self._handle(Failed(now, kind_of_exit(code), _how(code, last_words)))


def _how(code: int, last_words: str) -> str:
    """Describe an exit. The last message explains an exit code; for a signal, name likely
    senders."""
    if code >= 0:
        return f"the process exited with code {code}: {last_words}"
    name = f"signal {-code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
    sender = {
        "SIGKILL": "`kill -9`, or the kernel's out-of-memory killer (see `dmesg`)",
        "SIGTERM": "`kill`, or a service manager",
        "SIGHUP": "its terminal was closed",
        "SIGINT": "Ctrl-C",
    }.get(name, "usually a crash in native code: Python, Arrow or the JVM")
    return f"the process was terminated by {name}: {sender}"


def _last_words(out: IO[bytes] | None, since: int) -> str:
    """The last error message of the process, or its last line. Output before offset `since` belongs
    to previous processes."""
    if out is None:
        return "no message"
    try:
        with out:
            end = out.seek(0, os.SEEK_END)
            out.seek(max(since, end - LAST_BYTES))
            text = out.read().decode(errors="replace")
    except OSError as err:
        return f"no message ({reason_of(err)})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1].removeprefix("error: ")


def _signal(pid: int, number: int) -> None:
    """Signal the process group of a host. The group may not exist any more."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
