"""The history of a run: one flat list of events, written by the simulator and by chaos on real
processes, and judged by the checkers. The events record which rows sources logged, which buckets
clients received and when, and which faults were injected. A history file holds one JSON object per
line, in the order in which the events were recorded.

The history also holds the ideal results. Independent code computes the ideal results after the run
from the logs of the sources, without any of the components under test. A checker therefore needs
nothing but a history.
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
    """The run starts. The bounds are set by the harness, in addition to the contracts."""

    at: int
    network: str
    width_us: int
    #: While no fault is active, a bucket is delivered at most this long after its end.
    delay_us: int
    #: All components have recovered this long after the last fault has healed.
    recovery_us: int
    #: While no fault is active, no component holds more buckets of a stream than this.
    held_buckets: int
    #: Every process that depends on a dead, hung or disconnected process has detected the failure
    #: after this time.
    detect_us: int = 2_000_000
    #: Clients record which rows replace tentative ones (`replaces`) and REC_DONE (`Concluded`);
    #: the `corrected` checker verifies both.
    announces: bool = False
    #: All sources close their buckets by the wall clock.
    wall: bool = False


@dataclass(frozen=True, slots=True)
class Promised:
    """A client reads an output under a contract; `sources` are those that the output depends on."""

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
    """A source has confirmed to the application that these rows are durable."""

    at: int
    source: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Logged:
    """Rows of a bucket in a source's log: the actual input of the network."""

    at: int
    source: str
    bucket: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class PutAside:
    """Rows among the dead letters of a source: durable, but not part of the network's input."""

    at: int
    source: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """A source declared its buckets up to this one complete."""

    at: int
    source: str
    upto: int


@dataclass(frozen=True, slots=True)
class AtBound:
    """A source closes no buckets at present, because a consumer is `buffer_buckets` behind, the
    maximum allowed."""

    at: int
    source: str


@dataclass(frozen=True, slots=True)
class Made:
    """A node logged a segment; every instance and every replica must produce the same segment."""

    at: int
    node: str
    epoch: int
    stream: str
    bucket: int
    stability: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Given:
    """The application behind a client received the rows of a bucket, which replace all rows of this
    bucket that the application received before. A stable bucket without rows is also delivered if
    the bucket replaces a tentative one."""

    at: int
    client: str
    output: str
    bucket: int
    rows: tuple[Row, ...]
    stability: str = "STABLE"
    #: Of a tentative bucket: increases with every tentative result that replaces an earlier one.
    version: int = 0
    #: Of a tentative bucket: the missing inputs, and the share of the inputs that were available.
    missing: tuple[str, ...] = ()
    inputs_share: float = 1.0
    #: The client reports that these rows replace tentative ones.
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Progressed:
    """A client knows that an output is stable and complete up to here, including empty buckets."""

    at: int
    client: str
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Hinted:
    """A client has an output up to here, stable or tentative, including empty buckets."""

    at: int
    client: str
    output: str
    upto: int


@dataclass(frozen=True, slots=True)
class Expected:
    """The result that a client must receive under the current faults, by the trees of Borealis
    section 3.5: `STABLE`, `TENTATIVE`, `BLOCKING`, or `UNKNOWN` where the trees give no answer.
    After the expectation has been unchanged for `settle_us`, a bucket is available `within_us`
    after its end."""

    at: int
    client: str
    output: str
    kind: str
    within_us: int
    settle_us: int


@dataclass(frozen=True, slots=True)
class Owed:
    """From now on, the newest valid result at a client is never older than `age_us`, counted from
    the end of its bucket. None: no result is owed, because no replica that could answer is left, or
    because the replicas that could answer are still recovering."""

    at: int
    client: str
    output: str
    age_us: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """A consumer of a stream with several producers now reads from `replica` (empty: from none of
    them). `bad` gives the reason why this producer is unusable while another producer is usable,
    and is empty otherwise. Within `within_us` the consumer must leave the producer, or the producer
    must be usable again. The controller also counts as a consumer: the controller reads from each
    replica of a pair whose peer is alive, and leaves a replica by declaring the replica dead."""

    at: int
    consumer: str
    stream: str
    replica: str
    bad: str = ""
    within_us: int = 0


@dataclass(frozen=True, slots=True)
class Relied:
    """From now on a replica relies on other replicas for one of its paths. `what` is `answers`: the
    replica does not answer with new rows; or `correction`: the replica postpones its own
    correction. `on`: the replicas relied on, empty when the reliance is over; `sound`: those of
    `on` that are alive, reachable, and do the work expected of them; `reached`: the progress of the
    correction that the replica waits for."""

    at: int
    node: str
    path: str
    what: str
    on: tuple[str, ...] = ()
    sound: tuple[str, ...] = ()
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Deserted:
    """All replicas of a fragment correct at the same time, each relying on another to answer."""

    at: int
    fragment: str
    path: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A replica of a pair whose rebuild began at `since` works again; or the run ended before the
    rebuild was done. `calm`: no other component was broken during the rebuild."""

    at: int
    node: str
    since: int
    calm: bool


@dataclass(frozen=True, slots=True)
class Outlived:
    """More buckets of a stream are retained than any consumer may need, and the broken consumers of
    the stream were declared dead long ago."""

    at: int
    where: str
    stream: str
    buckets: int


@dataclass(frozen=True, slots=True)
class Concluded:
    """REC_DONE: all buckets that a client received up to this one are now stable."""

    at: int
    client: str
    output: str
    bucket: int


@dataclass(frozen=True, slots=True)
class Held:
    """A component holds this many buckets of a stream in its log, input or output buffer."""

    at: int
    where: str
    stream: str
    buckets: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A component must scan this many entries to decide on its next action. The number never
    exceeds `most`, however long a failure lasts."""

    at: int
    where: str
    what: str
    entries: int
    most: int


@dataclass(frozen=True, slots=True)
class Broke:
    """A fault begins. `on` names its target: a node, a source, a link `a->b`."""

    at: int
    fault: str
    on: str


@dataclass(frozen=True, slots=True)
class Healed:
    """The effects of a fault are over."""

    at: int
    fault: str
    on: str
    #: Time between the end of the fault itself and the end of its effects.
    felt_us: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    """An instance terminated itself because of an injected fault (`world`), which the instance
    reported as the cause, or because of a bug in Holdfast (`ours`)."""

    at: int
    who: str
    fault_of: str
    why: str


@dataclass(frozen=True, slots=True)
class Reported:
    """The monitor reported that a promise is broken (`kept` False) or kept again."""

    at: int
    output: str
    bucket: int
    promise: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Ideal:
    """The rows that an ideal system would have delivered for a bucket, at the end of the bucket."""

    at: int
    output: str
    bucket: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over. Not `settled`: the harness timed out waiting for clients to catch up."""

    at: int
    settled: bool


Event = (
    Began | Promised | Accepted | Logged | PutAside | Closed | AtBound | Made | Given | Progressed
    | Hinted | Expected | Owed | Reading | Relied | Deserted | Restored | Outlived
    | Concluded | Held | Pending | Broke | Healed | Stopped | Reported | Ideal | Finished
)  # fmt: skip

_KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Began, Promised, Accepted, Logged, PutAside, Closed, AtBound, Made, Given,
                 Progressed, Hinted, Expected, Owed, Reading, Relied, Deserted, Restored, Outlived,
                 Concluded, Held, Pending, Broke, Healed, Stopped, Reported, Ideal, Finished)
}  # fmt: skip


class History:
    """Events in the order in which they were recorded."""

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
        history = History()
        with open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    body = json.loads(line)
                    kind = _KINDS[body.pop("kind")]
                    history.add(kind(**{name: _frozen(value) for name, value in body.items()}))
                except (ValueError, KeyError, TypeError, AttributeError) as err:
                    raise InputError(
                        f"{path}, line {number}: not a history event ({err})"
                    ) from None
        return history


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
