"""Lag: finds a replica of a pair that is alive but makes no progress, because its disk is full, a
step hangs, its inputs are unreachable, or its host is too slow. Pure.

Such a replica answers all calls, so no failure detector finds it. But producers retain everything
that the replica has not received, and stop at `buffer_buckets`. Every heartbeat reports the
positions of a replica to the controller. The controller evicts a stalled replica: the replica is
declared dead (Flux section 3.2), and rebuilt from its peer when it works again. A replica is
stalled when, for `stall`,

- it has not moved while its peer is ahead, or
- it has been at or before the position that its peer had that long ago, is more than two steps
  behind, and has not come closer by more than one step. Up to two steps behind is normal: the
  replica computes one step and has received the input of the next.

Idle time does not count: a replica is late only since the time when its peer went ahead. With long
steps, one of two replicas always finishes first, and two steps must pass to show whether the other
one comes closer. So the time limit is at least twice the longest recent delay of either replica
before it moved while its peer was ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

#: A peer counts as ahead from this many buckets on: under load two replicas are never in step.
AHEAD_BUCKETS = 3
#: Number of recent steps and delays remembered for each replica.
REMEMBERED = 8

#: Last computed bucket of each path; None before the path has started.
Positions = Mapping[str, int | None]


@dataclass(slots=True)
class _Behind:
    """A path of a replica while the peer is ahead."""

    #: Time and position of the peer, oldest first, for positions that are still at least
    #: AHEAD_BUCKETS ahead of this replica.
    ahead: deque[tuple[int, int]]
    #: When the replica last moved, or fell behind.
    moved_at: int
    #: When the replica last came closer by more than one step, or fell behind.
    nearer_at: int
    #: Maximum distance to the peer since then, in buckets.
    most: int = 0

    @property
    def since(self) -> int:
        """Since when the peer has been ahead of the current position of this replica."""
        return self.ahead[0][0]


@dataclass(slots=True)
class _Copy:
    epoch: int
    positions: Positions
    heard_at: int
    behind: dict[str, _Behind] = field(default_factory=dict)
    #: Time without a move before each recent move, while the replica was behind.
    delays_us: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    #: Buckets per move, from one heartbeat to the next.
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


@dataclass(slots=True)
class Lag:
    stall_us: int
    silence_us: int
    _copies: dict[str, _Copy] = field(default_factory=dict)

    def heard(self, name: str, peer: str, epoch: int, positions: Positions, at: int) -> None:
        """Take the positions of a heartbeat. A gap of more than `silence_us` between two heartbeats
        does not count as a stall: the replica may have moved in between."""
        replica = self._copies.get(name)
        if replica is None or replica.epoch != epoch:
            replica = self._copies[name] = _Copy(epoch, positions, at)
        if at - replica.heard_at > self.silence_us:
            replica.positions = positions
            replica.behind.clear()
        for path, position in positions.items():
            before = replica.positions.get(path)
            if position == before:
                continue
            if position is not None and before is not None:
                replica.steps.append(position - before)
            if (behind := replica.behind.get(path)) is not None:
                replica.delays_us.append(at - behind.moved_at)
                behind.moved_at = at
        replica.positions, replica.heard_at = positions, at
        peer_replica = self._copies.get(peer)
        if peer_replica is not None:
            self._compare(replica, peer_replica, at)
            self._compare(peer_replica, replica, at)

    def stalled(self, name: str, peer: str) -> str | None:
        """The reason to evict the replica; None: it is not stalled."""
        replica, peer_replica = self._copies.get(name), self._copies.get(peer)
        if replica is None or peer_replica is None:
            return None
        patience_us = max(
            self.stall_us, *(2 * us for us in (*replica.delays_us, *peer_replica.delays_us)), 0
        )
        for path, behind in replica.behind.items():
            position, peer_position = replica.positions.get(path), peer_replica.positions.get(path)
            still_us, late_us = replica.heard_at - behind.moved_at, replica.heard_at - behind.since
            if still_us >= patience_us:
                return (
                    f"no progress although it sends heartbeats: path {path!r} has been at bucket "
                    f"{position} for {still_us / 1e6:.1f} s, its peer {peer} is at {peer_position}"
                )
            if position is None or peer_position is None:
                continue
            far_behind = late_us >= self.stall_us and peer_position - position > 2 * _step(
                replica, peer_replica
            )
            if far_behind and replica.heard_at - behind.nearer_at >= patience_us:
                return (
                    f"falls behind although it sends heartbeats: path {path!r} is at bucket "
                    f"{position}, where its peer {peer} was {late_us / 1e6:.1f} s ago; the peer is "
                    f"now at {peer_position}"
                )
        return None

    def forget(self, name: str) -> None:
        self._copies.pop(name, None)

    def _compare(self, replica: _Copy, peer: _Copy, at: int) -> None:
        for path, position in replica.positions.items():
            peer_position = peer.positions.get(path)
            if peer_position is None or (
                position is not None and peer_position - position < AHEAD_BUCKETS
            ):
                replica.behind.pop(path, None)
                continue
            behind = replica.behind.get(path)
            if behind is None or peer_position < behind.ahead[-1][1]:  # the peer restarted
                behind = replica.behind[path] = _Behind(deque([(at, peer_position)]), at, at)
            if peer_position > behind.ahead[-1][1]:
                behind.ahead.append((at, peer_position))
            if position is None:
                continue
            while behind.ahead[0][1] - position < AHEAD_BUCKETS:
                behind.ahead.popleft()
            distance = peer_position - position
            behind.most = max(behind.most, distance)
            if distance < behind.most - _step(replica, peer):
                behind.most, behind.nearer_at = distance, at


def _step(replica: _Copy, peer: _Copy) -> int:
    """The largest recent move of either replica, in buckets."""
    return max((*replica.steps, *peer.steps), default=1)
