"""Promises between replicas while one of them corrects itself (Borealis section 3.4.3). Pure.

Before a replica suspends its answers to correct itself, another one must have promised to go on
answering. A promise names who made it to whom, for which correction, and until when: it is a lease.
The corrector renews it and says how far it got, and is told how far the other one's answers are,
so that either end of it notices when the other is gone, hung, or does not get on: nobody waits for
ever for a replica that is stuck, or slower than its input; and nobody stays silent because of one
that died, or that answers questions but has no results. Replicas that want to correct themselves at
the same time go in the order of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.frozen import dataclass

#: A promise that is not renewed ends after so long, and is renewed this often.
PROMISE_US = 2_000_000
RENEW_US = 500_000
#: So long a promise is relied on, after an answer that shows progress, or that nothing was due.
RELY_US = 1_200_000
#: Peers that refused are asked again after so long.
ASK_AGAIN_US = 200_000
#: A correction that came no nearer to its end for so long is no reason to put off another one.
STALLED_US = 5_000_000

#: `answering`: it goes on answering, for as long as a promise lasts. `refused`: it is suspended
#: itself, or goes first. `away`: it has nothing to answer with, or cannot be reached.
Answer = Literal["answering", "refused", "away"]


class Question(Protocol):
    """What a peer asks that corrects itself, or wants to."""

    @property
    def at(self) -> int: ...
    @property
    def peer(self) -> str: ...
    @property
    def correction(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def started(self) -> bool: ...
    @property
    def done(self) -> bool: ...


class Answering(Protocol):
    """What a peer says to that."""

    @property
    def at(self) -> int: ...
    @property
    def peer(self) -> str: ...
    @property
    def correction(self) -> int: ...
    @property
    def answer(self) -> Answer: ...
    @property
    def reached(self) -> int | None: ...


@dataclass(slots=True)
class _Grant:
    """What this replica promised to a peer."""

    correction: int
    until: int
    #: How many buckets the peer had to go, and since when.
    left: int
    nearer_at: int


@dataclass(frozen=True, slots=True)
class _Lease:
    """What a peer promised to this replica."""

    until: int
    #: How far the answers of the peer are.
    reached: int


class Promises:
    """Of one path of one replica: those it was made, and those it made."""

    def __init__(self, me: str, peers: Sequence[str]) -> None:
        self.me, self.peers = me, tuple(peers)
        #: The correction that peers are asked about; None: none is under way.
        self.correction: int | None = None
        self._leases: dict[str, _Lease] = {}
        self._answers: dict[str, Answer] = {}
        self._ask_at = 0
        self._grants: dict[str, _Grant] = {}

    # -- for the one that corrects itself -------------------------------------------------------

    def begin(self, correction: int) -> None:
        if self.correction != correction:
            self.correction = correction
            self._leases, self._answers, self._ask_at = {}, {}, 0

    def end(self) -> bool:
        """The correction is over, or put off. True: peers were asked, whether they have answered
        or not, and should hear of it: else they wait for it as long as a promise lasts."""
        asked = self.correction is not None and bool(self._ask_at)
        self.correction, self._leases, self._answers = None, {}, {}
        return asked

    def due(self, at: int) -> bool:
        """Whether to ask now. Each asking is one round of answers."""
        if self.correction is None or not self.peers or at < self._ask_at:
            return False
        self._ask_at = at + RENEW_US
        return True

    def answered(self, reply: Answering, newest: int | None, mine: int | None) -> None:
        """`newest`: the last bucket of which this replica has input, and so has its peer. `mine`:
        the last one it has given. A peer so far behind that consumers would leave it has nothing to
        promise."""
        at, peer, answer = reply.at, reply.peer, reply.answer
        if reply.correction != self.correction:
            return
        lease, reached = self._leases.get(peer), reply.reached
        if lease is None and reached is not None and mine is not None:
            answer = "away" if mine - reached > LAG_BUCKETS else answer
        self._answers[peer] = answer
        if answer == "answering" and reached is not None:
            if lease is None or reached > lease.reached or newest is None or reached >= newest:
                self._leases[peer] = _Lease(at + RELY_US, reached)
            return
        self._leases.pop(peer, None)
        if self.decision(at) == "refused":
            self._ask_at = min(self._ask_at, at + ASK_AGAIN_US)

    def covered(self, at: int) -> bool:
        """Somebody has promised to answer, and the promise holds."""
        return any(lease.until > at for lease in self._leases.values())

    def decision(self, at: int) -> Answer | None:
        """What the answers come to: one peer that goes on answering is enough. None: not all of
        them have answered."""
        if self.covered(at):
            return "answering"
        if len(self._answers) < len(self.peers):
            return None
        return "refused" if "refused" in self._answers.values() else "away"

    # -- for the one that goes on answering -----------------------------------------------------

    def asked(self, question: Question, newest: int, *, able: bool, wants: bool) -> Answer:
        """`newest`: the last bucket of which this replica has input. `able`: it gives results,
        stable or tentative, as they become due. `wants`: it has not begun to correct itself, and is
        about to."""
        at, peer, grant = question.at, question.peer, self._grants.get(question.peer)
        if question.done:
            self._grants.pop(peer, None)
            return "away"
        if not able:
            self._grants.pop(peer, None)
            return "refused" if self.covered(at) else "away"
        held, left = grant is not None and grant.until > at, newest - question.position
        if wants and self.correction is not None and self.me < peer and not held:
            return "refused"
        if grant is None or grant.correction != question.correction:
            grant = _Grant(question.correction, at, left, at)
            self._grants[peer] = grant
        elif left < grant.left or not question.started:
            grant.left, grant.nearer_at = left, at
        if wants and at - grant.nearer_at >= STALLED_US:
            grant.until = at
            return "refused"
        grant.until = at + PROMISE_US
        return "answering"

    def waits_for(self, at: int) -> str | None:
        """The peer that corrects itself while this replica answers."""
        return next((peer for peer, grant in self._grants.items() if grant.until > at), None)

    def next_at(self, at: int) -> int | None:
        """When something of this changes by itself: to ask again, or that a promise ends."""
        found = [grant.until for grant in self._grants.values() if grant.until > at]
        if self.correction is not None and self.peers:
            ends = [lease.until for lease in self._leases.values()]
            found += [max(self._ask_at, at + 1), *(end for end in ends if end > at)]
        return min(found, default=None)
