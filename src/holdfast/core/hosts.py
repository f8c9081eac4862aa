"""A host: which nodes it starts, stops and tries again, and when it ends itself. Pure.

The controller says with every answer to a heartbeat what the host is to run (`core.membership`);
nothing is started without such an answer.
A node that fails is stopped and tried again beside the others, as `core.quarantine` says; a node
that crashed may have taken the process with it, so a host of which nothing works ends, and is
started again with a new JVM. A host whose controller is gone for long is an orphan: somebody else
may have been told to run its nodes, so it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

from holdfast.core import quarantine as q
from holdfast.core.quarantine import EXIT_CODES, Condition, Kind, Quarantine
from holdfast.frozen import dataclass

#: Heartbeats are sent this often.
HEARTBEAT_US = 500_000
#: A host whose controller is gone for so long ends itself.
ORPHANED_US = 10_000_000
#: At most so much of the time between two heartbeats counts as absence of the controller: the
#: process itself may have stood still.
ABSENCE_US = 5_500_000

DECLARED_DEAD = "the controller declared it dead (no heartbeat, or no progress); it is rebuilt"


def may_try_again(waited_us: int, *, in_use: bool) -> bool:
    """Before a host is up: its controller may be on its way back; `in_use`: a former process, which
    may have to find out first that it is an orphan, still has the storage."""
    return waited_us <= (3 if in_use else 1) * ORPHANED_US


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """To a heartbeat: what to run, and which instances that run here were declared dead."""

    at: int
    assigned: tuple[str, ...]
    dead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unanswered:
    at: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another process is this host now."""

    at: int


@dataclass(frozen=True, slots=True)
class NodeFailed:
    at: int
    node: str
    kind: Kind
    reason: str


@dataclass(frozen=True, slots=True)
class NodeProgressed:
    at: int
    node: str
    position: int


@dataclass(frozen=True, slots=True)
class NodeStopped:
    """Nothing of it runs any more: its storage is free."""

    at: int
    node: str


Event = Answered | Unanswered | Replaced | NodeFailed | NodeProgressed | NodeStopped

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartNode:
    node: str
    #: Move what is there of its storage aside first.
    rebuild: bool = False


@dataclass(frozen=True, slots=True)
class StopNode:
    """`NodeStopped` follows."""

    node: str


@dataclass(frozen=True, slots=True)
class Report:
    node: str
    condition: Condition | None


@dataclass(frozen=True, slots=True)
class End:
    """The process ends, with this exit code."""

    code: int
    why: str


Action = StartNode | StopNode | Report | End


@dataclass(slots=True)
class _Node:
    quarantine: Quarantine
    state: Literal["waits", "runs", "stops"] = "waits"
    #: It is assigned to this host.
    ours: bool = True

    @property
    def works(self) -> bool:
        """As far as anybody knows, and so does the process it runs in."""
        met = self.quarantine.condition
        return self.state == "runs" and (met is None or met.works or met.kind != "crash")


class Host:
    """`rebuildable`: whether the storage of a node can be made anew."""

    def __init__(self, at: int, rebuildable: Callable[[str], bool]) -> None:
        self._rebuildable = rebuildable
        self._nodes: dict[str, _Node] = {}
        #: When the last heartbeat was answered, or was not.
        self._last = at
        self._absent_us = 0

    @property
    def conditions(self) -> dict[str, Condition]:
        """Of the nodes that are not well."""
        met = {name: node.quarantine.condition for name, node in self._nodes.items() if node.ours}
        return {name: condition for name, condition in met.items() if condition is not None}

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Answered():
                self._last, self._absent_us = event.at, 0
                return [*self._assigned(event), *self._start_due(event.at)]
            case Unanswered():
                self._absent_us += min(event.at - self._last, ABSENCE_US)
                self._last = event.at
                if self._absent_us > ORPHANED_US:
                    return [End(0, "the controller is gone: this host is an orphan")]
                return []
            case Replaced():
                return [End(EXIT_CODES["transport"], "another process was started in its place")]
            case NodeFailed():
                return self._failed(event)
            case NodeProgressed():
                node = self._nodes[event.node]
                said = q.Progressed(event.at, event.position)
                return self._told(event.node, node.quarantine.handle(said))
            case NodeStopped():
                node = self._nodes[event.node]
                node.state = "waits"
                if not node.ours:
                    del self._nodes[event.node]
                return []
            case _:
                assert_never(event)

    def _assigned(self, event: Answered) -> list[Action]:
        actions: list[Action] = []
        for name, node in list(self._nodes.items()):
            node.ours = name in event.assigned
            if not node.ours and node.state == "runs":
                node.quarantine.handle(q.Ended(event.at, again_at=event.at))
                actions += self._stop(name)
            elif not node.ours and node.state == "waits":
                del self._nodes[name]
            elif name in event.dead and node.state == "runs":
                failed = NodeFailed(event.at, name, "transport", DECLARED_DEAD)
                actions += self._failed(failed)
        for name in event.assigned:
            if name not in self._nodes:
                self._nodes[name] = _Node(Quarantine(rebuildable=self._rebuildable(name)))
        return actions

    def _failed(self, event: NodeFailed) -> list[Action]:
        node = self._nodes[event.node]
        if node.state != "runs":
            return []  # it was being stopped
        actions = self._told(
            event.node, node.quarantine.handle(q.Failed(event.at, event.kind, event.reason))
        )
        actions += self._stop(event.node)
        if event.kind == "crash" and not any(other.works for other in self._nodes.values()):
            why = f"node {event.node} crashed and nothing else works here: {event.reason}"
            actions.append(End(EXIT_CODES["crash"], why))
        return actions

    def _stop(self, name: str) -> list[Action]:
        self._nodes[name].state = "stops"
        return [StopNode(name)]

    def _start_due(self, at: int) -> list[Action]:
        """Only with the controller's answer in hand: a process that was replaced without knowing it
        must not start anything."""
        actions: list[Action] = []
        for name, node in self._nodes.items():
            if node.ours and node.state != "stops":
                actions += self._told(name, node.quarantine.handle(q.Tick(at)))
        return actions

    def _told(self, name: str, decided: list[q.Action]) -> list[Action]:
        actions: list[Action] = []
        for action in decided:
            match action:
                case q.Start():
                    self._nodes[name].state = "runs"
                    actions.append(StartNode(name, action.rebuild))
                case q.Report():
                    actions.append(Report(name, action.condition))
        return actions
