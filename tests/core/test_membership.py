"""Who is dead, and who takes whose place (Flux sections 2.2 and 5.4)."""

from __future__ import annotations

from holdfast.core.membership import FailureDetector, Standing, lost, stand_ins

PAIR = {"a": "a@2", "a@2": "a"}
BOTH = {"a": Standing(1, 0), "a@2": Standing(1, 0)}


def test_two_hosts_do_not_go_to_the_same_one() -> None:
    runs = {"h1": ["a", "b@2"], "h2": ["b", "c@2"], "h3": ["c", "a@2"], "h4": []}
    spoken = {"h3", "h4"}
    moved = stand_ins(runs, {"a", "b@2", "b", "c@2"}, spoken.__contains__)
    assert moved == {"a": "h4", "b@2": "h4"}


def test_what_is_not_gone_stays_with_its_host() -> None:
    """Its partner was not there to be made from, or there is none."""
    runs = {"h1": ["a", "alone"], "h2": []}
    assert stand_ins(runs, {"a"}, {"h2"}.__contains__) == {"a": "h2"}


def test_a_host_that_speaks_keeps_what_it_has() -> None:
    """A node of it was declared dead: it is made anew there."""
    runs = {"h1": ["a"], "h2": []}
    assert stand_ins(runs, {"a"}, {"h1", "h2"}.__contains__) == {}


def test_one_that_is_known_to_have_ended_is_lost_at_once() -> None:
    detector = FailureDetector(silence_us=10, since=0)
    for name in PAIR:
        detector.heard(name, 5)
    detector.ended("a")
    assert lost(PAIR, BOTH, detector, at=6) == ["a"]
    detector.ended("a@2")
    assert lost(PAIR, BOTH, detector, at=6) == []
