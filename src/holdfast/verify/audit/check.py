"""One audit: read the logs, compute the batch, compare, judge.

Sources are logged and operators are deterministic. The ideal can therefore be computed at any time,
in one batch that does not use the engine it judges (ARCHITECTURE.md). The audit only reads
logs, so a running network can be audited too.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.edge.client import RECEIVED_AT
from holdfast.edge.dead_letters import stream_of
from holdfast.edge.source import COUNTERS
from holdfast.errors import HoldfastError, InputError
from holdfast.model import operators as ops
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.runtime.folders import client_folder, source_folder
from holdfast.storage import ReadOnlyLog, read_only
from holdfast.storage.log_state import StreamState
from holdfast.verify.audit.compare import BUCKET, compare
from holdfast.verify.audit.report import (
    OutputReport,
    Report,
    SourceReport,
    inter_order_breaks,
    judge,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.verify.audit.ideal import Batch

#: Minimum rows per row group of the input of the batch; the last group may be smaller.
_GROUP_ROWS = 1_000_000


def audit(network: Network, storage: str, spark: SparkSession) -> Report:
    """Audit every output of `network` that a durable client received into `storage`."""
    from holdfast.engine.compiled import send_by_value

    network.check()
    send_by_value(network)
    sources = {
        op.name: _Kept.of(source_folder(storage, op.name), op.name) for op in network.sources
    }
    clients = {
        op.name: _Kept.of(client_folder(storage, op.name), op.name) for op in network.outputs
    }
    complete_upto = [
        logged.stream.complete_upto for logged in clients.values() if logged.stream is not None
    ]
    reports: list[OutputReport] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-audit-") as scratch:
        batch = _batch(network, sources, max(complete_upto, default=0), scratch, spark)
        for op in network.outputs:
            report = OutputReport(op.name, op.contract)
            try:
                reports.append(_output(report, op, network, sources, clients[op.name], batch))
            except HoldfastError as err:
                reports.append(replace(report, unknown=str(err)))
            except Exception as err:
                if not _of_spark(err):
                    raise
                reports.append(
                    replace(report, unknown=f"computing the ideal failed: {_brief(err)}")
                )
    return Report(
        network.name,
        tuple(_inter(reports)),
        tuple(_source(name, logged) for name, logged in sources.items()),
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A logged stream, or the reason why it cannot be read."""

    log: ReadOnlyLog | None
    stream: StreamState | None
    absent_because: str = ""

    @classmethod
    def of(cls, folder: str, stream: str) -> _Kept:
        try:
            log = read_only(folder)
        except HoldfastError as err:
            return cls(None, None, str(err))
        if stream not in log.state.streams:
            return cls(log, None, f"{folder}: the log has no data of stream {stream!r} yet")
        return cls(log, log.state.streams[stream])


def _batch(
    network: Network, sources: dict[str, _Kept], upto: int, scratch: str, spark: SparkSession
) -> Batch:
    from holdfast.verify.audit.ideal import Batch, batch_session

    session = batch_session(spark)
    rows: dict[str, DataFrame] = _Lazily(
        lambda name: session.read.schema(schema_ddl(arrow_schema(_schema(network, name)))).parquet(
            _copy(name, sources[name], _schema(network, name), upto, scratch)
        )
    )
    return Batch(network, rows, session, upto=upto, scratch=scratch)


class _Lazily(dict[str, Any]):
    """Values created on first use: an unreadable source fails only the outputs that need it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


def _schema(network: Network, source: str) -> str:
    op = network.named(source)
    assert isinstance(op, ops.Source)
    return op.schema


def _copy(name: str, logged: _Kept, ddl: str, upto: int, scratch: str) -> str:
    """Write the rows of a source into one file, verifying the checksum of every segment."""
    path = os.path.join(scratch, f"{name}.parquet")
    schema = arrow_schema(ddl)
    if logged.stream is None or logged.log is None:
        raise InputError(f"source {name!r}: {logged.absent_because}")
    if schema_ddl(arrow_schema(logged.stream.schema)) != schema_ddl(schema):
        raise InputError(
            f"source {name!r}: expected schema ({ddl}), found ({logged.stream.schema}) in the log; "
            "audit with the network that ran"
        )
    tables: list[pa.Table] = []
    with pq.ParquetWriter(path, schema) as writer:
        for segment in logged.stream.between(-(2**62), upto):
            tables.append(logged.log.read(segment).cast(schema))
            if sum(table.num_rows for table in tables) >= _GROUP_ROWS:
                writer.write_table(pa.concat_tables(tables))
                tables = []
        if tables:
            writer.write_table(pa.concat_tables(tables))
    return path


def _output(
    report: OutputReport,
    op: ops.Output,
    network: Network,
    sources: dict[str, _Kept],
    client: _Kept,
    batch: Batch,
) -> OutputReport:
    if client.stream is None or client.log is None:
        return replace(
            report, unknown=f"no durable client received this output: {client.absent_because}"
        )
    stream, log = client.stream, client.log
    first, upto = max(stream.starts_at, stream.trimmed_upto + 1), stream.complete_upto
    above = ops.sources_of(op)
    source_reports = [_source(source.name, sources[source.name]) for source in above]
    notes = [text for source in source_reports for text in source.not_as_pushed()]
    broken = []
    start = _first_whole(op, above, sources, network.width_us)
    if start is None:
        return replace(
            report,
            unknown="the log of a source was trimmed, but an operator of this output needs all "
            "rows of the source; run with archive=True to retain them",
        )
    if start > first:
        notes.append(f"sources are trimmed: buckets before {start} cannot be audited")
        first = start
    if first > upto:
        return replace(
            report,
            unknown=f"no bucket to compare: the audit starts at bucket {first}, and the client "
            f"received buckets only up to {upto}",
        )
    for source in above:
        source_stream = sources[source.name].stream
        if (
            source_stream is not None
            and not source_stream.ended
            and source_stream.complete_upto < upto
        ):
            broken.append(
                f"the client received bucket {upto}, but source {source.name!r} is closed only "
                f"up to {source_stream.complete_upto}"
            )
    undelivered = _undelivered(stream, above, sources)
    if undelivered:
        notes.append(
            f"the client received buckets up to {upto}; the sources are complete up to bucket "
            f"{upto + undelivered}"
        )
    ideal_output = batch.output(op.name)
    names = [name for name in arrow_schema(stream.schema).names if name != RECEIVED_AT]
    schema = pa.schema([arrow_schema(stream.schema).field(name) for name in names])
    tables = [
        log.read(segment).append_column(BUCKET, pa.array([segment.id.bucket] * segment.rows))
        for segment in stream.between(first, upto)
    ]
    empty = arrow_schema(f"{stream.schema}, {BUCKET} bigint").empty_table()
    received = pa.concat_tables([empty, *(table.cast(empty.schema) for table in tables)])
    ideal = ideal_output.collect(schema, first * network.width_us, (upto + 1) * network.width_us)
    if ideal.num_rows and not stream.segments:
        return replace(
            report,
            unknown="the log of the client holds positions but no rows: the client ran without "
            f"archive=True, or all rows were lost ({ideal.num_rows} rows expected up to bucket "
            f"{upto})",
        )
    comparison = compare(
        ideal,
        received,
        time=ideal_output.time,
        width_us=network.width_us,
    )
    wall_clock = all(source.clock in ("wall", "live") for source in above)
    if not wall_clock:
        notes.append("delays are not judged: the clock of a source is manual or data")
    tentative, replaced, pending = (
        log.state.counters.get(f"{op.name}.{name}", 0)
        for name in ("tentative_rows", "replacements", "tentative")
    )
    if tentative or pending:
        notes.append(
            f"{tentative} tentative rows were delivered, and {replaced} tentative buckets were "
            "replaced by stable ones; delays are not judged, because stable rows waited for "
            "missing inputs; the contract monitor judges delays during the run"
        )
    if pending:
        notes.append(
            "the client stopped before all tentative results were replaced; tentative results are "
            "not judged"
        )
    timed = wall_clock and not (tentative or pending)
    broken += [*judge(comparison, op.contract, wall_clock=timed), *batch.accuracy(op.name)]
    return replace(
        report, broken=tuple(broken), notes=tuple(notes), from_bucket=first, upto=upto,
        found=comparison, tentative_rows=tentative, undelivered_us=undelivered * network.width_us,
    )  # fmt: skip


def _undelivered(client: StreamState, above: list[ops.Source], sources: dict[str, _Kept]) -> int:
    """Number of buckets that all sources have completed and the client has not received."""
    streams = [stream for op in above if (stream := sources[op.name].stream) is not None]
    if client.ended or not streams:
        return 0
    open_upto = [stream.complete_upto for stream in streams if not stream.ended]
    complete_upto = min(open_upto) if open_upto else max(s.complete_upto for s in streams)
    return max(0, complete_upto - client.complete_upto)


def _first_whole(
    op: ops.Operator, above: list[ops.Source], sources: dict[str, _Kept], width_us: int
) -> int | None:
    """Return the first bucket that needs no trimmed row; None if every bucket needs one."""
    gone = [
        stream.trimmed_upto
        for source in above
        if (stream := sources[source.name].stream) and stream.trimmed_upto >= stream.starts_at
    ]
    if not gone:
        return -(2**62)
    reach_us = _reach_us(op)
    return None if reach_us is None else max(gone) + 1 + -(-reach_us // width_us)


def _reach_us(op: ops.Operator) -> int | None:
    """How far back a result depends on the sources; None: back to their first row."""
    above = [_reach_us(up) for up in op.inputs if up is not None]
    if not op.convergent or None in above:
        return None
    return op.extent_us + max((reach for reach in above if reach is not None), default=0)


def _source(name: str, logged: _Kept) -> SourceReport:
    if logged.stream is None or logged.log is None:
        return SourceReport(name, None, False)
    state = logged.log.state
    counted = {key: state.counters.get(f"{name}.{key}", 0) for key in COUNTERS}
    dead = state.streams.get(stream_of(name))
    return SourceReport(
        name,
        logged.stream.complete_upto,
        logged.stream.ended,
        dead_letters=sum(segment.rows for segment in dead.segments) if dead else 0,
        **counted,
    )


def _inter(reports: list[OutputReport]) -> list[OutputReport]:
    """Judge order across outputs. One output promises it; checking it needs all outputs."""
    promised = [report for report in reports if report.contract.order == "inter"]
    early = inter_order_breaks(reports) if promised else ()
    if not early:
        return reports
    text = f"order across outputs: rows of {len(early)} buckets came too early"
    return [
        replace(report, broken=(*report.broken, text))
        if report in promised and report.found is not None
        else report
        for report in reports
    ]


def _of_spark(err: Exception) -> bool:
    from pyspark.errors import PySparkException

    return isinstance(err, PySparkException) or type(err).__module__.startswith("py4j")


def _brief(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines[0] if lines else type(err).__name__)[:300]
