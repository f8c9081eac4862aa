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

import numpy as np
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

#: Above this relative tolerance, a note warns that the column is unreliable.
_BLURRED = 1e-3
#: Minimum rows per row group of the input of the batch; the last group may be smaller.
_GROUP_ROWS = 1_000_000


def audit(network: Network, storage: str, spark: SparkSession) -> Report:
    """Audit every output of `network` that a durable client received into `storage`."""
    network.check()
    sources = {
        op.name: _Kept.of(source_folder(storage, op.name), op.name) for op in network.sources
    }
    clients = {
        op.name: _Kept.of(client_folder(storage, op.name), op.name) for op in network.outputs
    }
    heard = [kept.stream.complete_upto for kept in clients.values() if kept.stream is not None]
    told: list[OutputReport] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-audit-") as scratch:
        batch = _batch(network, sources, max(heard, default=0), scratch, spark)
        for op in network.outputs:
            report = OutputReport(op.name, op.contract)
            try:
                told.append(_output(report, op, network, sources, clients[op.name], batch))
            except HoldfastError as err:
                told.append(replace(report, unknown=str(err)))
            except Exception as err:
                if not _of_spark(err):
                    raise
                told.append(replace(report, unknown=f"the batch failed: {_brief(err)}"))
    return Report(
        network.name,
        tuple(_inter(told)),
        tuple(_source(name, kept) for name, kept in sources.items()),
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A logged stream, or the reason why it cannot be read."""

    log: ReadOnlyLog | None
    stream: StreamState | None
    lacking: str = ""

    @classmethod
    def of(cls, folder: str, stream: str) -> _Kept:
        try:
            log = read_only(folder)
        except HoldfastError as err:
            return cls(None, None, str(err))
        if stream not in log.state.streams:
            return cls(log, None, f"{folder}: nothing was logged of {stream!r} yet")
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


def _copy(name: str, kept: _Kept, ddl: str, upto: int, scratch: str) -> str:
    """Write the rows of a source into one file, verifying the checksum of every segment."""
    path = os.path.join(scratch, f"{name}.parquet")
    schema = arrow_schema(ddl)
    if kept.stream is None or kept.log is None:
        raise InputError(f"source {name!r}: {kept.lacking}")
    if schema_ddl(arrow_schema(kept.stream.schema)) != schema_ddl(schema):
        raise InputError(
            f"source {name!r} is logged as ({kept.stream.schema}), but the network says ({ddl}); "
            "audit with the network that ran"
        )
    held: list[pa.Table] = []
    with pq.ParquetWriter(path, schema) as writer:
        for segment in kept.stream.between(-(2**62), upto):
            held.append(kept.log.read(segment).cast(schema))
            if sum(table.num_rows for table in held) >= _GROUP_ROWS:
                writer.write_table(pa.concat_tables(held))
                held = []
        if held:
            writer.write_table(pa.concat_tables(held))
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
        return replace(report, unknown=f"no client received it durably: {client.lacking}")
    stream, log = client.stream, client.log
    first, upto = max(stream.starts_at, stream.trimmed_upto + 1), stream.complete_upto
    above = ops.sources_of(op)
    told = [_source(source.name, sources[source.name]) for source in above]
    notes = [text for source in told for text in source.not_as_pushed()]
    broken = []
    start = _first_whole(op, above, sources, network.width_us)
    if start is None:
        return replace(
            report,
            unknown="a source was trimmed, and an operator on the way needs it from its first row "
            "on; run with archive=True to keep everything",
        )
    if start > first:
        notes.append(f"sources are trimmed: buckets before {start} cannot be audited")
        first = start
    if first > upto:
        return replace(
            report, unknown=f"no bucket to compare: from {first} on, received up to {upto}"
        )
    for source in above:
        known = sources[source.name].stream
        if known is not None and not known.ended and known.complete_upto < upto:
            broken.append(
                f"bucket {upto} was received, but source {source.name!r} is closed only up to "
                f"{known.complete_upto}"
            )
    made = batch.output(op.name)
    names = [name for name in arrow_schema(stream.schema).names if name != RECEIVED_AT]
    schema = pa.schema([arrow_schema(stream.schema).field(name) for name in names])
    tables = [
        log.read(segment).append_column(BUCKET, pa.array([segment.id.bucket] * segment.rows))
        for segment in stream.between(first, upto)
    ]
    empty = arrow_schema(f"{stream.schema}, {BUCKET} bigint").empty_table()
    received = pa.concat_tables([empty, *(table.cast(empty.schema) for table in tables)])
    ideal = made.collect(schema, first * network.width_us, (upto + 1) * network.width_us)
    if ideal.num_rows and not stream.segments:
        return replace(
            report,
            unknown="the client's log holds positions but no rows: it ran without archive=True, or "
            f"everything was lost ({ideal.num_rows} rows up to bucket {upto})",
        )
    found = compare(
        ideal, received, time=made.time, width_us=network.width_us, tolerance=made.tolerance
    )
    wall_clock = all(source.clock in ("wall", "live") for source in above)
    if not wall_clock:
        notes.append("a source's clock is manual or data: delays say nothing and are not judged")
    notes += _blurred(ideal, made.tolerance)
    tentative, replaced, standing = (
        log.state.counters.get(f"{op.name}.{name}", 0)
        for name in ("tentative_rows", "replacements", "tentative")
    )
    if tentative or standing:
        notes.append(
            f"{tentative} tentative rows were given, and {replaced} tentative buckets replaced by "
            "stable ones; stable rows are late by as much as what they waited for, which is not "
            "judged here but by the monitor while it happens"
        )
    if standing:
        notes.append("the client was stopped while tentative results stood; they are not judged")
    timed = wall_clock and not (tentative or standing)
    broken += [*judge(found, op.contract, wall_clock=timed), *batch.accuracy(op.name)]
    return replace(
        report, broken=tuple(broken), notes=tuple(notes), from_bucket=first, upto=upto,
        found=found, tentative_rows=tentative,
    )  # fmt: skip


def _blurred(ideal: pa.Table, tolerance: dict[str, str]) -> list[str]:
    """Return a note for each column whose tolerance is too large to verify its values."""
    told = []
    for name, allowed in tolerance.items():
        values = np.abs(ideal[name].to_numpy().astype(np.float64))
        bad = int((ideal[allowed].to_numpy().astype(np.float64) > _BLURRED * values).sum())
        if bad:
            told.append(
                f"column {name!r} is hardly known in {bad} rows: a spread computed from n, sum and "
                "sum of squares loses its digits when it is small against the values"
            )
    return told


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


def _source(name: str, kept: _Kept) -> SourceReport:
    if kept.stream is None or kept.log is None:
        return SourceReport(name, None, False)
    state = kept.log.state
    counted = {key: state.counters.get(f"{name}.{key}", 0) for key in COUNTERS}
    dead = state.streams.get(stream_of(name))
    return SourceReport(
        name,
        kept.stream.complete_upto,
        kept.stream.ended,
        dead_letters=sum(segment.rows for segment in dead.segments) if dead else 0,
        **counted,
    )


def _inter(told: list[OutputReport]) -> list[OutputReport]:
    """Judge order across outputs. One output promises it; checking it needs all outputs."""
    promised = [report for report in told if report.contract.order == "inter"]
    early = inter_order_breaks(told) if promised else ()
    if not early:
        return told
    text = f"order across outputs: rows of {len(early)} buckets came too early"
    return [
        replace(report, broken=(*report.broken, text))
        if report in promised and report.found is not None
        else report
        for report in told
    ]


def _of_spark(err: Exception) -> bool:
    from pyspark.errors import PySparkException

    return isinstance(err, PySparkException) or type(err).__module__.startswith("py4j")


def _brief(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return (lines[0] if lines else type(err).__name__)[:300]
