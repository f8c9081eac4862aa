"""Between a node's decisions and whoever carries them out: what comes back as events, and what is
asked of an engine and of a carrier. Threads carry in production, virtual time in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from holdfast.core import progress_events as core
from holdfast.core.catch_up_events import BeganEmpty, NotReady
from holdfast.core.divergence import Window
from holdfast.engine.inputs import StepResult
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError
from holdfast.frozen import dataclass
from holdfast.model.fragments import Path
from holdfast.model.network import Network
from holdfast.streams.calls import Digests, Moving, Postpone, Postponement

#: What a newcomer is told: all paths as they are now, or why there is nothing to give.
StateAnswer = tuple[Moving, ...] | BeganEmpty | NotReady


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Compute a bucket of a stream again that another replica made otherwise, and log nothing."""

    path: str
    lo: int
    hi: int
    stream: str


#: What takes a step.
Work = core.Run | core.RunTentative | Recomputation


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows of a delivery are in the index; the boundary they came with may be believed."""

    stream: str
    upto: int
    rows: tuple[tuple[int, int], ...]
    ended: bool
    opened: tuple[int, int] | None
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()
    partial: tuple[float, float] = (1.0, 1.0)
    spent_us: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A step is done and logged, or failed."""

    run: Work
    version: Version | None
    seconds: float = 0.0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer corrects a path, and asks this replica to go on answering meanwhile."""

    asks: Postpone
    reply: Callable[[Postponement], None]


@dataclass(frozen=True, slots=True)
class Replied:
    """What became of a question to a peer: the reply, or why there is none."""

    asked: Postpone
    peer: str
    reply: Postponement | HoldfastError


@dataclass(frozen=True, slots=True)
class StateAsked:
    """A copy that is caught up asks for the state."""

    newcomer: str
    reply: Callable[[StateAnswer], None]


@dataclass(frozen=True, slots=True)
class StateRenewed:
    """The newcomer is still fetching."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class StateReleased:
    """The newcomer has all it wants, or gave up."""

    newcomer: str


@dataclass(frozen=True, slots=True)
class LeaseDue:
    """Time to see who is still fetching."""


@dataclass(frozen=True, slots=True)
class DigestsTold:
    """A peer said what it made."""

    peer: str
    digests: Digests


@dataclass(frozen=True, slots=True)
class InputDigestsTold:
    """All producers of some inputs said what they made: windows by input and producer, for an
    output that other replicas made otherwise."""

    stream: str
    made: Mapping[str, Mapping[str, Window]]


@dataclass(frozen=True, slots=True)
class Woken:
    """The time has come that was asked for."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer does not take what we say: we were replaced, or it cannot go on."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Again:
    """Time to try what a full disk kept from being done: this step, or the actions that wait."""

    step: core.Run | None = None


Event = (
    Arrived | Finished | Refused | Again | Asked | Replied | StateAsked | StateRenewed
    | StateReleased | LeaseDue | DigestsTold | InputDigestsTold | Woken | core.Event
)  # fmt: skip


class StepEngine(Protocol):
    """What a node asks of the engine; the simulator has a twin that is a plain function."""

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
        tentative: bool = False,
    ) -> StepResult: ...

    def check(self, version: Version) -> None: ...

    def recovered(self, versions: list[Version]) -> None: ...

    def release(self, path: Path, kept: list[Version], *, tentative: bool = False) -> None: ...

    def digest(self, table: Any) -> str: ...


class Carrier(Protocol):
    """Whatever takes time or goes to others."""

    def run(self, work: Work, version: Version) -> None:
        """Call `Performer.step`, then give it `Finished`. The two lines of a path may run at the
        same time."""

    def ask(self, asked: Postpone, peers: tuple[str, ...]) -> None:
        """Ask each of the other replicas (`Asked`), then give `Replied` for each."""

    def compare_inputs(self, path: str, stream: str) -> None:
        """Ask all producers of the path's inputs what they made, then give `InputDigestsTold`."""

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        """Tell the producer; `Refused` if it says that we were replaced."""

    def post(self, event: Event, after_s: float = 0.0) -> None:
        """Give the event to `Performer.take`, later; after a while only if called inside that."""
