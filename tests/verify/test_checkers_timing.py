"""Checkers of timing: each history violates one bound."""

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
    Progressed,
    Promised,
    Reported,
    Restored,
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
    of_bucket,
    rows,
    story,
    tentative_of,
    verdict,
)

# -- available ----------------------------------------------------------------------------------

WITHIN_US, SETTLE_US = 30_000, 200_000


def expected(at: int, kind: str) -> Expected:
    return Expected(at, "c", "out", kind, WITHIN_US, SETTLE_US)


def hinted(
    kind: str, *, without: Iterable[int] = (), late: int | None = None, by_us: int = 0
) -> History:
    """From bucket 5 to bucket 15, a client has a tree of this kind. Every bucket arrives 20 ms
    after its end, except that some never arrive and one arrives later."""
    hints = [
        Hinted(end_us(b) + (20_000 if b != late else by_us), "c", "out", b)
        for b in range(BUCKETS)
        if b not in without
    ]
    return story(expected(end_us(4), kind), expected(end_us(15), "UNKNOWN"), *hints)


@pytest.mark.parametrize("kind", ["STABLE", "TENTATIVE"])
def test_property_1_with_a_tree_every_bucket_is_available_in_time(kind: str) -> None:
    assert failed(hinted(kind)) == {}
    assert failed(hinted(kind, late=10, by_us=WITHIN_US)) == {}
    available = verdict(hinted(kind, late=10, by_us=WITHIN_US + 1), "available")
    assert (available.outcome, available.at) == ("failed", end_us(10) + WITHIN_US)
    assert available.why == (
        "output out at client c: bucket 10 was not available 0.03s after its end, "
        f"with a {kind} tree since 0.500s"
    )


@pytest.mark.parametrize("kind", ["BLOCKING", "UNKNOWN"])
def test_property_1_without_a_tree_the_client_may_wait(kind: str) -> None:
    assert failed(hinted(kind, without=range(5, BUCKETS))) == {}


def test_property_1_applies_between_settling_and_the_end_of_the_tree() -> None:
    """Bucket 7 begins 200 ms after the tree; bucket 14 is due before the tree is gone, 15 not."""
    required = [b for b in range(5, 17) if failed(hinted("TENTATIVE", without=[b]))]
    assert required == list(range(7, 15))
    assert failed(hinted("TENTATIVE", without=[14])).keys() == {"available"}


def test_property_1_is_met_by_a_later_position() -> None:
    """A client that has bucket 9 also has bucket 8, which may be empty. A lower position is
    ignored."""
    history = hinted("TENTATIVE", without=[8, 9])
    ahead, lower = (Hinted(end_us(8) + 20_000 + n, "c", "out", (9, 6)[n]) for n in (0, 1))
    history.events = sorted([*history.events, ahead, lower], key=lambda event: event.at)
    assert failed(history) == {}


def test_property_1_does_not_apply_after_all_sources_are_done() -> None:
    """All sources must be done: if one is retired, the network continues without that source."""
    silent = [b for b in range(BUCKETS) if b >= 12]

    def done(*sources: str) -> bool:
        history = hinted("TENTATIVE", without=silent)
        ends = [Closed(end_us(11), source, 2**62) for source in sources]
        history.events = sorted([*history.events, *ends], key=lambda event: event.at)
        return "available" not in failed(history)

    assert not done() and not done("two")
    assert done("one", "two")


def test_property_1_applies_to_each_client_by_its_own_tree() -> None:
    history = hinted("TENTATIVE")
    other = Expected(end_us(4), "d", "other", "STABLE", WITHIN_US, SETTLE_US)
    history.events = sorted([*history.events, other], key=lambda event: event.at)
    violations = failed(history)
    assert violations["available"].startswith(
        "output other at client d: bucket 7 was not available"
    )


def test_property_1_with_a_stable_tree_no_bucket_is_tentative() -> None:
    tentative = tentative_of(end_us(10) + 15_000, 10, rows(10))

    def available(kind: str, *extra: Event) -> str | None:
        history = hinted(kind)
        history.events = sorted([*history.events, tentative, *extra], key=lambda e: e.at)
        return failed(history).get("available")

    assert "bucket 10 arrived as tentative, with a stable tree" in (available("STABLE") or "")
    assert available("TENTATIVE") is None
    # After a recent fault or repair, the tree does not count yet.
    assert available("STABLE", Healed(end_us(9), "cut", "a<->b")) is None


def test_available_is_ok_without_expectations() -> None:
    assert verdict(story(), "available").outcome == "ok"


def test_a_lost_replica_of_a_pair_is_soon_rebuilt() -> None:
    at = end_us(9)
    long_us, bound_us = RECOVERY_US, RECOVERY_US // 2
    violations = failed(story(Restored(at, "a.0@2", at - long_us, True)))
    assert violations["paired"] == f"the rebuild of a.0@2 took {long_us / 1e6:g}s"
    assert not failed(story(Restored(at, "a.0@2", at - bound_us, True)))
    # Another component was broken too.
    assert not failed(story(Restored(at, "a.0@2", at - long_us, False)))


def test_no_bucket_is_retained_for_dead_consumers() -> None:
    violations = failed(story(Outlived(end_us(9), "a.0 log", "sums", 70)))
    assert violations["paired"] == "a.0 log retains 70 buckets of sums for dead consumers"


# -- delay, bounded, reported -------------------------------------------------------------------


def known_late(by_us: int, client: str = "d") -> Callable[[Event], Event]:
    """The client knows bucket 7 `by_us` after the bucket was closed."""
    at = end_us(7) + 1_000 + by_us
    return lambda event: (
        replace(event, at=at)
        if isinstance(event, Given | Progressed) and event.client == client
        and getattr(event, "bucket", getattr(event, "upto", 0)) == 7
        else event
    )  # fmt: skip


def test_a_bucket_arrives_in_time_without_faults() -> None:
    assert failed(story(change=known_late(DELAY_US))) == {}
    delay = verdict(story(change=known_late(DELAY_US + 1)), "delay")
    assert delay.outcome == "failed" and delay.at == end_us(7) + 1_000 + DELAY_US
    assert "bucket 7 arrived 0.050001s after its end and closing" in delay.why


def test_a_bucket_is_not_due_before_its_end() -> None:
    def ahead(event: Event) -> Event:
        return replace(event, at=event.at - WIDTH_US) if isinstance(event, Closed) else event

    late = known_late(DELAY_US - 1_000)
    assert failed(story(change=lambda event: late(ahead(event)))) == {}
    late = known_late(DELAY_US - 999)
    assert failed(story(change=lambda event: late(ahead(event)))).keys() == {"delay"}


def test_a_fault_and_its_recovery_excuse_overlapping_delays() -> None:
    late = known_late(DELAY_US + 1)
    due_us = end_us(7) + 1_000
    known_us = due_us + DELAY_US + 1
    for broke, healed, excused in (
        (due_us - 5, due_us + 5, True),
        (known_us, known_us + 5, True),
        (known_us + 1, known_us + 5, False),
        (0, due_us - RECOVERY_US, True),
        (0, due_us - RECOVERY_US - 1, False),
    ):
        history = story(replace(BROKE, at=broke), replace(HEALED, at=healed), change=late)
        assert (failed(history) == {}) is excused, (broke, healed)
    assert failed(story(replace(BROKE, at=5), change=late)) == {}  # the fault never heals
    other = story(replace(BROKE, at=5), replace(HEALED, at=6, on="n2"), change=late)
    assert failed(other) == {}  # another component healed
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


def test_a_delivered_bucket_is_known_without_a_position() -> None:
    assert failed(story(without=of_bucket(Progressed, BUCKETS - 1))) == {}
    early = tentative_of(5_000, 0, rows(0)[:3])
    complete = Given(end_us(0) + 5_000, "c", "out", 0, rows(0))
    assert failed(story(early, complete, without=of_bucket(Given, 0))) == {}


def test_an_empty_bucket_is_known_by_its_position() -> None:
    def silent(event: Event) -> bool:
        return isinstance(event, Progressed) and event.output == "out" and 3 <= event.upto <= 5

    violations = failed(story(without=silent))
    assert violations.keys() == {"delay"}
    assert f"bucket {EMPTY}" in violations["delay"]


def test_within_counts_from_the_start_of_the_bucket() -> None:
    def within(us: int) -> Callable[[Event], Event]:
        return lambda event: (
            replace(event, within_us=us)
            if isinstance(event, Promised) and event.output == "out"
            else event
        )

    assert failed(story(change=within(WIDTH_US + 10_001))) == {}
    violations = failed(story(change=within(WIDTH_US + 9_999)))
    assert violations.keys() == {"delay"}
    assert "bucket 0 arrived 0.11s after its start, allowed: 0.109999s" in violations["delay"]


def test_a_source_that_closes_late_breaks_only_within() -> None:
    def late(event: Event) -> Event:
        """Delays bucket 7 of source `two`, and of the output that depends on it, by 45 ms."""
        of_two = isinstance(event, Closed) and event.source == "two" and event.upto == 7
        of_out = of_bucket(Given, 7)(event) or of_bucket(Progressed, 7)(event)
        return replace(event, at=event.at + 45_000) if of_two or of_out else event

    violations = failed(story(change=late))
    assert violations.keys() == {"delay"}
    assert "after its start" in violations["delay"]


def test_buffers_stay_small_without_faults() -> None:
    much = Held(BROKE_US + 5, "n1", "one", 4)
    assert failed(story(much)) == {"bounded": "n1 holds 4 buckets of one"}
    assert failed(story(replace(much, buckets=3))) == {}
    assert failed(story(BROKE, HEALED, much)) == {}
    later = replace(much, at=HEALED_US + RECOVERY_US + 1)
    assert failed(story(BROKE, HEALED, later)).keys() == {"bounded"}


def broken_promise(*reports: Event, until_us: int = END_US) -> History:
    """No bucket arrives for half a second, then all of them arrive at once."""

    def held_up(event: Event) -> Event:
        if isinstance(event, Given | Progressed) and 750_000 < event.at <= 1_200_000:
            return replace(event, at=1_200_000 + event.at // 1_000)
        return event

    return story(
        Broke(750_000, "cut", "n1->c"), Healed(1_200_000, "cut", "n1->c"), *reports, change=held_up,
        without=lambda event: event.at > until_us,
    )  # fmt: skip


def test_a_broken_promise_must_be_reported() -> None:
    # Bucket 7 ends at 0.8 s and is promised within 0.15 s: after 0.95 s the promise is broken.
    in_time = Reported(1_150_000, "out", 7, "within", False)
    assert failed(broken_promise(in_time), monitored=True) == {}
    assert failed(broken_promise()) == {}, "without a monitor no report is required"
    reported = verdict(broken_promise(), "reported", monitored=True)
    assert reported.outcome == "failed" and reported.at == 1_150_000
    assert reported.why.startswith("output out: the monitor did not report that bucket 7 was late")
    late = replace(in_time, at=1_150_001)
    other = replace(in_time, output="other")
    promise_kept = replace(in_time, kept=True)
    for report in (late, other, promise_kept):
        assert failed(broken_promise(report)).keys() == {"reported"}


def test_a_tentative_result_in_time_keeps_the_promise() -> None:
    """No report is required for buckets that the client has in time, stable or tentative."""
    hints = [Hinted(end_us(b) + 20_000, "c", "out", b) for b in range(BUCKETS)]
    assert failed(broken_promise(*hints), monitored=True) == {}
    too_late = [replace(hint, at=hint.at + WIDTH_US + DELAY_US) for hint in hints]
    assert failed(broken_promise(*too_late), monitored=True).keys() == {"reported"}


def test_a_promise_breaks_after_its_last_instant_and_no_report_is_due_after_the_run() -> None:
    def known_at(us: int) -> History:
        """The client knows bucket 19, the last one, at `us`."""
        trouble = (Broke(end_us(19), "cut", "n1->c"), Healed(end_us(19) + 1, "cut", "n1->c"))
        affected = (of_bucket(Given, 19), of_bucket(Progressed, 19))
        return story(
            *trouble, change=lambda e: replace(e, at=us) if affected[0](e) or affected[1](e) else e
        )

    broken_us = end_us(19) + WIDTH_US + DELAY_US
    assert failed(known_at(broken_us), monitored=True) == {}
    assert failed(known_at(broken_us + 1), monitored=True).keys() == {"reported"}
    end = Finished(broken_us + 2 * WIDTH_US, settled=True)
    for by_us, keys in ((0, {"reported"}), (-1, set())):
        history = known_at(broken_us + 1)
        history.events[-1] = replace(end, at=end.at + by_us)
        assert failed(history, monitored=True).keys() == keys


def test_a_report_remains_valid_until_it_is_withdrawn() -> None:
    early = Reported(900_000, "out", 3, "within", False)
    assert failed(broken_promise(early)) == {}
    withdrawn = replace(early, at=940_000, kept=True)
    assert failed(broken_promise(early, withdrawn)).keys() == {"reported"}
    by_name = replace(early, bucket=7)
    again = Reported(1_120_000, "out", 8, "within", False)
    assert failed(broken_promise(by_name, withdrawn, again)) == {}


@pytest.mark.parametrize(
    ("missing", "share", "fits"),
    [(("one",), 0.5, True), ((), 1.0, True), (("one",), 1.0, False), ((), 0.5, False),
     (("one",), -0.1, False)],
)  # fmt: skip
def test_a_tentative_bucket_reports_its_missing_inputs_and_their_share(
    missing: tuple[str, ...], share: float, fits: bool
) -> None:
    tentative = Given(
        end_us(7) + 1_000, "c", "out", 7, rows(7), "TENTATIVE", missing=missing, inputs_share=share
    )
    assert ("labelled" not in failed(story(tentative))) is fits


def test_a_tentative_bucket_without_missing_inputs_has_the_ideal_rows() -> None:
    tentative = Given(end_us(7) + 1_000, "c", "out", 7, rows(7)[1:], "TENTATIVE")
    assert "rows are not the ideal rows" in failed(story(tentative))["labelled"]
