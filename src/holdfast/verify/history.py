"""What happened in a run, as one flat story that the simulator and chaos on real processes both
write and the checkers judge: what sources logged, what clients were given and when, which faults
were applied. A file holds one JSON object per line, in the order of `at`.

The story also holds the ideal, computed afterwards from what the sources logged by code that has
none of the machinery it judges. So a checker needs nothing but a history.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import InputError
from holdfast.frozen import dataclass

T = TypeVar("T")
#: JSON scalars, in the order of the stream's columns.
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """The run starts. The bounds are those of the harness: what it grants besides the promises."""

    at: int
    network: str
    width_us: int
    #: While nothing fails, a bucket is given so long after its end at the latest.
    delay_us: int
    #: So long after the last healing everything that failed has been made good.
    recovery_us: int
    #: While nothing fails, nobody holds more buckets of a stream than this.
    held_buckets: int
    #: So long after it died, hangs or was cut off, everybody who counted on a process knows.
    detect_us: int = 2_000_000
    #: Clients are asked whether they say what replaces what, and when all of it is stable.
    announces: bool = False
    #: All sources close their buckets by the wall clock.
    wall: bool = False


@dataclass(frozen=True, slots=True)
class Promised:
    """A client reads an output under a contract; the sources are those it depends on."""

    at: int
    client: str
    output: str
    sources: tuple[str, ...]
    within_us: int | None = None
    loss: float = 0.0
    error: float = 0.0
    order: str = "intra"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The application was told that these rows are safe."""

    at: int
    source: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Logged:
    """Rows in a source's log when the run was over: what the network's input really was."""

    at: int
    source: str
    bucket: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class PutAside:
    """Rows among the dead letters of a source: safe, but no part of the network's input."""

    at: int
    source: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A source said that its buckets up to this one are whole."""

    at: int
    source: str
    upto: int


@dataclass(frozen=True, slots=True)
class AtBound:
    """A source closes nothing now, since a reader is as many buckets behind as `buffer_buckets`
    allows."""

    at: int
    source: str


@dataclass(frozen=True, slots=True)
class Made:
    """A node logged a segment; every instance and every replica must make the same."""

    at: int
    node: str
    epoch: int
    stream: str
    bucket: int
    stability: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Given:
    """The application behind a client got the rows of a bucket, in place of what it had of this
    bucket before. A stable bucket without rows is given, too, where a tentative one has to go."""

    at: int
    client: str
    output: str
    bucket: int
    rows: tuple[Row, ...]
    stability: str = "STABLE"
    #: Of a tentative bucket: rises with every guess that replaces the one before.
    version: int = 0
    #: Of a tentative bucket: what it was computed without, and the share of the inputs that were
    #: there.
    missing: tuple[str, ...] = ()
    inputs_share: float = 1.0
    #: The client says that these rows take the place of tentative ones.
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """A client knows that an output is stable and whole up to here, empty buckets among it."""

    at: int
    client: str
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Hinted:
    """A client has an output up to here, be it as tentative, empty buckets among it."""

    at: int
    client: str
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What a client must be given by the trees of Borealis section 3.5 with what is broken now:
    `STABLE`, `TENTATIVE`, `BLOCKING`, or `UNKNOWN` where the trees do not tell. Once it has stood
    for `settle_us`, a bucket is there `within_us` after its end."""

    at: int
    client: str
    output: str
    kind: str
    within_us: int
    settle_us: int


@dataclass(frozen=True, slots=True)
class Owed:
    """From now on the newest result that stands at a client is never older than `age_us`, counted
    from the end of its bucket; None: nothing is owed, since nobody is left who could answer, or
    since whoever could is still coming back."""

    at: int
    client: str
    output: str
    age_us: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """Of a stream with several producers a reader now reads this one (empty: none of them). `bad`
    says why that one is of no use to it while another one would be, and is empty otherwise; it has
    to be left, or to be of use again, `within_us` later. The controller, too, reads: each of a pair
    whose partner lives, and leaves it by declaring it dead."""

    at: int
    reader: str
    stream: str
    replica: str
    bad: str = ""
    within_us: int = 0


@dataclass(frozen=True, slots=True)
class Relied:
    """From now on a replica counts on others for one of its paths: it gives no `answers` to new
    rows, or puts off its own `correction`. `on`: those it counts on, empty when it is over;
    `sound`: those of them that are alive, can be reached, and do what is expected of them;
    `reached`: how far the correction is that is waited for."""

    at: int
    node: str
    path: str
    what: str
    on: tuple[str, ...] = ()
    sound: tuple[str, ...] = ()
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Deserted:
    """All replicas of a fragment correct themselves at once, each counting on another to answer."""

    at: int
    fragment: str
    path: str


@dataclass(frozen=True, slots=True)
class Restored:
    """One of a pair that began to be made anew at `since` works again; or does not even now, at the
    end. `calm`: all the while nobody else was broken."""

    at: int
    node: str
    since: int
    calm: bool


@dataclass(frozen=True, slots=True)
class Outlived:
    """More of a stream is kept than anybody may need, and those of its readers that are broken were
    declared dead long ago."""

    at: int
    where: str
    stream: str
    buckets: int


@dataclass(frozen=True, slots=True)
class Concluded:
    """REC_DONE: everything that a client was given up to this bucket is stable now."""

    at: int
    client: str
    output: str
    bucket: int


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody keeps so many buckets of a stream: log, input or output buffer."""

    at: int
    where: str
    stream: str
    buckets: int


@dataclass(frozen=True, slots=True)
class Pending:
    """Something has to go through so many entries to decide what to do next. However long a failure
    lasts, there are no more than `most`."""

    at: int
    where: str
    what: str
    entries: int
    most: int


@dataclass(frozen=True, slots=True)
class Broke:
    """A fault begins. `on` names what it hits: a node, a source, a link `a->b`."""

    at: int
    fault: str
    on: str


@dataclass(frozen=True, slots=True)
class Healed:
    """It is not felt any more."""

    at: int
    fault: str
    on: str
    #: How long before that it was over.
    felt_us: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """An instance gave up by itself: the fault of the `world`, which it explained, or `ours`."""

    at: int
    who: str
    fault_of: str
    why: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The monitor said that a promise is broken (`kept` False) or kept again."""

    at: int
    output: str
    bucket: int
    promise: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Ideal:
    """What an ideal system would have given for a bucket, at its end."""

    at: int
    output: str
    bucket: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over. Not `settled`: the harness gave up waiting for clients to catch up."""

    at: int
    settled: bool


Event = (
    Began | Promised | Accepted | Logged | PutAside | Closed | AtBound | Made | Given | Told
    | Hinted | Expected | Owed | Reading | Relied | Deserted | Restored | Outlived
    | Concluded | Held | Pending | Broke | Healed | Stopped | Reported | Ideal | Finished
)  # fmt: skip

_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Began, Promised, Accepted, Logged, PutAside, Closed, AtBound, Made, Given, Told,
                 Hinted, Expected, Owed, Reading, Relied, Deserted, Restored, Outlived,
                 Concluded, Held, Pending, Broke, Healed, Stopped, Reported, Ideal, Finished)
}  # fmt: skip


class History:
    """Events in the order they happened."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[T]) -> Iterator[T]:
        return (event for event in self.events if isinstance(event, kind))

    def write(self, path: str | Path) -> None:
        with open(path, "w") as file:
            for event in self.events:
                body = {"kind": type(event).__name__.lower(), **asdict(event)}
                file.write(json.dumps(body, separators=(",", ":")) + "\n")

    @staticmethod
    def read(path: str | Path) -> History:
        found = History()
        with open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    body = json.loads(line)
                    kind = _KINDS[body.pop("kind")]
                    found.add(kind(**{name: _frozen(value) for name, value in body.items()}))
                except (ValueError, KeyError, TypeError, AttributeError) as err:
                    raise InputError(f"{path}, line {number}: not of a history ({err})") from None
        return found


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
