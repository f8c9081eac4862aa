"""The ticks that a state machine has requested (`Wake`) and that have not arrived yet. Pure.

Every `Wake` is answered by one `Tick`, the earliest first. A timer may fire early, because clocks
and timers are rounded: the tick is then used up before the deadline, and the machine requests
another one. An overdue tick stays in the list, but does not prevent a new request.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class Alarm:
    #: Due times of the requested ticks, ascending.
    _expected: list[int] = field(default_factory=list)

    def rang(self) -> None:
        """A `Tick` arrived, on time or not."""
        if self._expected:
            self._expected.pop(0)

    def needs(self, at: int, due: int) -> bool:
        """Whether to request a tick at `due`: no other tick is expected between `at` and `due`."""
        if any(at < expected <= due for expected in self._expected):
            return False
        insort(self._expected, due)
        return True
