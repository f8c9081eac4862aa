"""Which replica of a producer to read (Borealis sections 3.3 and 3.5). Pure.

Every replica says now and then how it stands with the stream. A reader follows one of them: one
that is STABLE if there is any, else one in UP_FAILURE, else whatever is there. While it has to be
content with tentative rows, a replica in STABILIZATION is followed beside it, for the corrections.
What is stable may be taken from anybody; what is tentative only from the one that is followed, so
that no two replicas' guesses are mixed.

Where replicas are pairs, a reader goes back to the copy in its own dataflow, its `home`. Two copies
under load take long steps, and finish them one after the other: that the other one is ahead by a
step is no reason to go there and back. It is one when it is ahead by more, or for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.core.following import NOTHING, Following
from holdfast.types import OutputState

#: A stable replica that is so many buckets behind another one is left for it.
LAG_BUCKETS = 3
#: A step takes less: after that, a home that is behind by a step is not at work on it.
STEP_US = 10_000_000


@dataclass(frozen=True, slots=True)
class Heard:
    """A replica said how it stands."""

    at: int
    replica: str
    state: OutputState
    upto: int
    tentative_upto: int | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A replica cannot be reached, or does not serve this reader."""

    at: int
    replica: str


Event = Heard | Gone


@dataclass(frozen=True, slots=True)
class Follow:
    """Read from this replica from now on, in place of the one before."""

    replica: str
    correcting: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop reading in that role."""

    correcting: bool


Action = Follow | Drop


@dataclass(frozen=True, slots=True)
class _Known:
    """How a replica stands, and how it got there."""

    heard: Heard
    #: How far it was before its last step, and when that was over.
    before: int
    stepped_at: int

    @property
    def reached(self) -> int:
        heard = self.heard
        return heard.upto if heard.tentative_upto is None else heard.tentative_upto

    def surely(self, now: int) -> int:
        """How far anybody else may be expected to be, too."""
        return self.reached if now - self.stepped_at >= STEP_US else min(self.before, self.reached)


class Upstream:
    """Of one reader and one stream."""

    def __init__(
        self, replicas: Sequence[str], following: Following, home: str | None = None
    ) -> None:
        self.replicas, self.following = tuple(replicas), following
        #: The one in the same dataflow, where replicas are pairs: read when it is as good.
        self.home = home
        self._known: dict[str, _Known] = {}
        self._now = 0
        #: Who is followed, and who is read for corrections; never the same.
        self.main: str | None = None
        self.correcting: str | None = None
        #: When a replica that was followed was found gone, until another one is read.
        self.lost_at: int | None = None

    def handle(self, event: Event) -> list[Action]:
        self._now = event.at
        if isinstance(event, Heard):
            self._hears(event)
        else:
            self._known.pop(event.replica, None)
            if event.replica == self.main:
                self.main, self.lost_at = None, event.at
            if event.replica == self.correcting:
                self.correcting = None
        return self._choose()

    def said(self, at: int, replica: str, state: OutputState, upto: int) -> list[Action]:
        """What comes with the rows: the state they were made in, and how far they go."""
        self._now, known = at, self._known.get(replica)
        if known is None:
            return []
        heard = known.heard
        self._hears(replace(heard, at=at, state=state, upto=max(upto, heard.upto)))
        return self._choose() if heard.state is not state else []

    def _hears(self, heard: Heard) -> None:
        was = self._known.get(heard.replica)
        known = _Known(heard, NOTHING if was is None else was.reached, heard.at)
        if was is not None and was.reached == known.reached:
            known = replace(was, heard=heard)
        self._known[heard.replica] = known

    def takes_tentative(self, replica: str) -> bool:
        return replica == self.main

    def _choose(self) -> list[Action]:
        main = self._best()
        correcting = self._corrector(main)
        actions: list[Action] = []
        if correcting is None and self.correcting is not None:
            actions.append(Drop(correcting=True))
        if main is not None and main != self.main:
            actions.append(Follow(main, correcting=False))
        if correcting is not None and correcting != self.correcting:
            actions.append(Follow(correcting, correcting=True))
        self.main, self.correcting = main, correcting
        return actions

    def _best(self) -> str | None:
        """The replica to follow; the one that is followed where nothing speaks for another."""
        known = [self._known[name] for name in self.replicas if name in self._known]
        rank = {it.heard.replica: self._rank(it) for it in known}
        first = min(
            rank,
            key=lambda name: (rank[name], name != self.home, name != self.main),
            default=None,
        )
        if first is None:
            return None
        equal = [it for it in known if rank[it.heard.replica] == rank[first]]
        if self._lags(first, self._known[first].reached, equal):
            return max(equal, key=lambda it: it.reached).heard.replica
        return first

    def _rank(self, known: _Known) -> int:
        heard = known.heard
        if heard.state is OutputState.STABLE:
            # One that has less than the reader itself is no better than one that catches up; and
            # one that was cut off from all its inputs knows of no failure, and does not get on.
            behind = self.following.at is not None and heard.upto < self.following.at - 1
            lags = self._lags(heard.replica, heard.upto, self._known.values())
            return 2 if behind or lags else 0
        return 1 if heard.state is OutputState.UP_FAILURE else 3

    def _lags(self, replica: str, reached: int, others: Iterable[_Known]) -> bool:
        home = replica == self.home
        furthest = max(it.surely(self._now) if home else it.reached for it in others)
        return furthest - reached >= LAG_BUCKETS

    def _corrector(self, main: str | None) -> str | None:
        if main is None or self._known[main].heard.state is not OutputState.UP_FAILURE:
            return None
        others = [
            known.heard
            for name, known in self._known.items()
            if name != main and known.heard.state is not OutputState.UP_FAILURE
        ]
        best = max(others, key=lambda heard: (heard.upto, heard.replica), default=None)
        return None if best is None else best.replica
