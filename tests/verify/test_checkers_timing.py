"""When clients knew what they were promised: histories that are late in one place each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from holdfast.verify.history import (
    Broke,
    Closed,
    Event,
    Expected,
    Finished,
    Given,
    Healed,
    Held,
    Hinted,
    History,
    Outlived,
    Promised,
    Reported,
    Restored,
    Told,
)
from tests.verify.histories import (
    BROKE,
    BROKE_US,
    BUCKETS,
    DELAY_US,
    EMPTY,
    END_US,
    HEALED,
    HEALED_US,
    RECOVERY_US,
    WIDTH_US,
    end_us,
    failed,
    guess_of,
    of_bucket,
    rows,
    story,
    verdict,
)

# -- available ----------------------------------------------------------------------------------

WITHIN_US, SETTLE_US = 30_000, 200_000


def expected(at: int, kind: str) -> Expected:
    return Expected(at, "c", "out", kind, WITHIN_US, SETTLE_US)


def hinted(
    kind: str, *, without: Iterable[int] = (), late: int | None = None, by_us: int = 0
) -> History:
    """From bucket 5 to bucket 15 a client has such a tree, and hears of every bucket 20 ms after
    its end but of some never, and of one later."""
    hints = [
        Hinted(end_us(b) + (20_000 if b != late else by_us), "c", "out", b)
        for b in range(BUCKETS)
        if b not in without
    ]
    return story(expected(end_us(4), kind), expected(end_us(15), "UNKNOWN"), *hints)


@pytest.mark.parametrize("kind", ["STABLE", "TENTATIVE"])
def test_property_1_with_a_tree_every_bucket_is_there_in_time(kind: str) -> None:
    assert failed(hinted(kind)) == {}
    assert failed(hinted(kind, late=10, by_us=WITHIN_US)) == {}
    found = verdict(hinted(kind, late=10, by_us=WITHIN_US + 1), "available")
    assert (found.outcome, found.at) == ("failed", end_us(10) + WITHIN_US)
    assert found.why == (
        "output out at client c: bucket 10 was not there 0.03s after its end, "
        f"with a {kind} tree since 0.500s"
    )


@pytest.mark.parametrize("kind", ["BLOCKING", "UNKNOWN"])
def test_property_1_without_a_tree_the_client_may_wait(kind: str) -> None:
    assert failed(hinted(kind, without=range(5, BUCKETS))) == {}


def test_property_1_counts_once_things_have_settled_and_as_long_as_they_last() -> None:
    """Bucket 7 begins 200 ms after the tree; bucket 14 is due before the tree is gone, 15 not."""
    asked = [b for b in range(5, 17) if failed(hinted("TENTATIVE", without=[b]))]
    assert asked == list(range(7, 15))
    assert failed(hinted("TENTATIVE", without=[14])).keys() == {"available"}


def test_property_1_asks_for_the_bucket_not_for_each_step_to_it() -> None:
    """Whoever has bucket 9 has bucket 8, which may have been empty. A lower hint is no news."""
    history = hinted("TENTATIVE", without=[8, 9])
    ahead, lower = (Hinted(end_us(8) + 20_000 + n, "c", "out", (9, 6)[n]) for n in (0, 1))
    history.events = sorted([*history.events, ahead, lower], key=lambda event: event.at)
    assert failed(history) == {}


def test_property_1_asks_nothing_after_the_sources_are_done() -> None:
    """All of them: when one was retired, everybody goes on without it."""
    silent = [b for b in range(BUCKETS) if b >= 12]

    def done(*sources: str) -> bool:
        history = hinted("TENTATIVE", without=silent)
        ends = [Closed(end_us(11), source, 2**62) for source in sources]
        history.events = sorted([*history.events, *ends], key=lambda event: event.at)
        return "available" not in failed(history)

    assert not done() and not done("two")
    assert done("one", "two")


def test_property_1_is_asked_of_every_client_by_its_own_tree() -> None:
    history = hinted("TENTATIVE")
    other = Expected(end_us(4), "d", "other", "STABLE", WITHIN_US, SETTLE_US)
    history.events = sorted([*history.events, other], key=lambda event: event.at)
    found = failed(history)
    assert found["available"].startswith("output other at client d: bucket 7 was not there")


def test_property_1_with_a_stable_tree_nothing_is_tentative() -> None:
    guess = guess_of(end_us(10) + 15_000, 10, rows(10))

    def told(kind: str, *more: Event) -> str | None:
        history = hinted(kind)
        history.events = sorted([*history.events, guess, *more], key=lambda e: e.at)
        return failed(history).get("available")

    assert "bucket 10 came as tentative, with a stable tree" in (told("STABLE") or "")
    assert told("TENTATIVE") is None
    # Something broke or healed a moment ago: not yet.
    assert told("STABLE", Healed(end_us(9), "cut", "a<->b")) is None


def test_where_nobody_says_what_is_to_be_expected_nothing_is() -> None:
    assert verdict(story(), "available").outcome == "ok"


def test_one_of_a_pair_is_soon_made_anew() -> None:
    at = end_us(9)
    long_us, bound_us = RECOVERY_US, RECOVERY_US // 2
    found = failed(story(Restored(at, "a.0@2", at - long_us, True)))
    assert found["paired"] == f"a.0@2 was made anew for {long_us / 1e6:g}s"
    assert not failed(story(Restored(at, "a.0@2", at - bound_us, True)))
    # Somebody else was broken, too.
    assert not failed(story(Restored(at, "a.0@2", at - long_us, False)))


def test_nothing_is_kept_for_the_dead() -> None:
    found = failed(story(Outlived(end_us(9), "a.0 log", "sums", 70)))
    assert found["paired"] == "a.0 log keeps 70 buckets of sums for the dead"


# -- delay, bounded, reported -------------------------------------------------------------------


def known_late(by_us: int, client: str = "d") -> Callable[[Event], Event]:
    """Bucket 7 is known so long after it was closed."""
    at = end_us(7) + 1_000 + by_us
    return lambda event: (
        replace(event, at=at)
        if isinstance(event, Given | Told) and event.client == client
        and getattr(event, "bucket", getattr(event, "upto", 0)) == 7
        else event
    )  # fmt: skip


def test_a_bucket_is_known_in_time_while_nothing_is_broken() -> None:
    assert failed(story(change=known_late(DELAY_US))) == {}
    found = verdict(story(change=known_late(DELAY_US + 1)), "delay")
    assert found.outcome == "failed" and found.at == end_us(7) + 1_000 + DELAY_US
    assert "bucket 7 was known 0.050001s after it was over and closed" in found.why


def test_a_bucket_is_not_due_before_it_is_over() -> None:
    def ahead(event: Event) -> Event:
        return replace(event, at=event.at - WIDTH_US) if isinstance(event, Closed) else event

    late = known_late(DELAY_US - 1_000)
    assert failed(story(change=lambda event: late(ahead(event)))) == {}
    late = known_late(DELAY_US - 999)
    assert failed(story(change=lambda event: late(ahead(event)))).keys() == {"delay"}


def test_trouble_excuses_what_overlaps_it_and_its_recovery() -> None:
    late = known_late(DELAY_US + 1)
    due = end_us(7) + 1_000
    known = due + DELAY_US + 1
    for broke, healed, excused in (
        (due - 5, due + 5, True),
        (known, known + 5, True),
        (known + 1, known + 5, False),
        (0, due - RECOVERY_US, True),
        (0, due - RECOVERY_US - 1, False),
    ):
        history = story(replace(BROKE, at=broke), replace(HEALED, at=healed), change=late)
        assert (failed(history) == {}) is excused, (broke, healed)
    assert failed(story(replace(BROKE, at=5), change=late)) == {}  # it never heals
    other = story(replace(BROKE, at=5), replace(HEALED, at=6, on="n2"), change=late)
    assert failed(other) == {}  # something else healed
    assert failed(story(HEALED, change=late)).keys() == {"delay"}


def test_two_faults_of_one_kind_heal_one_after_the_other() -> None:
    late = known_late(DELAY_US + 1)
    broke, due = BROKE_US - RECOVERY_US, end_us(7)
    twice: list[Event] = [
        replace(BROKE, at=broke),
        replace(BROKE, at=broke + 1),
        replace(HEALED, at=broke + 2),
    ]
    assert failed(story(*twice, change=late)) == {}
    healed = [replace(HEALED, at=due - RECOVERY_US - 1)]
    assert failed(story(*twice, *healed, change=late)).keys() == {"delay"}


def test_a_bucket_is_known_when_it_was_given_even_if_nobody_says_that_it_is_whole() -> None:
    assert failed(story(without=of_bucket(Told, BUCKETS - 1))) == {}
    early = guess_of(5_000, 0, rows(0)[:3])
    whole = Given(end_us(0) + 5_000, "c", "out", 0, rows(0))
    assert failed(story(early, whole, without=of_bucket(Given, 0))) == {}


def test_an_empty_bucket_is_known_when_it_was_told() -> None:
    def silent(event: Event) -> bool:
        return isinstance(event, Told) and event.output == "out" and 3 <= event.upto <= 5

    found = failed(story(without=silent))
    assert found.keys() == {"delay"}
    assert f"bucket {EMPTY}" in found["delay"]


def test_what_was_promised_within_a_time_counts_from_the_start_of_the_bucket() -> None:
    def within(us: int) -> Callable[[Event], Event]:
        return lambda event: (
            replace(event, within_us=us)
            if isinstance(event, Promised) and event.output == "out"
            else event
        )

    assert failed(story(change=within(WIDTH_US + 10_001))) == {}
    found = failed(story(change=within(WIDTH_US + 9_999)))
    assert found.keys() == {"delay"}
    assert "bucket 0 was known 0.11s after its start, 0.109999s were granted" in found["delay"]


def test_a_source_that_closes_late_delays_only_what_was_promised_within_a_time() -> None:
    def late(event: Event) -> Event:
        """Bucket 7 of source `two`, and what depends on it, 40 ms late."""
        of_two = isinstance(event, Closed) and event.source == "two" and event.upto == 7
        of_out = of_bucket(Given, 7)(event) or of_bucket(Told, 7)(event)
        return replace(event, at=event.at + 45_000) if of_two or of_out else event

    found = failed(story(change=late))
    assert found.keys() == {"delay"}
    assert "after its start" in found["delay"]


def test_buffers_stay_small_while_nothing_is_broken() -> None:
    much = Held(BROKE_US + 5, "n1", "one", 4)
    assert failed(story(much)) == {"bounded": "n1 holds 4 buckets of one"}
    assert failed(story(replace(much, buckets=3))) == {}
    assert failed(story(BROKE, HEALED, much)) == {}
    later = replace(much, at=HEALED_US + RECOVERY_US + 1)
    assert failed(story(BROKE, HEALED, later)).keys() == {"bounded"}


def broken_promise(*reports: Event, until_us: int = END_US) -> History:
    """Nothing gets through for half a second, and then everything at once."""

    def held_up(event: Event) -> Event:
        if isinstance(event, Given | Told) and 750_000 < event.at <= 1_200_000:
            return replace(event, at=1_200_000 + event.at // 1_000)
        return event

    return story(
        Broke(750_000, "cut", "n1->c"), Healed(1_200_000, "cut", "n1->c"), *reports, change=held_up,
        without=lambda event: event.at > until_us,
    )  # fmt: skip


def test_a_broken_promise_is_reported() -> None:
    #: Bucket 7 starts at 0.7 s, is promised within 0.15 s, so that 0.95 s is too late.
    in_time = Reported(1_150_000, "out", 7, "within", False)
    assert failed(broken_promise(in_time), monitored=True) == {}
    assert failed(broken_promise()) == {}, "without a monitor nothing is asked"
    found = verdict(broken_promise(), "reported", monitored=True)
    assert found.outcome == "failed" and found.at == 1_150_000
    assert found.why.startswith("output out: nobody said that bucket 7 was too late")
    late = replace(in_time, at=1_150_001)
    other = replace(in_time, output="other")
    kept = replace(in_time, kept=True)
    for report in (late, other, kept):
        assert failed(broken_promise(report)).keys() == {"reported"}


def test_a_tentative_answer_in_time_keeps_the_promise() -> None:
    """Nobody has to be told of buckets that the client has, be it as tentative."""
    hints = [Hinted(end_us(b) + 20_000, "c", "out", b) for b in range(BUCKETS)]
    assert failed(broken_promise(*hints), monitored=True) == {}
    too_late = [replace(hint, at=hint.at + WIDTH_US + DELAY_US) for hint in hints]
    assert failed(broken_promise(*too_late), monitored=True).keys() == {"reported"}


def test_a_promise_is_not_yet_broken_at_its_last_instant_nor_told_of_after_the_run() -> None:
    def known_at(us: int) -> History:
        """Bucket 19, the last; the run ends two buckets after its promise is broken."""
        trouble = (Broke(end_us(19), "cut", "n1->c"), Healed(end_us(19) + 1, "cut", "n1->c"))
        hit = (of_bucket(Given, 19), of_bucket(Told, 19))
        return story(*trouble, change=lambda e: replace(e, at=us) if hit[0](e) or hit[1](e) else e)

    broken_us = end_us(19) + WIDTH_US + DELAY_US
    assert failed(known_at(broken_us), monitored=True) == {}
    assert failed(known_at(broken_us + 1), monitored=True).keys() == {"reported"}
    end = Finished(broken_us + 2 * WIDTH_US, settled=True)
    for by_us, keys in ((0, {"reported"}), (-1, set())):
        history = known_at(broken_us + 1)
        history.events[-1] = replace(end, at=end.at + by_us)
        assert failed(history, monitored=True).keys() == keys


def test_a_report_stands_until_it_is_taken_back() -> None:
    early = Reported(900_000, "out", 3, "within", False)
    assert failed(broken_promise(early)) == {}
    taken_back = replace(early, at=940_000, kept=True)
    assert failed(broken_promise(early, taken_back)).keys() == {"reported"}
    by_name = replace(early, bucket=7)
    again = Reported(1_120_000, "out", 8, "within", False)
    assert failed(broken_promise(by_name, taken_back, again)) == {}


@pytest.mark.parametrize(
    ("missing", "share", "fits"),
    [(("one",), 0.5, True), ((), 1.0, True), (("one",), 1.0, False), ((), 0.5, False),
     (("one",), -0.1, False)],
)  # fmt: skip
def test_a_tentative_bucket_says_how_partial_it_is(
    missing: tuple[str, ...], share: float, fits: bool
) -> None:
    guess = Given(
        end_us(7) + 1_000, "c", "out", 7, rows(7), "TENTATIVE", missing=missing, inputs_share=share
    )
    assert ("labelled" not in failed(story(guess))) is fits


def test_a_tentative_bucket_that_lacks_nothing_has_the_right_rows() -> None:
    guess = Given(end_us(7) + 1_000, "c", "out", 7, rows(7)[1:], "TENTATIVE")
    assert "rows are not the right ones" in failed(story(guess))["labelled"]
