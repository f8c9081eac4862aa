"""Events and actions of `progress`, the state machine of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from holdfast.core.correction_leases import Answer
from holdfast.core.policy import Policy
from holdfast.core.sunion import WHOLE, Partial
from holdfast.frozen import dataclass
from holdfast.model.trees import Tree
from holdfast.types import NO_UPKEEP, OutputState, Upkeep

# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """The node has started. Paths with a durable version continue from it without waiting for
    inputs."""

    at: int


@dataclass(frozen=True, slots=True)
class InputOpened:
    """The log of an input was opened: its first bucket and its trimmed position are known."""

    at: int
    stream: str
    starts_at: int
    trimmed_upto: int


@dataclass(frozen=True, slots=True)
class BoundaryArrived:
    at: int
    stream: str
    upto: int
    #: Bucket, rows and bytes of each file with rows since the previous boundary.
    rows: tuple[tuple[int, int, int], ...] = ()
    ended: bool = False
    #: Last tentative bucket, computed without the inputs in `missing`.
    tentative_upto: int | None = None
    missing: tuple[str, ...] = ()
    partial: Partial = WHOLE
    #: Delay that the buckets have already spent upstream.
    spent_us: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """Buckets up to `hi` are logged; the version refers to inputs from `needs_from`."""

    at: int
    path: str
    hi: int
    needs_from: int
    #: Last bucket that may still have results without further input.
    horizon: int
    #: Entries of the version that recovery would read, and the number of open windows.
    entries: int = 0
    open: int = 0
    took_us: int = 0
    #: Entries of layers of keyed state.
    layered: int = 0
    #: Layers are being merged beside the steps.
    merging: bool = False


@dataclass(frozen=True, slots=True)
class StepTooLarge:
    """The results of a step do not fit the memory of the driver; nothing of the step was logged.
    `line`: number of the tentative line; None for a stable step."""

    at: int
    path: str
    line: int | None
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointDone:
    at: int
    path: str
    bucket: int
    needs_from: int
    #: Entries that recovery would read, and those of them that became durable now.
    entries: int = 0
    new_entries: int = 0
    took_us: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """The disk was full a moment ago."""

    at: int
    path: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """All consumers of an output have released it up to `needed`, and received it up to
    `received`."""

    at: int
    output: str
    needed: int
    received: int


@dataclass(frozen=True, slots=True)
class TentativeDone:
    """The tentative line with this number ran up to `hi`, and needs its inputs from `needs_from`
    on. `hi` None: the step failed. `no_pause`: it is retried at once, because a smaller step
    follows, or because the disk was full and the driver has paused already."""

    at: int
    path: str
    line: int
    hi: int | None
    needs_from: int | None = None
    no_pause: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A peer corrects its results, or wants to, and asks this replica to keep answering meanwhile.
    `ticket` identifies the request in `Reply`."""

    at: int
    ticket: int
    path: str
    peer: str
    #: Number of the peer's correction, and the last bucket of its stable line.
    correction: int
    position: int
    #: The correction is under way; the correction is over.
    started: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A peer's answer to `Ask`; the answer of an unreachable peer is `away`."""

    at: int
    path: str
    peer: str
    correction: int
    answer: Answer
    #: If the peer keeps answering: the last bucket it has published, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Unpaired:
    """The peer of a pair died (`unpaired`), or is alive again."""

    at: int
    unpaired: bool


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = (
    Began | InputOpened | BoundaryArrived | StepDone | StepTooLarge | CheckpointDone
    | CheckpointFailed | Acknowledged | TentativeDone | Asked | Answered | Unpaired | Tick
)  # fmt: skip

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start a path with the state after `bucket`. Results before `valid_from` are not published,
    because the inputs they need were deleted."""

    path: str
    bucket: int
    origin: int
    valid_from: int


@dataclass(frozen=True, slots=True)
class Run:
    path: str
    lo: int
    hi: int
    #: Set if the state before `lo` was discarded: start from the empty state. The state is correct
    #: from this bucket on, and results of earlier buckets are dropped.
    rebuild_from: int | None = None
    #: Delay that these buckets have already spent; reported to consumers.
    spent_us: int = 0
    upkeep: Upkeep = NO_UPKEEP


@dataclass(frozen=True, slots=True)
class Enter:
    """Start a tentative line from the stable state. The line replaces an older tentative line of
    the path. With `forget`, the stable state is discarded."""

    path: str
    line: int
    forget: bool


@dataclass(frozen=True, slots=True)
class RunTentative:
    """Run buckets of the tentative line on the available inputs. `outputs` lists the outputs that
    continue, each with its last bucket."""

    path: str
    line: int
    lo: int
    hi: int
    outputs: tuple[tuple[str, int], ...]
    missing: tuple[str, ...]
    partial: Partial = WHOLE


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask every peer to keep answering while this replica corrects its results. `Answered` follows
    for each peer, unless the correction is `done`."""

    path: str
    correction: int
    position: int
    started: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a peer's request (`Asked`)."""

    ticket: int
    answer: Answer
    #: If this replica keeps answering: the last bucket it has published, stable or tentative.
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """End the tentative line: the stable line has overtaken it."""

    path: str


@dataclass(frozen=True, slots=True)
class Change:
    """The outputs of the path are in this state; consumers are notified."""

    path: str
    state: OutputState


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` at `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Make the state after `bucket` durable, beside the steps. `CheckpointDone` or
    `CheckpointFailed` follows."""

    path: str
    bucket: int
    #: The costs of a recovery, to be logged with it.
    costs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryDone:
    """The first new bucket since a restart is committed. `stated_us`: how long this may take."""

    path: str
    took_us: int
    stated_us: int | None
    load_us: int
    replay_us: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    stream: str
    received: int
    no_longer_needed: int


@dataclass(frozen=True, slots=True)
class End:
    """Every input has ended, and all results were published."""

    path: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The storage of the node does not have the state that its inputs continue."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A bucket cannot be computed: the results of this bucket alone are too large."""

    path: str
    why: str


Action = (
    Start | Run | Enter | RunTentative | Ask | Reply | Leave | Change | Wake | Checkpoint
    | RecoveryDone | Acknowledge | End | Fail | GiveUp
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PathPlan:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convergent: bool
    #: How far windows and joins reach back into the inputs, in buckets, rounded up.
    extent: int
    policy: Policy = field(default_factory=Policy)
    #: For each output, the inputs that it requires.
    trees: Mapping[str, Tree] = field(default_factory=dict)

    @property
    def forgets(self) -> bool:
        """Undo/redo: the stable state is discarded and later rebuilt from retained inputs. Only a
        convergent path can be rebuilt that way."""
        return self.policy.reconcile == "undo" and self.convergent

    def needs_from(self, bucket: int, referred: int) -> int:
        """First bucket of the inputs that is needed to continue after `bucket`, from a version that
        refers to inputs from `referred` on."""
        return min(referred, bucket + 1 - self.extent) if self.forgets else referred
