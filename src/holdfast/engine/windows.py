"""Time windows: when windows close, which rows open windows need, and the SQL of their results.

The result of a window [end - size, end) has the time `end - 1`, so the window closes in the bucket
of `end - 1`. All arithmetic is on integer microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import gcd

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


def needed_from(op: TimeWindow, upto: int, width_us: int) -> int:
    """First bucket whose rows can contribute to a window that closes after bucket `upto`."""
    next_end = ((upto + 1) * width_us // op.slide_us + 1) * op.slide_us
    return (next_end - op.size_us) // width_us


def _pane(op: TimeWindow, time: str) -> str:
    """SQL: start of the pane that contains a row."""
    micros = f"unix_micros({quoted(time)})"
    return f"({micros} - pmod({micros}, {gcd(op.size_us, op.slide_us)}L))"


def partials(plan: AggregatePlan, op: TimeWindow, rows: str, time: str) -> str:
    """Raw rows to panes: partial aggregates per pane (start `__p`), keys and dimensions."""
    return plan.first(plan.prepare(rows), __p=_pane(op, time))


def direct(plan: AggregatePlan, op: TimeWindow, rows: str, ends: Sequence[int], time: str) -> str:
    """Raw rows of tumbling windows to the results of the windows `ends`, in one aggregation."""
    per_window = plan.first(plan.prepare(rows), __end=f"({_pane(op, time)} + {op.size_us}L)")
    return _finished(plan, op, per_window, ends, time)


def results(plan: AggregatePlan, op: TimeWindow, panes: str, ends: Sequence[int], time: str) -> str:
    """Panes to the results of the windows `ends`. A pane may consist of several rows to merge."""
    if op.size_us == op.slide_us:
        per_window = f"SELECT *, __p + {op.size_us}L AS __end FROM ({panes})"
    else:
        lo, hi = f"{ends[0]}L", f"{ends[-1]}L"
        pane_us, slide = gcd(op.size_us, op.slide_us), op.slide_us
        since, until = f"(__p + {pane_us}L + {slide - 1}L)", f"(__p + {op.size_us}L)"
        first = f"greatest({since} - pmod({since}, {slide}L), {lo})"
        last = f"least({until} - pmod({until}, {slide}L), {hi})"
        per_window = (
            f"SELECT *, explode(sequence({first}, {last}, {slide}L)) AS __end FROM ({panes}) "
            f"WHERE {first} <= {last}"
        )
    return _finished(plan, op, plan.merge(per_window, "__end"), ends, time)


def _finished(
    plan: AggregatePlan, op: TimeWindow, per_window: str, ends: Sequence[int], time: str
) -> str:
    """`__end`, the first instant after the window, becomes `window_start` and the time column."""
    columns = (
        f"timestamp_micros(__end - {op.size_us}L) AS window_start",
        f"timestamp_micros(__end - 1L) AS {quoted(time)}",
    )
    due = f"__end between {ends[0]}L and {ends[-1]}L"
    return plan.finish(per_window, ("__end",), columns, due)
