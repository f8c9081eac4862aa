"""Replicas of one path that send requests to each other, in virtual time. Each replica is a
`Progress` with a driver that performs its actions. A replica may die, hang, or have a full disk.

A tentative step and a request take one millisecond each. The test sets the time that a bucket of a
stable step takes, and the maximum number of buckets in a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from holdfast.core.correction_leases import Answer
from holdfast.core.job_size import JobLimits
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Action,
    Answered,
    Ask,
    Asked,
    BoundaryArrived,
    Event,
    Reply,
    Run,
    RunTentative,
    Tick,
    Wake,
)
from holdfast.types import OutputState
from tests.core.transcripts import done, plan_of, stable, tentative_done

MS = 1_000
#: How long a bucket may be held (X in Borealis). A bucket arrives every 100 ms.
X = 1_000 * MS
WIDTH = 100 * MS
#: A replica that does not answer for this long counts as away.
SILENCE = 2_000 * MS
POLICY = Policy("process", "process", patience_us=X, own_us=X)


@dataclass
class Replica:
    name: str
    core: Progress
    #: Dead: requests to the replica fail at once. Hung: requests time out.
    dead: bool = False
    hung: bool = False
    #: The disk is full: steps are computed, but cannot be written.
    full: bool = False
    #: When each bucket was first given, stable or tentative.
    given: dict[int, int] = field(default_factory=dict)
    states: list[tuple[int, OutputState]] = field(default_factory=list)
    #: Steps that wait for disk space.
    waiting: list[Run] = field(default_factory=list)

    @property
    def state(self) -> OutputState:
        return self.core.paths["p"].consistency.state

    @property
    def position(self) -> int:
        position = self.core.paths["p"].position
        assert position is not None
        return position

    def is_silent(self, now: int) -> bool:
        """The replica gives no results, because it relies on the promise of a peer."""
        path = self.core.paths["p"].consistency
        return path.state is OutputState.STABILIZATION and path.promises.covered(now)


class Replicas:
    def __init__(
        self, names: Sequence[str], policy: Policy = POLICY, *, cost_us: int = MS, group: int = 256
    ) -> None:
        self.now, self._cost_us = 0, cost_us
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._number = count()
        self._tickets = count(1)
        self.all = {
            name: Replica(
                name,
                stable(plan_of(replace(policy, peers=peers)), me=name, limits=JobLimits(group)),
            )
            for name in names
            for peers in [tuple(other for other in names if other != name)]
        }
        #: Replies that are due, by ticket: replica that replies, replica that asked, request.
        self._replies: dict[int, tuple[Replica, Replica, Ask]] = {}
        #: All answers: time, name of the replica that asked, name of the peer, answer.
        self.answers: list[tuple[int, str, str, Answer]] = []

    def __getitem__(self, name: str) -> Replica:
        return self.all[name]

    # -- time -----------------------------------------------------------------------------------

    def at(self, when: int, fn: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._number), fn))

    def until(self, when: int) -> None:
        while self._queue and self._queue[0][0] <= when:
            self.now, _, fn = heapq.heappop(self._queue)
            fn()
            suspended = [replica.is_silent(self.now) for replica in self.all.values()]
            assert not all(suspended), f"at {self.now} every replica relies on another one"
        self.now = when

    def tell(self, replica: Replica, event: Event) -> None:
        if not (replica.dead or replica.hung):
            for action in replica.core.handle(event):
                self._carry(replica, action)

    # -- inputs ---------------------------------------------------------------------------------

    def feed(self, stream: str, first: int, last: int, delay_us: int = 0) -> None:
        """Deliver a bucket every 100 ms: bucket b ends at b times 100 ms."""
        for bucket in range(first, last + 1):
            self.at(bucket * WIDTH + delay_us, lambda b=bucket: self.bring(stream, b))  # type: ignore[misc]

    def bring(self, stream: str, upto: int, *names: str) -> None:
        """Deliver a boundary to the replicas `names`; none given: to all."""
        rows = ((upto, 1, 0),)
        for name in names or self.all:
            self.tell(self.all[name], BoundaryArrived(self.now, stream, upto, rows))

    # -- driver ---------------------------------------------------------------------------------

    def _carry(self, replica: Replica, action: Action) -> None:
        match action:
            case Wake():
                self.at(action.at, lambda: self.tell(replica, Tick(self.now)))
            case Run():
                self._run(replica, action)
            case RunTentative():
                self.at(self.now + MS, lambda: self._tentative_buckets(replica, action))
            case Ask():
                for name in self.all[replica.name].core.paths["p"].plan.policy.peers:
                    peer = self.all[name]
                    self.at(self.now + MS, lambda peer=peer: self._ask(replica, peer, action))  # type: ignore[misc]
            case Reply():
                peer, asker, ask = self._replies.pop(action.ticket)
                self._answer(asker, peer, ask, action.answer, action.reached)
            case _:
                if (state := getattr(action, "state", None)) is not None:
                    replica.states.append((self.now, state))

    def _run(self, replica: Replica, run: Run) -> None:
        def finish() -> None:
            if replica.full:
                replica.waiting.append(run)
                return
            self._give(replica, run)
            self.tell(replica, done(self.now, run.hi))

        self.at(self.now + self._cost_us * (run.hi + 1 - run.lo), finish)

    def _tentative_buckets(self, replica: Replica, run: RunTentative) -> None:
        if not replica.full:
            self._give(replica, run)
        hi = None if replica.full else run.hi
        self.tell(replica, tentative_done(self.now, hi, run.line))

    def _give(self, replica: Replica, run: Run | RunTentative) -> None:
        if not (replica.dead or replica.hung):
            for bucket in range(run.lo, run.hi + 1):
                replica.given.setdefault(bucket, self.now)

    def has_space(self, name: str) -> None:
        replica = self.all[name]
        replica.full = False
        runs, replica.waiting = replica.waiting, []
        for run in runs:
            self._run(replica, run)

    def _ask(self, asker: Replica, peer: Replica, ask: Ask) -> None:
        if peer.hung:
            self.at(self.now + SILENCE, lambda: self._answer(asker, peer, ask, "away"))
            return
        if peer.dead:
            self._answer(asker, peer, ask, "away")
            return
        self._replies[ticket := next(self._tickets)] = (peer, asker, ask)
        self.tell(
            peer,
            Asked(
                self.now,
                ticket,
                "p",
                asker.name,
                ask.correction,
                ask.position,
                ask.started,
                ask.done,
            ),
        )

    def _answer(
        self, asker: Replica, peer: Replica, ask: Ask, answer: Answer, reached: int | None = None
    ) -> None:
        if not ask.done:
            self.answers.append((self.now, asker.name, peer.name, answer))
            answered = Answered(self.now, "p", peer.name, ask.correction, answer, reached)
            self.at(self.now, lambda: self.tell(asker, answered))

    # -- results for consumers ------------------------------------------------------------------

    def first_given(self, bucket: int) -> int | None:
        """Time at which the first replica gave the bucket; None: no replica gave it."""
        times = [r.given[bucket] for r in self.all.values() if bucket in r.given]
        return min(times, default=None)

    def latest_us(self, first: int, last: int) -> int:
        """The longest time from the end of one of these buckets to its first result."""
        delays = []
        for bucket in range(first, last + 1):
            given_at = self.first_given(bucket)
            assert given_at is not None, f"no replica gave bucket {bucket}"
            delays.append(given_at - bucket * WIDTH)
        return max(delays)
