"""A client: one output, bucket by bucket, each bucket once.

It follows the output's log, hides what it already has, delivers, and only then acknowledges; its
position (and, with `archive`, everything it received) is in a log of its own, so that a restarted
application goes on where it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.clock import now_us
from holdfast.core.following import Following
from holdfast.errors import HoldfastError, StaleEpoch, StorageFull, TransportError
from holdfast.model.schema import arrow_schema
from holdfast.storage import Counter, Ended, Log
from holdfast.streams.delivery import Delivery, Peer
from holdfast.streams.subscribing import Makers, Position, follow
from holdfast.types import SegmentId, Stability, StreamInfo

#: Before the first bucket.
BEFORE_ALL = -(2**62)
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
    #: What a tentative bucket was computed without.
    missing: tuple[str, ...] = ()
    #: UNDO: not a bucket, but the news that everything tentative after `bucket` is void.
    undo: bool = False
    #: REC_DONE: a failure has been corrected, up to `bucket`.
    rec_done: bool = False


class Client:
    """Iterate, or hand over a function. Used by one thread."""

    def __init__(
        self,
        output: str,
        makers: Makers,
        width_us: int,
        *,
        log: Log | None = None,
        name: str | None = None,
        from_bucket: int | None = None,
        tentative: bool = False,
        clock: Callable[[], int] = now_us,
    ) -> None:
        self.output, self.width_us = output, width_us
        self.name = name or f"client-{output}"
        self._makers = makers
        self._log = log
        self._clock = clock
        self._stop = threading.Event()
        self.tentative = tentative
        #: Where iterating goes on; None while nobody iterates.
        self._reading: Iterator[tuple[pa.Table, BucketInfo]] | None = None
        #: Why nothing comes after a bucket.
        self._failure: tuple[HoldfastError, int] | None = None
        self.peer: Peer | None = None
        self.following = Following(from_bucket, tentative=tentative)
        #: Last bucket that was given as tentative and not taken back since.
        self.tentative_upto: int | None = None
        #: Rows given as tentative, and how often all of that was taken back.
        self.tentative_rows = 0
        self.undos = 0
        self._schema: pa.Schema | None = None
        #: Last bucket delivered; None before the first.
        self.position: int | None = None if from_bucket is None else from_bucket - 1
        self.ended = False
        self.reconnects = 0
        #: The replicas that were read, one after the other: which, when its first rows came, and
        #: how many microseconds after it was decided to read it.
        self.switches: list[tuple[str, int, int]] = []
        #: Position that was last said upstream.
        self._said: int | None = None
        #: What the application has had and the log has not: a full disk may keep them apart.
        self._owed: list[tuple[pa.Table | None, int, BucketInfo | None]] = []
        if log is not None and output in log.streams():
            self.position = log.info(output).complete_upto
            self.following.at = self.position + 1
            self.ended = log.info(output).ended
            self.tentative_rows = log.counter(f"{output}.tentative_rows")
            self.undos = log.counter(f"{output}.undos")

    def __repr__(self) -> str:
        return f"<Client of output {self.output!r}, {_at(self.position)}>"

    def __iter__(self) -> Client:
        return self

    def __next__(self) -> tuple[pa.Table, BucketInfo]:
        """Buckets with rows, in order, until the output ends or `close()` is called. Asking for the
        next one says that the application is done with the one before; after a `break` iterating
        goes on there. Raises `NodeFailed` once the output cannot give any more."""
        if self._reading is None:
            self._reading = self._read()
        try:
            return next(self._reading)
        except BaseException:
            self._reading = None
            raise

    def _read(self) -> Iterator[tuple[pa.Table, BucketInfo]]:
        self.settle()
        if self.ended:
            return
        while not (self.ended or self._stop.is_set()):
            try:
                for delivery in follow(
                    self.output, self.following, self._makers, self._stop,
                    connected=self._connected, lost=self._lost, position=self._position,
                    switched=self._switched,
                ):  # fmt: skip
                    yield from self.take(delivery)
                    if self._failure is not None and self._known() >= self._failure[1]:
                        self._stop.set()
                    if self._stop.is_set():
                        break
            except TransportError as err:  # files that went with the storage of whoever made them
                self._lost(err)
                self._stop.wait(self.following.lost() / 1_000)
        if self._failure is not None and not self.ended:
            raise self._failure[0].with_traceback(None)

    def foreach_bucket(self, fn: Callable[[pa.Table, BucketInfo], None]) -> None:
        for table, info in self:
            try:
                fn(table, info)
            except BaseException:
                self._reading = None  # the application is not done with the bucket
                raise

    def close(self) -> None:
        self._stop.set()

    def fail(self, failure: HoldfastError, upto: int | None) -> None:
        """Nothing comes after a bucket, or (None) from now on. Iterating raises that when it gets
        there. Any thread may say so."""
        self._failure = failure, BEFORE_ALL if upto is None else upto
        if upto is None or self._known() >= upto:
            self._stop.set()

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    @property
    def known_upto(self) -> int | None:
        """Last bucket the application has heard of, be it as tentative."""
        return self.position if self.tentative_upto is None else self.tentative_upto

    def take(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """What of a delivery is to be taken back, then its stable buckets, one after the other,
        then the tentative ones; then the position is durable and acknowledged."""
        if delivery.info is not None:
            self._open(delivery.info)
            self._said = None  # whoever speaks may be new, and not know how far we are
        stable_news = self.position is None or delivery.upto > self.position
        if self.tentative_upto is not None and (delivery.undone or stable_news):
            self._take_back()
            yield self._nothing(), self._info(self._known(), Stability.STABLE, 0, undo=True)
        for bucket, stability, table in self._buckets(delivery, Stability.STABLE):
            info = self._info(bucket, stability, table.num_rows)
            yield table, info
            # Only now has the application had it.
            self._had(bucket, table, info)
        if self.position is None or delivery.upto > self.position:
            self._had(delivery.upto, None, None)
        if delivery.rec_done and self.following.tentative:
            yield self._nothing(), self._info(self._known(), Stability.STABLE, 0, rec_done=True)
        yield from self._take_tentative(delivery)
        self.ended = delivery.ended
        if self.ended and self._log is not None and not self._log.info(self.output).ended:
            self._log.append(Ended(self.output))
        self._acknowledge()

    def _take_back(self) -> None:
        self.tentative_upto = None
        self.following.undone()
        self.undos += 1
        if self._log is not None:
            with suppress(StorageFull):  # said with the next UNDO
                self._log.append(
                    Counter(f"{self.output}.tentative_rows", self.tentative_rows),
                    Counter(f"{self.output}.undos", self.undos),
                )

    def _take_tentative(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        upto = delivery.tentative_upto
        if upto is None or not self.following.tentative:
            return
        for bucket, stability, table in self._buckets(delivery, Stability.TENTATIVE):
            self.tentative_upto = bucket
            self.tentative_rows += table.num_rows
            yield table, self._info(bucket, stability, table.num_rows, missing=delivery.missing)
        self.following.taken_tentative(upto)
        if self.position is None or upto > self.position:
            self.tentative_upto = upto

    def _buckets(
        self, delivery: Delivery, stability: Stability
    ) -> Iterator[tuple[int, Stability, pa.Table]]:
        by_bucket: dict[int, list[pa.Table]] = {}
        for number, segment in enumerate(delivery.segments):
            if segment.stability is stability:
                by_bucket.setdefault(segment.id.bucket, []).append(delivery.table(number))
        for bucket in sorted(by_bucket):
            tables = by_bucket[bucket]
            yield bucket, stability, tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def _info(self, bucket: int, stability: Stability, rows: int, **more: Any) -> BucketInfo:
        at_us = self._clock()
        delay_us = at_us - (bucket + 1) * self.width_us
        return BucketInfo(self.output, bucket, stability, rows, delay_us, at_us, **more)

    def _known(self) -> int:
        """The last bucket that stands."""
        return BEFORE_ALL if self.position is None else self.position

    def _nothing(self) -> pa.Table:
        assert self._schema is not None
        return self._schema.empty_table()

    def _connected(self, peer: Peer) -> None:
        self.peer = peer

    def _switched(self, replica: str, us: int) -> None:
        self.switches.append((replica, self._clock(), us))

    def _lost(self, err: Exception) -> None:
        self.reconnects += 1

    def _open(self, info: StreamInfo) -> None:
        self._schema = arrow_schema(info.schema)
        if self._log is not None and self.output not in self._log.streams():
            ddl = f"{info.schema}, {RECEIVED_AT} timestamp"
            self._log.open_stream(self.output, ddl, info.time, info.starts_at)

    def _had(self, upto: int, table: pa.Table | None, info: BucketInfo | None) -> None:
        self.position = upto
        self.following.taken(upto)
        if self._log is not None:
            self._owed.append((table, upto, info))
            self.settle()

    def settle(self) -> None:
        """The position, and with `archive` the rows and when they came, are durable."""
        while self._owed:
            assert self._log is not None
            table, upto, info = self._owed[0]
            segments = []
            if table is not None and info is not None and self._log.archive:
                at = pa.scalar(info.received_at_us, pa.timestamp("us", tz="UTC"))
                rows = table.append_column(RECEIVED_AT, pa.repeat(at, table.num_rows))
                id = SegmentId(self.output, 0, upto)
                segments.append(self._log.write(rows, id, info.stability))
            if upto > self._log.info(self.output).complete_upto:
                self._log.commit(self.output, segments, upto)
            self._owed.pop(0)

    def not_acknowledged(self) -> None:
        """The last position did not arrive: it is said again with the next sign of life."""
        self._said = None

    def _position(self) -> Position | None:
        """What producers are told: only what is durable is no longer needed."""
        if self.position is None or self._owed:
            return None
        epoch = self._log.epoch if self._log is not None else 1
        return self.name, self.position, self.position, epoch

    def _acknowledge(self) -> None:
        position = self._position()
        if position is None or self.peer is None or self.position == self._said:
            return
        try:
            self._said = self.position
            self.peer.acknowledge(self.output, *position)
        except TransportError:
            self.not_acknowledged()
        except StaleEpoch:
            self.close()
            raise


def _at(position: int | None) -> str:
    return "before its first bucket" if position is None else f"at bucket {position}"
