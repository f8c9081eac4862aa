"""A client reads one output for an application and delivers each bucket once.

The client follows the log of the output, skips buckets that the application already has, delivers
the others, and only then acknowledges them. The position of a client (and, with `archive`, every
row that the client received) is stored in the client's own log. A restarted application continues
from that position.

A tentative bucket remains valid until the stable version of the same bucket replaces it; the stable
version may be empty. Other buckets do not affect it. The position of the last tentative bucket is
durable, too: a client that restarts during a failure delivers the valid tentative buckets again,
and each of them replaces the version that the previous instance delivered.
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
from holdfast.errors import HoldfastError, InputError, TransportError, Trimmed
from holdfast.model.schema import arrow_schema
from holdfast.storage import Counter, Ended, Log
from holdfast.streams.delivery import Delivery
from holdfast.streams.subscribing import Connections, Subscriber
from holdfast.types import SegmentId, Stability, StreamInfo

#: Before the first bucket.
BEFORE_ALL = -(2**62)
#: Column added to archived rows: the time at which the application received the row.
RECEIVED_AT = "__received_at"
#: Pause before the client retries a read whose files were deleted meanwhile.
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """Metadata of a delivered bucket."""

    output: str
    bucket: int
    stability: Stability
    rows: int
    #: From the end of the bucket to its delivery: the cost of waiting and computing.
    delay_us: int
    received_at_us: int
    #: Of a tentative bucket: the missing inputs, and lower bounds of its completeness: the share
    #: of the inputs that were present, and the share of the rows that recent rates predict.
    missing: tuple[str, ...] = ()
    inputs_share: float = 1.0
    rows_share: float = 1.0
    #: These rows (possibly none) replace the tentative rows of the same bucket.
    replaces: bool = False
    #: REC_DONE: not a bucket, but the notification that every delivered bucket up to `bucket` is
    #: stable.
    rec_done: bool = False


class Client:
    """Iterator over the buckets of an output; `foreach_bucket` calls a function instead.

    Only one thread may iterate. Any thread may call `close` and `fail`.
    """

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
        acknowledges: bool = True,
        clock: Callable[[], int] = now_us,
    ) -> None:
        self.output, self.width_us = output, width_us
        self._acknowledges = acknowledges
        self.name = name or f"client-{output}"
        self._producers = producers
        self._log = log
        self._clock = clock
        self._stop = threading.Event()
        self.tentative = tentative
        self._tolerance_buckets = tolerance_buckets
        #: Newest known epoch of each producer.
        self._epochs: dict[str, int] = {}
        #: Reports a new position to the producers; set by the current subscriber.
        self.advanced: Callable[[Position], None] = lambda position: None
        #: The iteration in progress; None if there is none.
        self._reading: Iterator[tuple[pa.Table, BucketInfo]] | None = None
        #: The error that ends the output, and the last bucket before it.
        self._failure: tuple[HoldfastError, int] | None = None
        #: Last bucket that was delivered as tentative and is not corrected yet.
        self.tentative_upto: int | None = None
        #: Uncorrected buckets whose rows were delivered as tentative, oldest first.
        self._tentative_buckets: deque[int] = deque()
        #: Last uncorrected tentative bucket that a previous instance may have delivered.
        self._inherited: int | None = None
        #: Number of rows delivered as tentative, and number of replaced buckets.
        self.tentative_rows = 0
        self.replacements = 0
        self._schema: pa.Schema | None = None
        #: Last stable bucket that was delivered; None before the first.
        self.position: int | None = None if from_bucket is None else from_bucket - 1
        self.ended = False
        self.reconnects = 0
        #: The replicas that the client has read, in order: name, time of the first rows, and
        #: microseconds from the decision to switch to these rows.
        self.switches: list[tuple[str, int, int]] = []
        #: Buckets that the application has received but the log does not hold yet, for example
        #: because the disk is full.
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
        """Return the next bucket with rows, until the output ends or `close()` is called. The call
        confirms that the application has processed the previous bucket. After a `break`, iteration
        continues from there. Raises `NodeFailed` when the output cannot give further results."""
        if self._reading is None:
            if self.closed and not self.ended and self._failure is None:
                raise InputError(
                    f"this client of {self.output!r} is closed; open a new one with "
                    f"run.client({self.output!r}), which continues from the same position"
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
            except TransportError as err:  # the files were lost with the storage of the producer
                self._lost(err)
                self._stop.wait(RETRY_S)
            except Trimmed:
                if self._log is None:
                    raise
                raise self._older_copy(str(self._log.root)) from None
        if self._failure is not None and not self.ended:
            raise self._failure[0].with_traceback(None)

    def _older_copy(self, folder: str) -> Trimmed:
        """Nothing is deleted that a client has not acknowledged: its folder is an older copy."""
        return Trimmed(
            f"client {self.name!r} continues after bucket {self.position}, but the next buckets "
            f"are deleted: its folder {folder} is an older copy. Restore its newest copy, "
            "or delete the folder: the client then starts with the oldest bucket that is left, and "
            "skips those in between"
        )

    def subscription(self, replicas: tuple[str, ...]) -> Subscription:
        """A subscription that starts after the buckets that the application has."""
        from_bucket = None if self.position is None else self.position + 1
        tentative_upto = NOTHING if self.tentative_upto is None else self.tentative_upto
        return Subscription(
            replicas, from_bucket, self.tentative, tentative_upto, self._epochs,
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
        """Close the log of this closed client, so that another client can continue from it."""
        if self._log is not None:
            self._log.close()

    def fail(self, failure: HoldfastError, upto: int | None) -> None:
        """Declare that no bucket follows after `upto`, or, with None, from now on. Iteration raises
        `failure` when it reaches that bucket. Any thread may call this method."""
        self._failure = failure, BEFORE_ALL if upto is None else upto
        if upto is None or self._known() >= upto:
            self._stop.set()

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    @property
    def known_upto(self) -> int | None:
        """Last bucket that the application has, stable or tentative."""
        return self.position if self._standing is None else self._standing

    @property
    def _standing(self) -> int | None:
        """Last uncorrected tentative bucket that this or a previous instance delivered."""
        positions = [upto for upto in (self.tentative_upto, self._inherited) if upto is not None]
        return max(positions, default=None)

    def take(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        """Yield the stable buckets of a delivery in order, then its tentative buckets. A stable
        bucket replaces its tentative version. Afterwards make the position durable and acknowledge
        it."""
        if delivery.info is not None:
            self._open(delivery.info)
        for bucket, table in self._stable(delivery):
            was_tentative = bool(self._tentative_buckets) and self._tentative_buckets[0] == bucket
            replaces = was_tentative or self._is_inherited(bucket)
            info = self._info(bucket, Stability.STABLE, table.num_rows, replaces=replaces)
            yield table, info
            if was_tentative:
                self._tentative_buckets.popleft()
            self.replacements += replaces
            # The application has processed the bucket only when it asks for the next one.
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
        """Buckets with rows, and empty buckets that replace tentative rows, in order."""
        tables = self._buckets(delivery, Stability.STABLE)
        # Buckets whose position a full disk did not record are delivered again by the producer.
        tables = {bucket: table for bucket, table in tables.items() if bucket > self._known()}
        replaced = {b for b in self._tentative_buckets if b <= delivery.upto}
        if self._inherited is not None:
            replaced.update(range(self._known() + 1, min(self._inherited, delivery.upto) + 1))
        for bucket in sorted(tables.keys() | replaced):
            yield bucket, tables[bucket] if bucket in tables else self._nothing()

    def _take_tentative(self, delivery: Delivery) -> Iterator[tuple[pa.Table, BucketInfo]]:
        upto = delivery.tentative_upto
        if upto is None or not self.tentative:
            return
        # Recorded before the delivery, so that these buckets are replaced even after a crash.
        self._note_tentative(upto if self._standing is None else max(upto, self._standing))
        inputs, rows = delivery.partial
        for bucket, table in self._buckets(delivery, Stability.TENTATIVE).items():
            if not self._tentative_buckets or bucket > self._tentative_buckets[-1]:
                self._tentative_buckets.append(bucket)
                self.tentative_rows += table.num_rows
            yield table, self._info(
                bucket, Stability.TENTATIVE, table.num_rows,
                missing=delivery.missing, inputs_share=inputs, rows_share=rows,
                replaces=self._is_inherited(bucket),
            )  # fmt: skip
            self.tentative_upto = bucket
        if upto > self._known():
            self.tentative_upto = upto

    def _is_inherited(self, bucket: int) -> bool:
        return self._inherited is not None and bucket <= self._inherited

    def _note_tentative(self, upto: int | None) -> None:
        """Make the position of the last tentative bucket and the counters durable."""
        if self._log is None:
            return
        flag, last = f"{self.output}.tentative", f"{self.output}.tentative_upto"
        recorded_upto = self._log.counter(last) if self._log.counter(flag) else None
        if recorded_upto == upto:
            return
        self._log.append(
            Counter(flag, int(upto is not None)),
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

    def _info(self, bucket: int, stability: Stability, rows: int, **details: Any) -> BucketInfo:
        at_us = self._clock()
        delay_us = at_us - (bucket + 1) * self.width_us
        return BucketInfo(self.output, bucket, stability, rows, delay_us, at_us, **details)

    def _known(self) -> int:
        """The last stable bucket that was delivered."""
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
        """Write all pending positions to the log, and with `archive` also the rows and the times of
        their delivery."""
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
        """Acknowledge the position to the producers. Only durable buckets are released."""
        if self.position is None or self._owed or not self._acknowledges:
            return
        epoch = self._log.epoch if self._log is not None else 1
        self.advanced(Position(self.position, self.position, epoch))


def _at(position: int | None) -> str:
    return "before its first bucket" if position is None else f"at bucket {position}"
