"""A host: what it starts, stops and tries again, and when it ends itself (Flux section 2.2)."""

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
    """One that runs these since 0."""
    made = Host(0, rebuildable=lambda node: True)
    assert made.handle(Answered(0, nodes)) == [StartNode(node) for node in nodes]
    return made


def said(host: Host, *events: Event) -> list[Action]:
    """What the last event gives, without reports."""
    actions: list[Action] = []
    for event in events:
        actions = [a for a in host.handle(event) if not isinstance(a, Report)]
    return actions


def test_it_runs_what_it_is_told_and_nothing_else() -> None:
    does = host("a", "b")
    assert does.handle(Answered(S, ("a", "b"))) == []
    assert does.handle(Answered(2 * S, ("b", "c"))) == [StopNode("a"), StartNode("c")]
    assert does.handle(Answered(3 * S, ("b", "c", "a"))) == [], "what was there is still stopping"
    assert does.handle(NodeStopped(4 * S, "a")) == []
    assert does.handle(Answered(4 * S, ("b", "c", "a"))) == [StartNode("a")]
    assert said(does, Answered(5 * S, ("b", "c")), NodeStopped(6 * S, "a")) == []
    assert does.handle(Answered(7 * S, ("b", "c"))) == []


def test_a_standby_runs_nothing_until_it_is_told_to() -> None:
    does = host()
    assert does.handle(Answered(S, ())) == []
    assert does.handle(Answered(3 * S, ("a", "b"))) == [StartNode("a"), StartNode("b")]


def test_a_bad_node_does_not_stop_the_others() -> None:
    does = host("a", "b")
    failed = does.handle(NodeFailed(S, "a", "refused", "the state of another query"))
    assert [type(action) for action in failed] == [Report, StopNode]
    assert said(does, NodeStopped(2 * S, "a"), Answered(900 * S, ("a", "b"))) == []
    assert does.conditions["a"].final and "b" not in does.conditions


def test_what_may_mend_is_tried_again_when_the_former_instance_is_gone() -> None:
    does = host("a", "b")
    assert said(does, NodeFailed(S, "a", "storage", "read-only")) == [StopNode("a")]
    assert said(does, Answered(60 * S, BOTH)) == [], "its threads may still hold the storage"
    assert said(does, NodeStopped(61 * S, "a"), Answered(61 * S, BOTH)) == [StartNode("a")]
    said(does, NodeProgressed(62 * S, "a", 5))
    assert does.handle(NodeProgressed(62 * S, "a", 6)) == [Report("a", None)]


def test_damaged_storage_is_rebuilt() -> None:
    does = host("a", "b")
    said(does, NodeFailed(S, "a", "damaged", "rot"), NodeStopped(S, "a"))
    assert said(does, Answered(2 * S, BOTH)) == [StartNode("a", rebuild=True)]


def test_nothing_is_started_without_the_controller() -> None:
    """The process may have been replaced without knowing it yet."""
    does = host("a", "b")
    said(does, NodeFailed(S, "a", "transport", "the older one must stop"), NodeStopped(S, "a"))
    assert [said(does, Unanswered(second * S)) for second in range(2, 8)] == [[]] * 6
    assert said(does, Answered(9 * S, BOTH)) == [StartNode("a")]


def test_one_that_was_declared_dead_is_started_anew() -> None:
    does = host("a", "b")
    assert said(does, Answered(S, ("a", "b"), dead=("a",))) == [StopNode("a")]
    assert said(does, Answered(2 * S, ("a", "b"), dead=("a",))) == []
    assert said(does, NodeStopped(3 * S, "a"), Answered(3 * S, BOTH)) == [StartNode("a")]


def test_a_crash_is_tried_again_in_place_while_something_works() -> None:
    does = host("a", "b")
    assert said(does, NodeFailed(S, "a", "crash", "ValueError")) == [StopNode("a")]
    assert said(does, NodeStopped(2 * S, "a"), Answered(2 * S, BOTH)) == [StartNode("a")]


def test_a_host_of_which_nothing_works_ends() -> None:
    """Of an unforeseen error the process itself may be the cause, such as a JVM that is gone."""
    does = host("a")
    *_, end = does.handle(NodeFailed(S, "a", "crash", "Py4JNetworkError"))
    assert isinstance(end, End) and end.code == 1
    does = host("a", "b")
    does.handle(NodeFailed(S, "a", "crash", "Py4JNetworkError"))
    *_, end = does.handle(NodeFailed(S, "b", "crash", "Py4JNetworkError"))
    assert isinstance(end, End)


def test_a_node_that_crashes_on_and_on_does_not_end_the_others() -> None:
    does, at = host("a", "b"), S
    for _ in range(3 * POLICIES["crash"].limit):
        assert said(does, NodeFailed(at, "a", "crash", "ValueError")) == [StopNode("a")]
        at += 60 * S
        assert said(does, NodeStopped(at, "a"), Answered(at, BOTH)) == [StartNode("a")]
    assert does.conditions["a"].quarantined


def test_an_error_that_comes_while_it_stops_changes_nothing() -> None:
    does = host("a", "b")
    said(does, NodeFailed(S, "a", "transport", "away"))
    assert said(does, NodeFailed(S, "a", "crash", "closed log")) == []
    assert does.conditions["a"].kind == "transport"


def test_an_orphan_ends_itself() -> None:
    does, at = host("a"), 0
    while at <= ORPHANED_US:
        assert said(does, Unanswered(at)) == []
        at += HEARTBEAT_US
    (end,) = said(does, Unanswered(at))
    assert isinstance(end, End) and end.code == 0


def test_an_answer_in_time_keeps_it() -> None:
    does = host("a")
    for second in range(9):
        said(does, Unanswered(second * S))
    said(does, Answered(9 * S, ("a",)))
    assert [said(does, Unanswered(second * S)) for second in range(10, 19)] == [[]] * 9


def test_time_in_which_the_host_itself_stood_still_does_not_count() -> None:
    does = host("a")
    assert said(does, Unanswered(3_600 * S)) == [], f"at most {ABSENCE_US / S} s of that hour"
    assert said(does, Answered(3_601 * S, ("a",))) == []


def test_a_host_that_was_replaced_ends() -> None:
    (end,) = said(host("a"), Replaced(S))
    assert isinstance(end, End) and end.code != 0
