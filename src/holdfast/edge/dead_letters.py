"""Dead letters: rows that a source rejected, with their original times and the reason.

Dead letters are a separate stream in the log of the source. They become durable in the same append
as the bucket or push that they arrived with, as one Parquet file per append. `holdfast
dead-letters` and `Source.dead_letters()` read them. With `archive` all dead letters are retained,
otherwise the newest `KEPT_BYTES`. A full disk affects dead letters like rows: the source waits, and
no dead letter is lost.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pyarrow as pa

from holdfast.errors import LogError
from holdfast.model.schema import REASON, REJECTED_AT, arrow_schema, schema_ddl
from holdfast.storage import Log, ReadOnlyLog
from holdfast.types import Segment, SegmentId, Stability, bucket_of

#: Bytes of dead-letter files that are retained without `archive`.
KEPT_BYTES = 64 << 20
TIMESTAMP = pa.timestamp("us", tz="UTC")


def stream_of(source: str) -> str:
    return f"{source}-dead-letters"


class DeadLetters:
    """The dead letters of one source. The source calls every method under its own lock."""

    def __init__(self, log: Log, source: str, schema: pa.Schema, width_us: int) -> None:
        self._log, self._width_us = log, width_us
        self.stream = stream_of(source)
        self.schema = arrow_schema(
            f"{REJECTED_AT} timestamp, {REASON} string, {schema_ddl(schema)}"
        )
        #: Rows that are not durable yet.
        self._rows: list[pa.Table] = []

    @property
    def pending_rows(self) -> int:
        """Number of rows that are not durable yet."""
        return sum(rows.num_rows for rows in self._rows)

    def add(self, rows: pa.Table, reason: str) -> None:
        self._rows.append(rows.add_column(0, REASON, pa.array([reason] * rows.num_rows)))

    def write(self, now_us: int) -> Segment | None:
        """Write the pending rows to a file. The caller appends the segment to the log or discards
        it."""
        if not self._rows:
            return None
        first = bucket_of(now_us, self._width_us)
        info = self._log.open_stream(self.stream, schema_ddl(self.schema), REJECTED_AT, first)
        bucket = max(info.complete_upto + 1, first)
        rows = pa.concat_tables(self._rows)
        stamp = pa.array(np.full(rows.num_rows, now_us)).view(TIMESTAMP)
        table = rows.add_column(0, REJECTED_AT, stamp)
        return self._log.write(table, SegmentId(self.stream, 0, bucket), Stability.STABLE)

    def written(self) -> None:
        """The pending rows are durable. Without `archive`, trim files beyond `KEPT_BYTES`."""
        self._rows = []
        if self._log.archive:
            return
        total_bytes = 0
        for segment in reversed(self._segments()):
            total_bytes += segment.size_bytes
            if total_bytes > KEPT_BYTES:
                with suppress(LogError):  # retried after the next write
                    self._log.trim(self.stream, segment.id.bucket)
                return

    def table(self, last: int | None) -> pa.Table:
        segments = [] if not self._log.has(self.stream) else self._segments()
        return _joined(self._log, segments, self.schema, last)

    def _segments(self) -> list[Segment]:
        since = self._log.info(self.stream).trimmed_upto + 1
        return self._log.segments(self.stream, since, 2**62)


def read_dead_letters(log: ReadOnlyLog, source: str, last: int | None = None) -> pa.Table | None:
    """Dead letters in the log of a source that may run in another process; None if none exist."""
    stream = log.state.streams.get(stream_of(source))
    return (
        None if stream is None else _joined(log, stream.segments, arrow_schema(stream.schema), last)
    )


def _joined(
    log: Log | ReadOnlyLog, segments: list[Segment], schema: pa.Schema, last: int | None
) -> pa.Table:
    """The newest `last` rows, or all rows, oldest first."""
    tables: list[pa.Table] = []
    rows = 0
    for segment in reversed(segments):
        if last is not None and rows >= last:
            break
        tables.insert(0, log.read(segment).cast(schema))
        rows += segment.rows
    table = pa.concat_tables([schema.empty_table(), *tables])
    return table if last is None else table.slice(max(0, table.num_rows - last))
