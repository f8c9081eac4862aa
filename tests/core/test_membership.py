"""Who is dead, and who takes whose place (Flux sections 2.2 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.failure_detector import FailureDetector
from holdfast.core.membership import Standing, lost, process_of, stand_ins

PAIR = {"a": "a@2", "a@2": "a"}
BOTH = {"a": Standing(1, 0), "a@2": Standing(1, 0)}


def listened(speaking: Iterable[str], since: int = 0) -> FailureDetector:
    detector = FailureDetector(silence_us=10, since=since)
    for host in speaking:
        detector.heard(process_of(host), 95)
    return detector


def test_two_hosts_do_not_go_to_the_same_one() -> None:
    runs = {"h1": ["a", "b@2"], "h2": ["b", "c@2"], "h3": ["c", "a@2"], "h4": []}
    moved = stand_ins(runs, {"a", "b@2", "b", "c@2"}, listened(["h3", "h4"]), at=100)
    assert moved == {"a": "h4", "b@2": "h4"}


def test_what_is_not_gone_stays_with_its_host() -> None:
    """Its partner was not there to be made from, or there is none."""
    runs = {"h1": ["a", "alone"], "h2": []}
    assert stand_ins(runs, {"a"}, listened(["h2"]), at=100) == {"a": "h2"}


def test_a_host_that_speaks_keeps_what_it_has() -> None:
    """A node of it was declared dead: it is made anew there."""
    runs = {"h1": ["a"], "h2": []}
    assert stand_ins(runs, {"a"}, listened(["h1", "h2"]), at=100) == {}


def test_a_controller_that_has_just_started_takes_nothing_from_a_host() -> None:
    """The host's node was declared dead before, and is being rebuilt there (seed 587)."""
    runs = {"h1": ["a"], "h2": []}
    detector = listened(["h2"], since=94)
    assert stand_ins(runs, {"a"}, detector, at=100) == {}
    assert stand_ins(runs, {"a"}, detector, at=104) == {}
    assert stand_ins(runs, {"a"}, listened(["h2"], since=84), at=100) == {"a": "h2"}


def test_one_that_is_known_to_have_ended_is_lost_at_once() -> None:
    detector = FailureDetector(silence_us=10, since=0)
    for name in PAIR:
        detector.heard(name, 5)
    detector.ended("a")
    assert lost(PAIR, BOTH, detector, at=6) == ["a"]
    detector.ended("a@2")
    assert lost(PAIR, BOTH, detector, at=6) == []
