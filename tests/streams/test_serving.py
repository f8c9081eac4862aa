"""The service of a node: take-over and fold-in of consumers (Flux sections 3.2.2, 5.3.2)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.core.membership import InstanceStatus
from holdfast.errors import InputError, RolledBack, SegmentLost
from holdfast.storage import Added, Boundary, Log
from holdfast.storage.rows import TIMESTAMP
from holdfast.streams.calls import Acknowledge
from holdfast.streams.serving import Service
from holdfast.types import SegmentId, Stability


class Interrupted(Log):
    """A log that calls `then` just after it has returned the position of a consumer."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def position(self, stream: str, consumer: str) -> tuple[int, int, int]:
        position = super().position(stream, consumer)
        then, self.then = self.then, lambda: None
        then()
        return position


def test_a_new_instance_that_holds_during_the_take_over_of_its_predecessor_is_waited_for(
    tmp_path: Path,
) -> None:
    """`lost` and `hold` run in different threads; neither order may fail."""
    log = Interrupted.open(tmp_path, "producer", fsync="never")
    assert isinstance(log, Interrupted)
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 9))
    service = Service(logs={"s": log}, consumers={"s": {"r", "r@2"}})
    for consumer in ("r", "r@2"):
        service.acknowledge("s", consumer, 5, 5, 1)
    log.then = lambda: service.hold("s", "r@2", 2, 0)
    service.lost({"r@2": InstanceStatus(1, 1, 1)}, 0)
    service.acknowledge("s", "r", 9, 9, 1)
    assert log.trimmable("s") <= 5, "the new instance has not received anything yet"


def test_a_source_whose_log_is_an_older_copy_refuses_consumers_that_are_ahead(
    tmp_path: Path,
) -> None:
    log = Log.open(tmp_path, "s", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    log.append(Boundary("s", 4))
    service = Service(logs={"s": log})
    assert service.begin("s", 10) is not None, "a node that is being rebuilt may be behind"
    service.pushes["s"] = lambda table, token, flush: None
    assert service.begin("s", 5) is not None
    with pytest.raises(RolledBack, match="ends at bucket 4, but a consumer has received bucket 9"):
        service.begin("s", 10)


def test_acknowledgements_of_unknown_consumers_are_refused(tmp_path: Path) -> None:
    log = Log.open(tmp_path, "node", fsync="never")
    log.open_stream("out", "ts timestamp", "ts", 0)
    log.append(Boundary("out", 9))
    service = Service(logs={"out": log}, consumers={"out": {"client-out", "next"}})
    for consumer in ("next", "client-out", "client-out+dashboard"):
        service._acknowledge(Acknowledge("out", consumer, 5, 5, 1))
    with pytest.raises(InputError, match=r"no consumer 'nobody'; .* client-out, next"):
        service._acknowledge(Acknowledge("out", "nobody", 0, 0, 1))
    assert log.trimmable("out") == 5


def test_a_consumer_that_connects_again_learns_that_a_segment_is_damaged(tmp_path: Path) -> None:
    """G2: the size of the file is right, and the consumer reads the file itself."""
    log = Log.open(tmp_path, "s", fsync="never")
    log.open_stream("s", "ts timestamp", "ts", 0)
    table = pa.table({"ts": pa.array([5, 6, 7], TIMESTAMP)})
    segment = log.write(table, SegmentId("s", 0, 0), Stability.STABLE)
    log.append(Added(segment), Boundary("s", 0))
    service = Service(logs={"s": log})
    reported: list[str] = []
    service.on_damage.append(lambda stream, err: reported.append(str(err)))
    assert next(service.follow("s", 0, lambda: True)).segments == (segment,)
    path = Path(log.absolute(segment))
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 11):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(SegmentLost, match=re.escape(str(path))):
            next(service.follow("s", 0, lambda: True))
    assert len(reported) == len(range(0, 8 * len(data), 11))
    path.write_bytes(data)
    assert next(service.follow("s", 0, lambda: True)).segments == (segment,)
