"""Messages of a source to users: late, future and timeless rows, and steps of the wall clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from holdfast.config import duration_text
from holdfast.core import source_clock, watermark
from holdfast.model.operators import Source

#: Advice that avoids late rows, by kind of clock.
_REMEDY = {
    "wall": "; for rows that arrive later use a longer grace=, for a backlog clock='data'",
    "data": "; for rows further out of order use a longer grace=, for longer pauses a longer idle=",
}


def report_text(op: Source, report: watermark.Report, now_us: int) -> str:
    """Describe excluded rows: how many, why, and what to do."""
    outcome = "given a new time (late='restamp')"
    if op.late != "restamp" or report.reason == "null time":
        outcome = f"rejected and written to the dead letters (`holdfast dead-letters {op.name}`)"
    rows = "row was" if report.rows == 1 else "rows were"
    total = "" if report.total == report.rows else f" ({report.total} so far)"
    text = f"{report.rows} {report.reason} {rows} {outcome}{total}"
    time = op.time
    if report.reason == "null time":
        return f"{text}: {time} is null"
    assert report.example_us is not None
    text = f"{text}, such as {time}={_instant(report.example_us)}"
    if report.reason == "future":
        bound = duration_text(op.ahead_us)
        now = _instant(now_us)
        return f"{text}: more than ahead={bound} ahead of the source clock ({now})"
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
            behind = (
                f"the wall clock is {_seconds(action.by_us)} behind the buckets that are closed"
            )
            return f"{behind}; {_goes_on(action.by_us)}"
        case source_clock.Followed():
            return f"the source clock jumped ahead by {_seconds(action.by_us)} to the wall clock"
        case source_clock.Agreed():
            return "the source clock agrees with the wall clock again"


def _goes_on(apart_us: int) -> str:
    """How the source clock continues when it is `apart_us` ahead of the wall clock."""
    course, lasts_us = source_clock.course_of(apart_us)
    match course:
        case "slower":
            return (
                f"buckets close at half speed for {_seconds(lasts_us)}, until both clocks agree; "
                "until then, rows stamped by the wall clock are late"
            )
        case "confirms":
            wait = _seconds(lasts_us)
            return f"buckets close as before; the source clock follows if the step lasts {wait}"
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
