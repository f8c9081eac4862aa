"""A client: one output, bucket by bucket, each bucket once.

It follows the output's log, hides what it already has, delivers, and only then acknowledges; its
position (and, with `archive`, everything it received) is in a log of its own, so that a restarted
application goes on where it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import StaleEpoch, TransportError
from holdfast.log import Ended, Log
from holdfast.log.files import put_file
from holdfast.source import now_us
from holdfast.transport.service import Delivery, Peer
from holdfast.types import Segment, SegmentId, Stability

_RETRY_S = 0.05
#: Column added to archived rows: when the application got them.
RECEIVED_AT = "_received_at"


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """What came with a bucket."""

    output: str
    bucket: int
    stability: Stability
    rows: int
    #: From the end of the bucket to its delivery: what waiting and computing cost.
    delay_us: int
    received_at_us: int


class Client:
    """Iterate, or hand over a function. Used by one thread."""

    def __init__(
        self,
        output: str,
        connect: Callable[[], Peer],
        width_us: int,
        *,
        log: Log | None = None,
        name: str | None = None,
        from_bucket: int | None = None,
    ) -> None:
        self.output, self.width_us = output, width_us
        self.name = name or f"client-{output}"
        self._connect = connect
        self._log = log
        self._stop = threading.Event()
        self._peer: Peer | None = None
        #: Last bucket delivered; None before the first.
        self.position: int | None = None if from_bucket is None else from_bucket - 1
        self.ended = False
        self.duplicates_hidden = 0
        self.reconnects = 0
        if log is not None and output in log.streams():
            self.position = log.info(output).complete_upto
            self.ended = log.info(output).ended

    def __iter__(self) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """Buckets with rows, in order, until the output ends or `close()` is called."""
        while not (self._stop.is_set() or self.ended):
            try:
                self._peer = self._connect()
                start = None if self.position is None else self.position + 1
                for delivery in self._peer.follow(self.output, start, self._stop):
                    yield from self._deliver(delivery)
                    if self._stop.is_set() or self.ended:
                        break
            except TransportError:
                self.reconnects += 1
                self._stop.wait(_RETRY_S)

    def foreach_bucket(self, fn: Callable[[pa.Table, BucketInfo], None]) -> None:
        for table, info in self:
            fn(table, info)

    def close(self) -> None:
        self._stop.set()

    def _deliver(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        if self._log is not None and self._log.owner and self.output not in self._log.streams():
            self._open()
        by_bucket: dict[int, list[tuple[Segment, pa.Table]]] = {}
        for number, segment in enumerate(delivery.segments):
            if self.position is not None and segment.id.bucket <= self.position:
                self.duplicates_hidden += 1
                continue
            by_bucket.setdefault(segment.id.bucket, []).append((segment, delivery.table(number)))
        for bucket in sorted(by_bucket):
            parts = by_bucket[bucket]
            table = pa.concat_tables([table for _, table in parts])
            at_us = now_us()
            info = BucketInfo(
                self.output, bucket, parts[0][0].stability, table.num_rows,
                at_us - (bucket + 1) * self.width_us, at_us,
            )  # fmt: skip
            yield table, info
            # Only now has the application had it.
            self._keep(table, info)
            self.position = bucket
        if self.position is None or delivery.upto > self.position:
            self.position = delivery.upto
            if self._log is not None:
                self._advance(delivery.upto)
        self.ended = delivery.ended
        if self.ended and self._log is not None and not self._log.info(self.output).ended:
            self._log.append(Ended(self.output))
        self._acknowledge()

    def _open(self) -> None:
        assert self._peer is not None
        assert self._log is not None
        for info in self._peer.streams():
            if info.name == self.output:
                ddl = f"{info.schema}, {RECEIVED_AT} timestamp"
                self._log.open_stream(self.output, ddl, info.time, info.starts_at)

    def _keep(self, table: pa.Table, info: BucketInfo) -> None:
        """The position, and with `archive` the rows and when they came, are durable."""
        if self._log is None:
            return
        segments = []
        if self._log.archive:
            at = pa.scalar(info.received_at_us, pa.timestamp("us", tz="UTC"))
            table = table.append_column(RECEIVED_AT, pa.repeat(at, table.num_rows))
            id = SegmentId(self.output, 0, info.bucket)
            segments.append(self._log.write(table, id, info.stability))
        self._log.commit(self.output, segments, info.bucket)

    def _advance(self, upto: int) -> None:
        assert self._log is not None
        if upto > self._log.info(self.output).complete_upto:
            self._log.commit(self.output, [], upto)

    def _acknowledge(self) -> None:
        if self.position is None or self._peer is None:
            return
        epoch = self._log.epoch if self._log is not None else 1
        try:
            self._peer.acknowledge(self.output, self.name, self.position, self.position, epoch)
        except TransportError:
            pass  # said again with the next delivery
        except StaleEpoch:
            self.close()
            raise


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """A folder of Parquet files, one per bucket, named by the bucket: writing one again replaces it
    by the same rows, so a restart can never double them."""

    folder: str

    def __call__(self, table: pa.Table, info: BucketInfo) -> None:
        from pathlib import Path

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        os.makedirs(self.folder, exist_ok=True)
        target = Path(self.folder) / f"bucket-{info.bucket:+020d}.parquet"
        put_file(target, memoryview(sink.getvalue()), fsync=True)
