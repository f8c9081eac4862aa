"""What the controller says is taken by the thread that sends heartbeats, so it waits for no disk
(Flux section 3.2.1)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NoReturn

from holdfast.config import Options
from holdfast.core.membership import Standing
from holdfast.errors import TransportError
from holdfast.model.fragments import fragments, readers_of
from holdfast.node.node import Node
from holdfast.storage import Boundary, Log
from holdfast.storage.disk import OS_DISK, AppendFile, OsDisk
from holdfast.streams.serving import Service
from holdfast.verify.sim.networks import pairs
from holdfast.verify.sim.simulated_engine import EngineTwin

LIMIT_S = 10.0


class HangingDisk(OsDisk):
    """An append to a file waits until the disk works again."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        return _Hanging(super().open_append(path, fsync=fsync), self.works)


class _Hanging:
    def __init__(self, file: AppendFile, works: threading.Event) -> None:
        self._file, self._works = file, works

    def append(self, data: bytes) -> None:
        self._works.wait(LIMIT_S)
        self._file.append(data)

    def truncate(self, length: int) -> None:
        self._file.truncate(length)

    def in_place(self) -> bool:
        return self._file.in_place()

    def close(self) -> None:
        self._file.close()


def away() -> NoReturn:
    raise TransportError("nobody there")


def test_a_disk_that_hangs_does_not_hold_up_the_heartbeat(tmp_path: Path) -> None:
    network, disk, service = pairs(1, 1), HangingDisk(), Service()
    part = next(part for part in fragments(network) if part.name == "lower.0")
    (output,) = part.outputs
    log = Log.open(tmp_path, "lower.0", fsync="always", disk=disk)
    log.open_stream(output, "ts timestamp, key long, total long", "ts", 0)
    log.append(Boundary(output, 9))
    service.logs[output] = log
    service.readers[output] = set(readers_of(network)[output])
    service.acknowledge(output, "upper.0", 9, 9, 1)
    service.acknowledge(output, "upper.0@2", 5, 5, 1)
    engine = EngineTwin(network, OS_DISK, str(tmp_path / "state"))
    upstream = {stream: {"ingress": away} for stream in part.inputs}
    node = Node("lower.0", part, engine, log, service, upstream, Options())  # type: ignore[arg-type]
    node.start()
    disk.works.clear()
    standings = {"upper.0@2": Standing(epoch=3, dead=3, released=3)}
    telling = threading.Thread(target=node.heard, args=(standings,), daemon=True)
    try:
        telling.start()
        telling.join(timeout=LIMIT_S / 2)
        assert not telling.is_alive(), "the heartbeat waits for the disk"
        disk.works.set()
        with log.changed:  # it is given up as soon as the disk works
            assert log.changed.wait_for(lambda: log.trimmable(output) == 9, LIMIT_S)
    finally:
        disk.works.set()
        node.stop()
        log.close()
