"""The only clock: everybody else is handed the time."""

from __future__ import annotations

import time


def now_us() -> int:
    """What time it is for people: of rows and of reports. It may be stepped at any moment."""
    return time.time_ns() // 1_000


def monotonic_us() -> int:
    """For every duration: it only goes forward, whatever happens to the clock on the wall."""
    return time.monotonic_ns() // 1_000
