"""Which replica of a producer to read (Borealis sections 3.3 and 3.5). Pure.

Every replica says now and then how it stands with the stream. A reader follows one of them: one
that is STABLE if there is any, else one in UP_FAILURE, else whatever is there. While it has to be
content with tentative rows, a replica in STABILIZATION is followed beside it, for the corrections.
What is stable may be taken from anybody; what is tentative only from the one that is followed, so
that no two replicas' guesses are mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core.following import Following
from holdfast.types import OutputState

#: A stable replica that is so many buckets behind another one is left for it.
LAG_BUCKETS = 3


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


class Upstream:
    """Of one reader and one stream."""

    def __init__(
        self, replicas: Sequence[str], following: Following, home: str | None = None
    ) -> None:
        self.replicas, self.following = tuple(replicas), following
        #: The one in the same dataflow, where replicas are pairs: read when it is as good.
        self.home = home
        self._known: dict[str, Heard] = {}
        #: Who is followed, and who is read for corrections; never the same.
        self.main: str | None = None
        self.correcting: str | None = None
        #: When a replica that was followed was found gone, until another one is read.
        self.lost_at: int | None = None

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Heard):
            self._known[event.replica] = event
        else:
            self._known.pop(event.replica, None)
            if event.replica == self.main:
                self.main, self.lost_at = None, event.at
            if event.replica == self.correcting:
                self.correcting = None
        return self._choose()

    def said(self, replica: str, state: OutputState, upto: int) -> list[Action]:
        """What comes with the rows: the state they were made in, and how far they go."""
        known = self._known.get(replica)
        if known is None:
            return []
        self._known[replica] = replace(known, state=state, upto=max(upto, known.upto))
        return self._choose() if known.state is not state else []

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
        ranked = sorted(
            known,
            key=lambda heard: (
                self._rank(heard), heard.replica != self.home, heard.replica != self.main,
            ),
        )  # fmt: skip
        if not ranked:
            return None
        first = ranked[0]
        equal = [heard for heard in known if self._rank(heard) == self._rank(first)]
        furthest = max(equal, key=_reached)
        if _reached(furthest) - _reached(first) >= LAG_BUCKETS:
            return furthest.replica
        return first.replica

    def _rank(self, heard: Heard) -> int:
        if heard.state is OutputState.STABLE:
            # One that has less than the reader itself is no better than one that catches up; and
            # one that was cut off from all its inputs knows of no failure, and does not get on.
            behind = self.following.at is not None and heard.upto < self.following.at - 1
            furthest = max(_reached(known) for known in self._known.values())
            return 2 if behind or furthest - heard.upto >= LAG_BUCKETS else 0
        return 1 if heard.state is OutputState.UP_FAILURE else 3

    def _corrector(self, main: str | None) -> str | None:
        if main is None or self._known[main].state is not OutputState.UP_FAILURE:
            return None
        others = [
            heard
            for name, heard in self._known.items()
            if name != main and heard.state is not OutputState.UP_FAILURE
        ]
        best = max(others, key=lambda heard: (heard.upto, heard.replica), default=None)
        return None if best is None else best.replica


def _reached(heard: Heard) -> int:
    return heard.upto if heard.tentative_upto is None else heard.tentative_upto
