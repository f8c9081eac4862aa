"""The only clocks: everybody else is handed the time. Durations and deadlines are measured on the
monotonic clock; the wall clock, which may step, only stamps rows and messages for people."""

from __future__ import annotations

import time


def now_us() -> int:
    """What time it is for people: of rows and of reports. It may be stepped at any moment."""
    return time.time_ns() // 1_000


def monotonic_us() -> int:
    return time.monotonic_ns() // 1_000
