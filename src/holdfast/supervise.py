"""Node processes: started, watched, restarted when they die, ended by pid.

A node that is killed comes back and recovers from its log or by replay. A node that gives up with a
clear error (exit code 2) would give up again, so it is reported instead.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from holdfast.config import Options

_log = logging.getLogger("holdfast.supervise")
#: Exit code of a node that met an error it can explain.
EXPLAINED = 2


class NodeProcess:
    def __init__(
        self,
        app: str,
        fragment: str,
        storage: str,
        supervisor: str,
        options: Options,
        report: Callable[[str], None],
    ) -> None:
        self.fragment = fragment
        self.restarts = 0
        self._command = [
            sys.executable, "-m", "holdfast.node_main", app, fragment, storage, supervisor,
            json.dumps(asdict(options)),
        ]  # fmt: skip
        self._log_file = os.path.join(storage, "nodes", f"{fragment}.log")
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._before_restart: Callable[[], None] | None = None
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self._spawn()
        self._watcher = threading.Thread(target=self._watch, name="supervise", daemon=True)
        self._watcher.start()

    def kill(self, *, before_restart: Callable[[], None] | None = None) -> None:
        """SIGKILL the process and its JVM; the watcher starts it again."""
        process = self._process
        if process is not None:
            self._before_restart = before_restart
            _end(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            _end(process.pid, signal.SIGKILL)
            process.wait(timeout=15)
        if self._watcher is not None:
            self._watcher.join(timeout=15)

    def _spawn(self) -> None:
        os.makedirs(os.path.dirname(self._log_file), exist_ok=True)
        with open(self._log_file, "ab") as out:
            # A group of its own: the JVM below it can be ended with it.
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def _watch(self) -> None:
        while not self._stopping.is_set():
            process = self._process
            assert process is not None
            code = process.wait()
            _end(process.pid, signal.SIGKILL)  # the JVM may have outlived its driver
            if self._stopping.is_set():
                return
            if code == EXPLAINED:
                self._report(f"node {self.fragment!r} stopped: {self._last_words()}")
                return
            if self._before_restart is not None:
                self._before_restart()
                self._before_restart = None
            self.restarts += 1
            _log.warning("node %s died (%s), starting it again", self.fragment, code)
            time.sleep(
                min(5.0, 0.1 * 2 ** min(self.restarts - 1, 6)) if self.restarts > 20 else 0.1
            )
            self._spawn()

    def _last_words(self) -> str:
        with open(self._log_file, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        told = [line for line in lines if line.startswith("error: ")]
        return (told or lines or ["no message"])[-1].removeprefix("error: ")


def _end(pid: int, number: int) -> None:
    """Signal the process group of a node; it may be gone already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
