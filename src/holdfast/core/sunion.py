"""SUnion (Borealis sections 3.2, 3.3): a bucket is complete when every input said so, and may be
held only so long.

Only boundaries count: rows that have arrived prove nothing about rows that have not. The order
inside a bucket is the engine's canonical one, so here a bucket is just a number. A question costs
the same however long a failure lasts: deadlines that a later one covers are forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from holdfast.errors import ProtocolViolation

#: Stands for "every bucket there will ever be": the boundary of a stream that has ended.
FOREVER = 2**62
#: So many deadlines of an input are kept although they may be over.
MANY = 8
#: Weight of the newest buckets in the recent rate of an input.
RATE_WEIGHT = 0.1


class _Held(NamedTuple):
    """Buckets up to `upto` arrived at `since` and may be held until `until`."""

    upto: int
    since: int
    until: int


class Partial(NamedTuple):
    """How partial a tentative bucket is: the share of the inputs that were there, and the share of
    the rows that the recent rates of all inputs let expect."""

    inputs: float
    rows: float


WHOLE = Partial(1.0, 1.0)


class _Guess(NamedTuple):
    """Buckets up to `upto`, since the guess before, came as tentative: what their producers lacked,
    and how partial they are."""

    upto: int
    lacked: tuple[str, ...]
    partial: Partial


_upto = attrgetter("upto")


class SUnion:
    """Boundaries of the inputs of one path."""

    def __init__(
        self, inputs: Sequence[str], patience_us: int | None = None, own_us: int = 0
    ) -> None:
        assert inputs, "a path without inputs"
        #: How long a bucket is held after it came on one input, with what was spent on its way, and
        #: how long if that was all of it. None: for ever.
        self.patience_us, self.own_us = patience_us, own_us
        #: Last complete bucket of each input; None until its log has been seen.
        self.complete_upto: dict[str, int | None] = dict.fromkeys(inputs)
        #: Last bucket of each input that has ended; its boundary is then FOREVER.
        self.ended_at: dict[str, int] = {}
        #: Last bucket that came as tentative, and how partial those are that may still be used.
        self.tentative_upto: dict[str, int] = {}
        self._guesses: dict[str, list[_Guess]] = {stream: [] for stream in inputs}
        #: Rows per bucket of each input, lately; None before any came.
        self.rate: dict[str, float | None] = dict.fromkeys(inputs)
        #: What was known of every input when the node was started again; older news is no news.
        self._resumed_at: int | None = None
        #: Deadlines per input, `upto` and `until` both rising.
        self._held: dict[str, deque[_Held]] = {stream: deque() for stream in inputs}
        self._expired_upto: int | None = None
        self._heard: set[str] = set()

    @property
    def heard_all(self) -> bool:
        """Every input has said how far it is, since the node was started."""
        return len(self._heard) == len(self.complete_upto)

    @property
    def lacks_since_start(self) -> bool:
        """It was started from a durable version, and some input has not been heard of since."""
        return self._resumed_at is not None and not self.heard_all

    def resume(self, bucket: int) -> None:
        """A durable version of this bucket was found: every input was complete up to it."""
        self._resumed_at = bucket
        self.complete_upto = dict.fromkeys(self.complete_upto, bucket)

    def boundary(
        self,
        stream: str,
        upto: int,
        at: int = 0,
        *,
        ended: bool = False,
        rows: int = 0,
        spent_us: int = 0,
    ) -> None:
        """`spent_us` of what the buckets may wait on their whole way was spent upstream."""
        known = self.complete_upto[stream]
        self._heard.add(stream)
        if ended:
            self._arrived(stream, upto, at, spent_us)
            self.ended_at[stream], upto = upto, FOREVER
        elif self._resumed_at is not None and upto <= self._resumed_at:
            return
        if known is not None and upto < known:
            raise ProtocolViolation(f"the boundary of {stream} went back from {known} to {upto}")
        self._arrived(stream, upto, at, spent_us)
        self._count(stream, rows, known, upto)
        self.complete_upto[stream] = upto
        if upto >= self.tentative_upto.get(stream, upto):
            self.tentative_upto.pop(stream, None)
        del self._guesses[stream][: bisect_right(self._guesses[stream], upto, key=_upto)]

    def tentative(
        self,
        stream: str,
        upto: int,
        at: int,
        lacked: tuple[str, ...],
        partial: Partial = WHOLE,
    ) -> None:
        known = self.complete_upto[stream]
        if known is None or upto > known:
            self._arrived(stream, upto, at, None)
            self.tentative_upto[stream] = max(upto, self.tentative_upto.get(stream, upto))
            guesses = self._guesses[stream]
            if guesses and guesses[-1].upto >= upto:
                return  # a bucket is taken as tentative once
            if guesses and (guesses[-1].lacked, guesses[-1].partial) == (lacked, partial):
                guesses.pop()
            guesses.append(_Guess(upto, lacked, partial))

    def _arrived(self, stream: str, upto: int, at: int, spent_us: int | None) -> None:
        if self.patience_us is None or upto >= FOREVER:
            return
        known = self.available(stream)
        if known is not None and upto <= known:
            return
        hold_us = self.own_us
        if spent_us is not None:
            hold_us = max(self.own_us, self.patience_us - spent_us)
        held, until = self._held[stream], at + hold_us
        if len(held) >= MANY:
            self.expired_upto(at)  # what is over need not be kept to know that
        since = at if spent_us is None else at - spent_us
        while held and held[-1].until >= until:  # once the newer one is over, the older one is too
            since = min(since, held.pop().since)
        held.append(_Held(upto, since, until))

    def _count(self, stream: str, rows: int, known: int | None, upto: int) -> None:
        if known is None or upto >= FOREVER or upto <= known:
            return
        newest, before = rows / (upto - known), self.rate[stream]
        weight = 1.0 if before is None else min(1.0, RATE_WEIGHT * (upto - known))
        self.rate[stream] = newest * weight + (before or 0.0) * (1.0 - weight)

    def newest(self) -> int | None:
        """The last bucket of which anything came."""
        found = [self.ended_at.get(s, self.available(s)) for s in self.complete_upto]
        return max((upto for upto in found if upto is not None), default=None)

    def available(self, stream: str) -> int | None:
        """Last bucket that is there, stable or tentative."""
        complete, tentative = self.complete_upto[stream], self.tentative_upto.get(stream)
        return tentative if tentative is not None else complete

    def all_complete_upto(self) -> int | None:
        """Last bucket that is complete on every input; None while an input is unknown."""
        known = [upto for upto in self.complete_upto.values() if upto is not None]
        return min(known) if len(known) == len(self.complete_upto) else None

    def waiting_for(self) -> list[str]:
        """The inputs that hold up the next bucket, in order of their names."""
        unknown = sorted(stream for stream, upto in self.complete_upto.items() if upto is None)
        if unknown:
            return unknown
        oldest = self.all_complete_upto()
        return sorted(stream for stream, upto in self.complete_upto.items() if upto == oldest)

    def missing(self, lo: int, hi: int) -> tuple[tuple[str, ...], Partial]:
        """What the buckets `lo` to `hi` lack, from all the way up; and how partial they are at
        worst."""
        names: list[str] = []
        lacked: list[str] = []
        known_rates = [rate for rate in self.rate.values() if rate is not None]
        usual = sum(known_rates) / len(known_rates) if known_rates else 1.0
        weights = {s: usual if rate is None else rate for s, rate in self.rate.items()}
        there = Partial(0.0, 0.0)
        for stream in sorted(self.complete_upto):
            known, weight = self.available(stream), weights[stream]
            share = Partial(0.0, 0.0)
            used = self._used(stream, lo, hi)
            for guess in used:
                lacked += guess.lacked
            if known is None or known < hi:
                names.append(stream)
            else:
                share = Partial(
                    min((guess.partial.inputs for guess in used), default=1.0),
                    min((guess.partial.rows for guess in used), default=1.0),
                )
            there = Partial(there.inputs + share.inputs, there.rows + weight * share.rows)
        expected = sum(weights.values())
        rows = there.rows / expected if expected else 1.0
        partial = Partial(round(there.inputs / len(self.complete_upto), 4), round(rows, 4))
        return tuple(dict.fromkeys([*names, *lacked])), partial

    def _used(self, stream: str, lo: int, hi: int) -> list[_Guess]:
        """What came as tentative of these buckets."""
        guesses = self._guesses[stream]
        first = bisect_left(guesses, lo, key=_upto)
        return guesses[first : bisect_left(guesses, hi, lo=first, key=_upto) + 1]

    def spent_us(self, at: int) -> int:
        """How much of what buckets may wait was spent on the oldest one that is held."""
        oldest = [held[0].since for held in self._held.values() if held]
        return max((at - since for since in oldest), default=0)

    def expired_upto(self, at: int) -> int | None:
        """Last bucket that has been held as long as may be."""
        for held in self._held.values():
            while held and held[0].until <= at:
                upto = held.popleft().upto
                self._expired_upto = max(upto, self._expired_upto or upto)
        return self._expired_upto

    def is_overdue(self, after: int, at: int) -> bool:
        """A bucket later than `after` has been held as long as may be."""
        if self._expired_upto is not None and self._expired_upto > after:
            return True
        return any(
            known.upto > after and known.until <= at
            for held in self._held.values()
            for known in held
        )

    def next_expiry(self, after: int, at: int) -> int | None:
        """When the next bucket after `after` will have been held as long as may be."""
        for held in self._held.values():
            while held and held[0].upto <= after:
                held.popleft()
        return min((held[0].until for held in self._held.values() if held), default=None)

    def done(self, upto: int) -> None:
        """Results are given up to here: nothing of it is held any more."""
        for held in self._held.values():
            while held and held[0].upto <= upto:
                held.popleft()
