"""Which nodes are dead, and which standby replaces which host (Flux sections 2.2 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.failure_detector import FailureDetector
from holdfast.core.membership import InstanceStatus, lost, process_of, take_overs

PAIR = {"a": "a@2", "a@2": "a"}
PAIRS = {f"{x}{c}": f"{x}{'@2' if not c else ''}" for x in "abc" for c in ("", "@2")}
BOTH = {"a": InstanceStatus(1, 0), "a@2": InstanceStatus(1, 0)}


def listened(
    live: Iterable[str], dead: Iterable[str], since: int = 0, silent: Iterable[str] = ()
) -> FailureDetector:
    """The dead nodes were found at 94. Their peers send a heartbeat at 95; the last heartbeat of
    the silent ones was at 93."""
    detector = FailureDetector(silence_us=10, since=since)
    detector.found_dead(list(dead), 94)
    for name in [*map(process_of, live), *(PAIRS[name] for name in dead)]:
        detector.heard(name, 93 if name in silent else 95)
    return detector


def test_one_standby_replaces_only_one_of_two_lost_hosts() -> None:
    runs = {"h1": ["a", "b@2"], "h2": ["b", "c@2"], "h3": ["c", "a@2"], "h4": []}
    detector = listened(["h3", "h4"], ["a", "b@2", "c@2"])
    assert take_overs(runs, PAIRS, detector, at=100) == {"a": "h4", "b@2": "h4"}


def test_a_node_that_is_not_dead_stays_with_its_host() -> None:
    """The node has no peer, or no live peer from which to be rebuilt."""
    runs = {"h1": ["a", "alone"], "h2": []}
    assert take_overs(runs, PAIRS, listened(["h2"], ["a"]), at=100) == {"a": "h2"}


def test_a_live_host_keeps_its_nodes() -> None:
    """One of its nodes was declared dead: the node is rebuilt on the same host."""
    runs = {"h1": ["a"], "h2": []}
    assert take_overs(runs, PAIRS, listened(["h1", "h2"], ["a"]), at=100) == {}


def test_a_controller_that_has_just_started_moves_no_node() -> None:
    """The host's node was declared dead before, and is being rebuilt there (seed 587)."""
    runs = {"h1": ["a"], "h2": []}
    detector = listened(["h2"], ["a"], since=94)
    assert take_overs(runs, PAIRS, detector, at=100) == {}
    assert take_overs(runs, PAIRS, detector, at=104) == {}
    assert take_overs(runs, PAIRS, listened(["h2"], ["a"], since=84), at=100) == {"a": "h2"}


def test_a_node_whose_peer_may_have_died_with_it_stays_with_its_disk() -> None:
    """The last heartbeat of the peer was before the death was found: its host died too, and a
    standby could get the state from no replica (seed 11989)."""
    runs = {"h1": ["a", "b"], "h2": ["a@2"], "h3": []}
    detector = listened(["h3"], ["a", "b"], silent=["a@2"])
    assert take_overs(runs, PAIRS, detector, at=100) == {}, "all nodes move together"
    detector.heard(process_of("h3"), 104)
    assert take_overs(runs, PAIRS, detector, at=105) == {"b": "h3"}, "within `silence`"
    detector.heard("a@2", 105)
    assert take_overs(runs, PAIRS, detector, at=105) == {"a": "h3", "b": "h3"}


def test_a_replica_that_is_known_to_have_stopped_is_lost_at_once() -> None:
    detector = FailureDetector(silence_us=10, since=0)
    for name in PAIR:
        detector.heard(name, 5)
    detector.ended("a")
    assert lost(PAIR, BOTH, detector, at=6) == ["a"]
    detector.ended("a@2")
    assert lost(PAIR, BOTH, detector, at=6) == []
