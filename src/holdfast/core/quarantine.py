"""What becomes of a part that fails: a node in its host, or the process of a host. Pure.

One bad part never stops the rest. It is tried again, sooner or later, as the kind of its error
says; what goes on failing is quarantined: reported as such, with what to do, and tried again at a
slow pace, because what the world broke the world may mend. Only what no repetition can help waits
for a person. Failures are counted from the last progress: a part that computes the same buckets
again and fails at the same one has made none.

What a part costs its readers, `stopped` says: an output stops when all replicas of something it
needs are out, and no other does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Literal, assert_never

from holdfast.errors import (
    HoldfastError,
    IdentityMismatch,
    InputsLost,
    LogCorrupted,
    LogError,
    Refuted,
    SetupError,
    StaleEpoch,
    StorageLost,
    TransportError,
    Trimmed,
)
from holdfast.frozen import dataclass

Kind = Literal[
    "transport", "storage", "damaged", "inputs", "setup", "refused", "crash", "killed", "hung"
]

S = 1_000_000
#: So many crashes within so long are a crash loop, whatever was done between them.
LOOP_CRASHES, LOOP_US = 5, 300 * S
#: What has run for so long without failing is well again, even if there was nothing to do.
STEADY_US = 60 * S
#: Characters of a reason.
REASON_MAX = 600
#: Storage that was moved aside is kept for people to look at, but not for ever.
DAMAGED_KEPT = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """The pause before the first repetition; it doubles from one to the next."""

    first_us: int
    most_us: int
    #: Quarantined with this failure in a row.
    limit: int
    remedy: str
    #: By itself; otherwise a person has to ask for it.
    repeated: bool = True


POLICIES: Mapping[Kind, Policy] = {
    # A peer or the controller is away, or the instance was replaced.
    "transport": Policy(
        200_000, 5 * S, 20,
        "it is tried again by itself; if it lasts, check the network between the hosts",
    ),
    # Full, read-only, denied, EIO. Trying costs little, and whoever is back soon catches up soon.
    "storage": Policy(
        500_000, 5 * S, 3, "free or repair the storage; it is tried again by itself",
    ),
    # Bytes are not what was written, or the folder is gone: rebuilt where that is safe.
    "damaged": Policy(
        200_000, 60 * S, 3,
        "its storage is rebuilt; what was there is kept beside it as *.damaged-N. Check the disk",
    ),
    # What it needs of an input is not to be had from anybody.
    "inputs": Policy(
        500_000, 30 * S, 5,
        "restore the named file from a backup; it is tried again by itself. Without the file its "
        "rows are lost: start the network afresh with another storage",
    ),
    # Java, ports, memory: of the machine.
    "setup": Policy(
        5 * S, 60 * S, 1, "prepare the machine as it says; it is tried again by itself",
    ),
    # The query, its options or its storage do not fit each other: the same again would fail again.
    "refused": Policy(
        0, 0, 1, "mend the cause, then run `holdfast restart --host HOST`", repeated=False,
    ),
    # Whatever nobody foresaw.
    "crash": Policy(
        100_000, 30 * S, 4,
        "it is tried again by itself; the reason is in the log of its host. If it is not memory "
        "(Options.memory, `--memory`), please report it with that log",
    ),
    # By somebody else: a person, the kernel.
    "killed": Policy(
        100_000, 30 * S, 4,
        "it is started again by itself. If nobody killed it, the machine is short of memory: lower "
        "Options.memory (`--memory`) or the number of hosts",
    ),
    # Alive, and without heartbeats for so long that it was killed (`core.watchdog`).
    "hung": Policy(
        100_000, 30 * S, 4,
        "it is killed and started again by itself. If it happens again, look for swapping, a disk "
        "that hangs, or a debugger or SIGSTOP on its machine",
    ),
}  # fmt: skip

NOT_REBUILT = (
    "restore its storage from a backup, or delete it to start empty: it is not rebuilt by itself, "
    "because with recovery='checkpoint' nobody keeps what it would need"
)

#: Kinds that end a process again and again in a crash loop; and of those, where the cause is not in
#: the buckets it computes: it is well again where it was before.
_LOOPING: tuple[Kind, ...] = ("crash", "killed", "hung")
_EXTERNAL: tuple[Kind, ...] = ("killed", "hung")
#: SIGHUP, SIGINT, SIGKILL, SIGTERM: somebody sends them; the others are faults of the process.
_SENT = (1, 2, 9, 15)

#: How a host process ends when it met an error it can name. 0: it was asked to, or is an orphan.
EXIT_CODES: Mapping[Kind, int] = {
    "crash": 1, "refused": 2, "setup": 3, "storage": 4, "transport": 5,
}  # fmt: skip


def kind_of(err: BaseException) -> Kind:
    match err:
        case TransportError() | StaleEpoch():
            return "transport"
        case InputsLost() | Trimmed():
            return "inputs"
        case LogCorrupted() | StorageLost() | Refuted():
            return "damaged"
        case LogError() | OSError():
            return "storage"
        case SetupError() if not isinstance(err, IdentityMismatch):
            return "setup"
        case HoldfastError():
            return "refused"
    return "crash"


def reason_of(err: BaseException) -> str:
    """One line, and not a page of Java."""
    text = str(err) if isinstance(err, HoldfastError | OSError) else f"{type(err).__name__}: {err}"
    line = " ".join(text.split())
    line = line if len(line) <= REASON_MAX else f"{line[:REASON_MAX]} ..."
    return line.encode(errors="replace").decode()


def kind_of_exit(code: int) -> Kind:
    """Of a process that was not asked to end."""
    named: dict[int, Kind] = {number: kind for kind, number in EXIT_CODES.items()}
    if -code in _SENT:
        return "killed"
    return "transport" if code == 0 else named.get(code, "crash")


@dataclass(frozen=True, slots=True)
class Condition:
    """Why a part is not well."""

    kind: Kind
    reason: str
    remedy: str
    #: Of the first failure since it was well.
    since: int
    #: In a row, without progress.
    failures: int
    quarantined: bool
    #: None: it runs, or has to be asked for.
    retry_at: int | None
    #: It runs and has made progress; only its past is reported.
    works: bool = False

    @classmethod
    def silent(cls, since: int, kill_at: int, reason: str) -> Condition:
        """Of a host that is not heard of, and has not been killed yet."""
        remedy = POLICIES["hung"].remedy
        return cls("hung", reason, remedy, since, 0, quarantined=False, retry_at=kill_at)

    @property
    def out(self) -> bool:
        """Nothing is to be expected of it soon."""
        return self.quarantined and not self.works

    @property
    def final(self) -> bool:
        """It is not tried again by itself."""
        return self.out and not POLICIES[self.kind].repeated

    def status(self, at: int) -> PartStatus:
        return PartStatus(
            self.kind, self.reason, self.remedy, self.failures, self.quarantined, self.out,
            self.final, (at - self.since) // 1_000,
            None if self.retry_at is None else max(0, self.retry_at - at) // 1_000,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A condition as others are told of it: a monotonic clock means nothing to them."""

    kind: Kind
    reason: str
    remedy: str
    failures: int
    quarantined: bool
    out: bool
    final: bool
    for_ms: int
    retry_in_ms: int | None

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        return "silent" if self.kind == "hung" and not self.failures else "restarting"

    @property
    def text(self) -> str:
        """One line: what happened, what follows, what to do."""
        tried = "" if self.retry_in_ms is None else f" (next try in {self.retry_in_ms / 1e3:.0f} s)"
        return f"{self.state}{tried}: {self.reason.rstrip('.')}. To do: {self.remedy}"


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    at: int
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """It was asked to end, and is started again then."""

    at: int
    again_at: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far it is: said again and again while it runs."""

    at: int
    position: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A person wants it tried now."""

    at: int


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = Failed | Ended | Progressed | Asked | Tick

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    #: Move what is there of its storage aside first.
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Its condition is another one; None: it is well again."""

    condition: Condition | None


Action = Start | Report


@dataclass(slots=True)
class Quarantine:
    """One part. It is started with the first `Tick`."""

    #: Lost storage can be made anew: from a peer, or because upstream keeps everything for it.
    rebuildable: bool = False
    condition: Condition | None = None
    #: Since when it runs; None: it does not.
    runs_since: int | None = None
    #: When it is to be started; None: it runs, or has to be asked for.
    due: int | None = 0
    _failures: int = 0
    _crashes: list[int] = field(default_factory=list)
    _reached: int | None = None
    _rebuild: bool = False

    def handle(self, event: Event) -> list[Action]:
        before = self.condition
        actions: list[Action] = []
        match event:
            case Failed():
                self._failed(event)
            case Ended():
                self.runs_since, self.due = None, event.again_at
            case Progressed():
                self._progressed(event)
            case Asked():
                if self.runs_since is None:
                    self.due = event.at
                actions += self._tick(event.at)
            case Tick():
                actions += self._tick(event.at)
            case _:
                assert_never(event)
        if _said(before) != _said(self.condition):
            actions.append(Report(self.condition))
        return actions

    def _failed(self, event: Failed) -> None:
        at, kind, policy = event.at, event.kind, POLICIES[event.kind]
        self.runs_since = None
        self._failures += 1
        self._rebuild = kind == "damaged" and self.rebuildable
        helpless = kind == "damaged" and not self.rebuildable
        reason, repeats = event.reason, self._failures
        if loops := kind in _LOOPING and self._loops(at, more=1):
            repeats = max(repeats, len(self._crashes))
            reason = (
                f"crash loop: it ended {len(self._crashes)} times within "
                f"{LOOP_US // S} s, the last time with: {reason}"
            )
        pause_us = min(policy.first_us * 2 ** min(repeats - 1, 30), policy.most_us)
        self.due = at + (policy.most_us if helpless else pause_us) if policy.repeated else None
        since = at if self.condition is None else self.condition.since
        self.condition = Condition(
            kind, reason, NOT_REBUILT if helpless else policy.remedy, since, self._failures,
            quarantined=loops or helpless or self._failures >= policy.limit, retry_at=self.due,
        )  # fmt: skip

    def _progressed(self, event: Progressed) -> None:
        known = self._reached
        self._reached = event.position if known is None else max(known, event.position)
        if known is None or self.runs_since is None:
            return
        back = self.condition is not None and self.condition.kind in _EXTERNAL
        if event.position > known or (back and event.position >= known):
            self._well(event.at)

    def _tick(self, at: int) -> list[Action]:
        if self.runs_since is not None:
            if at - self.runs_since >= STEADY_US:
                self._well(at)
            return []
        if self.due is None or at < self.due:
            return []
        self.runs_since, self.due = at, None
        rebuild, self._rebuild = self._rebuild, False
        if self.condition is not None:
            self.condition = replace(self.condition, retry_at=None)
        return [Start(rebuild)]

    def _well(self, at: int) -> None:
        """Failures are counted anew; that there were many crashes is told a while longer."""
        self._failures = 0
        if self.condition is None:
            return
        if self.condition.kind in _LOOPING and self._loops(at):
            self.condition = replace(self.condition, works=True, failures=0)
        else:
            self.condition = None

    def _loops(self, at: int, *, more: int = 0) -> bool:
        self._crashes = [then for then in self._crashes if at - then < LOOP_US] + [at] * more
        return len(self._crashes) >= LOOP_CRASHES


def _said(condition: Condition | None) -> object:
    """What is worth a line in the log."""
    if condition is None:
        return None
    loops = condition.reason.startswith("crash loop")
    return condition.kind, loops or condition.reason, condition.quarantined, condition.works


def damaged_to_delete(kept: Sequence[int]) -> Sequence[int]:
    """Of the numbers of what was moved aside before, oldest first, when one more is."""
    return kept[: max(0, len(kept) + 1 - DAMAGED_KEPT)]


def stopped(
    needs: Mapping[str, Collection[Sequence[str]]], out: Collection[str]
) -> dict[str, list[str]]:
    """The outputs of which something has no replica left, and the nodes that are missing. `needs`:
    for each output, the replicas of every fragment on the way to it; `out`: nodes of which nothing
    is to be expected."""
    found: dict[str, list[str]] = {}
    for output, groups in needs.items():
        gone = [name for group in groups if all(n in out for n in group) for name in group]
        if gone:
            found[output] = gone
    return found
