"""Compiles a network: derives the schema of every stream and checks every user function on a stub.

This module implements the part of well-formedness that needs Spark (ECOC rule 3: schemas along
every edge). All violations are collected and raised together.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from holdfast.engine import determinism, mergeable, windows
from holdfast.engine.count_windows import can_fold
from holdfast.engine.sql import query, quoted, select_from
from holdfast.errors import HoldfastError, InputError, NetworkError
from holdfast.model import operators as ops
from holdfast.model.fingerprint import Fingerprints
from holdfast.model.network import Network
from holdfast.model.schema import (
    arrow_schema,
    check_edge_names,
    check_names,
    check_time,
    columns_twice,
    schema_ddl,
    type_ddl,
)
from holdfast.model.wellformed import routed_by, routes_into, topological
from holdfast.storage.rows import compared_exactly, routed_alike

_log = logging.getLogger("holdfast.engine")


@dataclass(slots=True)
class Compiled:
    """Schema, time column and aggregate plan of each operator, by operator name."""

    network: Network
    schema: dict[str, str] = field(default_factory=dict)
    time: dict[str, str] = field(default_factory=dict)
    plans: dict[str, mergeable.AggregatePlan] = field(default_factory=dict)
    #: Spark schema of the panes of each time window.
    panes: dict[str, Any] = field(default_factory=dict)
    #: For each count window whose state is partial aggregates: the DDL of the rows with them.
    totals: dict[str, str] = field(default_factory=dict)
    #: Operators whose window function returns rows for an empty window (a count without groups).
    from_nothing: set[str] = field(default_factory=set)


def send_by_value(network: Network) -> None:
    """Pickle code of the application by value, also that which its functions call: executors cannot
    import the user's files."""
    for op in network.operators:
        if isinstance(op, ops.Stateful | ops.Apply | ops.TimeWindow) and op.fn is not None:
            _send_by_value(op.fn)


def _send_by_value(fn: Callable[..., Any]) -> None:
    fingerprints = Fingerprints()
    fingerprints.parts(fn)
    known = cloudpickle.list_registry_pickle_by_value()
    new = [
        name for name in sorted(fingerprints.modules - {"__main__"} - known)
        if name in sys.modules and name.partition(".")[0] != "holdfast"
    ]  # fmt: skip
    for name in new:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        cloudpickle.dumps(fn)
    except Exception:  # a module holds a lock or the like: executors have to import the others
        own = getattr(fn, "__module__", None)
        for name in new:
            if name != own:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])


def compile_network(network: Network, spark: SparkSession) -> Compiled:
    network.check()
    if network.logical is not network:
        return _partitioned(network, compile_network(network.logical, spark))
    send_by_value(network)
    compiled = Compiled(network)
    violations: list[str] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-stub-") as folder:
        empty = os.path.join(folder, "empty")
        os.mkdir(empty)

        def stub(ddl: str) -> DataFrame:
            return spark.readStream.schema(ddl).parquet(empty)

        for op in topological(network):
            if any(up is not None and up.name not in compiled.time for up in op.inputs):
                continue  # a violation of its input was reported already
            try:
                _compile(op, compiled, spark, stub)
            except HoldfastError as err:
                violations.append(str(err))
    if violations:
        raise NetworkError(violations)
    return compiled


def _partitioned(network: Network, logical: Compiled) -> Compiled:
    """Derive the compiled network with partitions from the one without. An operator compiles to the
    same result in every partition; operators that only route rows keep the schema of their input.
    """
    compiled = Compiled(network)
    for op in topological(network):
        logical_name = op.name if op.name in logical.schema else op.name.rpartition(".")[0]
        if isinstance(op, ops.Part | ops.Union) and logical_name not in logical.schema:
            up = op.inputs[0]
            assert up is not None
            compiled.schema[op.name], compiled.time[op.name] = (
                compiled.schema[up.name],
                compiled.time[up.name],
            )
            continue
        compiled.schema[op.name], compiled.time[op.name] = (
            logical.schema[logical_name],
            logical.time[logical_name],
        )
        if logical_name in logical.plans:
            compiled.plans[op.name] = logical.plans[logical_name]
        if logical_name in logical.panes:
            compiled.panes[op.name] = logical.panes[logical_name]
        if logical_name in logical.totals:
            compiled.totals[op.name] = logical.totals[logical_name]
        if logical_name in logical.from_nothing:
            compiled.from_nothing.add(op.name)
    return compiled


def _compile(
    op: ops.Operator, compiled: Compiled, spark: SparkSession, stub: Callable[[str], DataFrame]
) -> None:
    ups = [up for up in op.inputs if up is not None]
    ddl = [compiled.schema[up.name] for up in ups]
    time = compiled.time[ups[0].name] if ups else ""
    match op:
        case ops.Source():
            compiled.schema[op.name] = schema_ddl(arrow_schema(op.schema))
            compiled.time[op.name] = op.time
            return
        case ops.Apply():
            after = determinism.call(op.fn, stub(ddl[0]), op.name)
            determinism.check_plan(after, op.name, whole_window=False, python_udfs=op.python_udfs)
            determinism.check_time_kept(after, time, op.name)
            if isinstance(op, ops.Exchange):
                _have(op.keys, after, f"on({op.fragment!r})", "by")
                _no_maps(op.keys, arrow_schema(ddl[0]), f"on({op.fragment!r})")
            for key in sorted(routed_by(compiled.network, op)):
                determinism.check_key_kept(after, key, op.fragment, op.name)
            result_ddl = _ddl(after, op.name)
            if op.python_udfs:
                _try_udfs(op, ddl[0], time, spark)
            compiled.schema[op.name] = result_ddl
        case ops.Union():
            for number, (other, up) in enumerate(zip(ddl, ups, strict=True)):
                if _fields(other) != _fields(ddl[0]) or compiled.time[up.name] != time:
                    raise InputError(
                        f"{op.name}, input port {number}: {up.name} has schema ({other}) with time "
                        f"{compiled.time[up.name]!r}, but port 0 has ({ddl[0]}) with time "
                        f"{time!r}; make them equal with .map(...)"
                    )
            compiled.schema[op.name] = ddl[0]
        case ops.TimeWindow():
            df = stub(ddl[0])
            if op.fn is not None:
                after = determinism.call(op.fn, spark.createDataFrame([], ddl[0]), op.name)
                determinism.check_plan(after, op.name, whole_window=True, python_udfs=False)
                if not after.isEmpty():
                    compiled.from_nothing.add(op.name)
                compiled.schema[op.name] = _ddl(stamp(after, time, 0), op.name)
            else:
                _have(op.keys, df, op.name, "group_by")
                _free(op.keys, (time, "window_start"), op.name, "group_by")
                plan = mergeable.plan(df, op.keys, op.aggregates, time, op.name)
                compiled.plans[op.name] = plan
                panes = windows.partials(plan, op, select_from("rows"), time)
                partial = query(panes, rows=df)
                _same_everywhere(partial, op.name)
                compiled.panes[op.name] = partial.schema
                compiled.schema[op.name] = _ddl(
                    query(
                        windows.results(plan, op, windows.per_window(op, panes, (0,)), time),
                        rows=df,
                    ),
                    op.name,
                )
        case ops.Join():
            joined = join(
                spark.createDataFrame([], ddl[0]), spark.createDataFrame([], ddl[1]), op,
                time, compiled.time[ups[1].name],
            )  # fmt: skip
            _same_everywhere(joined, op.name)
            _comparable_keys(op, ddl[0], ddl[1], time, compiled.time[ups[1].name])
            compiled.schema[op.name] = _ddl(joined, op.name)
        case ops.CountWindow():
            df = stub(ddl[0])
            _have(op.keys, df, op.name, "by")
            _free(op.keys, (time,), op.name, "by")
            _no_maps(op.keys, arrow_schema(ddl[0]), op.name)
            plan = mergeable.plan(df, op.keys, op.aggregates, time, op.name)
            partial = query(plan.first(plan.prepare(select_from("rows"))), rows=df)
            _same_everywhere(partial, op.name)
            compiled.plans[op.name] = plan
            text = plan.of_each_row(select_from("rows"), df.columns)
            if op.slide == op.size and text is not None:
                singles = query(text, rows=df).schema
                each = to_arrow_schema(singles, timezone="UTC")
                collated = any("collate" in f.dataType.simpleString() for f in singles.fields)
                if not collated and can_fold(each, plan.dims, plan.merges):
                    compiled.totals[op.name] = schema_ddl(each)
            rows = select_from("rows", "0L AS __seq", "0L AS __last")
            compiled.schema[op.name] = _ddl(
                query(count_windows(plan, rows, time), rows=df), op.name
            )
        case ops.Stateful():
            df = stub(ddl[0])
            _have(op.keys, df, op.name, "key")
            _no_maps(op.keys, arrow_schema(ddl[0]), op.name)
            out = arrow_schema(op.out)
            check_names(out.names, of=f"{op.name}, out")
            if time not in out.names:
                raise InputError(
                    f"{op.name}, out: no time column {time!r} among the columns "
                    f"{', '.join(out.names)}, but results carry the time column of the input; add "
                    f"{time!r} to out="
                )
            problem = check_time(out, time, of=f"{op.name}, out")
            if problem:
                raise InputError(problem)
            compiled.schema[op.name] = schema_ddl(out)
        case ops.Output():
            check_edge_names(arrow_schema(ddl[0]).names, of=op.name)
            compiled.schema[op.name] = ddl[0]
        case _:
            raise InputError(f"{op.name}: operators of kind {op.kind} cannot run yet")
    compiled.time[op.name] = time


def count_windows(plan: mergeable.AggregatePlan, rows: str, time: str) -> str:
    """SQL from rows assigned to windows to results. `__seq`: number of the window; `__last`: time
    of the last row of the window."""
    partials = plan.first(plan.prepare(rows), __seq="__seq", __last="__last")
    return count_results(plan, partials, time)


def count_results(plan: mergeable.AggregatePlan, partials: str, time: str) -> str:
    """SQL from partials of count windows to results."""
    return plan.finish(
        partials, ("__seq", "__last"), (f"timestamp_micros(__last) AS {quoted(time)}",)
    )


def stamp(df: DataFrame, time: str, end_us: int) -> DataFrame:
    """Set the time column of a window function's result to the last instant of the window."""
    return df.select(
        *[F.col(quoted(name)) for name in df.columns if name != time],
        F.expr(f"timestamp_micros({end_us - 1}L)").alias(time),
    )


def join(left: DataFrame, right: DataFrame, op: ops.Join, time_l: str, time_r: str) -> DataFrame:
    """Join pairs at most `within` apart. The left time column gets the later of the two times."""
    equal = op.on if isinstance(op.on, tuple) else ()
    _have(equal, left, f"{op.name}, input port 0", "on")
    _have(equal, right, f"{op.name}, input port 1", "on")
    same_time = {time_l} if time_l == time_r else set()
    clash = set(left.columns) & set(right.columns) - set(equal) - same_time
    if clash:
        raise InputError(
            f"{op.name}: both sides have a column {', '.join(sorted(clash))}; rename one with "
            ".map(...) before the join"
        )
    condition = (
        op.on
        if isinstance(op.on, str)
        else " and ".join(f"l.{quoted(key)} = r.{quoted(key)}" for key in equal)
    )
    apart = (
        f"abs(unix_micros(l.{quoted(time_l)}) - unix_micros(r.{quoted(time_r)})) <= {op.within_us}L"
    )
    later = f"greatest(l.{quoted(time_l)}, r.{quoted(time_r)})"
    columns_r = [name for name in right.columns if name not in equal and name not in same_time]
    try:
        return (
            left.alias("l")
            .join(right.alias("r"), F.expr(f"({condition}) and {apart}"))
            .select(
                *[
                    F.expr(later).alias(time_l) if name == time_l else F.col(f"l.{quoted(name)}")
                    for name in left.columns
                ],
                *[F.col(f"r.{quoted(name)}") for name in columns_r],
            )
        )
    except Exception as err:
        from pyspark.errors import PySparkException

        if isinstance(err, PySparkException):
            raise determinism.explain(
                err, f"{op.name}, on={op.on!r}", [f"l.{c}" for c in left.columns]
                + [f"r.{c}" for c in right.columns],
            ) from None  # fmt: skip
        raise


def _no_maps(keys: tuple[str, ...], schema: pa.Schema, of: str) -> None:
    """Maps that are equal in Spark may have their entries in another order."""
    for key in keys:
        if "map<" in type_ddl(schema.field(key).type):
            raise InputError(
                f"{of}: rows cannot be routed by {key!r}, because equal maps may "
                "have their entries in another order; use another column, or compute one with "
                ".map(...) first"
            )


def _comparable_keys(op: ops.Join, left: str, right: str, time_l: str, time_r: str) -> None:
    """Spark compares the keys of both sides without losing digits, and equal keys are routed to the
    same partition."""
    sides = (arrow_schema(left), arrow_schema(right))
    for key in op.on if isinstance(op.on, tuple) else ():
        kinds = [side.field(key).type for side in sides]
        if not compared_exactly(kinds[0], kinds[1]):
            raise InputError(
                f"{op.name}: the column {key!r} is {type_ddl(kinds[0])} on the left and "
                f"{type_ddl(kinds[1])} on the right; Spark would compare them without their last "
                "digits: cast one of them with .map(...) before the join"
            )
    for key in sorted({key for route in routes_into(op) for key in route}):
        if key == time_l != time_r:
            raise InputError(
                f"{op.name}: fragment {op.fragment!r} is split by {key!r}, the time column of the "
                "left side, which gets the later of both times; split by a copy of the column"
            )
        kinds = [side.field(key).type for side in sides]
        if not routed_alike(kinds[0], kinds[1]):
            raise InputError(
                f"{op.name}: the column {key!r}, by which fragment {op.fragment!r} is split, is "
                f"{type_ddl(kinds[0])} on the left and {type_ddl(kinds[1])} on the right; equal "
                "values would be in different partitions: cast one of them with .map(...) before "
                f".on({op.fragment!r}, ...)"
            )


def _have(keys: tuple[str, ...], df: DataFrame, of: str, option: str) -> None:
    for key in keys:
        if key not in df.columns:
            raise InputError(
                f"{of}: {option} names the column {key!r}, which is not among "
                f"{', '.join(df.columns)}"
            )


def _free(keys: tuple[str, ...], taken: tuple[str, ...], of: str, option: str) -> None:
    for key in keys:
        if key in taken:
            raise InputError(
                f"{of}: {option} names {key!r}, which the result uses for its own time; rename the "
                "column with .map(...) first"
            )


def _same_everywhere(df: DataFrame, of: str) -> None:
    """Apply the determinism rules of user functions to aggregates and join conditions."""
    determinism.check_plan(df, of, whole_window=True, python_udfs=False)


def _fields(ddl: str) -> list[tuple[str, str]]:
    return [(f.name, type_ddl(f.type)) for f in arrow_schema(ddl)]


def _ddl(df: DataFrame, of: str) -> str:
    check_names(df.columns, of=of)
    twice = columns_twice(df.columns)
    if twice:
        raise InputError(f"{of}: the result has the column {', '.join(twice)} twice; rename one")
    schema: pa.Schema = to_arrow_schema(df.schema, timezone="UTC")
    for item in schema:
        if pa.types.is_null(item.type):
            raise InputError(f"{of}: column {item.name!r} has no type; cast the null")
    return schema_ddl(schema)


def _try_udfs(op: ops.Apply, ddl: str, time: str, spark: SparkSession) -> None:
    """Run declared UDFs on sample rows in two orders and partitionings, and compare the results."""
    from holdfast.engine.sample import sample_rows
    from holdfast.storage.rows import canonical, digest

    rows = sample_rows(arrow_schema(ddl), 64)
    digests = []
    for order, parts in ((rows, 1), (rows.take(list(range(63, -1, -1))), 3)):
        df = spark.createDataFrame(order.to_pandas(), ddl).repartition(parts)
        try:
            digests.append(digest(canonical(op.fn(df).toArrow())))
        except Exception as err:  # a UDF may expect more of its values than their type
            reason = str(err).strip().splitlines()[-1]
            _log.warning(
                "%s: Holdfast could not check that the Python UDF is deterministic: the UDF raised "
                "on sample rows, whose strings are like 'v56' (%s). Make sure that it gives the "
                "same result on every replica", op.name, reason,
            )  # fmt: skip
            return
    if digests[0] != digests[1]:
        raise InputError(
            f"{op.name}: its Python UDF gave different results for the same rows in another order "
            "or partitioning; a UDF must be deterministic and work row by row"
        )
