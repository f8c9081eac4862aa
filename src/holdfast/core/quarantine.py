"""Restart and quarantine of a failed component: a node in its host, or a host process. Pure.

One failed component never stops the others. The component is restarted after a pause that depends
on the kind of its error. A component that keeps failing is quarantined: it is reported with a
remedy, and restarted with long pauses, because an external cause may disappear. Errors that a
restart cannot fix wait for an operator. Failures are counted since the last progress: a component
that computes the same buckets again and fails at the same bucket has made no progress.

`stopped` lists the affected outputs: an output stops when all replicas of a fragment that it needs
are out.
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
#: `LOOP_CRASHES` crashes within `LOOP_US` are a crash loop, even with progress between them.
LOOP_CRASHES, LOOP_US = 5, 300 * S
#: A component that ran for this long without a failure is healthy again, even without progress.
STEADY_US = 60 * S
#: Longest reason, in characters.
REASON_MAX = 600
#: Number of damaged storage folders that are retained for inspection.
DAMAGED_KEPT = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """Restarts after one kind of error. The pause before a restart doubles with each failure."""

    #: First and longest pause.
    first_us: int
    most_us: int
    #: Number of failures in a row that leads to quarantine.
    limit: int
    #: What to do. HOST stands for the host of the component.
    remedy: str
    #: Restarted automatically; otherwise only when an operator requests it.
    repeated: bool = True


POLICIES: Mapping[Kind, Policy] = {
    # A peer or the controller is unreachable, or the instance was replaced.
    "transport": Policy(
        200_000, 5 * S, 20,
        "restarts automatically; if the error persists, check the network between the hosts",
    ),
    # Full, read-only, permission denied, EIO. Attempts are cheap, and a component that returns
    # early catches up early.
    "storage": Policy(
        500_000, 5 * S, 3,
        "restarts automatically; if the error persists, free or repair its storage",
    ),
    # The data differs from what was written, or the folder is missing: rebuilt where that is safe.
    "damaged": Policy(
        200_000, 60 * S, 3,
        "restarts automatically and rebuilds its storage; the damaged storage is retained beside "
        "it as *.damaged-N. Check the disk",
    ),
    # No producer has the input data that the component needs.
    "inputs": Policy(
        500_000, 30 * S, 5,
        "restarts automatically; if the error persists, restore the missing files from a backup. "
        "Without them their rows are lost: start the network from scratch with another --storage",
    ),
    # The environment: Java, ports, memory.
    "setup": Policy(
        5 * S, 60 * S, 1,
        "restarts automatically; correct the setup of the machine as described",
    ),
    # The query, its options and its storage do not match: a restart would fail again.
    "refused": Policy(
        0, 0, 1,
        "fix the cause, then run `holdfast restart --host HOST`. If the query itself must change, "
        "stop the run and start it with another --storage",
        repeated=False,
    ),
    # Any other error.
    "crash": Policy(
        100_000, 30 * S, 4,
        "restarts automatically. See the log of its host: if memory is short, change `--memory` "
        "(Options.memory); otherwise report it with that log",
    ),
    # Killed from outside, by an operator or the kernel.
    "killed": Policy(
        100_000, 30 * S, 4,
        "restarts automatically. If nobody killed it, the machine is short of memory: lower "
        "`--memory` (Options.memory) or the number of hosts",
    ),
    # Alive, but killed because heartbeats were missing for too long (`core.watchdog`).
    "hung": Policy(
        100_000, 30 * S, 4,
        "is killed and restarts automatically. If this happens again, look for swapping, a disk "
        "that hangs, or a debugger or SIGSTOP on its machine",
    ),
}  # fmt: skip

NOT_REBUILT = (
    "wait for the restart of the node: it continues from its checkpoint, or from the first bucket "
    "if none of its inputs was deleted. If it fails again, restore the damaged files, or the whole "
    "folder of the node, from a backup that has its newest checkpoint, and restart the host with "
    "`holdfast restart --host`. Without such a backup, the state is lost: start the network with "
    "another --storage"
)

#: `_LOOPING`: kinds that count as crashes of a crash loop. `_EXTERNAL`: those of them that are not
#: caused by the computed buckets. After these the component is healthy when it has reached its
#: previous position again.
_LOOPING: tuple[Kind, ...] = ("crash", "killed", "hung")
_EXTERNAL: tuple[Kind, ...] = ("killed", "hung")
#: SIGHUP, SIGINT, SIGKILL, SIGTERM: sent from outside. Other signals are faults of the process.
_SENT = (1, 2, 9, 15)

#: Exit code of a host process by kind of error. 0: asked to stop, or the supervisor is gone.
EXIT_CODES: Mapping[Kind, int] = {
    "crash": 1, "refused": 2, "setup": 3, "storage": 4, "transport": 5,
}  # fmt: skip


def kind_of(err: BaseException) -> Kind:
    match err:
        case TransportError() | StaleEpoch():
            return "transport"
        case InputsLost():
            return "inputs"
        # Trimmed: the node has released these buckets, so its storage is an older copy.
        case LogCorrupted() | StorageLost() | Refuted() | Trimmed():
            return "damaged"
        case LogError() | OSError():
            return "storage"
        case SetupError() if not isinstance(err, IdentityMismatch):
            return "setup"
        case HoldfastError():
            return "refused"
    return "crash"


def reason_of(err: BaseException) -> str:
    """The error message in one line of limited length, without the Java stack trace."""
    text = str(err) if isinstance(err, HoldfastError | OSError) else f"{type(err).__name__}: {err}"
    line = " ".join(text.split())
    line = line if len(line) <= REASON_MAX else f"{line[:REASON_MAX]} ..."
    return line.encode(errors="replace").decode()


def kind_of_exit(code: int) -> Kind:
    """Kind of error of a process that exited with `code` without being asked to stop."""
    kinds: dict[int, Kind] = {number: kind for kind, number in EXIT_CODES.items()}
    if -code in _SENT:
        return "killed"
    return "transport" if code == 0 else kinds.get(code, "crash")


@dataclass(frozen=True, slots=True)
class Condition:
    """Why a component is not healthy."""

    kind: Kind
    reason: str
    remedy: str
    #: Time of the first failure since the component was healthy.
    since: int
    #: Failures in a row without progress between them.
    failures: int
    quarantined: bool
    #: Time of the next restart; for a silent host, of its kill. None: the component runs, or
    #: restarts only on request.
    retry_at: int | None
    #: The component runs and has made progress; only its recent crash loop is reported.
    works: bool = False

    @classmethod
    def silent(cls, since: int, kill_at: int, reason: str) -> Condition:
        """Condition of a host without heartbeats that is killed at `kill_at`."""
        remedy = POLICIES["hung"].remedy
        return cls("hung", reason, remedy, since, 0, quarantined=False, retry_at=kill_at)

    @property
    def out(self) -> bool:
        """The component is quarantined and does not work."""
        return self.quarantined and not self.works

    @property
    def final(self) -> bool:
        """The component is not restarted automatically."""
        return self.out and not POLICIES[self.kind].repeated

    def status(self, at: int, host: str) -> PartStatus:
        """The condition of the host `host`, or of a node on it."""
        return PartStatus(
            self.kind, self.reason, self.remedy.replace("HOST", host), self.failures,
            self.quarantined, self.out, self.final, (at - self.since) // 1_000,
            None if self.retry_at is None else max(0, self.retry_at - at) // 1_000,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A condition as reported to other processes: with durations, because monotonic times are only
    valid within one process."""

    kind: Kind
    reason: str
    remedy: str
    failures: int
    quarantined: bool
    out: bool
    final: bool
    for_ms: int
    #: Time until the next restart; for a silent host, until it is killed.
    retry_in_ms: int | None

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        return "silent" if self.kind == "hung" and not self.failures else "restarting"

    @property
    def text(self) -> str:
        """One line: state, next restart, reason and remedy."""
        due = due_text(self.state, self.retry_in_ms)
        when = "" if due is None else f" ({due})"
        return f"{self.state}{when}: {self.reason.rstrip('.')}. Remedy: {self.remedy}"


def due_text(state: str, retry_in_ms: int | None) -> str | None:
    """What happens next to a component, and when; None: nothing is due."""
    if retry_in_ms is None:
        return None
    due_s = f"in {retry_in_ms / 1e3:.0f} s"
    return f"killed {due_s} unless it responds" if state == "silent" else f"next restart {due_s}"


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    at: int
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The component stopped on request, and is started again at `again_at`."""

    at: int
    again_at: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """Position of the component, reported regularly while it runs."""

    at: int
    position: int


@dataclass(frozen=True, slots=True)
class Asked:
    """An operator requests a restart now."""

    at: int


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = Failed | Ended | Progressed | Asked | Tick

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    #: Move the existing storage aside first.
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The condition has changed; None: the component is healthy again."""

    condition: Condition | None


Action = Start | Report


@dataclass(slots=True)
class Quarantine:
    """State machine of one component. The first `Tick` starts the component."""

    #: Lost storage can be rebuilt, from a peer or from inputs that upstream retains.
    rebuildable: bool = False
    condition: Condition | None = None
    #: Time of the last start; None: the component does not run.
    runs_since: int | None = None
    #: Time of the next start. None: the component runs, or restarts only on request.
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
                f"crash loop: {len(self._crashes)} failures within {LOOP_US // S} s, "
                f"the last one: {reason}"
            )
        pause_us = min(policy.first_us * 2 ** min(repeats - 1, 30), policy.most_us)
        self.due = at + (policy.most_us if helpless else pause_us) if policy.repeated else None
        since = at if self.condition is None else self.condition.since
        self.condition = Condition(
            kind, reason, NOT_REBUILT if helpless else policy.remedy, since, self._failures,
            quarantined=loops or helpless or self._failures >= policy.limit, retry_at=self.due,
        )  # fmt: skip

    def _progressed(self, event: Progressed) -> None:
        reached = self._reached
        self._reached = event.position if reached is None else max(reached, event.position)
        if reached is None or self.runs_since is None:
            return
        external = self.condition is not None and self.condition.kind in _EXTERNAL
        if event.position > reached or (external and event.position >= reached):
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
        """Reset the count of failures. A recent crash loop remains in the report for a while."""
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
    """The part of a condition whose change is worth a report."""
    if condition is None:
        return None
    loops = condition.reason.startswith("crash loop")
    return condition.kind, loops or condition.reason, condition.quarantined, condition.works


def damaged_to_delete(kept: Sequence[int]) -> Sequence[int]:
    """Numbers of the damaged folders to delete before another one is moved aside. `kept`: the
    numbers of the existing ones, oldest first."""
    return kept[: max(0, len(kept) + 1 - DAMAGED_KEPT)]


def stopped(
    needs: Mapping[str, Collection[Sequence[str]]], out: Collection[str]
) -> dict[str, list[str]]:
    """The outputs that need a fragment without any replica left, and the nodes that are missing.
    `needs`: for each output, the replicas of every fragment upstream of it. `out`: the nodes that
    do not work."""
    stopped_outputs: dict[str, list[str]] = {}
    for output, groups in needs.items():
        missing_nodes = [name for group in groups if all(n in out for n in group) for name in group]
        if missing_nodes:
            stopped_outputs[output] = missing_nodes
    return stopped_outputs
