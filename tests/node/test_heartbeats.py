"""The thread that sends heartbeats also handles the replies of the controller, so it must never
wait for a disk (Flux section 3.2.1)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NoReturn

from holdfast.config import Options
from holdfast.core.membership import InstanceStatus
from holdfast.errors import TransportError
from holdfast.model.fragments import consumers_of, fragments
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
    raise TransportError("the producer is away")


def test_a_hung_disk_does_not_delay_heartbeats(tmp_path: Path) -> None:
    network, disk, service = pairs(1, 1), HangingDisk(), Service()
    fragment = next(fragment for fragment in fragments(network) if fragment.name == "lower.0")
    (output,) = fragment.outputs
    log = Log.open(tmp_path, "lower.0", fsync="always", disk=disk)
    log.open_stream(output, "ts timestamp, key long, total long", "ts", 0)
    log.append(Boundary(output, 9))
    service.logs[output] = log
    service.consumers[output] = set(consumers_of(network)[output])
    service.acknowledge(output, "upper.0", 9, 9, 1)
    service.acknowledge(output, "upper.0@2", 5, 5, 1)
    engine = EngineTwin(network, OS_DISK, str(tmp_path / "state"))
    upstream = {stream: {"ingress": away} for stream in fragment.inputs}
    node = Node("lower.0", fragment, engine, log, service, upstream, Options())  # type: ignore[arg-type]
    node.start()
    disk.works.clear()
    statuses = {"upper.0@2": InstanceStatus(epoch=3, dead=3, released=3)}
    heartbeat = threading.Thread(target=node.heard, args=(statuses,), daemon=True)
    try:
        heartbeat.start()
        heartbeat.join(timeout=LIMIT_S / 2)
        assert not heartbeat.is_alive(), "the heartbeat waits for the disk"
        disk.works.set()
        with log.changed:  # the dead consumer is dropped as soon as the disk works
            assert log.changed.wait_for(lambda: log.trimmable(output) == 9, LIMIT_S)
    finally:
        disk.works.set()
        node.stop()
        log.close()
