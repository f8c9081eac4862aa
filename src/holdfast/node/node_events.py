"""The interface between the `Performer` of a node and its environment: the events that the
performer receives, and the protocols of the engine and the carrier that the performer calls. The
carrier uses threads in production and virtual time in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import BeganEmpty, NotReady
from holdfast.core.divergence import Window
from holdfast.engine.inputs import OnResults, StepResult
from holdfast.engine.state import Line, Version
from holdfast.errors import HoldfastError
from holdfast.frozen import dataclass
from holdfast.model.fragments import Path
from holdfast.model.network import Network
from holdfast.streams.calls import Digests, Moving, Postpone, Postponement
from holdfast.types import NO_UPKEEP, Upkeep

#: The answer to a newcomer, a peer that is being rebuilt: the current state of all paths, or why
#: there is none.
StateAnswer = tuple[Moving, ...] | BeganEmpty | NotReady


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Recompute a bucket of a stream that differs from another replica's, without logging it."""

    path: str
    lo: int
    hi: int
    stream: str


#: The work of one step.
Work = core.Run | core.RunTentative | Recomputation


@dataclass(frozen=True, slots=True)
class Arrived:
    """The rows of a delivery are in the index, so its boundary is valid."""

    stream: str
    upto: int
    #: Bucket, rows and bytes of each stable file.
    rows: tuple[tuple[int, int, int], ...]
    ended: bool
    opened: tuple[int, int] | None
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()
    partial: tuple[float, float] = (1.0, 1.0)
    spent_us: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A step is done and its results are logged, or the step failed."""

    run: Work
    version: Version | None
    seconds: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """A version is durable, or could not be made so."""

    version: Version
    #: Entries that became durable.
    new_entries: int = 0
    seconds: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer corrects a path, and asks this replica to keep answering meanwhile."""

    asks: Postpone
    reply: Callable[[Postponement], None]


@dataclass(frozen=True, slots=True)
class Replied:
    """The reply of a peer to a request, or the error."""

    asked: Postpone
    peer: str
    reply: Postponement | HoldfastError


@dataclass(frozen=True, slots=True)
class StateAsked:
    """The newcomer asks for the state."""

    newcomer: str
    reply: Callable[[StateAnswer], None]


@dataclass(frozen=True, slots=True)
class StateRenewed:
    """The newcomer is still fetching files."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class StateReleased:
    """The newcomer has fetched all files, or gave up."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class LeaseDue:
    """The leases of newcomers are due for a check."""


@dataclass(frozen=True, slots=True)
class DigestsReceived:
    """A peer reported the digests of its results."""

    peer: str
    digests: Digests


@dataclass(frozen=True, slots=True)
class InputDigestsReceived:
    """The producers of some inputs reported their digests. `made`: windows by input and producer;
    `stream`: the output that differs between replicas."""

    stream: str
    made: Mapping[str, Mapping[str, Window]]


@dataclass(frozen=True, slots=True)
class Woken:
    """The timer set for `Wake` has expired."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error that stops the node: a subscription failed, for example because the node was
    replaced; an input was lost; or the node's own log is damaged."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Again:
    """Retry after a full disk: this step, or the waiting actions."""

    step: core.Run | None = None


Event = (
    Arrived | Finished | Flushed | Refused | Again | Asked | Replied | StateAsked | StateRenewed
    | StateReleased | LeaseDue | DigestsReceived | InputDigestsReceived | Woken | core.Event
)  # fmt: skip


class StepEngine(Protocol):
    """The operations of the engine that a node uses. The simulator implements them without
    Spark."""

    folder: str
    network: Network

    @property
    def width_us(self) -> int: ...

    def schema(self, stream: str) -> str: ...

    def time(self, stream: str) -> str: ...

    def plan_hash(self, path: Path) -> str: ...

    def empty(self, path: Path, bucket: int) -> Version: ...

    def run(
        self,
        path: Path,
        version: Version,
        lo: int,
        hi: int,
        inputs: Any,
        *,
        line: Line = "stable",
        on_results: OnResults | None = None,
        upkeep: Upkeep = NO_UPKEEP,
    ) -> StepResult: ...

    def check(self, version: Version) -> None: ...

    def recovered(self, versions: list[Version]) -> None: ...

    def release(self, path: Path, kept: list[Version], *, line: Line = "stable") -> None: ...

    def digest(self, table: Any) -> str: ...

    @property
    def is_merging(self) -> bool:
        """Layers of keyed state are being merged beside the steps."""
        ...


class Carrier(Protocol):
    """Performs everything that takes time or calls other processes."""

    def run(self, work: Work, version: Version) -> None:
        """Call `Performer.step`, then post `Finished`. The stable and the tentative line of a path
        may run at the same time."""

    def flush(self, version: Version, costs: tuple[float, ...]) -> None:
        """Call `Performer.flush`, then post `Flushed`. Steps may run meanwhile."""

    def ask(self, asked: Postpone, peers: tuple[str, ...]) -> None:
        """Send the request to each peer (`Asked`), then post `Replied` for each."""

    def compare_inputs(self, path: str, stream: str) -> None:
        """Fetch the digests of all producers of the path's inputs, then post
        `InputDigestsReceived`."""

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        """Acknowledge to the producers; post `Refused` if this node was replaced."""

    def post(self, event: Event, after_s: float = 0.0) -> None:
        """Pass the event to `Performer.take` later. `after_s` may be set only in calls from within
        `take`."""
