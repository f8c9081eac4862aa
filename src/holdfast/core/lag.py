"""A copy of a pair that is alive but makes no progress: its disk is full, a step hangs, or it was
cut off from its inputs. Pure.

Such a copy answers everybody, so no failure detector sees it; but producers keep all it has not
had, and stop at `buffer_buckets`. The controller hears with every heartbeat how far each copy is,
and evicts one that has stood still for `stall` while the other one is ahead: it is declared dead
(Flux section 3.2), and caught up from the other one when it works again.

Time in which there is nothing to do does not count: a copy stands still only since the other one is
ahead. Where steps are long, one of two copies is always done first; so the patience is never less
than twice what either of them took lately to make good what the other one was ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The other copy is ahead when it is ahead by so many buckets: under load two are never in step.
AHEAD_BUCKETS = 3
#: So many of the last delays of a copy are remembered.
REMEMBERED = 8

#: Of each path, the last bucket that was computed; None before the path has begun.
Positions = Mapping[str, int | None]


@dataclass(slots=True)
class _Copy:
    epoch: int
    positions: Positions
    heard_at: int
    #: Since when it has stood still while the other one is ahead, by path.
    behind_since: dict[str, int] = field(default_factory=dict)
    #: How long it stood still before it moved.
    delays_us: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


@dataclass(slots=True)
class Lag:
    stall_us: int
    silence_us: int
    _copies: dict[str, _Copy] = field(default_factory=dict)

    def heard(self, name: str, partner: str, epoch: int, positions: Positions, at: int) -> None:
        """A heartbeat. A gap between two of them does not count as standing still: whoever was not
        heard of may have moved."""
        known = self._copies.get(name)
        if known is None or known.epoch != epoch:
            known = self._copies[name] = _Copy(epoch, positions, at)
        if at - known.heard_at > self.silence_us:
            known.behind_since.clear()
        for path, position in positions.items():
            if position != known.positions.get(path):
                since = known.behind_since.pop(path, None)
                if since is not None:
                    known.delays_us.append(at - since)
        known.positions, known.heard_at = positions, at
        self._compare(known, self._copies.get(partner), at)
        self._compare(self._copies.get(partner), known, at)

    def stalled(self, name: str, partner: str) -> str | None:
        """Why the copy is to be evicted; None: it is not."""
        mine, other = self._copies.get(name), self._copies.get(partner)
        if mine is None or other is None:
            return None
        patience_us = max(self.stall_us, *(2 * us for us in (*mine.delays_us, *other.delays_us)), 0)
        for path, since in mine.behind_since.items():
            stood_us = mine.heard_at - since
            if stood_us >= patience_us:
                return (
                    f"alive but makes no progress: path {path!r} has stood at bucket "
                    f"{mine.positions[path]} for {stood_us / 1e6:.1f} s, {partner} is at "
                    f"{other.positions.get(path)}"
                )
        return None

    def forget(self, name: str) -> None:
        self._copies.pop(name, None)

    def _compare(self, copy: _Copy | None, other: _Copy | None, at: int) -> None:
        if copy is None or other is None:
            return
        for path, position in copy.positions.items():
            theirs = other.positions.get(path)
            if theirs is None or (position is not None and theirs - position < AHEAD_BUCKETS):
                copy.behind_since.pop(path, None)
            else:
                copy.behind_since.setdefault(path, at)
