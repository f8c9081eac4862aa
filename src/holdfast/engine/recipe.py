"""Recipes: what a job reads and computes, as values. `build` turns a recipe into a DataFrame.

Recipes are compared by value. If a step needs a job whose recipe an earlier step had, the physical
plan of that step runs again (`prepared.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from holdfast.engine import count_windows, determinism, keyed, keyed_operators
from holdfast.engine.compiled import Compiled, join, stamp
from holdfast.engine.sql import query, quoted, read_parquet
from holdfast.frozen import dataclass
from holdfast.model import operators as ops
from holdfast.model.network import Network
from holdfast.model.schema import arrow_schema, schema_ddl


@dataclass(frozen=True, slots=True)
class Read:
    """The rows of Parquet files."""

    #: The stream of the rows, or the time window of the panes.
    of: str
    files: tuple[str, ...]
    #: Whether all rows are read by one task.
    one_task: bool
    #: `due` are panes with the end of the window to which they contribute (`__end`).
    kind: Literal["rows", "panes", "due"] = "rows"


@dataclass(frozen=True, slots=True)
class Filtered:
    rows: Recipe
    condition: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The user's function of an operator."""

    op: str
    rows: Recipe


@dataclass(frozen=True, slots=True)
class United:
    parts: tuple[Recipe, ...]
    one_task: bool


@dataclass(frozen=True, slots=True)
class Query:
    """SQL text over frames (`sql.query`)."""

    text: str
    frames: tuple[tuple[str, Recipe], ...]
    #: Whether later steps may have the same text.
    recurs: bool = True


@dataclass(frozen=True, slots=True)
class Joined:
    op: str
    left: Recipe
    right: Recipe
    #: The side that is sent to all tasks, because it has few rows.
    broadcast: Literal["left", "right"] | None


@dataclass(frozen=True, slots=True)
class WindowFunction:
    """The user's function of a window. If the end of the window is None, the time column of the
    results has to be set afterwards."""

    op: str
    rows: Recipe
    end_us: int | None


@dataclass(frozen=True, slots=True)
class Sharded:
    """An operator with keyed state. Without rows, only timers are due."""

    op: str
    rows: Recipe | None
    #: Description of the state; or the file that contains it, for a plan that runs again.
    state: keyed.StepState | str
    #: Whether one task processes all shards.
    one_task: bool


Recipe = Read | Filtered | Applied | United | Query | Joined | WindowFunction | Sharded


def parts_of(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe and all recipes in it."""
    yield recipe
    match recipe:
        case Filtered(rows) | Applied(_, rows) | WindowFunction(_, rows) | Sharded(_, rows):
            inner: tuple[Recipe | None, ...] = (rows,)
        case United(parts):
            inner = parts
        case Query(_, frames):
            inner = tuple(rows for _, rows in frames)
        case Joined(_, left, right):
            inner = (left, right)
        case _:
            inner = ()
    for part in inner:
        if part is not None:
            yield from parts_of(part)


def files_of(recipe: Recipe) -> frozenset[str] | None:
    """The files that a job reads; None if no later step can have an equal recipe."""
    files: set[str] = set()
    for part in parts_of(recipe):
        match part:
            case Read():
                files.update(part.files)
            case Sharded(state=str(state)):
                files.add(state)
            case Sharded() | Filtered() | Query(recurs=False) | WindowFunction(end_us=int()):
                return None
    return frozenset(files)


@dataclass(frozen=True, slots=True)
class Builder:
    network: Network
    compiled: Compiled
    spark: SparkSession

    def build(self, recipe: Recipe) -> DataFrame:
        match recipe:
            case Read():
                return self._read(recipe)
            case Filtered(rows, condition):
                return self.build(rows).filter(condition)
            case Applied(name, rows):
                op: Any = self.network.named(name)
                return determinism.apply(op.fn, self.build(rows), name)
            case United(parts, one_task):
                united = self.build(parts[0])
                for part in parts[1:]:
                    united = united.unionByName(self.build(part))
                return united.coalesce(1) if one_task else united
            case Query(text, frames, _):
                return query(text, **{name: self.build(rows) for name, rows in frames})
            case Joined(name, left, right, broadcast):
                op = self.network.named(name)
                times = [self.compiled.time[up.name] for up in op.inputs]
                sides = {"left": self._side(left), "right": self._side(right)}
                if broadcast is not None:
                    sides[broadcast] = F.broadcast(sides[broadcast])
                return join(sides["left"], sides["right"], op, times[0], times[1])
            case WindowFunction():
                return self._window_function(recipe)
            case Sharded():
                return self._sharded(recipe)

    def _side(self, recipe: Recipe) -> DataFrame:
        """A side of a join. Rows that were stored in between have no -0.0, so results of functions
        must not have it either."""
        rows = self.build(recipe)
        if not any(isinstance(part, Applied) for part in parts_of(recipe)):
            return rows
        kinds = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
        floats = {name: kind for name, kind in kinds.items() if kind in ("double", "float")}
        positive = {
            name: F.expr(f"if({quoted(name)} = 0, CAST(0 AS {kind}), {quoted(name)})")
            for name, kind in floats.items()
        }
        return rows.withColumns(positive) if positive else rows

    def _read(self, recipe: Read) -> DataFrame:
        schema: Any = self.compiled.schema.get(recipe.of)
        if recipe.kind != "rows":
            schema = self.compiled.panes[recipe.of]
        if recipe.kind == "due":
            schema = type(schema)(list(schema.fields)).add("__end", LongType())
        rows = read_parquet(self.spark, self.spark.read.schema(schema), recipe.files)
        return rows.coalesce(1) if recipe.one_task else rows

    def _window_function(self, recipe: WindowFunction) -> DataFrame:
        """The rows are in one Spark partition and in canonical order, so that even a sum of doubles
        has a fixed order."""
        op: Any = self.network.named(recipe.op)
        rows = self.build(recipe.rows).coalesce(1)
        rows = rows.sortWithinPartitions(*_sortable(rows, self.compiled.time[op.inputs[0].name]))
        result = determinism.apply(op.fn, rows, op.name)
        result = stamp(result, self.compiled.time[op.name], recipe.end_us or 0)
        if op.name in self.compiled.from_nothing:
            # A window without rows has no result, even if the function returns rows for it.
            result = result.join(rows.select(F.lit(1).alias("__any")).limit(1)).drop("__any")
        return result

    def _sharded(self, recipe: Sharded) -> DataFrame:
        op: Any = self.network.named(recipe.op)
        operator, out, out_ddl = self.operator(op)
        ddl = self.compiled.totals.get(op.name, self.compiled.schema[op.inputs[0].name])
        schema, shards = arrow_schema(ddl), self.network.partitions
        rows = (
            self.spark.createDataFrame([], ddl) if recipe.rows is None else self.build(recipe.rows)
        )
        shard = F.expr(f"pmod(hash({quoted(*op.keys)}), {shards})")
        if recipe.one_task:
            rows = rows.select("*", shard.alias(keyed.SHARD)).coalesce(1)
        else:
            rows = rows.repartitionById(shards, shard)
        if any("." in name or "`" in name for name in schema.names):
            # `mapInArrow` takes a dot in a name for the field of a struct.
            names = [f"c{place}" for place in range(len(schema))]
            rows = rows.toDF(*names, *([keyed.SHARD] if recipe.one_task else []))
        task = keyed.ShardTask(
            op.name, operator, recipe.state, schema, out, shards if recipe.one_task else None
        )
        return rows.mapInArrow(task, out_ddl)

    def operator(
        self, op: ops.CountWindow | ops.Stateful
    ) -> tuple[keyed_operators.KeyedOperator, pa.Schema, str]:
        """An operator with keyed state, and the schema of its results."""
        up = op.inputs[0]
        assert up is not None
        ddl, time = self.compiled.schema[up.name], self.compiled.time[up.name]
        rows = arrow_schema(ddl)
        if isinstance(op, ops.CountWindow):
            if op.name in self.compiled.totals:
                each = arrow_schema(self.compiled.totals[op.name])
                plan = self.compiled.plans[op.name]
                fields = [each.field(name) for name in (*op.keys, *plan.dims, *plan.merges)]
                totals = count_windows.CountTotals(
                    op.keys, time, op.size, plan.dims, plan.merges,
                    pa.schema([*fields, ("__n", pa.int64())]),
                )  # fmt: skip
                return totals, totals.out, schema_ddl(totals.out)
            assigned = f"{ddl}, __seq bigint, __last bigint"
            windows = count_windows.CountWindows(op.keys, time, op.size, op.slide, rows)
            return windows, arrow_schema(assigned), assigned
        out, state = arrow_schema(op.out), arrow_schema(op.state)
        by_key = keyed_operators.has_keys(state, rows, op.keys)
        function = keyed_operators.UserFunction(
            op.fn, op.name, self.compiled.time[op.name], op.timer, state, out,
            self.network.width_us, op.keys if by_key else None,
        )  # fmt: skip
        return function, out, self.compiled.schema[op.name]


def _sortable(df: DataFrame, time: str) -> list[Column]:
    """The columns in canonical order: the time first, without maps, which have no order."""
    others = [
        f.name
        for f in df.schema.fields
        if f.name != time and "map<" not in f.dataType.simpleString()
    ]
    return [F.col(quoted(name)) for name in (time, *others)]
