"""Time windows: when windows close, which rows open windows need, and the SQL of their results.

The result of a window [end - size, end) has the time `end - 1`, so the window closes in the bucket
of `end - 1`. All arithmetic is on integer microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import gcd

import numpy as np
import pyarrow as pa

from holdfast.engine.mergeable import AggregatePlan
from holdfast.engine.sql import quoted
from holdfast.model.operators import TimeWindow


def ends_due(op: TimeWindow, lo: int, hi: int, buckets: Sequence[int], width_us: int) -> list[int]:
    """Ends of the windows that close in buckets lo..hi and overlap a bucket with rows.

    `buckets` must be sorted. Gaps without rows are skipped, so that even a gap of years is cheap.
    """
    first, last = lo * width_us + 1, (hi + 1) * width_us
    ends: list[int] = []
    at = 0
    while at < len(buckets):
        run = at
        while run + 1 < len(buckets) and buckets[run + 1] - buckets[run] <= 1:
            run += 1
        start = max(first, buckets[at] * width_us + 1, ends[-1] + 1 if ends else first)
        stop = min(last, (buckets[run] + 1) * width_us - 1 + op.size_us)
        end = -(-start // op.slide_us) * op.slide_us
        while end <= stop:
            ends.append(end)
            end += op.slide_us
        at = run + 1
    return [end for end in ends if _any_between(buckets, (end - op.size_us) // width_us,
                                                (end - 1) // width_us)]  # fmt: skip


def _any_between(buckets: Sequence[int], lo: int, hi: int) -> bool:
    at = bisect_left(buckets, lo)
    return at < len(buckets) and buckets[at] <= hi


def needed_from_us(op: TimeWindow, upto: int, width_us: int) -> int:
    """First instant that lies in a window that closes after bucket `upto`."""
    next_end = ((upto + 1) * width_us // op.slide_us + 1) * op.slide_us
    return next_end - op.size_us


def needed_from(op: TimeWindow, upto: int, width_us: int) -> int:
    """First bucket whose rows can contribute to a window that closes after bucket `upto`."""
    return needed_from_us(op, upto, width_us) // width_us


def pane_us(op: TimeWindow) -> int:
    """Length of a pane."""
    return gcd(op.size_us, op.slide_us)


def _pane(op: TimeWindow, time: str) -> str:
    """SQL: start of the pane that contains a row."""
    micros = f"unix_micros({quoted(time)})"
    return f"({micros} - pmod({micros}, {pane_us(op)}L))"


def are_in_all(op: TimeWindow, panes_us: tuple[int, int], ends: Sequence[int]) -> bool:
    """Whether all windows contain the panes from the first to the last start."""
    return ends[-1] - op.size_us <= panes_us[0] and panes_us[1] + pane_us(op) <= ends[0]


def in_each(total: pa.Table, ends: Sequence[int]) -> pa.Table:
    """The rows once for each window, with `__end`."""
    return pa.concat_tables(
        total.append_column("__end", pa.repeat(pa.scalar(end, pa.int64()), total.num_rows))
        for end in ends
    )


def partials(plan: AggregatePlan, op: TimeWindow, rows: str, time: str) -> str:
    """Raw rows to panes: partial aggregates per pane (start `__p`), keys and dimensions."""
    return plan.first(plan.prepare(rows), __p=_pane(op, time))


def direct(plan: AggregatePlan, op: TimeWindow, rows: str, time: str) -> str:
    """Raw rows of tumbling windows to their results, in one aggregation."""
    per_window = plan.first(plan.prepare(rows), __end=f"({_pane(op, time)} + {op.size_us}L)")
    return _finished(plan, op, per_window, time)


def results(plan: AggregatePlan, op: TimeWindow, per_window: str, time: str) -> str:
    """Panes with the ends of their windows (`__end`) to results. A pane may consist of several rows
    to merge."""
    return _finished(plan, op, plan.merge(per_window, "__end"), time)


def per_window(op: TimeWindow, panes: str, ends: Sequence[int]) -> str:
    """SQL: each pane once for each of the windows `ends` that contains it, with `__end`."""
    slide = op.slide_us
    since, until = f"(__p + {pane_us(op)}L + {slide - 1}L)", f"(__p + {op.size_us}L)"
    first = f"greatest({since} - pmod({since}, {slide}L), {ends[0]}L)"
    last = f"least({until} - pmod({until}, {slide}L), {ends[-1]}L)"
    return (
        f"SELECT *, explode(sequence({first}, {last}, {slide}L)) AS __end FROM ({panes}) "
        f"WHERE {first} <= {last}"
    )


def due(op: TimeWindow, panes: pa.Table, ends: Sequence[int], bytes_max: int) -> pa.Table | None:
    """`per_window` for a table; None if the result would be larger than `bytes_max`."""
    start = panes["__p"].to_numpy()
    length, slide = pane_us(op), op.slide_us
    first = np.maximum(-(-(start + length) // slide) * slide, ends[0])
    last = np.minimum((start + op.size_us) // slide * slide, ends[-1])
    count = np.maximum((last - first) // slide + 1, 0)
    if int(count.sum()) * (panes.nbytes // max(1, panes.num_rows)) > bytes_max:
        return None
    of_pane = np.repeat(np.arange(len(start)), count)
    number = np.arange(len(of_pane)) - np.repeat(np.cumsum(count) - count, count)
    rows = panes.take(pa.array(of_pane))
    return rows.append_column("__end", pa.array(first[of_pane] + number * slide, pa.int64()))


def _finished(plan: AggregatePlan, op: TimeWindow, per_window: str, time: str) -> str:
    """`__end`, the first instant after the window, becomes `window_start` and the time column."""
    columns = (
        f"timestamp_micros(__end - {op.size_us}L) AS window_start",
        f"timestamp_micros(__end - 1L) AS {quoted(time)}",
    )
    return plan.finish(per_window, ("__end",), columns)
