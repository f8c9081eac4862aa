"""Messages of a source to users: late, future and timeless rows, and steps of the wall clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from holdfast.config import duration_text
from holdfast.core import source_clock, watermark
from holdfast.model.operators import Source

#: Advice that avoids late rows, by kind of clock.
_REMEDY = {
    "wall": "; rows that take longer need a longer grace=, a backlog needs clock='data'",
    "data": "; rows that are further out of order need a longer grace=, pauses a longer idle=",
}


def report_text(op: Source, report: watermark.Report, now_us: int) -> str:
    """Describe excluded rows: how many, why, and what to do."""
    done = "given another time (late='restamp')"
    if op.late != "restamp" or report.reason == "null time":
        done = f"not taken and put among the dead letters (`holdfast dead-letters {op.name}`)"
    rows = "row was" if report.rows == 1 else "rows were"
    more = "" if report.total == report.rows else f" ({report.total} so far)"
    text = f"{report.rows} {report.reason} {rows} {done}{more}"
    time = op.time
    if report.reason == "null time":
        return f"{text}: {time} is null"
    assert report.example_us is not None
    text = f"{text}, such as {time}={_instant(report.example_us)}"
    if report.reason == "future":
        bound = duration_text(op.ahead_us)
        now = _instant(now_us)
        return f"{text}: more than ahead={bound} after the source clock, {now}"
    assert report.closed_upto_us is not None
    closed = _instant(report.closed_upto_us)
    return f"{text}: buckets are closed up to {closed}{_REMEDY.get(op.clock, '')}"


def clock_text(action: source_clock.ClockAction) -> str:
    """Describe a step of the wall clock, and its effect on buckets."""
    match action:
        case source_clock.Stepped():
            way = "ahead" if action.by_us > 0 else "back"
            return f"the wall clock stepped {way} by {_seconds(abs(action.by_us))}; " + _goes_on(
                action.apart_us
            )
        case source_clock.Behind():
            behind = f"the wall clock is {_seconds(action.by_us)} behind what was closed before"
            return f"{behind}; {_goes_on(action.by_us)}"
        case source_clock.Followed():
            return f"the source clock follows the wall clock, {_seconds(action.by_us)} ahead"
        case source_clock.Agreed():
            return "the source clock agrees with the wall clock again"


def _goes_on(apart_us: int) -> str:
    """How the source clock continues when it is `apart_us` ahead of the wall clock."""
    course, lasts_us = source_clock.course_of(apart_us)
    match course:
        case "slower":
            return (
                f"buckets close at half speed for {_seconds(lasts_us)}, until both clocks agree, "
                "and rows that are stamped by it are late"
            )
        case "confirms":
            stands = _seconds(lasts_us)
            return f"buckets close as before, and follow it once it has stood there for {stands}"
        case "as before":
            return "buckets close as before"


def _seconds(us: int) -> str:
    return f"{us / 1e6:.1f} s"


def _instant(us: int) -> str:
    """A time in ISO format, or as a number if it is outside the range of `datetime`."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).isoformat()
    except OverflowError:
        return f"{us} us"
