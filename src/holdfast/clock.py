"""The only clocks; all other modules receive the time as an argument or a function.

Protocols measure durations and deadlines on the monotonic clock. The wall clock, which may be
stepped, is for rows and reports."""

from __future__ import annotations

import time


def now_us() -> int:
    """Wall-clock time, for rows and reports. The wall clock may be stepped at any time."""
    return time.time_ns() // 1_000


def monotonic_us() -> int:
    return time.monotonic_ns() // 1_000
