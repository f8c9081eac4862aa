"""What a node is told and what it decides: the events and actions of `progress`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from holdfast.core.correction_leases import Answer
from holdfast.core.policy import Policy
from holdfast.core.sunion import WHOLE, Partial
from holdfast.frozen import dataclass
from holdfast.model.trees import Tree
from holdfast.types import OutputState

# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The node works: paths with a durable version go on from it, whatever inputs are there."""

    at: int


@dataclass(frozen=True, slots=True)
class InputOpened:
    """An input's log was seen: what it holds is known."""

    at: int
    stream: str
    starts_at: int
    trimmed_upto: int


@dataclass(frozen=True, slots=True)
class BoundaryArrived:
    at: int
    stream: str
    upto: int
    #: Rows of each bucket with rows since the boundary before.
    rows: tuple[tuple[int, int], ...] = ()
    ended: bool = False
    #: Buckets up to here are there too, but were made without `lacked`.
    tentative_upto: int | None = None
    lacked: tuple[str, ...] = ()
    partial: Partial = WHOLE
    #: How much of what a bucket may wait on its whole way was spent upstream.
    spent_us: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """Buckets up to `hi` are logged; the version refers to inputs from `needs_from`."""

    at: int
    path: str
    hi: int
    needs_from: int
    #: Without further input something may still come out up to this bucket.
    horizon: int


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    at: int
    path: str
    bucket: int
    needs_from: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """No reader of an output will ask for anything up to `needed` again, and all of them have had
    it up to `received`."""

    at: int
    output: str
    needed: int
    received: int


@dataclass(frozen=True, slots=True)
class TentativeDone:
    """The line of this number was run up to `hi`, and needs its inputs from `needs_from` on; or
    could not be run (`hi` None)."""

    at: int
    path: str
    line: int
    hi: int | None
    needs_from: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer corrects itself, or wants to, and asks this replica to go on answering meanwhile; the
    shell answers it by `ticket`."""

    at: int
    ticket: int
    path: str
    peer: str
    #: Number of the peer's correction, and how far its stable results are.
    correction: int
    position: int
    #: It is under way; it is over.
    started: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """What a peer says to `Ask`; one that could not be asked is `away`."""

    at: int
    path: str
    peer: str
    correction: int
    answer: Answer
    #: Of one that goes on answering: the last bucket it has given, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Of a pair: the partner is gone, or there is one again."""

    at: int
    unpaired: bool


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = (
    Began | InputOpened | BoundaryArrived | StepDone | CheckpointDone | Acknowledged
    | TentativeDone | Asked | Answered | Unpaired | Tick
)  # fmt: skip

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a path with the state after `bucket`; results before `valid_from` are not to be given
    to anybody, because the inputs they need are gone."""

    path: str
    bucket: int
    origin: int
    valid_from: int


@dataclass(frozen=True, slots=True)
class Run:
    path: str
    lo: int
    hi: int
    #: The state before `lo` is not kept: begin from nothing, so far back that it heals on the way
    #: to this bucket, before which no result counts.
    rebuild_from: int | None = None
    #: How much of what a bucket may wait was spent on these; consumers are told.
    spent_us: int = 0


@dataclass(frozen=True, slots=True)
class Enter:
    """A tentative line starts from the stable state, which is kept, or with `forget` is not. It
    takes the place of an older line of the path, if there is one."""

    path: str
    line: int
    forget: bool


@dataclass(frozen=True, slots=True)
class RunTentative:
    """On what is there. An output goes on up to its own bucket, if it does at all."""

    path: str
    line: int
    lo: int
    hi: int
    outputs: tuple[tuple[str, int], ...]
    missing: tuple[str, ...]
    partial: Partial = WHOLE


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask every peer to go on answering while this replica corrects itself; `Answered` follows for
    each of them, unless it is told that the correction is `done`."""

    path: str
    correction: int
    position: int
    started: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """To a peer that asked."""

    ticket: int
    answer: Answer
    #: If this replica goes on answering: the last bucket it has given, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """The tentative line is over: the stable one has overtaken it."""

    path: str


@dataclass(frozen=True, slots=True)
class Change:
    """The outputs of the path are in this state; readers are told."""

    path: str
    state: OutputState


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a Tick then."""

    at: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: str
    bucket: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    stream: str
    received: int
    no_longer_needed: int


@dataclass(frozen=True, slots=True)
class End:
    """Every input has ended and everything that could come out has."""

    path: str


@dataclass(frozen=True, slots=True)
class Fail:
    path: str
    why: str


Action = (
    Start | Run | Enter | RunTentative | Ask | Reply | Leave | Change | Wake | Checkpoint
    | Acknowledge | End | Fail
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PathPlan:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convergent: bool
    #: Reach of the windows and joins back into the inputs, in whole buckets.
    extent: int
    policy: Policy = field(default_factory=Policy)
    #: For each output, what of the inputs it cannot do without.
    trees: Mapping[str, Tree] = field(default_factory=dict)

    @property
    def forgets(self) -> bool:
        """Undo/redo: the state is rebuilt from the inputs that still matter, where that heals."""
        return self.policy.reconcile == "undo" and self.convergent

    def needs_from(self, bucket: int, referred: int) -> int:
        """First bucket of the inputs that is needed to go on after `bucket`, with a version that
        refers to them from `referred` on."""
        return min(referred, bucket + 1 - self.extent) if self.forgets else referred
