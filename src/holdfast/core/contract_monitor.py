"""Are the promises of the outputs kept, now? Pure.

ECOC section 2.5: limited delay (LIDE), no loss (LOLE). A failure that outlasts the allowed delay is
no longer a temporary one (section 3.4); this is where it is told apart.

The monitor sees buckets, not rows. A row stamped in bucket b must have its result at the reader
`within` after its stamp, so from the end of b plus `within` on a reader without b has been let down
by any row of b. That moment is reported, at the first tick after it, once per episode; an earlier
row of b was late up to one bucket width before. Lateness is judged by ticks alone: a reader found
to have a bucket has it, whenever it came.

A gap is a loss and not a delay: buckets that can never be given are owed no more. It is never made
good, so nothing is said when it is over.

The clock is the wall's, because stamps are; it may go back. Nothing is reported before its time by
the clock as it stands, and a promise once broken is kept again only when the bucket that broke it
has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, assert_never

from holdfast.frozen import dataclass
from holdfast.types import bucket_end_us, bucket_of

#: Named as in the contract.
Promise = Literal["within", "loss"]


@dataclass(frozen=True, slots=True)
class Promised:
    #: None: only gaps are watched.
    within_us: int | None = None
    #: False where the contract allows some loss: what a gap costs in rows is for the audit to say.
    lossless: bool = True


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """From now on the output is watched: the bucket that is open now is the first one it owes."""

    at: int
    output: str


@dataclass(frozen=True, slots=True)
class Known:
    """The reader has the output up to this bucket."""

    at: int
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Buckets, both included, that a reader can never be given, though another may have had them.
    Gaps come in order."""

    at: int
    output: str
    from_bucket: int
    upto: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The output owes nothing any more and is not watched."""

    at: int
    output: str
    #: The stream is over and the reader has all of it, so that nothing is missing whatever is due;
    #: false where watching ends for another reason.
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
    #: The first bucket that is overdue, or lost.
    bucket: int
    overdue_us: int
    why: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything is on time again."""

    at: int
    output: str
    promise: Promise
    #: The reader has the output up to here.
    bucket: int
    broken_for_us: int


Action = Broken | Kept


@dataclass(frozen=True, slots=True)
class Standing:
    """Of one output at one moment."""

    kept: bool
    #: When the bucket that broke the promise was due; None while `within` is kept.
    broken_since_us: int | None
    #: By how much the first missing bucket is overdue; 0 while `within` is kept.
    overdue_us: int
    #: Episodes of each promise so far.
    breaks: dict[Promise, int]
    worst_us: int
    lost_buckets: int
    known_upto: int | None
    #: First bucket that is owed and not known; None while the output is not watched.
    missing: int | None


@dataclass(slots=True)
class _Output:
    promised: Promised
    #: First bucket that is owed; None while the output is not watched.
    first: int | None = None
    #: Never falls, whichever reader is asked.
    known_upto: int | None = None
    #: Gaps ahead of what is known, in order, apart from each other.
    gaps: list[tuple[int, int]] = field(default_factory=list)
    lost_upto: int | None = None
    lost_buckets: int = 0
    #: The bucket that broke `within` and when it was due; None while it is kept.
    broken: tuple[int, int] | None = None
    breaks: dict[Promise, int] = field(default_factory=lambda: {"within": 0, "loss": 0})
    worst_us: int = 0

    def missing(self) -> int:
        """First bucket that is owed and not known."""
        assert self.first is not None
        bucket = self.first
        if self.known_upto is not None:
            bucket = max(bucket, self.known_upto + 1)
        for lo, hi in self.gaps:
            if lo <= bucket <= hi:
                bucket = hi + 1
        return bucket


class Monitor:
    """What is counted of an output stays when it is not watched for a while."""

    def __init__(self, width_us: int, promised: Mapping[str, Promised]) -> None:
        self.width_us = width_us
        self._outputs = {name: _Output(promise) for name, promise in promised.items()}

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Tick):
            outputs = self._outputs.items()
            return [
                action for name, known in outputs for action in self._tick(event.at, name, known)
            ]
        output = self._outputs[event.output]
        if isinstance(event, Began):
            # What broke the promise to an earlier reader is not owed to this one.
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
        """When a tick is needed next, unless something becomes known before; None: not at all."""
        due = [
            due_us
            for output in self._outputs.values()
            if output.broken is None and (due_us := self._due_us(output)) is not None
        ]
        return max(at, min(due)) if due else None

    def standing(self, output: str, at: int) -> Standing:
        known = self._outputs[output]
        return Standing(
            kept=known.broken is None and not known.breaks["loss"],
            broken_since_us=known.broken[1] if known.broken else None,
            overdue_us=self._overdue_us(at, known),
            breaks=dict(known.breaks),
            worst_us=max(known.worst_us, self._overdue_us(at, known)),
            lost_buckets=known.lost_buckets,
            known_upto=known.known_upto,
            missing=None if known.first is None else known.missing(),
        )

    # -- one method per event ---------------------------------------------------------------------

    def _known(self, event: Known, output: _Output) -> list[Action]:
        output.worst_us = max(output.worst_us, self._overdue_us(event.at, output))
        known = output.known_upto
        output.known_upto = event.upto if known is None else max(known, event.upto)
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
            why = f"buckets {lo} to {event.upto} were deleted before the reader had them"
            actions.append(Broken(event.at, event.output, "loss", lo, 0, why))
        return actions + self._kept_again(event, output)

    def _ended(self, event: Ended, output: _Output) -> list[Action]:
        """An episode is over only if what was owed has come; else it stays as it was left."""
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
        bucket, known = output.missing(), output.known_upto
        output.broken = (bucket, due_us)
        output.breaks["within"] += 1
        why = "the reader has " + ("nothing yet" if known is None else f"up to bucket {known}")
        return [Broken(at, name, "within", bucket, at - due_us, why)]

    # -- decisions --------------------------------------------------------------------------------

    def _kept_again(self, event: Known | Gap | Ended, output: _Output) -> list[Action]:
        """When what broke the promise has come, and what is missing now is not due yet."""
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
        """First instant at which the missing bucket is overdue; None when no delay is judged."""
        within_us = output.promised.within_us
        if output.first is None or within_us is None:
            return None
        return bucket_end_us(output.missing(), self.width_us) + within_us

    def _overdue_us(self, at: int, output: _Output) -> int:
        due_us = self._due_us(output)
        return 0 if output.broken is None or due_us is None else max(0, at - due_us)
