"""Which replica of a producer to read (Borealis sections 3.3 and 3.5). Pure.

Every replica regularly reports its status for the stream. A consumer reads one replica: a STABLE
replica that is not too far behind, else a replica in UP_FAILURE that makes progress, else the
furthest of the others. Among equals, it leaves a replica that is `LAG_BUCKETS` behind, or that
makes no progress for `STEP_US` while another one is ahead. While the consumer reads a replica in
UP_FAILURE, it also reads one in STABILIZATION or STABLE, for the corrections. Stable buckets may
come from any replica. Tentative buckets come only from the main replica, so that tentative results
of two replicas are never mixed.

The consumer determines how far behind is too far: while its `max_delay` (X in Borealis) allows it
to wait, stable rows a little later are better than tentative rows now.

In pairs, a consumer prefers its local replica, the replica in the same dataflow. Two replicas under
load take long steps and finish them at different times, so the consumer does not switch to a peer
that is ahead by one step. The consumer switches when the peer is ahead by more than a step, or
stays ahead for longer than `STEP_US`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.frozen import dataclass
from holdfast.types import OutputState

#: A position before every bucket.
NOTHING = -(2**62)
#: A consumer switches between replicas of equal rank when its replica is this many buckets behind.
LAG_BUCKETS = 3
#: Longest duration of a step. A local replica that is a step behind for longer is not running it.
STEP_US = 10_000_000


class Status(NamedTuple):
    """Status of a replica for a stream: its last stable and its last tentative bucket, and whether
    it has completed the stream."""

    state: OutputState
    upto: int
    tentative_upto: int | None = None
    ended: bool = False

    @property
    def reached(self) -> int:
        return self.upto if self.tentative_upto is None else self.tentative_upto


class Choice(NamedTuple):
    """The replica that is read, and another one that is read for corrections."""

    main: str | None = None
    correcting: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """Last reported status of a replica, and its progress."""

    replica: str
    status: Status
    #: Position before the last step, and the time at which that step was reported.
    before: int
    stepped_at: int

    def surely(self, now: int) -> int:
        """Position that every other replica can be expected to have reached as well."""
        reached = self.status.reached
        return reached if now - self.stepped_at >= STEP_US else min(self.before, reached)


class ReplicaSelector:
    """Chooses the replica for one consumer and one stream."""

    def __init__(
        self,
        replicas: Sequence[str],
        local_replica: str | None = None,
        tolerance_buckets: int = LAG_BUCKETS,
    ) -> None:
        self.replicas = tuple(replicas)
        #: The local replica, in pairs: preferred among replicas of equal rank.
        self.local_replica = local_replica
        #: A STABLE replica that is this many buckets behind loses its rank to a tentative one.
        self.too_far = max(LAG_BUCKETS, tolerance_buckets + 1)
        self._known: dict[str, _Known] = {}
        #: Position of a replica that is behind another one, and since when it has been there.
        self._behind: dict[str, tuple[int, int]] = {}
        self.choice = Choice()

    def knows(self, replica: str) -> bool:
        return replica in self._known

    def heard(self, at: int, replica: str, status: Status) -> None:
        last = self._known.get(replica)
        if last is None:
            self._known[replica] = _Known(replica, status, NOTHING, at)
        elif last.status.reached != status.reached:
            self._known[replica] = _Known(replica, status, last.status.reached, at)
        elif last.status != status:
            self._known[replica] = _Known(replica, status, last.before, last.stepped_at)

    def said(self, at: int, replica: str, state: OutputState, upto: int) -> bool:
        """Update the status from a delivery: the state of the replica and its last stable bucket.
        True if the choice may change."""
        entry = self._known.get(replica)
        if entry is None:
            return False
        before = entry.status
        self.heard(at, replica, before._replace(state=state, upto=max(upto, before.upto)))
        return before.state is not state

    def gone(self, replica: str) -> None:
        self._known.pop(replica, None)
        self._behind.pop(replica, None)
        main, correcting = self.choice
        self.choice = Choice(
            None if main == replica else main, None if correcting == replica else correcting
        )

    def forget(self) -> None:
        self._known, self._behind, self.choice = {}, {}, Choice()

    def choose(self, now: int, wanted: int | None) -> Choice:
        """Choose the replicas to read. `wanted`: the next stable bucket that the consumer is
        missing."""
        main = self._best(now, wanted)
        self.choice = Choice(main, self._corrector(main))
        return self.choice

    def _best(self, now: int, wanted: int | None) -> str | None:
        """The replica to read. The current one is preferred among equally good replicas."""
        entries = [self._known[name] for name in self.replicas if name in self._known]
        rank = {entry.replica: self._rank(entry, now) for entry in entries}

        def key(entry: _Known) -> tuple[int, bool, bool, bool, bool]:
            behind = wanted is not None and entry.status.upto < wanted - 1
            name = entry.replica
            # A replica that never completes the stream need not be behind by a single bucket.
            return rank[name], rank[name] == 0 and behind, not entry.status.ended, (
                name != self.local_replica), name != self.choice.main  # fmt: skip

        first = min(entries, key=key, default=None)
        if first is None:
            return None
        equal = [entry for entry in entries if rank[entry.replica] == rank[first.replica]]
        lag = self._furthest(first, equal, now) - first.status.reached
        if lag >= LAG_BUCKETS or self._is_stuck(first, lag, now):
            return max(equal, key=lambda entry: entry.status.reached).replica
        return first.replica

    def _is_stuck(self, entry: _Known, lag: int, now: int) -> bool:
        """Where buckets are wide, `LAG_BUCKETS` of them take long: a replica is also left when it
        has made no progress for `STEP_US` while another one was ahead."""
        if lag < 1:
            self._behind.pop(entry.replica, None)
            return False
        reached = entry.status.reached
        at, since = self._behind.setdefault(entry.replica, (reached, now))
        if at != reached:
            self._behind[entry.replica] = reached, now
            return False
        return now - since >= STEP_US

    def _rank(self, entry: _Known, now: int) -> int:
        status = entry.status
        if status.state is OutputState.STABLE:
            # A replica that is cut off from all its inputs stays STABLE but makes no progress.
            furthest = self._furthest(entry, self._known.values(), now)
            return 2 if furthest - status.upto >= self.too_far else 0
        if status.state is OutputState.UP_FAILURE:
            # A replica that makes no progress has no new results.
            furthest = self._furthest(entry, self._known.values(), now)
            return 3 if furthest - status.reached >= self.too_far else 1
        return 2  # the furthest one of these and of the STABLE replicas that are too far behind

    def _furthest(self, entry: _Known, others: Iterable[_Known], now: int) -> int:
        """Position of the furthest replica. For the local replica: the position that it can be
        expected to have reached as well."""
        is_local = entry.replica == self.local_replica
        return max(other.surely(now) if is_local else other.status.reached for other in others)

    def _corrector(self, main: str | None) -> str | None:
        if main is None or self._known[main].status.state is not OutputState.UP_FAILURE:
            return None
        others = [
            entry
            for name, entry in self._known.items()
            if name != main and entry.status.state is not OutputState.UP_FAILURE
        ]
        best = max(others, key=lambda other: (other.status.upto, other.replica), default=None)
        return None if best is None else best.replica
