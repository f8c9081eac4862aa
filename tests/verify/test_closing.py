"""Checkers of sources whose clock is stepped: buckets close, and not too many at once."""

from __future__ import annotations

from holdfast.verify.checkers import check
from holdfast.verify.history import (
    Accepted,
    AtBound,
    Began,
    Broke,
    Closed,
    Event,
    Finished,
    Healed,
    History,
    Logged,
    PutAside,
)

S = 1_000_000
WIDTH = S // 2


def verdict(checker: str, *events: Event) -> tuple[str, str]:
    story = [Began(0, "net", WIDTH, S, 7 * S, 30, wall=True), *events, Finished(40 * S, True)]
    (judgement,) = [v for v in check(History(story)) if v.checker == checker]
    return judgement.outcome, judgement.why


def closings(*steps: tuple[float, float]) -> list[Event]:
    """Events of a source that closes buckets: pairs of (time, closed up to), in seconds."""
    return [Closed(int(at * S), "s1", int(upto * S) // WIDTH - 1) for at, upto in steps]


def set_clock(from_s: float, to_s: float) -> list[Event]:
    return [Broke(int(from_s * S), "skew", "s1"), Healed(int(to_s * S), "skew", "s1")]


def test_buckets_may_close_at_their_end() -> None:
    assert verdict("closing", *closings(*((at / 2, at / 2) for at in range(1, 60))))[0] == "ok"


def test_a_source_with_a_stepped_clock_still_closes_buckets() -> None:
    steps = closings((1, 1), (1.5, 1.5), (4, 2))
    outcome, why = verdict("closing", *set_clock(1.5, 4), *steps)
    assert outcome == "failed" and "closed no bucket for 2.5s" in why
    half = closings((1, 1), (2, 1.5), (3, 2), (4, 2.5))
    assert verdict("closing", *set_clock(1, 4), *half)[0] == "ok"


def test_a_source_at_the_bound_of_its_buffer_may_close_no_bucket() -> None:
    steps = closings((1, 1), (1.5, 1.5), (4, 4), (8, 8))
    assert verdict("closing", *steps)[0] == "failed"
    outcome, why = verdict("closing", *steps, AtBound(3 * S, "s1"), AtBound(6 * S, "s2"))
    assert outcome == "failed" and "closed no bucket for 4s" in why
    assert verdict("closing", *steps, AtBound(3 * S, "s1"), AtBound(6 * S, "s1"))[0] == "ok"


def test_a_killed_source_may_close_no_bucket_until_it_has_recovered() -> None:
    steps = closings((1, 1), (12, 12))
    dead = [Broke(1 * S, "kill", "s1"), Healed(3 * S, "kill", "s1")]
    assert verdict("closing", *dead, *steps)[0] == "ok"
    steps = closings((1, 1), (13, 13))
    assert "closed no bucket for 3s" in verdict("closing", *dead, *steps)[1]


def test_a_source_must_not_run_ahead_after_a_recent_clock_step() -> None:
    steps = closings((1, 1), (1.5, 3_600))
    outcome, why = verdict("closing", *set_clock(1.2, 30), *steps)
    assert outcome == "failed" and "just after its clock was stepped" in why
    steps = closings(*((at / 2, at / 2) for at in range(1, 24)), (12, 3_600))
    assert verdict("closing", *set_clock(1.2, 30), *steps)[0] == "ok"


def test_a_source_soon_follows_a_corrected_clock() -> None:
    behind = closings(*((at / 2, at / 2 - 3) for at in range(7, 60)))
    outcome, why = verdict("closing", *set_clock(0, 3), *behind)
    assert outcome == "failed" and "3s after its end" in why


def test_dead_letters_count_as_accepted_once() -> None:
    rows = ((1,), (2,))
    accepted, logged = Accepted(1, "s1", rows), Logged(1, "s1", 0, ((1,),))
    assert verdict("accepted", accepted, logged, PutAside(1, "s1", ((2,),)))[0] == "ok"
    assert verdict("accepted", accepted, logged)[0] == "failed"
    twice = [PutAside(1, "s1", ((2,),))] * 2
    assert "more often" in verdict("accepted", accepted, logged, *twice)[1]


def test_no_bucket_closes_before_its_end_without_a_clock_step() -> None:
    steps = closings((1, 1), (1.4, 1.5), (2, 2))
    outcome, why = verdict("closing", *steps)
    assert outcome == "failed" and "before its end" in why
    assert verdict("closing", *set_clock(0.5, 1), *steps)[0] == "ok"
