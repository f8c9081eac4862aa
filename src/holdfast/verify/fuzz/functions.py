"""Functions of `stateful` operators and of windows in random networks."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.engine.sql import quoted


def running(
    state: pa.Table, rows: pa.Table, info: Any, *, keys: list[str], time: str
) -> tuple[pa.Table, pa.Table]:
    """Per key, the number of rows so far, in every bucket that has rows of the key."""
    grouped = _grouped(state, rows, keys, time)
    out = grouped.filter(pc.is_valid(grouped["at"])).select([*keys, "n", "at"])
    return out.rename_columns([*keys, "n", time]), grouped.select([*keys, "n"])


def quiet(
    state: pa.Table, rows: pa.Table, info: Any, *, keys: list[str], time: str, gap_us: int
) -> tuple[pa.Table, pa.Table]:
    """Per key, the number of rows before each bucket without rows of the key in which the timer,
    `gap_us` after the last row, is due."""
    grouped = _grouped(state, rows, keys, time)
    end = pa.scalar(info.end_us, pa.int64()).cast(state.schema.field("due").type)
    gap = pa.scalar(gap_us, pa.duration("us"))
    due = pc.if_else(pc.is_valid(grouped["at"]), pc.add(grouped["at"], gap), grouped["due"])
    fires = pc.and_(pc.is_null(grouped["at"]), pc.less(due, end))
    counts = grouped.select([*keys, "n"]).append_column("due", due)
    out = counts.filter(fires).rename_columns([*keys, "n", time])
    return out, counts.filter(pc.invert(fires))


def _grouped(state: pa.Table, rows: pa.Table, keys: list[str], time: str) -> pa.Table:
    """Per key: `n`, all its rows; `due` of the state; `at`, the time of its latest new row."""
    stamp = rows.schema.field(time).type
    nothing = pa.nulls(rows.num_rows, stamp)
    due = state["due"] if "due" in state.column_names else pa.nulls(state.num_rows, stamp)
    new = rows.select(keys).append_column("n", pa.array([1] * rows.num_rows, pa.int64()))
    old = state.select([*keys, "n"]).append_column("due", due)
    both = pa.concat_tables(
        [
            old.append_column("at", pa.nulls(state.num_rows, stamp)),
            new.append_column("due", nothing).append_column("at", rows[time]),
        ]
    )
    sums = [("n", "sum"), ("due", "max"), ("at", "max")]
    grouped = both.group_by(keys, use_threads=False).aggregate(sums)
    return grouped.select([*keys, "n_sum", "due_max", "at_max"]).rename_columns(
        [*keys, "n", "due", "at"]
    )


def counted(df: Any, *, keys: list[str]) -> Any:
    """The number of rows of a window, by key."""
    from pyspark.sql import functions as F

    return df.groupBy(*map(quoted, keys)).agg(F.count(F.lit(1)).alias("rows_in_window"))


def distinct(df: Any, *, keys: list[str]) -> Any:
    """The distinct keys of a window."""
    return df.select(*map(quoted, keys)).distinct()
