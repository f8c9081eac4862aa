"""A run on real processes that is fed all the time, while one node of it is broken."""

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
from holdfast.storage.manifest import HEADER
from holdfast.verify.audit import audit
from holdfast.verify.chaos.proxy import Proxies
from tests.processes import kill_app
from tests.processes.test_kill import push

LIMIT_S = 180.0
#: So far everything goes on while the bad part is looked at.
FURTHER = 10
DISK_MB = 64


def mount(*what: object) -> None:
    subprocess.run(["mount", *map(str, what)], check=True, capture_output=True)


def may_mount(folder: Path) -> bool:
    """A disk can only be filled or made read-only by who may mount one."""
    try:
        mount("-t", "tmpfs", "holdfast-test", folder)
    except (OSError, subprocess.CalledProcessError):
        return False
    subprocess.run(["umount", folder], check=True)
    return True


def fill(ballast: Path) -> bool:
    """Take whatever is left of a disk."""
    try:
        with ballast.open("ab", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass
    except OSError as err:
        return err.errno == errno.ENOSPC
    return False


def delete(folder: Path) -> None:
    """At once, while a node writes there."""
    gone = folder.with_name(f"{folder.name}.gone")
    folder.rename(gone)
    while gone.exists():
        shutil.rmtree(gone, ignore_errors=True)


class BrokenRun:
    """`bad` is the node that is broken, and `host` runs it."""

    def __init__(self, storage: Path, network: str, bad: str, host: str, **more: Any) -> None:
        self.storage, self.bad, self.host = storage, bad, host
        options = Options(
            memory="1g", checkpoint_buckets=10, java_options="-XX:TieredStopAtLevel=1", **more
        )
        app = f"{Path(kill_app.__file__)}:{network}"
        self.network = getattr(kill_app, network)
        self.run = Run(
            self.network, storage=str(storage), deployment="processes", options=options, app=app
        )
        self.proxies = Proxies()
        self.run.route = lambda reader, producer, address: (
            self.proxies.link(producer, reader, address).address
        )
        nodes = storage / "nodes"
        self.folder = nodes / bad if bad == host else nodes / host / bad
        #: What has a disk of its own.
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
        """Nothing was lost, doubled or changed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=LIMIT_S)
            assert not thread.is_alive()
        self.run.stop()
        report = audit(self.network, str(self.storage), sessions.large)
        assert report.ok, report.text()

    def until(self, what: str, test: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while not test():
            assert time.monotonic() < until, f"{what}: not within {limit_s} s; {self.told()}"
            time.sleep(0.05)

    def told(self) -> list[dict[str, Any]]:
        """What the run says of its bad parts."""
        self.run.raise_failure()
        assert self.run.status()["stopped"] == {}
        return self.run.parts.status()

    def position(self, node: str) -> int:
        paths = node_status(self.run, node).get("paths", {})
        found = [path["position"] for path in paths.values()]
        return -1 if not found or None in found else min(found)

    def given(self) -> int:
        return min(-1 if client.position is None else client.position for client in self.clients)

    def is_named(self, **wanted: object) -> Callable[[], bool]:
        def named() -> bool:
            return any(
                one["part"] == self.bad and all(one[key] == value for key, value in wanted.items())
                for one in self.told()
            )

        return named

    def goes_on(self) -> None:
        before = self.given()
        self.until("outputs to go on", lambda: self.given() > before + FURTHER)

    def heals(self) -> None:
        at = self.given()
        self.until("it to heal", lambda: not self.told() and self.position(self.bad) > at)

    def stop(self) -> None:
        self.run.stop()
        self.proxies.close()

    def stand_still(self) -> None:
        """SIGSTOP, for longer than silence is taken for death."""
        process = self.run.processes[self.host]
        process.pause()
        self.until("it to be named", lambda: "failure" in self._status())
        self.goes_on()
        process.resume()
        self.heals()

    def be_cut_off(self) -> None:
        """From everybody it reads and from everybody who reads it."""
        mine = set(self.run.controller.assigned(self.host))
        links = [one for one in self.proxies.all() if mine & {one.producer, one.reader}]
        assert links
        for link in links:
            link.cut()
        self.goes_on()
        for link in links:
            link.mend()
        self.heals()

    def _status(self) -> dict[str, Any]:
        (mine,) = [one for one in self.run.status()["nodes"] if one["node"] == self.bad]
        return mine

    def damage_manifest(self) -> None:
        """In its first record: the last one would be taken for torn, and cut."""
        manifest = self.folder / "manifest"
        data = bytearray(manifest.read_bytes())
        data[len(HEADER) + 12] ^= 0xFF
        manifest.write_bytes(data)

    def lose_segment(self, harm: str) -> None:
        """The newest one, since whoever reads is about to need it; the process is killed. It stands
        still meanwhile, so that nothing is trimmed."""
        process = self.run.processes[self.host]

        def harmed() -> bool:
            process.pause()
            segments = [*(self.folder / "segments").rglob("*.parquet")]
            if not segments:
                process.resume()
                return False
            newest = max(segments, key=lambda file: file.stat().st_mtime)
            if harm == "deleted":
                newest.unlink()
            else:
                newest.write_bytes(newest.read_bytes()[:-9])
            return True

        self.until("a segment", harmed)
        process.kill()

    @contextmanager
    def own_disk(self) -> Iterator[None]:
        """The folder of the host is a small file system of its own meanwhile."""

        def move(change: Callable[[], object]) -> None:
            kept = self.disk.with_name("kept")
            shutil.copytree(self.disk, kept)
            change()
            shutil.copytree(kept, self.disk, dirs_exist_ok=True)
            shutil.rmtree(kept)

        options = ["-t", "tmpfs", "-o", f"size={DISK_MB}m", "holdfast-test"]
        self.kill(lambda: move(lambda: mount(*options, self.disk)))
        self.heals()
        try:
            yield
        finally:
            mount("-o", "remount,rw", self.disk)
            self.kill(lambda: move(lambda: subprocess.run(["umount", self.disk], check=True)))
            self.until("the disk to be gone", lambda: not self.disk.is_mount())
        self.heals()

    def full_and_read_only(self) -> None:
        """A disk that is full, and then one that is read-only: the node is named, waits, and goes
        on by itself."""
        ballast = self.disk / "ballast"
        with self.own_disk():
            self.until("its disk to be full", lambda: fill(ballast) and self.lacks_space())
            self.goes_on()
            ballast.unlink()
            self.heals()
            self.kill(lambda: mount("-o", "remount,ro", self.disk))
            self.until("it to be quarantined", self.is_named(kind="storage", state="quarantined"))
            self.goes_on()
            mount("-o", "remount,rw", self.disk)
            self.heals()

    def lacks_space(self) -> bool:
        """The run says so, by whatever way it learnt of it."""
        said = [*self.run.status()["failures"], *self.told()]
        return any("No space left" in str(one) and self.bad in str(one) for one in said)

    def kill(self, before_restart: Callable[[], None]) -> None:
        self.run.processes[self.host].kill(before_restart=before_restart)
