"""SUnion (Borealis sections 3.2, 3.3): a bucket is complete when every input has declared its
boundary, and is held for a limited time.

Only boundaries count: rows that have arrived prove nothing about rows that have not. The engine
sorts the rows of a bucket into canonical order, so here a bucket is just a number. The cost of a
query does not grow with the duration of a failure: a deadline that a newer one covers is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from holdfast.errors import ProtocolViolation

#: The boundary of a stream that has ended: after every bucket.
FOREVER = 2**62
#: Expired deadlines of an input are removed when the input has this many deadlines.
MANY = 8
#: Weight of one new bucket in the moving average of an input's row rate.
RATE_WEIGHT = 0.1


class _Held(NamedTuple):
    """Buckets up to `upto` arrived at `since` and may be held until `until`."""

    upto: int
    since: int
    until: int


class Partial(NamedTuple):
    """How partial a tentative bucket is: the share of the inputs that were available, and their
    share of the rows expected from the recent rates of all inputs."""

    inputs: float
    rows: float


WHOLE = Partial(1.0, 1.0)


class _TentativeInput(NamedTuple):
    """Tentative buckets after the previous entry, up to `upto`: the inputs that were missing
    upstream, and how partial the buckets are."""

    upto: int
    missing: tuple[str, ...]
    partial: Partial


_upto = attrgetter("upto")


class SUnion:
    """Boundaries of the inputs of one path."""

    def __init__(
        self, inputs: Sequence[str], patience_us: int | None = None, own_us: int = 0
    ) -> None:
        assert inputs, "expected at least one input, found none"
        #: How long a bucket is held after it arrived on one input: `patience_us` less the delay
        #: already spent upstream, but at least `own_us`. `patience_us` None: without limit.
        self.patience_us, self.own_us = patience_us, own_us
        #: Last complete bucket of each input; None while it is unknown.
        self.complete_upto: dict[str, int | None] = dict.fromkeys(inputs)
        #: Last bucket of each input that has ended; its boundary is then FOREVER.
        self.ended_at: dict[str, int] = {}
        #: Last bucket of such an input that was due when it ended; None: no bucket was due.
        self._due_at_end: dict[str, int | None] = {}
        #: Last tentative bucket of each input, and the tentative buckets that may still be used.
        self.tentative_upto: dict[str, int] = {}
        self._tentative_inputs: dict[str, list[_TentativeInput]] = {stream: [] for stream in inputs}
        #: Recent rows per bucket of each input; None before the first measurement.
        self.rate: dict[str, float | None] = dict.fromkeys(inputs)
        #: Bucket of the durable version after a restart; boundaries up to this bucket are ignored.
        self._resumed_at: int | None = None
        #: Deadlines per input; `upto` and `until` both ascend.
        self._held: dict[str, deque[_Held]] = {stream: deque() for stream in inputs}
        self._expired_upto: int | None = None
        #: Inputs that have declared a boundary since the start of the node.
        self._heard: set[str] = set()

    @property
    def heard_all(self) -> bool:
        """Every input has declared a boundary since the start of the node."""
        return len(self._heard) == len(self.complete_upto)

    @property
    def missing_since_start(self) -> bool:
        """The node was restarted from a durable version, and some input has declared no boundary
        since."""
        return self._resumed_at is not None and not self.heard_all

    def resume(self, bucket: int) -> None:
        """The node continues from a durable version of `bucket`: every input was complete up to
        this bucket."""
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
        """An input is complete up to `upto`. `spent_us`: delay that the buckets have already spent
        upstream."""
        complete = self.complete_upto[stream]
        self._heard.add(stream)
        if ended:
            if stream not in self.ended_at:
                # The end may be in the future: only the next bucket counts as due.
                due = None if complete is None else min(upto, complete + 1)
                if due is not None:
                    self._arrived(stream, due, at, spent_us)
                self._due_at_end[stream] = due
            self.ended_at[stream], upto = upto, FOREVER
        elif self._resumed_at is not None and upto <= self._resumed_at:
            return
        if complete is not None and upto < complete:
            raise ProtocolViolation(f"the boundary of {stream} went back from {complete} to {upto}")
        self._arrived(stream, upto, at, spent_us)
        self._count(stream, rows, complete, upto)
        self.complete_upto[stream] = upto
        if upto >= self.tentative_upto.get(stream, upto):
            self.tentative_upto.pop(stream, None)
        del self._tentative_inputs[stream][
            : bisect_right(self._tentative_inputs[stream], upto, key=_upto)
        ]

    def tentative(
        self,
        stream: str,
        upto: int,
        at: int,
        missing: tuple[str, ...],
        partial: Partial = WHOLE,
    ) -> None:
        complete = self.complete_upto[stream]
        if complete is None or upto > complete:
            self._arrived(stream, upto, at, None)
            self.tentative_upto[stream] = max(upto, self.tentative_upto.get(stream, upto))
            entries = self._tentative_inputs[stream]
            if entries and entries[-1].upto >= upto:
                return  # a tentative bucket is taken once
            if entries and (entries[-1].missing, entries[-1].partial) == (missing, partial):
                entries.pop()
            entries.append(_TentativeInput(upto, missing, partial))

    def _arrived(self, stream: str, upto: int, at: int, spent_us: int | None) -> None:
        if self.patience_us is None or upto >= FOREVER:
            return
        available = self.available(stream)
        if available is not None and upto <= available:
            return
        hold_us = self.own_us
        if spent_us is not None:
            hold_us = max(self.own_us, self.patience_us - spent_us)
        held, until = self._held[stream], at + hold_us
        if len(held) >= MANY:
            self.expired_upto(at)  # removes expired deadlines
        since = at if spent_us is None else at - spent_us
        while held and held[-1].until >= until:  # the newer deadline covers the older one
            since = min(since, held.pop().since)
        held.append(_Held(upto, since, until))

    def _count(self, stream: str, rows: int, complete: int | None, upto: int) -> None:
        if complete is None or upto >= FOREVER or upto <= complete:
            return
        newest, before = rows / (upto - complete), self.rate[stream]
        weight = 1.0 if before is None else min(1.0, RATE_WEIGHT * (upto - complete))
        self.rate[stream] = newest * weight + (before or 0.0) * (1.0 - weight)

    def newest(self) -> int | None:
        """The newest bucket that is due on any input. The end of an input may be in the future."""
        if len(self.ended_at) == len(self.complete_upto):
            return max(self.ended_at.values())
        positions = [self._due_at_end.get(s, self.available(s)) for s in self.complete_upto]
        return max((upto for upto in positions if upto is not None), default=None)

    def available(self, stream: str) -> int | None:
        """Last available bucket of an input, stable or tentative."""
        complete, tentative = self.complete_upto[stream], self.tentative_upto.get(stream)
        return tentative if tentative is not None else complete

    def all_complete_upto(self) -> int | None:
        """Last bucket that is complete on every input; None while any input is unknown."""
        boundaries = [upto for upto in self.complete_upto.values() if upto is not None]
        return min(boundaries) if len(boundaries) == len(self.complete_upto) else None

    def waiting_for(self) -> list[str]:
        """The inputs that the next bucket waits for, in order of their names."""
        unknown = sorted(stream for stream, upto in self.complete_upto.items() if upto is None)
        if unknown:
            return unknown
        oldest = self.all_complete_upto()
        return sorted(stream for stream, upto in self.complete_upto.items() if upto == oldest)

    def missing(self, lo: int, hi: int) -> tuple[tuple[str, ...], Partial]:
        """The inputs missing in the buckets `lo` to `hi`, here or upstream, and how partial the
        worst of these buckets is."""
        names: list[str] = []
        missing_upstream: list[str] = []
        known_rates = [rate for rate in self.rate.values() if rate is not None]
        usual = sum(known_rates) / len(known_rates) if known_rates else 1.0
        weights = {s: usual if rate is None else rate for s, rate in self.rate.items()}
        available = Partial(0.0, 0.0)
        for stream in sorted(self.complete_upto):
            available_upto, weight = self.available(stream), weights[stream]
            share = Partial(0.0, 0.0)
            entries = self._used(stream, lo, hi)
            for entry in entries:
                missing_upstream += entry.missing
            if available_upto is None or available_upto < hi:
                names.append(stream)
            else:
                share = Partial(
                    min((entry.partial.inputs for entry in entries), default=1.0),
                    min((entry.partial.rows for entry in entries), default=1.0),
                )
            available = Partial(
                available.inputs + share.inputs, available.rows + weight * share.rows
            )
        expected = sum(weights.values())
        rows = available.rows / expected if expected else 1.0
        partial = Partial(round(available.inputs / len(self.complete_upto), 4), round(rows, 4))
        return tuple(dict.fromkeys([*names, *missing_upstream])), partial

    def _used(self, stream: str, lo: int, hi: int) -> list[_TentativeInput]:
        """The tentative entries that cover the buckets `lo` to `hi`."""
        entries = self._tentative_inputs[stream]
        first = bisect_left(entries, lo, key=_upto)
        return entries[first : bisect_left(entries, hi, lo=first, key=_upto) + 1]

    def spent_us(self, at: int) -> int:
        """Delay spent so far on the oldest bucket that is held, including upstream."""
        oldest = [held[0].since for held in self._held.values() if held]
        return max((at - since for since in oldest), default=0)

    def expired_upto(self, at: int) -> int | None:
        """Last bucket whose deadline has passed."""
        for held in self._held.values():
            while held and held[0].until <= at:
                upto = held.popleft().upto
                last = self._expired_upto
                self._expired_upto = upto if last is None else max(upto, last)
        return self._expired_upto

    def is_overdue(self, after: int, at: int) -> bool:
        """Whether the deadline of a bucket later than `after` has passed."""
        if self._expired_upto is not None and self._expired_upto > after:
            return True
        return any(
            deadline.upto > after and deadline.until <= at
            for held in self._held.values()
            for deadline in held
        )

    def next_expiry(self, after: int, at: int) -> int | None:
        """Next deadline of a bucket later than `after`."""
        for held in self._held.values():
            while held and held[0].upto <= after:
                held.popleft()
        return min((held[0].until for held in self._held.values() if held), default=None)

    def done(self, upto: int) -> None:
        """Results up to `upto` are published: the deadlines of these buckets are removed."""
        for held in self._held.values():
            while held and held[0].upto <= upto:
                held.popleft()
