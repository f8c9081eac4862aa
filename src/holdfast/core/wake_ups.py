"""The ticks that a machine has asked for (`Wake`) and that have not come. Pure.

Every `Wake` is answered by one `Tick`, the earliest first. A timer may fire before its time, since
clocks and timers are rounded: the tick is then spent and the deadline still ahead, so the machine
asks again. A tick that is overdue is counted, but not relied on.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class Alarm:
    #: When the ticks that were asked for are due, in order.
    _expected: list[int] = field(default_factory=list)

    def rang(self) -> None:
        """A Tick came, whatever time it is."""
        if self._expected:
            self._expected.pop(0)

    def needs(self, at: int, due: int) -> bool:
        """Whether to ask for a tick at `due`: none is expected from now until then."""
        if any(at < expected <= due for expected in self._expected):
            return False
        insort(self._expected, due)
        return True
