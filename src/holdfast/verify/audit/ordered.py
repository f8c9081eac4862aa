"""Order-sensitive parts of the ideal: canonical order in SQL, and replay of user functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from holdfast.engine.keyed_operators import BucketInfo
from holdfast.engine.sql import quoted
from holdfast.errors import InputError
from holdfast.model.schema import arrow_schema, schema_ddl


@dataclass(frozen=True, slots=True)
class Replay:
    """Calls a user function as the model defines.

    The function is called once for every bucket that has rows or a due timer. Input batches must
    arrive in canonical order.
    """

    fn: Callable[[Any, Any, Any], Any]
    time: str
    timer: str | None
    rows: pa.Schema
    state: pa.Schema
    out: pa.Schema
    width_us: int
    end_us: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        state = self.state.empty_table()
        for bucket, rows in self._buckets(batches):
            while (due := self._due(state)) is not None and due < bucket:
                out, state = self._call(state, self.rows.empty_table(), due)
                yield from out.to_batches()
            if bucket * self.width_us < self.end_us:
                out, state = self._call(state, rows, bucket)
                yield from out.to_batches()

    def _buckets(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of each bucket, then the end bucket without rows, so that timers fire."""
        tables: list[pa.Table] = []
        bucket: int | None = None
        for batch in batches:
            table = pa.Table.from_batches([batch]).cast(self.rows)
            buckets = table[self.time].cast(pa.int64()).to_numpy() // self.width_us
            cuts = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
            for begin, end in pairwise(cuts):
                if begin == end:
                    continue
                if bucket is not None and int(buckets[begin]) != bucket:
                    yield bucket, pa.concat_tables(tables).combine_chunks()
                    tables = []
                bucket = int(buckets[begin])
                tables.append(table.slice(begin, end - begin))
        if bucket is not None:
            yield bucket, pa.concat_tables(tables).combine_chunks()
        yield self.end_us // self.width_us, self.rows.empty_table()

    def _due(self, state: pa.Table) -> int | None:
        """Return the bucket of the earliest timer; None if there is no timer."""
        if self.timer is None:
            return None
        times = state[self.timer].drop_null().cast(pa.int64()).to_numpy()
        return int(times.min()) // self.width_us if len(times) else None

    def _call(self, state: pa.Table, rows: pa.Table, bucket: int) -> tuple[pa.Table, pa.Table]:
        info = BucketInfo(bucket, bucket * self.width_us, (bucket + 1) * self.width_us)
        out, after = self.fn(state, rows, info)
        out = out.select(self.out.names).cast(self.out)
        after = after.select(self.state.names).cast(self.state)
        due = self._due(after)
        if due is not None and due <= bucket:
            raise InputError(
                f"a timer in the state was due in bucket {due}, but the function did not remove it"
            )
        return out, after


def canonical_order(df: DataFrame, time: str) -> tuple[DataFrame, list[Column]]:
    """Return the rows and the columns to sort them by.

    Rows are sorted by time, then by every other column in schema order: nulls first, then NaN.
    Nested columns, which have no order, are sorted by their hash.
    """
    order: list[Column] = [F.col(quoted(time)).asc_nulls_first()]
    nested = [f.name for f in df.schema.fields if _nested(f.dataType.simpleString())]
    for item in df.schema.fields:
        column, kind = F.col(quoted(item.name)), item.dataType.simpleString()
        if item.name in nested:
            order.append(F.col(quoted(f"__h_{item.name}")).asc())
        elif kind in ("float", "double"):
            order += [column.isNull().desc(), F.isnan(column).desc(), (column + F.lit(0)).asc()]
        elif item.name != time:
            order.append(column.asc_nulls_first())
    return (_with_hashes(df, nested) if nested else df), order


def _with_hashes(df: DataFrame, nested: list[str]) -> DataFrame:
    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from holdfast.storage.hashing import hash_array
        from holdfast.storage.rows import canonical

        for batch in batches:
            table = pa.Table.from_batches([batch])
            for name in nested:
                column = canonical(table.select([name])).column(0).combine_chunks()
                hashes = hash_array(column) ^ np.uint64(1 << 63)  # unsigned order in a signed type
                table = table.append_column(f"__h_{name}", pa.array(hashes.view(np.int64)))
            yield from table.combine_chunks().to_batches()

    fields = ", ".join(f"{quoted(f'__h_{name}')} bigint" for name in nested)
    return df.mapInArrow(add, f"{schema_ddl(rows_schema(df))}, {fields}")


def rows_schema(df: DataFrame) -> pa.Schema:
    """Return the Arrow schema of `df` in canonical form."""
    return arrow_schema(schema_ddl(to_arrow_schema(df.schema, timezone="UTC")))


def _nested(kind: str) -> bool:
    return kind.startswith(("array<", "map<", "struct<"))
