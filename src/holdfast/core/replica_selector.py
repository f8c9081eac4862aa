"""Which replica of a producer to read (Borealis sections 3.3 and 3.5). Pure.

Every replica says now and then how it is doing with the stream. A consumer reads one of them: one
that is STABLE if there is any that is not too far behind, else one in UP_FAILURE that gets on, else
whatever is there. While it has to be content with tentative rows, a replica in STABILIZATION is
read beside it, for the corrections. What is stable may be taken from any replica; what is tentative
only from the one that is read, so that no two replicas' guesses are mixed.

How far behind is too far is for the consumer to say: as long as it may wait anyway, stable rows a
little later are better than tentative ones now.

Where replicas are pairs, a consumer goes back to the copy in its own dataflow, its `home`. Two
copies under load take long steps, and finish them one after the other: that the other one is ahead
by a step is no reason to go there and back. It is one when it is ahead by more, or for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.frozen import dataclass
from holdfast.types import OutputState

#: Before every bucket.
NOTHING = -(2**62)
#: Of two that are equally good, the one that is read is left when it is so many buckets behind.
LAG_BUCKETS = 3
#: A step takes less: after that, a home that is behind by a step is not at work on it.
STEP_US = 10_000_000


class Status(NamedTuple):
    """How a replica is doing with a stream: up to where it is stable, and tentative."""

    state: OutputState
    upto: int
    tentative_upto: int | None = None

    @property
    def reached(self) -> int:
        return self.upto if self.tentative_upto is None else self.tentative_upto


class Choice(NamedTuple):
    """Who is read, and who is read beside it for corrections; never the same."""

    main: str | None = None
    correcting: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """How a replica is doing, and how it got there."""

    replica: str
    status: Status
    #: How far it was before its last step, and when that was over.
    before: int
    stepped_at: int

    def surely(self, now: int) -> int:
        """How far any other may be expected to be, too."""
        reached = self.status.reached
        return reached if now - self.stepped_at >= STEP_US else min(self.before, reached)


class ReplicaSelector:
    """Of one consumer and one stream."""

    def __init__(
        self,
        replicas: Sequence[str],
        home: str | None = None,
        tolerance_buckets: int = LAG_BUCKETS,
    ) -> None:
        self.replicas = tuple(replicas)
        #: The one in the same dataflow, where replicas are pairs: read when it is as good.
        self.home = home
        #: A stable replica that is so far behind a tentative one is left for it.
        self.too_far = max(LAG_BUCKETS, tolerance_buckets + 1)
        self._known: dict[str, _Known] = {}
        self.choice = Choice()

    def knows(self, replica: str) -> bool:
        return replica in self._known

    def heard(self, at: int, replica: str, status: Status) -> None:
        was = self._known.get(replica)
        if was is None:
            self._known[replica] = _Known(replica, status, NOTHING, at)
        elif was.status.reached != status.reached:
            self._known[replica] = _Known(replica, status, was.status.reached, at)
        elif was.status != status:
            self._known[replica] = _Known(replica, status, was.before, was.stepped_at)

    def said(self, at: int, replica: str, state: OutputState, upto: int) -> bool:
        """What came with rows: the state they were made in, and how far they go. True if that may
        change the choice."""
        known = self._known.get(replica)
        if known is None:
            return False
        before = known.status
        self.heard(at, replica, before._replace(state=state, upto=max(upto, before.upto)))
        return before.state is not state

    def gone(self, replica: str) -> None:
        self._known.pop(replica, None)
        main, correcting = self.choice
        self.choice = Choice(
            None if main == replica else main, None if correcting == replica else correcting
        )

    def forget(self) -> None:
        self._known, self.choice = {}, Choice()

    def choose(self, now: int, wanted: int | None) -> Choice:
        """`wanted`: the next stable bucket the consumer lacks."""
        main = self._best(now, wanted)
        self.choice = Choice(main, self._corrector(main))
        return self.choice

    def _best(self, now: int, wanted: int | None) -> str | None:
        """The replica to read; the one that is read where nothing speaks for another."""
        known = [self._known[name] for name in self.replicas if name in self._known]
        rank = {it.replica: self._rank(it, now) for it in known}

        def key(it: _Known) -> tuple[int, bool, bool, bool]:
            behind = wanted is not None and it.status.upto < wanted - 1
            name = it.replica
            return rank[name], rank[name] == 0 and behind, name != self.home, (
                name != self.choice.main
            )  # fmt: skip

        first = min(known, key=key, default=None)
        if first is None:
            return None
        equal = [it for it in known if rank[it.replica] == rank[first.replica]]
        if self._furthest(first, equal, now) - first.status.reached >= LAG_BUCKETS:
            return max(equal, key=lambda it: it.status.reached).replica
        return first.replica

    def _rank(self, known: _Known, now: int) -> int:
        status = known.status
        if status.state is OutputState.STABLE:
            # One that was cut off from all its inputs knows of no failure, and does not get on.
            furthest = self._furthest(known, self._known.values(), now)
            return 2 if furthest - status.upto >= self.too_far else 0
        if status.state is OutputState.UP_FAILURE:
            # One that is stuck answers nothing, however much it has to correct.
            furthest = self._furthest(known, self._known.values(), now)
            return 4 if furthest - status.reached >= self.too_far else 1
        return 3

    def _furthest(self, known: _Known, others: Iterable[_Known], now: int) -> int:
        """How far the others are; of a home, how far it may be expected to be, too."""
        home = known.replica == self.home
        return max(it.surely(now) if home else it.status.reached for it in others)

    def _corrector(self, main: str | None) -> str | None:
        if main is None or self._known[main].status.state is not OutputState.UP_FAILURE:
            return None
        others = [
            known
            for name, known in self._known.items()
            if name != main and known.status.state is not OutputState.UP_FAILURE
        ]
        best = max(others, key=lambda it: (it.status.upto, it.replica), default=None)
        return None if best is None else best.replica
