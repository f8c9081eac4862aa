"""One of a pair comes back (Flux section 3.3): from its partner's state, or else from its own disk.

It asks its producers to keep what it may need, then its partner for the state; whoever carries does
both. Here is what follows when there was nothing to be had. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: So often it asks its partner before it takes what is on its own disk.
REFUSALS = 4
#: If nothing was to be had anywhere by then, there is nothing.
LOST_US = 120_000_000

Next = Literal["again", "own", "lost"]


@dataclass(slots=True)
class CatchUp:
    began: int
    refusals: int = 0

    def refused(self, at: int, *, own: bool, waits: bool = False) -> Next:
        """`own`: there is a version of every path on its disk, or its inputs are all there since
        the start. `waits`: the partner answered that it looks for state itself, so there is no use
        in asking again."""
        self.refusals += 1
        if own and (waits or self.refusals >= REFUSALS):
            return "own"
        return "lost" if at - self.began > LOST_US else "again"
