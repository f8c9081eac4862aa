"""SUnion (Borealis sections 3.2, 3.3): a bucket is whole when every input said that it is complete,
and may be held only so long.

Only boundaries count: rows that have arrived prove nothing about rows that have not. The order
inside a bucket is the engine's canonical one, so here a bucket is just a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ProtocolViolation

#: Stands for "every bucket there will ever be": the boundary of a stream that has ended.
FOREVER = 2**62


class _Step(NamedTuple):
    """Buckets up to `upto` came with this arrival; they may be held until `until`."""

    upto: int
    until: int


class SUnion:
    """Boundaries of the inputs of one path."""

    def __init__(
        self, inputs: Sequence[str], patience_us: int | None = None, own_us: int = 0
    ) -> None:
        assert inputs, "a path without inputs"
        #: How long a bucket is held after it came on one input, as stable and as tentative: what is
        #: tentative has been held before. None: for ever.
        self.patience_us, self.own_us = patience_us, own_us
        #: Last whole bucket of each input; None until its log has been seen.
        self.complete_upto: dict[str, int | None] = dict.fromkeys(inputs)
        #: Last bucket of each input that has ended; its boundary is then FOREVER.
        self.ended_at: dict[str, int] = {}
        #: Last bucket that came as tentative, and what its makers lacked.
        self.tentative_upto: dict[str, int] = {}
        self.lacked: dict[str, tuple[str, ...]] = {}
        #: Arrivals per input of buckets that nobody has run yet, oldest first.
        self._steps: dict[str, list[_Step]] = {stream: [] for stream in inputs}

    def boundary(self, stream: str, upto: int, at: int = 0, *, ended: bool = False) -> None:
        known = self.complete_upto[stream]
        if ended:
            self._arrived(stream, upto, at, self.patience_us)
            self.ended_at[stream], upto = upto, FOREVER
        if known is not None and upto < known:
            raise ProtocolViolation(f"the boundary of {stream} went back from {known} to {upto}")
        self._arrived(stream, upto, at, self.patience_us)
        self.complete_upto[stream] = upto
        if upto >= self.tentative_upto.get(stream, upto):
            self.tentative_upto.pop(stream, None)

    def tentative(self, stream: str, upto: int, at: int, lacked: tuple[str, ...]) -> None:
        known = self.complete_upto[stream]
        if known is None or upto > known:
            self._arrived(stream, upto, at, None if self.patience_us is None else self.own_us)
            self.tentative_upto[stream] = max(upto, self.tentative_upto.get(stream, upto))
            self.lacked[stream] = lacked

    def _arrived(self, stream: str, upto: int, at: int, hold_us: int | None) -> None:
        known = self.available(stream)
        if hold_us is not None and upto < FOREVER and (known is None or upto > known):
            self._steps[stream].append(_Step(upto, at + hold_us))

    def newest(self) -> int | None:
        """The last bucket of which anything came."""
        found = [self.ended_at.get(s, self.available(s)) for s in self.complete_upto]
        return max((upto for upto in found if upto is not None), default=None)

    def available(self, stream: str) -> int | None:
        """Last bucket that is there, stable or tentative."""
        whole, tentative = self.complete_upto[stream], self.tentative_upto.get(stream)
        return tentative if tentative is not None else whole

    def whole_upto(self) -> int | None:
        """Last bucket that is whole on every input; None while an input is unknown."""
        known = [upto for upto in self.complete_upto.values() if upto is not None]
        return min(known) if len(known) == len(self.complete_upto) else None

    def waiting_for(self) -> list[str]:
        """The inputs that hold up the next bucket, in order of their names."""
        unknown = sorted(stream for stream, upto in self.complete_upto.items() if upto is None)
        if unknown:
            return unknown
        whole = self.whole_upto()
        return sorted(stream for stream, upto in self.complete_upto.items() if upto == whole)

    def expired_upto(self, at: int) -> int | None:
        """Last bucket that has been held as long as may be."""
        found = [step.upto for steps in self._steps.values() for step in steps if step.until <= at]
        return max(found, default=None)

    def next_expiry(self, after: int, at: int) -> int | None:
        """When the next bucket after `after` will have been held as long as may be."""
        found = [
            step.until
            for steps in self._steps.values()
            for step in steps
            if step.upto > after and step.until > at
        ]
        return min(found, default=None)

    def done(self, upto: int) -> None:
        """Stable results are given up to here: nothing of it is held any more."""
        for steps in self._steps.values():
            while steps and steps[0].upto <= upto:
                del steps[0]
