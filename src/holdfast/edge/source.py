"""A source: rows are logged durably before anybody sees them, and buckets are closed by a clock.

Boundaries come from the source's clock, never from row times: one row of the year 3000 must not
close the world. A row that comes after its bucket was closed is late: it is moved to the open
bucket (`restamp`) or goes to the dead letters (`reject`); both are counted, none is dropped in
silence. An idle source closes empty buckets, so it never holds anybody up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.clock import now_us
from holdfast.errors import HoldfastError, InputError, LogError, StorageFull
from holdfast.model.operators import Source as SourceOperator
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.storage import Counter, Ended, Log, Retired, Token
from holdfast.storage.rows import canonical, runs
from holdfast.types import Segment, SegmentId, Stability, bucket_of

COUNTERS = ("rows", "late_restamped", "late_rejected", "ahead_restamped", "ahead_rejected",
            "null_time_rejected")  # fmt: skip


def dead_letters(source: str) -> str:
    """Name of the stream of rows a source refused, with the reason."""
    return f"{source}-dead"


class Source:
    """Thread-safe: the application pushes, a clock closes buckets."""

    def __init__(
        self,
        op: SourceOperator,
        log: Log,
        width_us: int,
        *,
        clock: Callable[[], int] = now_us,
        buffer_buckets: int | None = None,
        received: Callable[[], int] | None = None,
    ) -> None:
        #: At most so many closed buckets wait for readers that have not had them.
        self._buffer_buckets, self._received = buffer_buckets, received
        self.name, self.op, self.log, self.width_us = op.name, op, log, width_us
        self._clock = clock
        #: Why rows reach nobody any more; told to whoever pushes.
        self.failure: HoldfastError | None = None
        self.schema = arrow_schema(op.schema)
        self.counters = {name: log.counter(f"{op.name}.{name}") for name in COUNTERS}
        self._lock = threading.RLock()
        #: Rows of buckets that are not closed yet and not durable yet.
        self._pending: dict[int, list[pa.Table]] = {}
        self._dead: list[pa.Table] = []
        #: Next part number of each open bucket that already has durable rows.
        self._parts: dict[int, int] = {}
        self._token: str | None = None
        self._dirty = False
        if op.name in log.streams():
            info = log.info(op.name)
            for segment in log.segments(op.name, info.complete_upto + 1, 2**62):
                bucket = segment.id.bucket
                self._parts[bucket] = max(self._parts.get(bucket, 0), segment.id.part + 1)

    def __repr__(self) -> str:
        return f"<Source {self.name!r} ({schema_ddl(self.schema)})>"

    @property
    def opened(self) -> bool:
        return self.name in self.log.streams()

    @property
    def token(self) -> str | None:
        """The application's token of the last durable push, to resume from after a restart."""
        return self.log.token(self.name)

    def start(self, at_us: int) -> None:
        """Open the stream: nothing will ever be before the bucket of `at_us`."""
        with self._lock:
            if not self.opened:
                ddl = schema_ddl(self.schema)
                first = bucket_of(at_us, self.width_us)
                dead = f"rejected_at timestamp, reason string, {ddl}"
                self.log.open_stream(dead_letters(self.name), dead, "rejected_at", first)
                self.log.open_stream(self.name, ddl, self.op.time, first)

    def push(self, data: Any, *, token: str | None = None, flush: bool = False) -> None:
        """Take rows: an Arrow table, a pandas DataFrame, a list of dicts, or a dict of columns.

        They are durable, and acknowledged, when their bucket closes, or at once with `flush`. The
        last push, if it failed or was not answered, may be repeated with the same `token`: rows
        that are here already are not taken twice.
        """
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        table = self._fit(data)
        with self._lock:
            last = self.token if self._token is None else self._token
            repeated = token is not None and token == last
            if table.num_rows and not repeated:
                self._place(table)
            if token is not None and not repeated:
                self._token = token
            if flush:
                self.flush()

    def take(self, table: pa.Table, token: str | None, flush: bool) -> None:
        """`push` as the transport calls it."""
        self.push(table, token=token, flush=flush)

    def advance(self, to_us: int) -> None:
        """The clock stands at `to_us`: close every bucket that ended before."""
        with self._lock:
            self.start(to_us)
            upto, info = bucket_of(to_us, self.width_us) - 1, self.log.info(self.name)
            if upto > info.complete_upto and not info.ended:
                room_upto = self._room_upto()
                if min(upto, room_upto) > info.complete_upto:
                    self._close(min(upto, room_upto))
                if upto > room_upto:
                    raise self._no_room()

    def flush(self) -> None:
        """Make everything pushed so far durable, without closing a bucket."""
        with self._lock:
            if not self.opened:
                return
            self._commit(sorted(self._pending), self.log.info(self.name).complete_upto)

    def end(self) -> None:
        """No row will come any more: close the buckets that have rows and end the stream."""
        self._end(None)

    def retire(self, why: str) -> int:
        """Decide that the source never comes back: from the next bucket on everybody goes on
        without it, so that results become stable again. Durable when returned; gives the bucket.
        There is no way back: what the source still has must come under another name."""
        return self._end(why)

    def _end(self, retired: str | None) -> int:
        with self._lock:
            self.start(self._clock())
            info = self.log.info(self.name)
            if not info.ended:
                upto = max([info.complete_upto, *self._pending, *self._parts])
                self._close(upto)
                over = Ended(self.name)
                self.log.append(over if retired is None else Retired(self.name, upto + 1, retired))
            return self.log.info(self.name).complete_upto + 1

    def _room_upto(self) -> int:
        """The last bucket that may be closed before the slowest reader has had an older one."""
        if self._buffer_buckets is None or self._received is None:
            return 2**62
        return self._received() + self._buffer_buckets

    def _no_room(self) -> StorageFull:
        return StorageFull(
            f"source {self.name!r} holds {self._buffer_buckets} buckets that a reader has not had; "
            "it closes no more until one has caught up. Bring back what is missing, retire the "
            "source that is, or raise buffer_buckets"
        )

    # -- placing rows ---------------------------------------------------------------------------

    def _fit(self, data: Any) -> pa.Table:
        try:
            table = _table(data, self.schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as err:
            raise InputError(f"source {self.name!r}: rows do not fit ({err})") from None
        unknown = [name for name in table.column_names if name not in self.schema.names]
        missing = [name for name in self.schema.names if name not in table.column_names]
        if unknown or missing:
            problem = " and ".join(
                text for text in (
                    f"unknown column {', '.join(unknown)}" if unknown else "",
                    f"missing column {', '.join(missing)}" if missing else "",
                ) if text
            )  # fmt: skip
            raise InputError(
                f"source {self.name!r}: {problem}; it was declared as ({schema_ddl(self.schema)})"
            )
        try:
            if table.schema != self.schema:
                table = table.select(self.schema.names).cast(self.schema)
            return canonical(table)
        except pa.ArrowException as err:
            raise InputError(
                f"source {self.name!r}: rows do not fit ({schema_ddl(self.schema)}): {err}"
            ) from None

    def _place(self, table: pa.Table) -> None:
        time_at = self.schema.get_field_index(self.op.time)
        column = table.column(time_at)
        if column.null_count:
            self._reject(table.filter(column.is_null()), "null time", "null_time_rejected")
            table = table.filter(column.is_valid())
            column = table.column(time_at)
        if not table.num_rows:
            return
        times = column.combine_chunks().to_numpy(zero_copy_only=False).view(np.int64)
        wall = self.op.clock == "wall"
        if not self.opened:
            self.start(self._clock() if wall else int(times.min()))
        info = self.log.info(self.name)
        if info.ended:
            retired = self.log.retired(self.name)
            how = "has ended" if retired is None else f"was retired ({retired.why})"
            raise InputError(f"source {self.name!r} {how}; it takes no more rows")
        open_us = (info.complete_upto + 1) * self.width_us
        clock_us = self._clock() if wall else None
        limit_us = 2**62 if clock_us is None else clock_us + self.op.ahead_us
        if times.min() < open_us or times.max() > limit_us:
            late, ahead = times < open_us, times > limit_us
            if self.op.late == "reject":
                self._reject(table.filter(pa.array(late)), "late", "late_rejected")
                self._reject(table.filter(pa.array(ahead)), "ahead of the clock", "ahead_rejected")
                table, times = table.filter(pa.array(~(late | ahead))), times[~(late | ahead)]
            else:
                self.counters["late_restamped"] += int(late.sum())
                self.counters["ahead_restamped"] += int(ahead.sum())
                stamp_us = open_us if clock_us is None else max(open_us, clock_us)
                times = np.where(ahead, stamp_us, np.where(late, open_us, times))
                stamped = pa.array(times).cast(self.schema.field(time_at).type)
                table = table.set_column(time_at, self.schema.field(time_at), stamped)
            self._dirty = True
        self.counters["rows"] += table.num_rows
        buckets = times // self.width_us
        if len(buckets) and buckets.min() != buckets.max():
            order = np.argsort(buckets, kind="stable")
            table, buckets = table.take(pa.array(order)), buckets[order]
        for bucket, lo, hi in runs(buckets):
            self._pending.setdefault(bucket, []).append(table.slice(lo, hi - lo))

    def _reject(self, rows: pa.Table, reason: str, counter: str) -> None:
        if rows.num_rows:
            self.counters[counter] += rows.num_rows
            self._dirty = True
            rows = rows.add_column(0, "reason", pa.array([reason] * rows.num_rows))
            self._dead.append(rows)

    # -- closing buckets ------------------------------------------------------------------------

    def _close(self, upto: int) -> None:
        """A token is durable with its rows or not at all, so with it go the open buckets too."""
        due = sorted(self._pending)
        if self._token is None:
            due = [bucket for bucket in due if bucket <= upto]
        self._commit(due, upto)
        self._parts = {bucket: part for bucket, part in self._parts.items() if bucket > upto}

    def _commit(self, buckets: list[int], upto: int) -> None:
        """Files first, then one append with everything. What was pending stays so if it fails."""
        written: list[Segment] = []
        try:
            if self._dead:
                dead = self._write_dead()
                self.log.commit(dead.id.stream, [dead], dead.id.bucket)
                self._dead = []
            for bucket in buckets:
                table = pa.concat_tables(self._pending[bucket])
                id = SegmentId(self.name, 0, bucket, part=self._parts.get(bucket, 0))
                written.append(self.log.write(table, id, Stability.STABLE))
            extra: list[Any] = []
            if self._token is not None:
                extra.append(Token(self.name, self._token))
            if buckets or self._dirty:
                extra += [
                    Counter(f"{self.name}.{name}", value)
                    for name, value in self.counters.items()
                    if value
                ]
            self.log.commit(self.name, written, upto, *extra)
        except LogError:
            self.log.discard(written)
            raise
        for bucket in buckets:
            del self._pending[bucket]
            if bucket > upto:
                self._parts[bucket] = self._parts.get(bucket, 0) + 1
        self._token, self._dirty = None, False

    def _write_dead(self) -> Segment:
        stream = dead_letters(self.name)
        info = self.log.info(stream)
        rows = pa.concat_tables(self._dead)
        bucket = max(info.complete_upto + 1, bucket_of(self._clock(), self.width_us))
        stamped = pa.array(np.full(rows.num_rows, bucket * self.width_us))
        table = rows.add_column(0, "rejected_at", stamped.cast(pa.timestamp("us", tz="UTC")))
        return self.log.write(table, SegmentId(stream, 0, bucket), Stability.STABLE)


def _table(data: Any, schema: pa.Schema) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "iloc"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if isinstance(data, Mapping):
        return pa.table({name: _column(name, values, schema) for name, values in data.items()})
    if isinstance(data, Iterable):
        rows = [_named(row, schema) for row in data]
        names = dict.fromkeys(name for row in rows for name in row) if rows else schema.names
        return _table({name: [row.get(name) for row in rows] for name in names}, schema)
    raise TypeError(f"{type(data).__name__} is not a table, a DataFrame, a list of dicts or a dict")


def _named(row: Any, schema: pa.Schema) -> Mapping[str, Any]:
    """A row by the names of its columns; of a tuple they are those of the schema, in order."""
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "asDict"):  # Spark's Row
        named: Mapping[str, Any] = row.asDict()
        return named
    if isinstance(row, tuple | list) and len(row) == len(schema.names):
        return dict(zip(schema.names, row, strict=True))
    raise TypeError(
        f"expected rows as dicts, or as tuples of {len(schema.names)} values "
        f"({', '.join(schema.names)}), found {type(row).__name__} {repr(row)[:80]}"
    )


def _column(name: str, values: Any, schema: pa.Schema) -> pa.Array:
    """Arrays keep their type until the cast to the schema; Python values are given its type."""
    if isinstance(values, np.ndarray) or name not in schema.names:
        return pa.array(values)
    return pa.array(list(values), schema.field(name).type)
