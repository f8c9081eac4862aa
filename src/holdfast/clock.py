"""The only clocks: everybody else is handed the time."""

from __future__ import annotations

import time


def now_us() -> int:
    """The wall clock, in microseconds since 1970. It can be set, ahead or back."""
    return time.time_ns() // 1_000


def monotonic_us() -> int:
    """For every duration: never goes back, whatever is done to the wall clock."""
    return time.monotonic_ns() // 1_000
