"""A run on real processes with continuous input, while one of its nodes is broken."""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.config import Options
from holdfast.engine.session import Sessions
from holdfast.runtime.run_status import node_status
from holdfast.runtime.running import Run
from holdfast.storage import read_only
from holdfast.storage.manifest import HEADER
from holdfast.verify.audit import audit
from holdfast.verify.chaos.proxy import Proxies
from tests.processes import kill_app
from tests.processes.test_kill import push

LIMIT_S = 180.0
#: Buckets by which the outputs must advance while a component is broken.
FURTHER = 10
DISK_MB = 64


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount disks: tests fill them and make them read-only."""
    try:
        mount("-t", "tmpfs", "holdfast-test", folder)
    except (OSError, subprocess.CalledProcessError):
        return False
    subprocess.run(["umount", folder], check=True)
    return True


def fill(ballast: Path) -> bool:
    """Fill a disk; True when the disk is full."""
    try:
        with ballast.open("ab", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
    except OSError as err:
        return err.errno == errno.ENOSPC
    return False


def delete(folder: Path) -> None:
    """Delete a folder in one step, while a node writes to it."""
    renamed = folder.with_name(f"{folder.name}.gone")
    folder.rename(renamed)
    while renamed.exists():
        shutil.rmtree(renamed, ignore_errors=True)


class BrokenRun:
    """`bad` is the broken node, and `host` runs this node."""

    def __init__(self, storage: Path, network: str, bad: str, host: str, **extra: Any) -> None:
        self.storage, self.bad, self.host = storage, bad, host
        options = Options(
            memory="1g", checkpoint_buckets=10, java_options="-XX:TieredStopAtLevel=1", **extra
        )
        app = f"{Path(kill_app.__file__)}:{network}"
        self.network = getattr(kill_app, network)
        self.run = Run(
            self.network, storage=str(storage), deployment="processes", options=options, app=app
        )
        self.proxies = Proxies()
        self.run.route = lambda consumer, producer, address: (
            self.proxies.link(producer, consumer, address).address
        )
        nodes = storage / "nodes"
        self.folder = nodes / bad if bad == host else nodes / host / bad
        #: Folder that `own_disk` mounts a separate disk on.
        self.disk = nodes / host
        self._stop = threading.Event()

    def begin(self) -> None:
        self.run.start()
        self.clients = [self.run.client(output.name) for output in self.network.outputs]
        self._threads = [
            threading.Thread(target=c.foreach_bucket, args=(lambda table, info: None,), daemon=True)
            for c in self.clients
        ]
        self._threads.append(
            threading.Thread(target=push, args=(self.run, self._stop), daemon=True)
        )
        for thread in self._threads:
            thread.start()
        self.until("both replicas to work", lambda: self.position(self.bad) > 5)

    def judge(self, sessions: Sessions) -> None:
        """Check that no row was lost, duplicated or changed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=LIMIT_S)
            assert not thread.is_alive()
        self.run.stop()
        report = audit(self.network, str(self.storage), sessions.large)
        assert report.ok, report.text()

    def until(self, event: str, test: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline_s = time.monotonic() + limit_s
        while not test():
            assert time.monotonic() < deadline_s, (
                f"{event}: not within {limit_s} s; {self.reported()}"
            )
            time.sleep(0.05)

    def reported(self) -> list[dict[str, Any]]:
        """Status of the unhealthy components, as reported by the run."""
        self.run.raise_failure()
        assert self.run.status()["stopped"] == {}
        return self.run.parts.status()

    def position(self, node: str) -> int:
        paths = node_status(self.run, node).get("paths", {})
        positions = [path["position"] for path in paths.values()]
        return -1 if not positions or None in positions else min(positions)

    def given(self) -> int:
        return min(-1 if client.position is None else client.position for client in self.clients)

    def is_named(self, **wanted: object) -> Callable[[], bool]:
        def named() -> bool:
            return any(
                one["part"] == self.bad and all(one[key] == value for key, value in wanted.items())
                for one in self.reported()
            )

        return named

    def goes_on(self) -> None:
        before = self.given()
        self.until("outputs to continue", lambda: self.given() > before + FURTHER)

    def heals(self) -> None:
        at = self.given()
        self.until(
            "the node to recover", lambda: not self.reported() and self.position(self.bad) > at
        )

    def stop(self) -> None:
        self.run.stop()
        self.proxies.close()

    def stand_still(self) -> None:
        """Suspend the host (SIGSTOP) until its missing heartbeats are reported."""
        process = self.run.processes[self.host]
        process.pause()
        self.until("the node to be reported", lambda: "failure" in self._status())
        self.goes_on()
        process.resume()
        self.heals()

    def be_cut_off(self) -> None:
        """Cut all links of the host to producers and consumers."""
        node_names = set(self.run.controller.assigned(self.host))
        links = [one for one in self.proxies.all() if node_names & {one.producer, one.consumer}]
        assert links
        for link in links:
            link.cut()
        self.goes_on()
        for link in links:
            link.mend()
        self.heals()

    def _status(self) -> dict[str, Any]:
        (status,) = [one for one in self.run.status()["nodes"] if one["node"] == self.bad]
        return status

    def damage_manifest(self) -> None:
        """Damage the first record: a damaged last record would be taken for torn, and cut off."""
        manifest = self.folder / "manifest"
        data = bytearray(manifest.read_bytes())
        data[len(HEADER) + 12] ^= 0xFF
        manifest.write_bytes(data)

    def lose_segment(self, harm: str) -> None:
        """Damage the newest segment, which consumers are about to read, and kill the process. The
        process is suspended meanwhile, so that nothing is trimmed. Only segments in the manifest
        count: a file without a record is deleted when the log is opened."""
        process = self.run.processes[self.host]

        def harmed() -> bool:
            process.pause()
            log = read_only(str(self.folder))
            segments = [s for stream in log.state.streams.values() for s in stream.segments]
            if not segments:
                process.resume()
                return False
            newest = Path(log.absolute(max(segments, key=lambda segment: segment.id.bucket)))
            if harm == "deleted":
                newest.unlink()
            else:
                newest.write_bytes(newest.read_bytes()[:-9])
            return True

        self.until("a segment", harmed)
        process.kill()

    @contextmanager
    def own_disk(self) -> Iterator[None]:
        """Mount a separate small file system on the folder of the host."""

        def move(change: Callable[[], object]) -> None:
            backup = self.disk.with_name("kept")
            shutil.copytree(self.disk, backup)
            change()
            shutil.copytree(backup, self.disk, dirs_exist_ok=True)
            shutil.rmtree(backup)

        options = ["-t", "tmpfs", "-o", f"size={DISK_MB}m", "holdfast-test"]
        self.kill(lambda: move(lambda: mount(*options, self.disk)))
        self.heals()
        try:
            yield
        finally:
            mount("-o", "remount,rw", self.disk)
            self.kill(lambda: move(lambda: subprocess.run(["umount", self.disk], check=True)))
            self.until("the disk to be unmounted", lambda: not self.disk.is_mount())
        self.heals()

    def full_and_read_only(self) -> None:
        """A full disk, then a read-only one: the node is reported, waits, and continues
        automatically."""
        ballast = self.disk / "ballast"
        with self.own_disk():
            self.until("its disk to be full", lambda: fill(ballast) and self.reports_full())
            self.goes_on()
            ballast.unlink()
            self.heals()
            self.kill(lambda: mount("-o", "remount,ro", self.disk))
            self.until(
                "the node to be quarantined", self.is_named(kind="storage", state="quarantined")
            )
            self.goes_on()
            mount("-o", "remount,rw", self.disk)
            self.heals()

    def reports_full(self) -> bool:
        """Whether the run reports the full disk of the node, as a failure or as a status."""
        reports = [*self.run.status()["failures"], *self.reported()]
        return any("No space left" in str(one) and self.bad in str(one) for one in reports)

    def kill(self, before_restart: Callable[[], None]) -> None:
        self.run.processes[self.host].kill(before_restart=before_restart)
