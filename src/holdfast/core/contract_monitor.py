"""Contract monitor: checks the contracts of the outputs while the network runs. Pure.

ECOC section 2.5: limited delay (LIDE), no loss (LOLE). A failure that outlasts the allowed delay is
no longer a temporary one (section 3.4). The monitor makes this distinction.

The monitor sees buckets, not rows. The result of a row with a timestamp in bucket b must reach the
client `within` after the timestamp. If the client does not have b at the end of b plus `within`,
every row of b is late. The first tick after that moment reports the violation, once per episode.
The earliest rows of b were late up to one bucket width before. Only ticks detect lateness: a bucket
that the client has received by the next tick counts as on time.

A gap is a loss and not a delay: buckets that can never be delivered are no longer due. A loss is
permanent, so its end is never reported.

The clock is the wall clock, because timestamps are wall-clock times, and may be stepped back. A
violation is never reported before the current clock reaches the due time. A broken `within` counts
as kept again only after the bucket that broke it has arrived or was declared lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, assert_never

from holdfast.frozen import dataclass
from holdfast.types import bucket_end_us, bucket_of

#: Names as in the contract.
Promise = Literal["within", "loss"]


@dataclass(frozen=True, slots=True)
class Promised:
    #: None: only gaps are monitored.
    within_us: int | None = None
    #: False if the contract allows some loss: the audit then counts the rows lost in a gap.
    lossless: bool = True


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """Monitoring of the output starts; the bucket that is open now is the first one due."""

    at: int
    output: str


@dataclass(frozen=True, slots=True)
class Known:
    """The client has the output up to this bucket."""

    at: int
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Buckets, both ends included, that can never be delivered to a client; another client may have
    received them. Gaps arrive in order."""

    at: int
    output: str
    from_bucket: int
    upto: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Monitoring of the output ends: no further bucket is due."""

    at: int
    output: str
    #: The stream has ended and the client has all of it, so no bucket is missing. False: monitoring
    #: ends for another reason.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = Began | Known | Gap | Ended | Tick

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broken:
    at: int
    output: str
    promise: Promise
    #: The first overdue or lost bucket.
    bucket: int
    overdue_us: int
    why: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything is on time again."""

    at: int
    output: str
    promise: Promise
    #: Last bucket before the first missing one.
    bucket: int
    broken_for_us: int


Action = Broken | Kept


@dataclass(frozen=True, slots=True)
class ContractStatus:
    """Status of the contract of one output at one moment."""

    kept: bool
    #: When the bucket that broke the promise was due; None while `within` is kept.
    broken_since_us: int | None
    #: By how much the first missing bucket is overdue; 0 while `within` is kept.
    overdue_us: int
    #: Number of violations of each promise so far.
    breaks: dict[Promise, int]
    worst_us: int
    lost_buckets: int
    known_upto: int | None
    #: First bucket that the client must receive and does not have; None while the output is not
    #: monitored.
    missing: int | None


@dataclass(slots=True)
class _Output:
    promised: Promised
    #: First bucket that the client must receive; None while the output is not monitored.
    first: int | None = None
    #: Last bucket that a client has; never decreases, also when another client reports.
    known_upto: int | None = None
    #: Gaps that end after `known_upto`, in order, without overlap.
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lost_upto: int | None = None
    lost_buckets: int = 0
    #: The bucket that broke `within`, and when it was due; None while `within` is kept.
    broken: tuple[int, int] | None = None
    breaks: dict[Promise, int] = field(default_factory=lambda: {"within": 0, "loss": 0})
    worst_us: int = 0

    def missing(self) -> int:
        """First bucket that the client must receive and does not have."""
        assert self.first is not None
        bucket = self.first
        if self.known_upto is not None:
            bucket = max(bucket, self.known_upto + 1)
        for lo, hi in self.gaps:
            if lo <= bucket <= hi:
                bucket = hi + 1
        return bucket


class Monitor:
    """Monitors all outputs. Counters of an output survive pauses in its monitoring."""

    def __init__(self, width_us: int, promised: Mapping[str, Promised]) -> None:
        self.width_us = width_us
        self._outputs = {name: _Output(promise) for name, promise in promised.items()}

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Tick):
            outputs = self._outputs.items()
            return [
                action for name, state in outputs for action in self._tick(event.at, name, state)
            ]
        output = self._outputs[event.output]
        if isinstance(event, Began):
            # A bucket that broke the promise to an earlier client is not due for this one.
            output.first, output.broken = bucket_of(event.at, self.width_us), None
            return []
        if output.first is None:
            return []
        match event:
            case Known():
                return self._known(event, output)
            case Gap():
                return self._gap(event, output)
            case Ended():
                return self._ended(event, output)
            case _:
                assert_never(event)

    def next_due(self, at: int) -> int | None:
        """Time of the next required tick, unless another event comes first; None: no tick."""
        due = [
            due_us
            for output in self._outputs.values()
            if output.broken is None and (due_us := self._due_us(output)) is not None
        ]
        return max(at, min(due)) if due else None

    def status(self, output: str, at: int) -> ContractStatus:
        state = self._outputs[output]
        return ContractStatus(
            kept=state.broken is None and not state.breaks["loss"],
            broken_since_us=state.broken[1] if state.broken else None,
            overdue_us=self._overdue_us(at, state),
            breaks=dict(state.breaks),
            worst_us=max(state.worst_us, self._overdue_us(at, state)),
            lost_buckets=state.lost_buckets,
            known_upto=state.known_upto,
            missing=None if state.first is None else state.missing(),
        )

    # -- one method per event ---------------------------------------------------------------------

    def _known(self, event: Known, output: _Output) -> list[Action]:
        output.worst_us = max(output.worst_us, self._overdue_us(event.at, output))
        known_upto = output.known_upto
        output.known_upto = event.upto if known_upto is None else max(known_upto, event.upto)
        output.gaps = [(lo, hi) for lo, hi in output.gaps if hi > output.known_upto]
        return self._kept_again(event, output)

    def _gap(self, event: Gap, output: _Output) -> list[Action]:
        lo = event.from_bucket
        if output.lost_upto is not None:
            lo = max(lo, output.lost_upto + 1)
        if lo > event.upto:
            return []
        output.gaps.append((lo, event.upto))
        output.lost_upto = event.upto
        output.lost_buckets += event.upto - lo + 1
        actions: list[Action] = []
        if output.promised.lossless:
            output.breaks["loss"] += 1
            why = f"buckets {lo} to {event.upto} were deleted before the client received them"
            actions.append(Broken(event.at, event.output, "loss", lo, 0, why))
        return actions + self._kept_again(event, output)

    def _ended(self, event: Ended, output: _Output) -> list[Action]:
        """A violation ends only if the missing buckets have arrived; otherwise it remains open."""
        if event.whole and output.broken is not None:
            actions = self._kept(event, output, output.missing() - 1)
        else:
            actions = self._kept_again(event, output)
        output.first = None
        return actions

    def _tick(self, at: int, name: str, output: _Output) -> list[Action]:
        due_us = self._due_us(output)
        if due_us is None or at < due_us:
            return []
        output.worst_us = max(output.worst_us, at - due_us)
        if output.broken is not None:
            return []
        bucket, known_upto = output.missing(), output.known_upto
        output.broken = (bucket, due_us)
        output.breaks["within"] += 1
        why = "the client has received " + (
            "nothing yet" if known_upto is None else f"buckets up to {known_upto}"
        )
        return [Broken(at, name, "within", bucket, at - due_us, why)]

    # -- decisions --------------------------------------------------------------------------------

    def _kept_again(self, event: Known | Gap | Ended, output: _Output) -> list[Action]:
        """Report the end of a violation: the bucket that broke the promise is no longer missing,
        and the first missing bucket is not due yet."""
        due_us = self._due_us(output)
        if output.broken is None or due_us is None:
            return []
        missing = output.missing()
        if missing <= output.broken[0] or event.at >= due_us:
            return []
        return self._kept(event, output, missing - 1)

    def _kept(self, event: Known | Gap | Ended, output: _Output, bucket: int) -> list[Action]:
        assert output.broken is not None
        broken_for_us = max(0, event.at - output.broken[1])
        output.broken = None
        return [Kept(event.at, event.output, "within", bucket, broken_for_us)]

    def _due_us(self, output: _Output) -> int | None:
        """First instant at which the missing bucket is overdue; None: no delay is monitored."""
        within_us = output.promised.within_us
        if output.first is None or within_us is None:
            return None
        return bucket_end_us(output.missing(), self.width_us) + within_us

    def _overdue_us(self, at: int, output: _Output) -> int:
        due_us = self._due_us(output)
        return 0 if output.broken is None or due_us is None else max(0, at - due_us)
