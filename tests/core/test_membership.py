"""Who is dead, and who takes whose place (Flux sections 2.2 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.failure_detector import FailureDetector
from holdfast.core.membership import Standing, lost, process_of, stand_ins

PAIR = {"a": "a@2", "a@2": "a"}
PAIRS = {f"{x}{c}": f"{x}{'@2' if not c else ''}" for x in "abc" for c in ("", "@2")}
BOTH = {"a": Standing(1, 0), "a@2": Standing(1, 0)}


def listened(
    speaking: Iterable[str], dead: Iterable[str], since: int = 0, silent: Iterable[str] = ()
) -> FailureDetector:
    """Found dead at 94. All peers speak at 95, except those that are silent."""
    detector = FailureDetector(silence_us=10, since=since)
    detector.found_dead(list(dead), 94)
    for name in [*map(process_of, speaking), *(PAIRS[name] for name in dead)]:
        detector.heard(name, 93 if name in silent else 95)
    return detector


def test_two_hosts_do_not_go_to_the_same_one() -> None:
    runs = {"h1": ["a", "b@2"], "h2": ["b", "c@2"], "h3": ["c", "a@2"], "h4": []}
    detector = listened(["h3", "h4"], ["a", "b@2", "c@2"])
    assert stand_ins(runs, PAIRS, detector, at=100) == {"a": "h4", "b@2": "h4"}


def test_what_is_not_gone_stays_with_its_host() -> None:
    """Its partner was not there to be made from, or there is none."""
    runs = {"h1": ["a", "alone"], "h2": []}
    assert stand_ins(runs, PAIRS, listened(["h2"], ["a"]), at=100) == {"a": "h2"}


def test_a_host_that_speaks_keeps_what_it_has() -> None:
    """A node of it was declared dead: it is made anew there."""
    runs = {"h1": ["a"], "h2": []}
    assert stand_ins(runs, PAIRS, listened(["h1", "h2"], ["a"]), at=100) == {}


def test_a_controller_that_has_just_started_takes_nothing_from_a_host() -> None:
    """The host's node was declared dead before, and is being rebuilt there (seed 587)."""
    runs = {"h1": ["a"], "h2": []}
    detector = listened(["h2"], ["a"], since=94)
    assert stand_ins(runs, PAIRS, detector, at=100) == {}
    assert stand_ins(runs, PAIRS, detector, at=104) == {}
    assert stand_ins(runs, PAIRS, listened(["h2"], ["a"], since=84), at=100) == {"a": "h2"}


def test_a_node_whose_peer_may_have_died_with_it_stays_with_its_disk() -> None:
    """The peer was heard before the death was found, and never since: its host died too, and a
    standby could get the state from nobody (seed 11989)."""
    runs = {"h1": ["a", "b"], "h2": ["a@2"], "h3": []}
    detector = listened(["h3"], ["a", "b"], silent=["a@2"])
    assert stand_ins(runs, PAIRS, detector, at=100) == {}, "all nodes move together"
    detector.heard(process_of("h3"), 104)
    assert stand_ins(runs, PAIRS, detector, at=105) == {"b": "h3"}, "within `silence`"
    detector.heard("a@2", 105)
    assert stand_ins(runs, PAIRS, detector, at=105) == {"a": "h3", "b": "h3"}


def test_one_that_is_known_to_have_ended_is_lost_at_once() -> None:
    detector = FailureDetector(silence_us=10, since=0)
    for name in PAIR:
        detector.heard(name, 5)
    detector.ended("a")
    assert lost(PAIR, BOTH, detector, at=6) == ["a"]
    detector.ended("a@2")
    assert lost(PAIR, BOTH, detector, at=6) == []
