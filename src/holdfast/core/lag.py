"""A copy of a pair that is alive but makes no progress: its disk is full, a step hangs, it was cut
off from its inputs, or its host is too slow. Pure.

Such a copy answers everybody, so no failure detector sees it; but producers keep all it has not
had, and stop at `buffer_buckets`. The controller hears with every heartbeat how far each copy is,
and evicts one that is of no use: it is declared dead (Flux section 3.2), and caught up from the
other one when it works again. For `stall`

- it has stood still while the other one is ahead, or
- it has been where the other one was that long ago, and has not come nearer by more than one step.
  One or two steps behind, it is at one and has got the next: where steps are long that is normal.

Time in which there is nothing to do does not count: a copy is late only since the other one is
ahead. Where steps are long, one of two copies is always done first, and whether one comes nearer is
seen after two of them; so both are given twice as long, at least, as either took lately to move
while the other one was ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: The other copy is ahead when it is ahead by so many buckets: under load two are never in step.
AHEAD_BUCKETS = 3
#: So many of the last steps of a copy are remembered.
REMEMBERED = 8

#: Of each path, the last bucket that was computed; None before the path has begun.
Positions = Mapping[str, int | None]


@dataclass(slots=True)
class _Behind:
    """A path of a copy while the other one is ahead."""

    #: Where the other one was when, as far as this one has not come near it.
    ahead: deque[tuple[int, int]]
    #: When it last moved, or fell behind.
    moved_at: int
    #: When it last came nearer by more than a step, or fell behind.
    nearer_at: int
    #: By how much the other one was ahead since then, at most.
    most: int = 0

    @property
    def since(self) -> int:
        """When the other one left where this one is."""
        return self.ahead[0][0]


@dataclass(slots=True)
class _Copy:
    epoch: int
    positions: Positions
    heard_at: int
    behind: dict[str, _Behind] = field(default_factory=dict)
    #: How long it stood still before it moved, while it was behind.
    delays_us: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    #: By how many buckets it moved from one heartbeat to the next.
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


@dataclass(slots=True)
class Lag:
    stall_us: int
    silence_us: int
    _copies: dict[str, _Copy] = field(default_factory=dict)

    def heard(self, name: str, peer: str, epoch: int, positions: Positions, at: int) -> None:
        """A heartbeat. A gap between two of them does not count as standing still: whoever was not
        heard of may have moved."""
        known = self._copies.get(name)
        if known is None or known.epoch != epoch:
            known = self._copies[name] = _Copy(epoch, positions, at)
        if at - known.heard_at > self.silence_us:
            known.positions = positions
            known.behind.clear()
        for path, position in positions.items():
            before = known.positions.get(path)
            if position == before:
                continue
            if position is not None and before is not None:
                known.steps.append(position - before)
            if (behind := known.behind.get(path)) is not None:
                known.delays_us.append(at - behind.moved_at)
                behind.moved_at = at
        known.positions, known.heard_at = positions, at
        other = self._copies.get(peer)
        if other is not None:
            self._compare(known, other, at)
            self._compare(other, known, at)

    def stalled(self, name: str, peer: str) -> str | None:
        """Why the copy is to be evicted; None: it is not."""
        mine, other = self._copies.get(name), self._copies.get(peer)
        if mine is None or other is None:
            return None
        patience_us = max(self.stall_us, *(2 * us for us in (*mine.delays_us, *other.delays_us)), 0)
        for path, behind in mine.behind.items():
            position, theirs = mine.positions.get(path), other.positions.get(path)
            stood_us, late_us = mine.heard_at - behind.moved_at, mine.heard_at - behind.since
            if stood_us >= patience_us:
                return (
                    f"alive but makes no progress: path {path!r} has stood at bucket {position} "
                    f"for {stood_us / 1e6:.1f} s, {peer} is at {theirs}"
                )
            if position is None or theirs is None:
                continue
            far = late_us >= self.stall_us and theirs - position > 2 * _step(mine, other)
            if far and mine.heard_at - behind.nearer_at >= patience_us:
                return (
                    f"alive but falls behind: path {path!r} is at bucket {position}, where "
                    f"{peer} was {late_us / 1e6:.1f} s ago, which is at {theirs}"
                )
        return None

    def forget(self, name: str) -> None:
        self._copies.pop(name, None)

    def _compare(self, copy: _Copy, other: _Copy, at: int) -> None:
        for path, position in copy.positions.items():
            theirs = other.positions.get(path)
            if theirs is None or (position is not None and theirs - position < AHEAD_BUCKETS):
                copy.behind.pop(path, None)
                continue
            behind = copy.behind.get(path)
            if behind is None or theirs < behind.ahead[-1][1]:  # restarted, from its disk
                behind = copy.behind[path] = _Behind(deque([(at, theirs)]), at, at)
            if theirs > behind.ahead[-1][1]:
                behind.ahead.append((at, theirs))
            if position is None:
                continue
            while behind.ahead[0][1] - position < AHEAD_BUCKETS:
                behind.ahead.popleft()
            distance = theirs - position
            behind.most = max(behind.most, distance)
            if distance < behind.most - _step(copy, other):
                behind.most, behind.nearer_at = distance, at


def _step(copy: _Copy, other: _Copy) -> int:
    """The most that either of them has lately made at once."""
    return max((*copy.steps, *other.steps), default=1)
