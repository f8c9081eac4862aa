"""A client: one output, bucket by bucket, each bucket once.

It follows the output's log, hides what it already has, delivers, and only then acknowledges; its
position (and, with `archive`, everything it received) is in a log of its own, so that a restarted
application goes on where it was.

A tentative bucket stands until the same bucket comes again and replaces it, also by nothing; news
of other buckets does not touch it. How far tentative buckets were given is durable, too: a client
that is started again in the middle of a failure gives what stands again, each bucket in the place
of whatever its predecessor gave for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.clock import now_us
from holdfast.core.replica_selector import NOTHING
from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, InputError, TransportError
from holdfast.model.schema import arrow_schema
from holdfast.storage import Counter, Ended, Log
from holdfast.streams.delivery import Delivery
from holdfast.streams.subscribing import Connections, Subscriber
from holdfast.types import SegmentId, Stability, StreamInfo

#: Before the first bucket.
BEFORE_ALL = -(2**62)
#: Column added to archived rows: when the application got them.
RECEIVED_AT = "_received_at"
#: Files that were deleted while they were read are asked for again after so long.
RETRY_S = 0.05


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
    #: What a tentative bucket was computed without, and how partial it is at worst: the share of
    #: the inputs that were there, and of the rows that their recent rates let expect.
    missing: tuple[str, ...] = ()
    inputs_share: float = 1.0
    rows_share: float = 1.0
    #: These rows, none perhaps, take the place of those given as tentative for the same bucket.
    replaces: bool = False
    #: REC_DONE: not a bucket, but the news that everything given up to `bucket` is stable now.
    rec_done: bool = False


class Client:
    """Iterate, or hand over a function. Used by one thread."""

    def __init__(
        self,
        output: str,
        producers: Connections,
        width_us: int,
        *,
        log: Log | None = None,
        name: str | None = None,
        from_bucket: int | None = None,
        tentative: bool = False,
        tolerance_buckets: int = 0,
        clock: Callable[[], int] = now_us,
    ) -> None:
        self.output, self.width_us = output, width_us
        self.name = name or f"client-{output}"
        self._producers = producers
        self._log = log
        self._clock = clock
        self._stop = threading.Event()
        self.tentative = tentative
        self._tolerance_buckets = tolerance_buckets
        #: The newest epochs of producers heard of, and the subscription that tells them positions.
        self._epochs: dict[str, int] = {}
        self.advanced: Callable[[Position], None] = lambda position: None
        #: Where iterating goes on; None while nobody iterates.
        self._reading: Iterator[tuple[pa.Table, BucketInfo]] | None = None
        #: Why nothing comes after a bucket.
        self._failure: tuple[HoldfastError, int] | None = None
        #: Last bucket that was given as tentative and still is.
        self.tentative_upto: int | None = None
        #: Buckets with rows that were given as tentative and still are, oldest first.
        self._guessed: deque[int] = deque()
        #: So far a predecessor may have given tentative buckets that stand.
        self._inherited: int | None = None
        #: Rows given as tentative, and buckets that were replaced.
        self.tentative_rows = 0
        self.replacements = 0
        self._schema: pa.Schema | None = None
        #: Last bucket delivered; None before the first.
        self.position: int | None = None if from_bucket is None else from_bucket - 1
        self.ended = False
        self.reconnects = 0
        #: The replicas that were read, one after the other: which, when its first rows came, and
        #: how many microseconds after it was decided to read it.
        self.switches: list[tuple[str, int, int]] = []
        #: What the application has had and the log has not: a full disk may keep them apart.
        self._owed: list[tuple[pa.Table | None, int, BucketInfo | None]] = []
        if log is not None and log.has(output):
            self.position = log.info(output).complete_upto
            self.ended = log.info(output).ended
            self.tentative_rows = log.counter(f"{output}.tentative_rows")
            self.replacements = log.counter(f"{output}.replacements")
            if log.counter(f"{output}.tentative"):
                self._inherited = log.counter(f"{output}.tentative_upto")

    def __repr__(self) -> str:
        return f"<Client of output {self.output!r}, {_at(self.position)}>"

    def __iter__(self) -> Client:
        return self

    def __next__(self) -> tuple[pa.Table, BucketInfo]:
        """Buckets with rows, in order, until the output ends or `close()` is called. Asking for the
        next one says that the application is done with the one before; after a `break` iterating
        goes on there. Raises `NodeFailed` once the output cannot give any more."""
        if self._reading is None:
            if self.closed and not self.ended and self._failure is None:
                raise InputError(
                    f"this client of {self.output!r} was closed; open another one with "
                    f"run.client({self.output!r}), which goes on where this one was"
                )
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
            subscriber = Subscriber(
                self.output, self.name, self.subscription(tuple(self._producers)), self._producers,
                self._stop, lost=self._lost, switched=self._switched,
            )  # fmt: skip
            self.advanced = subscriber.advanced
            try:
                for delivery in subscriber.deliveries():
                    yield from self.take(delivery)
                    if self._failure is not None and self._known() >= self._failure[1]:
                        self._stop.set()
                    if self._stop.is_set():
                        break
            except TransportError as err:  # files that went with the storage of whoever made them
                self._lost(err)
                self._stop.wait(RETRY_S)
        if self._failure is not None and not self.ended:
            raise self._failure[0].with_traceback(None)

    def subscription(self, replicas: tuple[str, ...]) -> Subscription:
        """From where the application is."""
        wanted = None if self.position is None else self.position + 1
        given = NOTHING if self.tentative_upto is None else self.tentative_upto
        return Subscription(
            replicas, wanted, self.tentative, given, self._epochs,
            tolerance_buckets=self._tolerance_buckets,
        )  # fmt: skip

    def foreach_bucket(self, fn: Callable[[pa.Table, BucketInfo], None]) -> None:
        for table, info in self:
            try:
                fn(table, info)
            except BaseException:
                self._reading = None  # the application is not done with the bucket
                raise

    def close(self) -> None:
        self._stop.set()

    def release(self) -> None:
        """Lets go of its log: another client may go on where this one, which was closed, is."""
        if self._log is not None:
            self._log.close()

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
        """Last bucket the application has, be it as tentative."""
        return self.position if self._standing is None else self._standing

    @property
    def _standing(self) -> int | None:
        """Last bucket that was given as tentative, also by a predecessor, and still is."""
        found = [upto for upto in (self.tentative_upto, self._inherited) if upto is not None]
        return max(found, default=None)

    def take(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """The stable buckets of a delivery, one after the other, each in place of what was given as
        tentative for it; then the tentative ones; then the position is durable and acknowledged."""
        if delivery.info is not None:
            self._open(delivery.info)
        for bucket, table in self._stable(delivery):
            guessed = bool(self._guessed) and self._guessed[0] == bucket
            replaces = guessed or self._is_inherited(bucket)
            info = self._info(bucket, Stability.STABLE, table.num_rows, replaces=replaces)
            yield table, info
            if guessed:
                self._guessed.popleft()
            self.replacements += replaces
            # Only now has the application had it.
            self._had(bucket, table if table.num_rows else None, info)
        if self.position is None or delivery.upto > self.position:
            self._had(delivery.upto, None, None)
        if self._standing is not None and self._known() >= self._standing:
            self.tentative_upto = self._inherited = None
            yield self._nothing(), self._info(self._known(), Stability.STABLE, 0, rec_done=True)
        yield from self._take_tentative(delivery)
        self._note_tentative(self._standing)
        self.ended = delivery.ended
        if self.ended and self._log is not None and not self._log.info(self.output).ended:
            self._log.append(Ended(self.output))
        self._acknowledge()

    def _stable(self, delivery: Delivery) -> Iterator[tuple[int, pa.Table]]:
        """Buckets with rows, and those that are empty in place of tentative rows, in order."""
        found = self._buckets(delivery, Stability.STABLE)
        # What a full disk kept from being noted comes again.
        found = {bucket: table for bucket, table in found.items() if bucket > self._known()}
        replaced = {b for b in self._guessed if b <= delivery.upto}
        if self._inherited is not None:
            replaced.update(range(self._known() + 1, min(self._inherited, delivery.upto) + 1))
        for bucket in sorted(found.keys() | replaced):
            yield bucket, found[bucket] if bucket in found else self._nothing()

    def _take_tentative(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        upto = delivery.tentative_upto
        if upto is None or not self.tentative:
            return
        # Known before the application has any of it: after a crash it is replaced.
        self._note_tentative(upto if self._standing is None else max(upto, self._standing))
        inputs, rows = delivery.partial
        for bucket, table in self._buckets(delivery, Stability.TENTATIVE).items():
            self.tentative_upto = bucket
            self._guessed.append(bucket)
            self.tentative_rows += table.num_rows
            yield table, self._info(
                bucket, Stability.TENTATIVE, table.num_rows,
                missing=delivery.missing, inputs_share=inputs, rows_share=rows,
                replaces=self._is_inherited(bucket),
            )  # fmt: skip
        if upto > self._known():
            self.tentative_upto = upto

    def _is_inherited(self, bucket: int) -> bool:
        return self._inherited is not None and bucket <= self._inherited

    def _note_tentative(self, upto: int | None) -> None:
        """How far tentative buckets stand survives the process, and so do the counters."""
        if self._log is None:
            return
        stands, last = f"{self.output}.tentative", f"{self.output}.tentative_upto"
        known = self._log.counter(last) if self._log.counter(stands) else None
        if known == upto:
            return
        self._log.append(
            Counter(stands, int(upto is not None)),
            Counter(last, upto or 0),
            Counter(f"{self.output}.tentative_rows", self.tentative_rows),
            Counter(f"{self.output}.replacements", self.replacements),
        )

    def _buckets(self, delivery: Delivery, stability: Stability) -> dict[int, pa.Table]:
        """Tables by bucket, in order."""
        by_bucket: dict[int, list[pa.Table]] = {}
        for number, segment in enumerate(delivery.segments):
            if segment.stability is stability:
                by_bucket.setdefault(segment.id.bucket, []).append(delivery.table(number))
        return {
            bucket: parts[0] if len(parts) == 1 else pa.concat_tables(parts)
            for bucket, parts in sorted(by_bucket.items())
        }

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

    def _switched(self, replica: str, us: int) -> None:
        self.switches.append((replica, self._clock(), us))

    def _lost(self, err: HoldfastError) -> None:
        self.reconnects += 1

    def _open(self, info: StreamInfo) -> None:
        self._schema = arrow_schema(info.schema)
        if self._log is not None and not self._log.has(self.output):
            ddl = f"{info.schema}, {RECEIVED_AT} timestamp"
            self._log.open_stream(self.output, ddl, info.time, info.starts_at)

    def _had(self, upto: int, table: pa.Table | None, info: BucketInfo | None) -> None:
        self.position = upto
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

    def _acknowledge(self) -> None:
        """Producers are told: only what is durable is no longer needed."""
        if self.position is None or self._owed:
            return
        epoch = self._log.epoch if self._log is not None else 1
        self.advanced(Position(self.position, self.position, epoch))


def _at(position: int | None) -> str:
    return "before its first bucket" if position is None else f"at bucket {position}"
