"""A source logs rows durably, in buckets by their time column, before any consumer reads them.

`core.watermark` decides which buckets are closed, and which rows are late or in the future; this
module carries out its decisions. Late and future rows go to the dead letters with their times and
the reason (`late="dead-letter"`), or receive another time (`late="restamp"`). Both are counted and
reported; no row is dropped silently. An idle source closes empty buckets, so it never blocks its
consumers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, assert_never

import numpy as np
import pyarrow as pa

from holdfast.clock import monotonic_us, now_us
from holdfast.config import duration_text
from holdfast.core import source_clock, watermark
from holdfast.core.watermark import Reason, Watermark, WatermarkPlan
from holdfast.edge.dead_letters import DeadLetters
from holdfast.edge.row_conversion import fit
from holdfast.edge.source_messages import clock_text, report_text
from holdfast.errors import BufferFull, HoldfastError, InputError, LogError, RowsNotDurable
from holdfast.model.operators import Source as SourceOperator
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.storage import Added, Boundary, Counter, Ended, Log, Retired, Token
from holdfast.storage.rows import runs
from holdfast.types import Segment, SegmentId, Stability, bucket_of

#: `rows`: rows taken, including restamped rows. Of the late, future and null-time rows,
#: `restamped_rows` received another time; the others went to the dead letters.
COUNTERS = ("rows", "late_rows", "future_rows", "null_time_rows", "restamped_rows")
_COUNTER_OF: dict[Reason, str] = {
    "late": "late_rows", "future": "future_rows", "null time": "null_time_rows",
}  # fmt: skip
#: Maximum pause between reading the two clocks; a longer pause would look like a step.
_READ_US = 1_000

_log = logging.getLogger("holdfast.source")


class Source:
    """Thread-safe: the application pushes rows, a clock thread closes buckets."""

    def __init__(
        self,
        op: SourceOperator,
        log: Log,
        width_us: int,
        *,
        clock: Callable[[], int] = now_us,
        monotonic: Callable[[], int] = monotonic_us,
        buffer_buckets: int | None = None,
        received: Callable[[], int] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        #: Maximum number of closed buckets that a consumer has not received, and the last bucket
        #: that all consumers have received.
        self._buffer_buckets, self._received = buffer_buckets, received
        self.name, self.op, self.log, self.width_us = op.name, op, log, width_us
        self._clock, self._monotonic = clock, monotonic
        #: Receives messages for users; by default a warning in the log.
        self._say = say or (lambda text: _log.warning("source %s: %s", op.name, text))
        #: Why rows reach no output any more; raised by `push`.
        self.failure: HoldfastError | None = None
        self.schema = arrow_schema(op.schema)
        self.counters = {name: log.counter(f"{op.name}.{name}") for name in COUNTERS}
        self._lock = threading.RLock()
        #: Rows of open buckets that are not durable yet.
        self._pending: dict[int, list[pa.Table]] = {}
        self._dead = DeadLetters(log, op.name, self.schema, width_us)
        #: Next part number of each open bucket that already has durable rows.
        self._parts: dict[int, int] = {}
        #: Last bucket that was due to close, closed or not.
        self._due_upto = -(2**62)
        self._token: str | None = None
        self._dirty = False
        #: The run was stopped, so the source takes no more rows.
        self._closed = False
        plan = WatermarkPlan(width_us, op.clock, op.grace_us, op.ahead_us, op.idle_us)
        self._watermark = Watermark(plan, self._open_us() if self.opened else None)
        #: Monotonic time of the last clock reading, in microseconds.
        self._at = 0
        self._read()
        if self.opened:
            info = log.info(op.name)
            for segment in log.segments(op.name, info.complete_upto + 1, 2**62):
                bucket = segment.id.bucket
                self._parts[bucket] = max(self._parts.get(bucket, 0), segment.id.part + 1)

    def __repr__(self) -> str:
        return f"<Source {self.name!r} ({schema_ddl(self.schema)})>"

    @property
    def opened(self) -> bool:
        return self.log.has(self.name)

    @property
    def ended(self) -> bool:
        """The stream has ended, or the source was retired: no row is taken any more."""
        return self.opened and self.log.info(self.name).ended

    @property
    def token(self) -> str | None:
        """The application's token of the last durable push, to resume from after a restart."""
        return self.log.token(self.name)

    def dead_letters(self, last: int | None = None) -> pa.Table:
        """Rejected rows, with `_rejected_at` and `_reason`, oldest first: the newest `last` rows,
        or all retained rows. A row appears when its push is durable."""
        with self._lock:
            return self._dead.table(last)

    def status(self) -> dict[str, Any]:
        """Counters and clock of the source. Takes no lock, so that a hanging disk does not delay
        the reply."""
        excluded_rows = sum(self.counters[name] for name in _COUNTER_OF.values())
        clock = self._watermark.clock
        return {
            "complete_upto": self.log.info(self.name).complete_upto if self.opened else None,
            "ended": self.ended,
            "clock": self.op.clock,
            **self.counters,
            "dead_letter_rows": excluded_rows - self.counters["restamped_rows"],
            "clock_steps": clock.steps,
            "clock_apart_ms": clock.apart_us / 1_000,
        }

    def now_us(self) -> int:
        """The source clock: the wall clock, unless that was stepped (`core.source_clock`)."""
        with self._lock:
            self._read()
            return self._watermark.clock.now_us

    def start(self, at_us: int) -> None:
        """Open the stream: the bucket of `at_us` is its first bucket."""
        with self._lock:
            if not self.opened:
                first = bucket_of(at_us, self.width_us)
                self.log.open_stream(self.name, schema_ddl(self.schema), self.op.time, first)
                self._handle(watermark.Closed(self._at, self._open_us()))

    def push(self, data: Any, *, token: str | None = None, flush: bool = False) -> None:
        """Take rows: an Arrow table, a pandas DataFrame, a list of dicts, or a dict of columns.

        Rows are durable when their bucket closes, when the run is stopped, or, with `flush`, when
        this call returns. The last push, if it failed or was not answered, may be repeated with the
        same `token`; rows that the source already has are not taken twice. While a consumer is
        further behind than `buffer_buckets`, raises `hf.StorageFull` and takes no row.
        """
        if self.failure is not None and not self._closed:
            raise self.failure.with_traceback(None)
        # A manual clock may show any time.
        table = fit(data, self.schema, self.name, real_time=self.op.clock != "manual")
        with self._lock:
            self._check_open()
            last = self.token if self._token is None else self._token
            repeated = token is not None and token == last
            if table.num_rows and not repeated:
                if self._due_upto > self._room_upto():
                    raise self._no_room()
                self._read()
                self._place(table)
            if token is not None and not repeated:
                self._token = token
            if flush:
                self.flush()

    def take(self, table: pa.Table, token: str | None, flush: bool) -> None:
        """`push` with the signature that the transport calls."""
        self.push(table, token=token, flush=flush)

    def working(self) -> None:
        """The feed is about to push rows, so the source is not idle and closes no bucket for
        idleness."""
        with self._lock:
            self._read()
            self._handle(watermark.Working(self._at))

    def tick(self) -> None:
        """Close the buckets that are due by the source clock or by the times of the rows."""
        with self._lock:
            self._check_open()
            at, wall_us = self._clocks()
            self._at = at
            self._handle(watermark.Tick(at, wall_us))

    def due_in_us(self) -> int:
        """Microseconds until the next `tick` is due."""
        with self._lock:
            self._read()
            return self._watermark.due_in_us()

    def advance(self, to_us: int) -> None:
        """Advance the clock to `to_us`: close every bucket that ends at or before this time."""
        with self._lock:
            self._check_open()
            self._read()
            self._advance(to_us)

    def flush(self) -> None:
        """Make everything pushed so far durable, without closing a bucket."""
        with self._lock:
            self._check_open()
            upto = self.log.info(self.name).complete_upto if self.opened else None
            self._commit(sorted(self._pending), upto)

    def close(self) -> None:
        """The run is stopped: make all pushed rows durable, and take no more rows. Raises
        `RowsNotDurable` if the storage refuses the write."""
        with self._lock:
            try:
                if self._pending or self._dirty or self._token is not None:
                    self.flush()
            except LogError as err:
                raise RowsNotDurable(
                    f"source {self.name!r}: {self._pending_rows()} pushed rows are not durable "
                    f"({err}); push them again"
                ) from err
            finally:
                self._closed = True

    def end(self) -> None:
        """No further row will arrive: close the buckets that have rows and end the stream."""
        self._end(None)

    def retire(self, why: str) -> int:
        """Declare that the source never returns. From the returned bucket on, consumers continue
        without the source, so that results become stable again. The decision is durable when this
        method returns, and final: further rows need a source with another name."""
        return self._end(why)

    def _end(self, retired: str | None) -> int:
        with self._lock:
            self._check_open()
            self.start(self.now_us())
            info = self.log.info(self.name)
            if not info.ended:
                upto = max([info.complete_upto, *self._pending, *self._parts])
                self._close(upto)
                ended = Ended(self.name)
                self.log.append(ended if retired is None else Retired(self.name, upto + 1, retired))
            return self.log.info(self.name).complete_upto + 1

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(
                f"source {self.name!r}: the run was stopped; start another run with hf.run(...) on "
                "the same storage, and push the rows to that run"
            )

    def _pending_rows(self) -> int:
        rows: list[int] = [table.num_rows for tables in self._pending.values() for table in tables]
        return self._dead.pending_rows + sum(rows)

    # -- time -----------------------------------------------------------------------------------

    def _clocks(self) -> tuple[int, int]:
        """Monotonic time and wall clock, read at the same moment as closely as possible."""
        for _ in range(3):
            at, wall_us = self._monotonic(), self._clock()
            if self._monotonic() - at <= _READ_US:
                break
        return at, wall_us

    def _read(self) -> None:
        self._at, wall_us = self._clocks()
        self._handle(source_clock.Read(self._at, wall_us))

    def _handle(self, event: watermark.Event) -> None:
        for action in self._watermark.handle(event):
            match action:
                case watermark.Close():
                    self._advance(action.to_us)
                case watermark.Report():
                    self._say(report_text(self.op, action, self._watermark.clock.now_us))
                case watermark.Idled():
                    assert self.op.idle_us is not None
                    _log.info("source %s: idle for %s, closing buckets by the clock", self.name,
                              duration_text(self.op.idle_us))  # fmt: skip
                case (
                    source_clock.Stepped()
                    | source_clock.Behind()
                    | source_clock.Followed()
                    | source_clock.Agreed()
                ):
                    self._say(clock_text(action))
                case _:
                    assert_never(action)

    # -- placing rows ---------------------------------------------------------------------------

    def _place(self, table: pa.Table) -> None:
        """Put rows into buckets or among the dead letters. If this method raises, no row was
        taken."""
        if self.opened:
            self._refuse_after_end()
        column = table.column(self.op.time)
        timeless = table.filter(column.is_null()) if column.null_count else None
        if timeless is not None:
            table = table.filter(column.is_valid())
        times = table.column(self.op.time).to_numpy().view(np.int64)
        if len(times) and not self.opened:
            self._open_for(times)
        if timeless is not None:
            self._exclude("null time", timeless.num_rows, None, timeless)
        if not len(times):
            return
        open_us = self._open_us() if self.opened else self._watermark.future_after_us
        if times.min() < open_us or times.max() > self._watermark.future_after_us:
            table, times = self._sort_out(table, times, open_us)
        if len(times):
            self._take(table, times)

    def _open_for(self, times: Any) -> None:
        """Open the stream for its first rows, unless all of them are future rows, which do not
        determine the start of the stream."""
        future, now = times > self._watermark.future_after_us, self._watermark.clock.now_us
        if self.op.late == "restamp" or not future.all():
            self.start(self._watermark.starts_us(int(np.where(future, now, times).min())))

    def _sort_out(self, table: pa.Table, times: Any, open_us: int) -> tuple[pa.Table, Any]:
        """Remove late and future rows, or, with `restamp`, give them new times."""
        restamps = self.op.late == "restamp"
        future = times > self._watermark.future_after_us
        late = (times < open_us) & ~future
        reasons: list[tuple[Reason, Any]] = [("late", late), ("future", future)]
        for reason, excluded in reasons:
            if count := int(np.count_nonzero(excluded)):
                dead = None if restamps else table.filter(pa.array(excluded))
                self._exclude(reason, count, int(times[excluded][0]), dead)
        if not restamps:
            taken = ~(late | future)
            return table.filter(pa.array(taken)), times[taken]
        stamp_us = max(open_us, self._watermark.clock.now_us)
        times = np.where(future, stamp_us, np.where(late, open_us, times))
        index = self.schema.get_field_index(self.op.time)
        stamped = pa.array(times).view(self.schema.field(index).type)
        return table.set_column(index, self.schema.field(index), stamped), times

    def _take(self, table: pa.Table, times: Any) -> None:
        self.counters["rows"] += table.num_rows
        self._handle(watermark.Arrived(self._at, int(times.max())))
        buckets = times // self.width_us
        if buckets.min() != buckets.max():
            order = np.argsort(buckets, kind="stable")
            table, buckets = table.take(pa.array(order)), buckets[order]
        for bucket, lo, hi in runs(buckets):
            self._pending.setdefault(bucket, []).append(table.slice(lo, hi - lo))

    def _exclude(
        self, reason: Reason, rows: int, example_us: int | None, dead: pa.Table | None
    ) -> None:
        """Count and report excluded rows. `dead`: the rows; None if they receive another time."""
        self._dirty = True
        self.counters[_COUNTER_OF[reason]] += rows
        if dead is None:
            self.counters["restamped_rows"] += rows
        else:
            self._dead.add(dead, reason)
        self._handle(watermark.Excluded(self._at, reason, rows, example_us))

    def _refuse_after_end(self) -> None:
        if self.log.info(self.name).ended:
            retired = self.log.retired(self.name)
            state = "has ended" if retired is None else f"was retired ({retired.why})"
            raise InputError(
                f"source {self.name!r} {state} and accepts no more rows; push them to a source "
                "with another name"
            )

    # -- closing buckets ------------------------------------------------------------------------

    def _open_us(self) -> int:
        """Start of the first open bucket, in microseconds."""
        return (self.log.info(self.name).complete_upto + 1) * self.width_us

    def _advance(self, to_us: int) -> None:
        self.start(to_us)
        upto, info = bucket_of(to_us, self.width_us) - 1, self.log.info(self.name)
        if upto > info.complete_upto and not info.ended:
            self._due_upto, room_upto = upto, self._room_upto()
            if min(upto, room_upto) > info.complete_upto:
                self._close(min(upto, room_upto))
            if upto > room_upto:
                raise self._no_room()

    def _room_upto(self) -> int:
        """Last bucket that may close before the slowest consumer makes progress."""
        if self._buffer_buckets is None or self._received is None:
            return 2**62
        return self._received() + self._buffer_buckets

    def _no_room(self) -> BufferFull:
        return BufferFull(
            f"source {self.name!r} accepts no more rows: the slowest consumer has not received the "
            f"last {self._buffer_buckets} closed buckets (buffer_buckets). See `holdfast status` "
            "for what is missing: restart that component (`holdfast restart`), retire a source "
            "that will not return (`holdfast retire`), open a durable client that is not reading "
            "(folders in STORAGE/clients), or raise buffer_buckets"
        )

    def _close(self, upto: int) -> None:
        """Close the buckets up to `upto`. A token must become durable together with all its rows,
        so a pending token also commits the rows of open buckets."""
        buckets = sorted(self._pending)
        if self._token is None:
            buckets = [bucket for bucket in buckets if bucket <= upto]
        self._commit(buckets, upto)
        self._parts = {bucket: part for bucket, part in self._parts.items() if bucket > upto}
        self._handle(watermark.Closed(self._at, self._open_us()))

    def _commit(self, buckets: list[int], upto: int | None) -> None:
        """Write the files first, then append all records at once. After a failure all rows remain
        pending. `upto` is None before the stream is open: then only dead letters exist."""
        written: list[Segment] = []
        extra: list[Any] = []
        try:
            dead = self._dead.write(self._watermark.clock.now_us)
            if dead is not None:
                written.append(dead)
                extra += [Added(dead), Boundary(dead.id.stream, dead.id.bucket)]
            for bucket in buckets:
                table = pa.concat_tables(self._pending[bucket])
                id = SegmentId(self.name, 0, bucket, part=self._parts.get(bucket, 0))
                written.append(self.log.write(table, id, Stability.STABLE))
            if buckets or self._dirty:
                extra += [
                    Counter(f"{self.name}.{name}", value)
                    for name, value in self.counters.items()
                    if value
                ]
            if self._token is not None:
                extra.append(Token(self.name, self._token))
            if upto is None:
                self.log.append(*extra)
            else:
                rows = [segment for segment in written if segment is not dead]
                self.log.commit(self.name, rows, upto, *extra)
        except LogError:
            self.log.discard(written)
            raise
        for bucket in buckets:
            del self._pending[bucket]
            if upto is None or bucket > upto:
                self._parts[bucket] = self._parts.get(bucket, 0) + 1
        self._token, self._dirty = None, False
        if dead is not None:
            self._dead.written()


def close_all(sources: Iterable[Source]) -> list[str]:
    """Make the rows in open buckets durable. Returns the errors."""
    errors: list[str] = []
    for source in sources:
        try:
            source.close()
        except RowsNotDurable as err:
            errors.append(str(err))
    return errors
