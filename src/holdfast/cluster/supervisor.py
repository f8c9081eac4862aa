"""Host processes: started, watched, restarted when they die, ended by pid.

A host that is killed comes back, and its nodes recover from their logs or by replay. One that gives
up with a clear error (exit code 2) would give up again, so it is reported instead. One that stands
still can be replaced: its successor starts in a folder of its own, because the other still holds
the lock of its own and may wake up. Then it finds out by itself that it was replaced, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from holdfast.clock import now_us
from holdfast.config import Options

_log = logging.getLogger("holdfast.supervise")
#: Exit code of a host that met an error it can explain.
EXPLAINED = 2
RESTART_S = 0.1
#: A process that was asked to end and has not by then is killed.
END_S = 15.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended that was not asked to."""

    at_us: int
    pid: int
    code: int
    #: It had a successor already.
    replaced: bool
    last_words: str


class HostProcess:
    def __init__(
        self,
        app: str,
        host: str,
        storage: str,
        supervisor: str,
        options: Options,
        report: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self.host = host
        self.restarts = 0
        self.exits: list[Exit] = []
        #: Every process that was ever started.
        self.pids: list[int] = []
        self._app, self._supervisor, self._options = app, supervisor, options
        self._nodes = os.path.join(storage, "nodes")
        self._number = self._newest()
        self._report, self._ended = report, ended
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        #: Replaced, and not known to have ended.
        self._former: list[subprocess.Popen[bytes]] = []
        self._restart_after_s = RESTART_S
        self._before_restart: Callable[[], None] | None = None
        self._stopping = threading.Event()
        self._watchers: list[threading.Thread] = []

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
        """Processes that were replaced and are still there."""
        with self._lock:
            return [process.pid for process in self._former]

    def start(self) -> None:
        self._spawn()

    def kill(
        self,
        *,
        restart_after_s: float = RESTART_S,
        before_restart: Callable[[], None] | None = None,
    ) -> None:
        """SIGKILL the process and its JVM; the watcher starts it again."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._restart_after_s, self._before_restart = restart_after_s, before_restart
                _signal(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask it to end in good order; the watcher starts it again."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()

    def pause(self) -> None:
        """The process and its JVM stand still."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                _signal(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Whatever stands still goes on, those that were replaced among it."""
        with self._lock:
            for process in (*self._former, self._process):
                if process is not None and process.poll() is None:
                    _signal(process.pid, signal.SIGCONT)

    def replace(self) -> None:
        """Start a successor although the process is still there, in whatever condition."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._former.append(self._process)
            self._number += 1
            self._spawn()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            former, process = list(self._former), self._process
        for zombie in former:
            _signal(zombie.pid, signal.SIGKILL)
        if process is not None and process.poll() is None:
            _signal(process.pid, signal.SIGCONT)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            _signal(process.pid, signal.SIGKILL)
            process.wait(timeout=END_S)
        for watcher in self._watchers:
            watcher.join(timeout=END_S)

    def _newest(self) -> int:
        """Storage of a replaced instance is behind what others have trimmed since."""
        with suppress(FileNotFoundError):
            named = [name.rpartition(".") for name in os.listdir(self._nodes)]
            return max([int(n) for f, _, n in named if f == self.host and n.isdigit()] or [0])
        return 0

    def _spawn(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            folder = self.folder
            command = [
                sys.executable, "-m", "holdfast.cluster.host_main", self._app, self.host, folder,
                self._supervisor, json.dumps(asdict(self._options)),
            ]  # fmt: skip
            os.makedirs(self._nodes, exist_ok=True)
            with open(f"{folder}.log", "ab") as out:
                # A group of its own: the JVM below it can be ended with it. But the same session:
                # should we die, the kernel ends (SIGHUP) a group that stands still.
                self._process = subprocess.Popen(
                    command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0
                )
            self.pids.append(self._process.pid)
            watcher = threading.Thread(
                target=self._watch, args=(self._process, folder), name="supervise", daemon=True
            )
            self._watchers = [held for held in self._watchers if held.is_alive()]
            self._watchers.append(watcher)
            watcher.start()

    def _watch(self, process: subprocess.Popen[bytes], folder: str) -> None:
        code = process.wait()
        _signal(process.pid, signal.SIGKILL)  # the JVM may have outlived its driver
        with self._lock:
            replaced = process is not self._process
            self._former = [other for other in self._former if other is not process]
            if self._stopping.is_set():
                return
            said = _last_words(f"{folder}.log")
            self.exits.append(Exit(now_us(), process.pid, code, replaced, said))
            wait_s, self._restart_after_s = self._restart_after_s, RESTART_S
            before, self._before_restart = self._before_restart, None
        if not replaced:
            self._ended(self.host)
        if replaced:
            _log.info("host %s: the instance that was replaced ended (%s)", self.host, said)
        elif code == EXPLAINED:
            self._report(f"host {self.host!r} stopped: {said}")
        else:
            _log.warning("host %s ended (%s), starting it again", self.host, code)
            slower = min(5.0, 0.1 * 2 ** min(self.restarts, 6)) if self.restarts >= 20 else 0.0
            self._stopping.wait(max(wait_s, slower))
            with self._lock:
                if self._process is process and not self._stopping.is_set():
                    if before is not None:
                        before()
                    self._spawn()
                    self.restarts += 1


def _last_words(path: str) -> str:
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    return (told or lines or ["no message"])[-1].removeprefix("error: ")


def _signal(pid: int, number: int) -> None:
    """Signal the process group of a host; it may be gone already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
