"""Which nodes a host starts, stops and restarts, and when it terminates (Flux section 2.2)."""

from __future__ import annotations

from holdfast.core.hosts import (
    ABSENCE_US,
    HEARTBEAT_US,
    ORPHANED_US,
    Action,
    Answered,
    End,
    Event,
    Host,
    NodeFailed,
    NodeProgressed,
    NodeStopped,
    Replaced,
    Report,
    StartNode,
    StopNode,
    Unanswered,
)
from holdfast.core.quarantine import POLICIES, S

BOTH = ("a", "b")


def host(*nodes: str) -> Host:
    """A host that has run these nodes since 0."""
    machine = Host(0, rebuildable=lambda node: True)
    assert machine.handle(Answered(0, nodes)) == [StartNode(node) for node in nodes]
    return machine


def handle(host: Host, *events: Event) -> list[Action]:
    """Actions of the last event, without reports."""
    actions: list[Action] = []
    for event in events:
        actions = [a for a in host.handle(event) if not isinstance(a, Report)]
    return actions


def test_a_host_runs_exactly_the_nodes_that_are_assigned_to_it() -> None:
    machine = host("a", "b")
    assert machine.handle(Answered(S, ("a", "b"))) == []
    assert machine.handle(Answered(2 * S, ("b", "c"))) == [StopNode("a"), StartNode("c")]
    assert machine.handle(Answered(3 * S, ("b", "c", "a"))) == [], (
        "the former instance is still stopping"
    )
    assert machine.handle(NodeStopped(4 * S, "a")) == []
    assert machine.handle(Answered(4 * S, ("b", "c", "a"))) == [StartNode("a")]
    assert handle(machine, Answered(5 * S, ("b", "c")), NodeStopped(6 * S, "a")) == []
    assert machine.handle(Answered(7 * S, ("b", "c"))) == []


def test_a_standby_runs_no_node_until_one_is_assigned() -> None:
    machine = host()
    assert machine.handle(Answered(S, ())) == []
    assert machine.handle(Answered(3 * S, ("a", "b"))) == [StartNode("a"), StartNode("b")]


def test_a_failed_node_does_not_stop_the_others() -> None:
    machine = host("a", "b")
    failed = machine.handle(NodeFailed(S, "a", "refused", "the state of another query"))
    assert [type(action) for action in failed] == [Report, StopNode]
    assert handle(machine, NodeStopped(2 * S, "a"), Answered(900 * S, ("a", "b"))) == []
    assert machine.conditions["a"].final and "b" not in machine.conditions


def test_a_node_is_restarted_only_after_its_former_instance_has_stopped() -> None:
    machine = host("a", "b")
    assert handle(machine, NodeFailed(S, "a", "storage", "read-only")) == [StopNode("a")]
    assert handle(machine, Answered(60 * S, BOTH)) == [], (
        "threads of the former instance may still use the storage"
    )
    assert handle(machine, NodeStopped(61 * S, "a"), Answered(61 * S, BOTH)) == [StartNode("a")]
    handle(machine, NodeProgressed(62 * S, "a", 5))
    assert machine.handle(NodeProgressed(62 * S, "a", 6)) == [Report("a", None)]


def test_damaged_storage_is_rebuilt() -> None:
    machine = host("a", "b")
    handle(machine, NodeFailed(S, "a", "damaged", "rot"), NodeStopped(S, "a"))
    assert handle(machine, Answered(2 * S, BOTH)) == [StartNode("a", rebuild=True)]


def test_no_node_is_started_without_the_controller() -> None:
    """The host may have been replaced without having been notified."""
    machine = host("a", "b")
    handle(machine, NodeFailed(S, "a", "transport", "the older must stop"), NodeStopped(S, "a"))
    assert [handle(machine, Unanswered(second * S)) for second in range(2, 8)] == [[]] * 6
    assert handle(machine, Answered(9 * S, BOTH)) == [StartNode("a")]


def test_a_node_that_was_declared_dead_is_restarted() -> None:
    machine = host("a", "b")
    assert handle(machine, Answered(S, ("a", "b"), dead=("a",))) == [StopNode("a")]
    assert handle(machine, Answered(2 * S, ("a", "b"), dead=("a",))) == []
    assert handle(machine, NodeStopped(3 * S, "a"), Answered(3 * S, BOTH)) == [StartNode("a")]


def test_a_crashed_node_is_restarted_in_place_while_another_node_works() -> None:
    machine = host("a", "b")
    assert handle(machine, NodeFailed(S, "a", "crash", "ValueError")) == [StopNode("a")]
    assert handle(machine, NodeStopped(2 * S, "a"), Answered(2 * S, BOTH)) == [StartNode("a")]


def test_a_host_without_a_working_node_terminates() -> None:
    """The cause of an unexpected error may be the process itself, for example a lost JVM."""
    machine = host("a")
    *_, end = machine.handle(NodeFailed(S, "a", "crash", "Py4JNetworkError"))
    assert isinstance(end, End) and end.code == 1
    machine = host("a", "b")
    machine.handle(NodeFailed(S, "a", "crash", "Py4JNetworkError"))
    *_, end = machine.handle(NodeFailed(S, "b", "crash", "Py4JNetworkError"))
    assert isinstance(end, End)


def test_a_node_that_crashes_repeatedly_does_not_stop_the_others() -> None:
    machine, at = host("a", "b"), S
    for _ in range(3 * POLICIES["crash"].limit):
        assert handle(machine, NodeFailed(at, "a", "crash", "ValueError")) == [StopNode("a")]
        at += 60 * S
        assert handle(machine, NodeStopped(at, "a"), Answered(at, BOTH)) == [StartNode("a")]
    assert machine.conditions["a"].quarantined


def test_an_error_of_a_stopping_node_does_not_replace_the_first_one() -> None:
    machine = host("a", "b")
    handle(machine, NodeFailed(S, "a", "transport", "away"))
    assert handle(machine, NodeFailed(S, "a", "crash", "closed log")) == []
    assert machine.conditions["a"].kind == "transport"


def test_an_orphaned_host_terminates() -> None:
    machine, at = host("a"), 0
    while at <= ORPHANED_US:
        assert handle(machine, Unanswered(at)) == []
        at += HEARTBEAT_US
    (end,) = handle(machine, Unanswered(at))
    assert isinstance(end, End) and end.code == 0


def test_an_answer_in_time_keeps_the_host_running() -> None:
    machine = host("a")
    for second in range(9):
        handle(machine, Unanswered(second * S))
    handle(machine, Answered(9 * S, ("a",)))
    assert [handle(machine, Unanswered(second * S)) for second in range(10, 19)] == [[]] * 9


def test_time_in_which_the_host_itself_was_suspended_does_not_count() -> None:
    machine = host("a")
    assert handle(machine, Unanswered(3_600 * S)) == [], f"at most {ABSENCE_US / S} s of that hour"
    assert handle(machine, Answered(3_601 * S, ("a",))) == []


def test_a_host_that_was_replaced_terminates() -> None:
    (end,) = handle(host("a"), Replaced(S))
    assert isinstance(end, End) and end.code != 0


def test_a_restarted_host_warms_up_only_if_a_recovery_time_is_stated() -> None:
    assert Host.warms_up(1, has_nodes=True, states_recovery_time=False), "a first start"
    assert Host.warms_up(2, has_nodes=False, states_recovery_time=False), "a standby"
    assert not Host.warms_up(2, has_nodes=True, states_recovery_time=False)
    assert Host.warms_up(2, has_nodes=True, states_recovery_time=True)
