"""The ideal output: the whole network over the whole source tables, in one batch of plain Spark.

The batch judges the engine, so it uses the model but not the engine. The batch has no panes, no
state versions and no shards. Buckets appear only where the model defines them (`stateful`). The
code must be simple; it may be slow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from holdfast.engine.sql import quoted
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.network import Network, _same
from holdfast.model.schema import arrow_schema, schema_ddl
from holdfast.verify.audit.ideal_aggregates import Grouped, grouped
from holdfast.verify.audit.ordered import Replay, canonical_order, rows_schema

#: Calls of a window function that run in one Spark job.
_WINDOWS_PER_JOB = 16
_CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.shuffle.partitions": "4",
}


@dataclass(frozen=True, slots=True)
class IdealOutput:
    frame: DataFrame
    time: str

    def collect(self, schema: pa.Schema, from_us: int, until_us: int) -> pa.Table:
        """Return the rows with times in [`from_us`, `until_us`)."""
        produced = rows_schema(self.frame)
        if [(f.name, f.type) for f in produced] != [(f.name, f.type) for f in schema]:
            raise InputError(
                f"the network produces ({schema_ddl(produced)}), but the client received "
                f"({schema_ddl(schema)}); "
                "audit with the network that ran"
            )
        t = _micros(self.time)
        rows = self.frame.filter(f"{t} >= {from_us}L and {t} < {until_us}L").toArrow()
        return rows.cast(schema)


def batch_session(spark: SparkSession) -> SparkSession:
    """Create a separate session for a batch, with the SQL settings that networks assume."""
    session = spark.newSession()
    for key, value in _CONF.items():
        session.conf.set(key, value)
    return session


class Batch:
    """One evaluation of a network. Each operator is evaluated once, when an output needs it."""

    def __init__(
        self,
        network: Network,
        rows: Mapping[str, DataFrame],
        session: SparkSession,
        *,
        upto: int,
        scratch: str,
    ) -> None:
        self.network, self.rows, self.session, self.scratch = network, rows, session, scratch
        #: End of the evaluated time, exclusive.
        self.end_us = (upto + 1) * network.width_us
        self._frames: dict[str, DataFrame] = {}
        self._grouped: dict[str, tuple[Grouped, list[Column]]] = {}

    def output(self, name: str) -> IdealOutput:
        up = _up(self.network.named(name))
        while isinstance(up, ops.Apply) and up.fn is _same:
            up = _up(up)
        frame = self.frame(up)
        if up.name in self._grouped:
            grouping, columns = self._grouped[up.name]
            return IdealOutput(grouping.frame.select(*columns), self.time(up))
        return IdealOutput(frame, self.time(up))

    def accuracy(self, name: str) -> list[str]:
        """Report approximate aggregates upstream of an output that exceed their declared error."""
        violations: list[str] = []
        waiting, seen = [self.network.named(name)], set()
        while waiting:
            op = waiting.pop()
            if op.name not in seen:
                seen.add(op.name)
                waiting += [up for up in op.inputs if up is not None]
                if op.name in self._grouped:
                    violations += [
                        f"{op.name}: {text}" for text in self._grouped[op.name][0].accuracy()
                    ]
        return violations

    def time(self, op: ops.Operator) -> str:
        return op.time if isinstance(op, ops.Source) else self.time(_up(op))

    def frame(self, op: ops.Operator) -> DataFrame:
        if op.name not in self._frames:
            self._frames[op.name] = self._frame(op)
        return self._frames[op.name]

    def _frame(self, op: ops.Operator) -> DataFrame:
        match op:
            case ops.Source():
                return self.rows[op.name].filter(f"{_micros(op.time)} < {self.end_us}L")
            case ops.Apply():
                applied: DataFrame = op.fn(self.frame(_up(op)))
                return applied
            case ops.Union():
                frames = [self.frame(_up(op, port)) for port in range(len(op.inputs))]
                return reduce(lambda one, other: one.unionByName(other), frames)
            case ops.TimeWindow():
                return self._window_function(op) if op.fn is not None else self._window(op)
            case ops.Join():
                return self._join(op)
            case ops.CountWindow():
                return self._count_window(op)
            case ops.Stateful():
                return self._stateful(op)
        raise InputError(f"{op.name}: the audit cannot compute {op.kind}")

    # -- time windows ---------------------------------------------------------------------------

    def _in_windows(self, op: ops.TimeWindow) -> DataFrame:
        """Repeat each row for every window [end - size, end) that contains it, with its `__end`."""
        t, slide = _micros(self.time(op)), op.slide_us
        first = f"({t} - pmod({t}, {slide}L) + {slide}L)"
        last = f"least({t} + {op.size_us}L - pmod({t} + {op.size_us}L, {slide}L), {self.end_us}L)"
        rows = self.frame(_up(op)).filter(f"{first} <= {last}")
        return rows.select("*", F.expr(f"explode(sequence({first}, {last}, {slide}L)) as __end"))

    def _window(self, op: ops.TimeWindow) -> DataFrame:
        time = self.time(op)
        grouping = grouped(self._in_windows(op), ["__end", *op.keys], op.aggregates, time)
        start = F.expr(f"timestamp_micros(__end - {op.size_us}L)").alias("window_start")
        stamp = F.expr("timestamp_micros(__end - 1L)").alias(time)
        return self._take(op, grouping, [start, stamp])

    def _take(
        self, op: ops.TimeWindow | ops.CountWindow, grouping: Grouped, stamps: list[Column]
    ) -> DataFrame:
        columns = [*_columns([*op.keys, *grouping.names]), *stamps]
        self._grouped[op.name] = (grouping, columns)
        return grouping.frame.select(*columns)

    def _window_function(self, op: ops.TimeWindow) -> DataFrame:
        """Apply the window function to each nonempty window separately."""
        assert op.fn is not None
        time = self.time(op)
        window_ends = self._in_windows(op).select("__end").distinct().toArrow()["__end"]
        ends = sorted(window_ends.to_pylist())
        path = self._path(op, "rows")
        self.frame(_up(op)).orderBy(F.col(quoted(time))).write.parquet(path)
        rows = self.session.read.schema(self.frame(_up(op)).schema).parquet(path)
        parts = []
        for at in range(0, len(ends), _WINDOWS_PER_JOB):
            results = [
                self._window_result(op, rows, end) for end in ends[at : at + _WINDOWS_PER_JOB]
            ]
            parts.append(self._path(op, f"part-{at}"))
            reduce(lambda one, other: one.unionByName(other), results).write.parquet(parts[-1])
        nothing = self._window_result(op, rows.limit(0), 0)
        if not parts:
            return nothing
        return self.session.read.schema(nothing.schema).parquet(*parts)

    def _window_result(self, op: ops.TimeWindow, rows: DataFrame, end: int) -> DataFrame:
        assert op.fn is not None
        time = self.time(op)
        since, until = (F.timestamp_micros(F.lit(us)) for us in (end - op.size_us, end))
        (at,) = _columns([time])
        result: DataFrame = op.fn(rows.filter((at >= since) & (at < until)))
        columns = _columns(name for name in result.columns if name != time)
        return result.select(*columns, F.timestamp_micros(F.lit(end - 1)).alias(time))

    # -- joins ----------------------------------------------------------------------------------

    def _join(self, op: ops.Join) -> DataFrame:
        left, right = (self.frame(_up(op, port)) for port in (0, 1))
        of_l, of_r = (self.time(_up(op, port)) for port in (0, 1))
        by = op.on if isinstance(op.on, tuple) else ()
        # Columns of the right side that the result omits, because the left side has the same name.
        dropped = {name: f"__r_{name}" for name in (*by, of_r) if name in left.columns}
        l_side, r_side = left.alias("l"), right.alias("r")
        conditions = [F.expr(f"l.{quoted(key)} = r.{quoted(key)}") for key in by]
        if isinstance(op.on, str):
            conditions.append(F.expr(op.on))
        apart = F.expr(f"unix_micros(l.{quoted(of_l)}) - unix_micros(r.{quoted(of_r)})")
        conditions.append(apart.between(-op.within_us, op.within_us))
        pairs = l_side.join(r_side, reduce(lambda all_, one: all_ & one, conditions))
        later = F.greatest(F.col(f"l.{quoted(of_l)}"), F.col(f"r.{quoted(of_r)}")).alias(of_l)
        return pairs.select(
            *[later if name == of_l else F.col(f"l.{quoted(name)}") for name in left.columns],
            *[F.col(f"r.{quoted(name)}") for name in right.columns if name not in dropped],
        )

    # -- order-sensitive operators --------------------------------------------------------------

    def _count_window(self, op: ops.CountWindow) -> DataFrame:
        """Number the rows of each key; window k holds rows k * slide to k * slide + size - 1."""
        time = self.time(op)
        rows, order = canonical_order(self.frame(_up(op)), time)
        number = (
            F.row_number().over(Window.partitionBy(*_columns(op.keys)).orderBy(*order)).cast("long")
            - 1
        )
        first = f"greatest(0L, (__n - {op.size - 1}L + {op.slide - 1}L) div {op.slide}L)"
        members = rows.withColumn("__n", number).withColumn(
            "__k", F.expr(f"explode(sequence({first}, __n div {op.slide}L))")
        )
        grouping = grouped(
            members, [*op.keys, "__k"], {**op.aggregates, "__last": _last(time)}, time
        )
        grouping.names.remove("__last")
        grouping.frame = grouping.frame.filter(f"__rows = {op.size}")
        return self._take(op, grouping, [F.col("__last").alias(time)])

    def _stateful(self, op: ops.Stateful) -> DataFrame:
        """Call the function bucket by bucket in a single task, with all keys at once."""
        up = self.frame(_up(op))
        rows, order = canonical_order(up, self.time(op))
        out, time = arrow_schema(op.out), self.time(op)
        schema = rows_schema(up)
        replay = Replay(
            op.fn, time, op.timer, schema, arrow_schema(op.state), out, self.network.width_us,
            self.end_us,
        )  # fmt: skip
        ordered = rows.repartition(1).sortWithinPartitions(*order)
        input_rows = ordered.select(*_columns(up.columns))
        return input_rows.mapInArrow(replay, schema_ddl(out))

    # -- internals ------------------------------------------------------------------------------

    def _path(self, op: ops.Operator, name: str) -> str:
        return os.path.join(self.scratch, "windows", op.name, name)


def _last(time: str) -> Column:
    return F.max(F.col(quoted(time)))


def _micros(time: str) -> str:
    return f"unix_micros({quoted(time)})"


def _columns(names: Iterable[str]) -> list[Column]:
    return [F.col(quoted(name)) for name in names]


def _up(op: ops.Operator, port: int = 0) -> ops.Operator:
    upstream = op.inputs[port]
    assert upstream is not None
    return upstream
