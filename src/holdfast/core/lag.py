"""A copy of a pair that is alive but makes no progress: its disk is full, a step hangs, or it was
cut off from its inputs. Pure.

Such a copy answers everybody, so no failure detector sees it; but producers keep all it has not
had, and stop at `buffer_buckets`. The controller hears with every heartbeat how far each copy is,
and evicts one that has stood still for `stall` while the other one is ahead: it is declared dead
(Flux section 3.2), and caught up from the other one when it works again.

A copy that is evicted for nothing (a step that really takes so long) loses only time; so that it
cannot go on for ever, each eviction doubles the patience for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The other copy is ahead when it is ahead by so many buckets: under load two are never in step.
AHEAD_BUCKETS = 3
#: A new instance has so many times as long for its first step: everything is cold.
FIRST_STEP = 3
#: The patience is doubled so often at most, and an eviction is forgotten after so long.
DOUBLED_MAX = 5
FORGIVEN_US = 600_000_000

#: Of each path, the last bucket that was computed; None before the path has begun.
Positions = Mapping[str, int | None]


@dataclass(slots=True)
class _Copy:
    epoch: int
    positions: Positions
    #: When each path moved last, in time that was listened to.
    moved_at: dict[str, int]
    heard_at: int
    #: Paths that moved at all in this life.
    warm: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Lag:
    stall_us: int
    silence_us: int
    _copies: dict[str, _Copy] = field(default_factory=dict)
    #: When each copy was evicted, lately.
    _evicted: dict[str, list[int]] = field(default_factory=dict)

    def heard(self, name: str, epoch: int, positions: Positions, at: int) -> None:
        """A heartbeat. A gap between two of them does not count as standing still: whoever was not
        heard of may have moved."""
        known = self._copies.get(name)
        if known is None or known.epoch != epoch:
            self._copies[name] = _Copy(epoch, positions, dict.fromkeys(positions, at), at)
            return
        gap = at - known.heard_at > self.silence_us
        for path, position in positions.items():
            before = known.positions.get(path)
            if gap or path not in known.moved_at or position != before:
                known.moved_at[path] = at
            if before is not None and position != before:
                known.warm.add(path)
        known.positions, known.heard_at = positions, at

    def stalled(self, name: str, partner: str, at: int) -> str | None:
        """Why the copy is to be evicted; None: it is not."""
        mine, other = self._copies.get(name), self._copies.get(partner)
        if mine is None or other is None:
            return None
        patience_us = self.stall_us << min(len(self._recent(name, at)), DOUBLED_MAX)
        for path, theirs in other.positions.items():
            position = mine.positions.get(path)
            stood_us = mine.heard_at - mine.moved_at.get(path, mine.heard_at)
            if theirs is None or stood_us < patience_us * (1 if path in mine.warm else FIRST_STEP):
                continue
            if position is None or theirs - position >= AHEAD_BUCKETS:
                return (
                    f"alive but makes no progress: path {path!r} has stood at bucket {position} "
                    f"for {stood_us / 1e6:.1f} s, {partner} is at {theirs}"
                )
        return None

    def evicted(self, name: str, at: int) -> None:
        self._evicted[name] = [*self._recent(name, at), at]
        self._copies.pop(name, None)

    def _recent(self, name: str, at: int) -> list[int]:
        return [was for was in self._evicted.get(name, []) if at - was < FORGIVEN_US]
