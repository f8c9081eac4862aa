"""Watcher of a chaos run, from outside the processes that are being broken.

The watcher records client positions, stopped processes, retained buckets and logged segments. A
process that does not answer must not stop the watcher.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from holdfast.clock import now_us
from holdfast.core.quarantine import kind_of_exit
from holdfast.edge.client import Client
from holdfast.errors import HoldfastError
from holdfast.runtime.failures import Failure
from holdfast.runtime.running import Run
from holdfast.storage import Added, read_only
from holdfast.storage.folder import MANIFEST
from holdfast.storage.manifest import read_records
from holdfast.types import Segment
from holdfast.verify.chaos.recorder import Recorder
from holdfast.verify.history import Held, Hinted, Made, Progressed, Stopped

#: Poll intervals: positions and exits; logs and buffers.
LOOK_S = 0.02
LOOK_INTO_S = 1.0


class Watcher:
    def __init__(self, run: Run, clients: list[Client], recorder: Recorder) -> None:
        self._run, self._clients, self._recorder = run, clients, recorder
        self._positions: dict[str, int | None] = {}
        self._hinted: dict[str, int] = {}
        self._stopped: list[Failure] = []
        self._exits: dict[str, int] = {}
        #: Every segment of the run, as logged by its producer; by node folder and file.
        self._made: dict[tuple[str, str], Made] = {}
        #: Every process of the run so far. The process object detects a reused pid.
        self._seen: dict[int, psutil.Process] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._every, args=args, name="watcher", daemon=True)
            for args in ((LOOK_S, self._look), (LOOK_INTO_S, self._look_inside))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def left(self) -> list[psutil.Process]:
        """Return the processes of the run that are still running."""
        return [process for process in self._seen.values() if _runs(process)]

    def made(self) -> list[Made]:
        """Return all segments that nodes have logged so far."""
        self.look_into_logs()
        with self._lock:
            return list(self._made.values())

    def look_into_logs(self) -> None:
        """Remember the logged segments, before they are trimmed or deleted."""
        folder = Path(self._run.storage) / "nodes"
        with self._lock, suppress(OSError):
            for root in sorted(path for path in folder.iterdir() if path.is_dir()):
                with suppress(OSError, HoldfastError):
                    manifest = root / MANIFEST
                    for record in read_records(manifest.read_bytes(), str(manifest)):
                        if isinstance(record, Added):
                            self._take(root.name, record.segment)

    def _every(self, seconds: float, look: Callable[[], None]) -> None:
        while not self._stop.wait(seconds):
            look()
        look()

    def _look(self) -> None:
        for client in self._clients:
            position = client.position
            if position is not None and position != self._positions.get(client.output):
                self._positions[client.output] = position
                self._recorder.add(Progressed(now_us(), client.name, client.output, position))
            seen = client.known_upto
            if seen is not None and seen != self._hinted.get(client.output):
                self._hinted[client.output] = seen
                self._recorder.add(Hinted(now_us(), client.name, client.output, seen))
        for name, process in self._run.processes.items():
            seen = self._exits.get(name, 0)
            self._exits[name] = len(process.exits)
            for ended in process.exits[seen:]:
                if ended.code != -signal.SIGKILL:  # SIGKILL counts as injected
                    foreseen = ended.replaced or kind_of_exit(ended.code) != "crash"
                    whose = "world" if foreseen else "ours"
                    self._recorder.add(Stopped(ended.at_us, name, whose, ended.last_words))
        for failure in self._run.failures.all():
            hosted = failure.kind in ("node", "host")  # recorded as exits above
            if not hosted and failure not in self._stopped:
                self._stopped.append(failure)
                self._recorder.add(Stopped(now_us(), "run", "ours", failure.message))

    def _look_inside(self) -> None:
        self._see_processes()
        self.look_into_logs()
        for name, process in self._run.processes.items():
            with suppress(HoldfastError, OSError):
                for stream in read_only(process.folder).state.streams.values():
                    if stream.name in {client.output for client in self._clients}:
                        retained = stream.complete_upto - stream.trimmed_upto
                        self._recorder.add(Held(now_us(), name, stream.name, retained))
        for node in self._run.status()["nodes"]:
            held: dict[str, Any] = node.get("inputs_held", {})
            for name, buckets in held.items():
                self._recorder.add(Held(now_us(), node["node"], name, buckets))

    def _see_processes(self) -> None:
        for process in self._run.processes.values():
            for pid in process.pids:
                with suppress(psutil.Error):
                    parent = self._seen.setdefault(pid, psutil.Process(pid))
                    for child in parent.children(recursive=True):
                        self._seen.setdefault(child.pid, child)

    def _take(self, node: str, segment: Segment) -> None:
        self._made.setdefault(
            (node, segment.path),
            Made(now_us(), node, segment.epoch, segment.id.stream, segment.id.bucket,
                 segment.stability.value, segment.checksum),
        )  # fmt: skip


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
