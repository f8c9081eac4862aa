"""Host: which nodes a host starts, stops and restarts, and when the host terminates. Pure.

Every reply of the controller to a heartbeat lists the nodes that the host must run
(`core.membership`). The host starts no node without such a reply.

A failed node is stopped and restarted while the other nodes of the host continue;
`core.quarantine` decides when. A crash may have damaged the process as well. So a host terminates
when a node crashes and no other node works; the process is then restarted with a new JVM. A host
that has been without its controller for long is an orphan: another host may have taken over its
nodes, so the orphan terminates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

from holdfast.config import HOST_HEARTBEAT_US
from holdfast.core import quarantine as q
from holdfast.core.quarantine import EXIT_CODES, Condition, Kind, Quarantine
from holdfast.frozen import dataclass

HEARTBEAT_US = HOST_HEARTBEAT_US
#: A host terminates when its controller has been absent for this long.
ORPHANED_US = 10_000_000
#: Upper bound of the absence counted between two heartbeats: the process of the host itself may
#: have been suspended.
ABSENCE_US = 5_500_000

DECLARED_DEAD = (
    "the controller declared the node dead (no heartbeat, or no progress); the node is rebuilt"
)


def may_try_again(waited_us: int, *, in_use: bool) -> bool:
    """Whether a host that is starting may keep retrying: its controller may be restarting.
    `in_use`: a former process still has the storage, and may first have to notice that it is an
    orphan."""
    return waited_us <= (3 if in_use else 1) * ORPHANED_US


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """The controller replied to a heartbeat: the nodes to run, and the instances on this host that
    were declared dead."""

    at: int
    assigned: tuple[str, ...]
    dead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unanswered:
    at: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another process has replaced this one as the host."""

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
    """The node has stopped completely, and its storage is free."""

    at: int
    node: str


Event = Answered | Unanswered | Replaced | NodeFailed | NodeProgressed | NodeStopped

# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartNode:
    node: str
    #: Move the existing storage of the node aside first.
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
    """Terminate the process with this exit code."""

    code: int
    why: str


Action = StartNode | StopNode | Report | End


@dataclass(slots=True)
class _Node:
    quarantine: Quarantine
    state: Literal["waits", "runs", "stops"] = "waits"
    #: The node is assigned to this host.
    ours: bool = True

    @property
    def works(self) -> bool:
        """Whether the node runs and shows that the process is intact: the last failure of the node
        was not a crash, or the node has made progress since."""
        condition = self.quarantine.condition
        return self.state == "runs" and (
            condition is None or condition.works or condition.kind != "crash"
        )


class Host:
    """State machine of one host. `rebuildable`: whether the storage of a node can be rebuilt."""

    def __init__(self, at: int, rebuildable: Callable[[str], bool]) -> None:
        self._rebuildable = rebuildable
        self._nodes: dict[str, _Node] = {}
        #: Time of the last reply to a heartbeat, or of the last missing reply.
        self._last = at
        self._absent_us = 0

    @property
    def conditions(self) -> dict[str, Condition]:
        """Conditions of the assigned nodes that have failed."""
        conditions = {
            name: node.quarantine.condition for name, node in self._nodes.items() if node.ours
        }
        return {name: condition for name, condition in conditions.items() if condition is not None}

    @staticmethod
    def warms_up(epoch: int, *, has_nodes: bool, states_recovery_time: bool) -> bool:
        """Whether a process first runs its paths on generated rows. A first start and a standby do;
        a restarted host with nodes does not, because its waiting buckets warm up the code, unless a
        recovery time is stated, of which the warm-up is no part."""
        return epoch == 1 or not has_nodes or states_recovery_time

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Answered():
                self._last, self._absent_us = event.at, 0
                return [*self._assigned(event), *self._start_due(event.at)]
            case Unanswered():
                self._absent_us += min(event.at - self._last, ABSENCE_US)
                self._last = event.at
                if self._absent_us > ORPHANED_US:
                    return [
                        End(
                            0,
                            f"no reply from the controller for {ORPHANED_US // 1_000_000} s: the "
                            "host stops, because another host may have taken over its nodes",
                        )
                    ]
                return []
            case Replaced():
                return [End(EXIT_CODES["transport"], "another process has replaced this host")]
            case NodeFailed():
                return self._failed(event)
            case NodeProgressed():
                node = self._nodes[event.node]
                progressed = q.Progressed(event.at, event.position)
                return self._node_actions(event.node, node.quarantine.handle(progressed))
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
            return []  # the node is already being stopped
        actions = self._node_actions(
            event.node, node.quarantine.handle(q.Failed(event.at, event.kind, event.reason))
        )
        actions += self._stop(event.node)
        if event.kind == "crash" and not any(other.works for other in self._nodes.values()):
            why = f"node {event.node} crashed and no other node of the host works: {event.reason}"
            actions.append(End(EXIT_CODES["crash"], why))
        return actions

    def _stop(self, name: str) -> list[Action]:
        self._nodes[name].state = "stops"
        return [StopNode(name)]

    def _start_due(self, at: int) -> list[Action]:
        """Start the nodes that are due. Called only with a reply of the controller: a process that
        was replaced without noticing must not start nodes."""
        actions: list[Action] = []
        for name, node in self._nodes.items():
            if node.ours and node.state != "stops":
                actions += self._node_actions(name, node.quarantine.handle(q.Tick(at)))
        return actions

    def _node_actions(self, name: str, decided: list[q.Action]) -> list[Action]:
        actions: list[Action] = []
        for action in decided:
            match action:
                case q.Start():
                    self._nodes[name].state = "runs"
                    actions.append(StartNode(name, action.rebuild))
                case q.Report():
                    actions.append(Report(name, action.condition))
        return actions
