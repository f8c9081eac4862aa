"""Promises between replicas while one of them corrects its results (Borealis section 3.4.3). Pure.

Before a replica suspends its results for a correction, a peer must have promised to keep giving
results. The promise is a lease: it holds between two replicas, for one correction, and until a
certain time. The correcting replica renews the lease and reports its position; the peer replies
with the position of its own results. So each replica notices when the other is gone, hung, or makes
no progress. No replica waits forever for a correction that is stuck or slower than its input. No
replica stays suspended because of a peer that died, or that answers calls but gives no results.
Replicas that want to correct their results at the same time do so in the order of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.frozen import dataclass

#: A promise that is not renewed ends after PROMISE_US; it is renewed every RENEW_US.
PROMISE_US = 2_000_000
RENEW_US = 500_000
#: A correcting replica relies on a promise for this long after an answer that shows progress, or
#: that shows that no result was due.
RELY_US = 1_200_000
#: Peers are asked again after this long when one of them has refused.
ASK_AGAIN_US = 200_000
#: A correction without progress for this long does not delay the correction of another replica.
STALLED_US = 5_000_000

#: `answering`: the peer keeps giving results for as long as the promise lasts. `refused`: the peer
#: is suspended itself, or corrects its results first. `away`: the peer has no results to give, or
#: is unreachable.
Answer = Literal["answering", "refused", "away"]


class Question(Protocol):
    """The request of a peer that corrects its results, or wants to."""

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
    """The reply of a peer to a `Question`."""

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
    """A promise that this replica made to a peer."""

    correction: int
    until: int
    #: Buckets that the peer has left to correct, and when this number last decreased.
    left: int
    nearer_at: int


@dataclass(frozen=True, slots=True)
class _Lease:
    """A promise that a peer made to this replica."""

    until: int
    #: Last bucket that the peer has given, stable or tentative.
    reached: int


class Promises:
    """Promises that one path of one replica has received and made."""

    def __init__(self, me: str, peers: Sequence[str]) -> None:
        self.me, self.peers = me, tuple(peers)
        #: The correction that peers are asked about; None: no correction is wanted or under way.
        self.correction: int | None = None
        self._leases: dict[str, _Lease] = {}
        self._answers: dict[str, Answer] = {}
        self._ask_at = 0
        self._grants: dict[str, _Grant] = {}

    # -- the correcting replica -----------------------------------------------------------------

    def begin(self, correction: int) -> None:
        if self.correction != correction:
            self.correction = correction
            self._leases, self._answers, self._ask_at = {}, {}, 0

    def end(self) -> bool:
        """The correction is over, or postponed. True: peers were asked, answered or not, and must
        be notified; otherwise they wait for the correction until the promise ends."""
        peers_asked = self.correction is not None and bool(self._ask_at)
        self.correction, self._leases, self._answers = None, {}, {}
        return peers_asked

    def due(self, at: int) -> bool:
        """Whether to ask all peers now. True starts the interval until the next request."""
        if self.correction is None or not self.peers or at < self._ask_at:
            return False
        self._ask_at = at + RENEW_US
        return True

    def answered(self, reply: Answering, newest: int | None, mine: int | None) -> None:
        """`newest`: the last bucket for which this replica, and so its peer, has input. `mine`: the
        last bucket that this replica has given. A new promise is ignored if the peer is so far
        behind that consumers would switch away from it."""
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
        """Whether a promise of any peer is still valid."""
        return any(lease.until > at for lease in self._leases.values())

    def decision(self, at: int) -> Answer | None:
        """The combined answer of all peers: one peer that keeps giving results is enough. None: no
        promise is valid and not all peers have answered."""
        if self.covered(at):
            return "answering"
        if len(self._answers) < len(self.peers):
            return None
        return "refused" if "refused" in self._answers.values() else "away"

    # -- the replica that keeps giving results --------------------------------------------------

    def asked(self, question: Question, newest: int, *, able: bool, wants: bool) -> Answer:
        """`newest`: the last bucket for which this replica has input. `able`: this replica gives
        results, stable or tentative, as they become due. `wants`: this replica is in UP_FAILURE and
        has a correction of its own ahead."""
        at, peer, grant = question.at, question.peer, self._grants.get(question.peer)
        if question.done:
            self._grants.pop(peer, None)
            return "away"
        if not able:
            self._grants.pop(peer, None)
            return "refused" if self.covered(at) else "away"
        promised, remaining = grant is not None and grant.until > at, newest - question.position
        if wants and self.correction is not None and self.me < peer and not promised:
            return "refused"
        if grant is None or grant.correction != question.correction:
            grant = _Grant(question.correction, at, remaining, at)
            self._grants[peer] = grant
        elif remaining < grant.left or not question.started:
            grant.left, grant.nearer_at = remaining, at
        if wants and at - grant.nearer_at >= STALLED_US:
            grant.until = at
            return "refused"
        grant.until = at + PROMISE_US
        return "answering"

    def waits_for(self, at: int) -> str | None:
        """The peer that corrects its results while this replica keeps giving results."""
        return next((peer for peer, grant in self._grants.items() if grant.until > at), None)

    def next_at(self, at: int) -> int | None:
        """Time of the next change without an event: a request is due, or a promise ends."""
        times = [grant.until for grant in self._grants.values() if grant.until > at]
        if self.correction is not None and self.peers:
            ends = [lease.until for lease in self._leases.values()]
            times += [max(self._ask_at, at + 1), *(end for end in ends if end > at)]
        return min(times, default=None)
