"""Checker of the age of the newest valid result."""

from __future__ import annotations

import pytest

from holdfast.verify.checkers.freshness import newest_age_us
from holdfast.verify.checkers.story import Story
from holdfast.verify.history import (
    Broke,
    Event,
    Given,
    Healed,
    Hinted,
    History,
    Owed,
    Progressed,
)
from tests.verify.histories import (
    BROKE_US,
    BUCKETS,
    END_US,
    WIDTH_US,
    end_us,
    failed,
    rows,
    story,
    verdict,
)

#: In a correct run, a bucket arrives 10 ms after its end, when the previous bucket is 110 ms old.
#: The position that covers an empty bucket arrives a microsecond later.
BEST_US = WIDTH_US + 10_001
AGE_US = 150_000


def in_failure(*extra: Event, age_us: int | None = AGE_US, stable_from: int = 15) -> History:
    """A result is owed from bucket 5 on. Buckets 8 to 14 become stable only at 1.6 s."""

    def missing(event: Event) -> bool:
        late = isinstance(event, Given | Progressed) and event.client == "c"
        return late and 8 <= getattr(event, "bucket", getattr(event, "upto", 0)) < stable_from

    corrections = [
        Given(end_us(stable_from), "c", "out", bucket, rows(bucket))
        for bucket in range(8, stable_from)
    ]
    position = Progressed(end_us(stable_from), "c", "out", stable_from - 1)
    return story(
        Owed(end_us(4), "c", "out", age_us),
        Owed(end_us(BUCKETS - 2), "c", "out", None),
        Broke(BROKE_US, "cut", "one->n1"),
        Healed(end_us(14), "cut", "one->n1"),
        *corrections,
        position,
        *extra,
        without=missing,
    )


def tentative_of(bucket: int, after_us: int = 20_000, version: int = 0) -> Given:
    at = end_us(bucket) + after_us
    return Given(at, "c", "out", bucket, rows(bucket)[2:], "TENTATIVE", version)


TENTATIVE = [tentative_of(bucket) for bucket in range(8, 15)]


def too_old(history: History) -> str | None:
    return failed(history).get("standing")


def test_tentative_results_during_a_failure_are_recent_enough() -> None:
    assert too_old(in_failure(*TENTATIVE)) is None


def test_without_results_the_newest_result_becomes_too_old() -> None:
    """Bucket 7 is the last result; it is 0.8 s old when bucket 14 arrives."""
    standing = verdict(in_failure(), "standing")
    assert standing.outcome == "failed" and standing.at == end_us(7) + AGE_US
    assert standing.why == (
        "output out at client c: the newest valid result was 0.8s old, allowed: 0.15s"
    )


@pytest.mark.parametrize(("after_us", "old"), [(50_000, False), (50_001, True)])
def test_one_late_bucket_makes_the_previous_bucket_too_old(after_us: int, old: bool) -> None:
    late = [g if g.bucket != 10 else tentative_of(10, after_us) for g in TENTATIVE]
    assert bool(too_old(in_failure(*late))) is old


def test_an_older_stable_position_does_not_raise_the_age() -> None:
    position = Progressed(end_us(13) + 40_000, "c", "out", 8)
    assert too_old(in_failure(*TENTATIVE, position)) is None


@pytest.mark.parametrize("stability", ["TENTATIVE", "STABLE"])
def test_an_empty_replacement_does_not_raise_the_age(stability: str) -> None:
    at = end_us(13) + 40_000
    again = Given(at, "c", "out", 13, (), stability, 1, replaces=True)
    assert too_old(in_failure(*TENTATIVE, again)) is None


def test_a_newer_version_of_an_older_bucket_does_not_raise_the_age() -> None:
    assert too_old(in_failure(*TENTATIVE, tentative_of(9, 220_000, version=1))) is None


def test_tentative_buckets_without_rows_are_valid_results() -> None:
    """For such buckets, the client only receives a position."""
    tentative = [g for g in TENTATIVE if g.bucket != 10]
    assert too_old(in_failure(*tentative)) is not None
    position = Hinted(end_us(10) + 20_000, "c", "out", 10)
    assert too_old(in_failure(*tentative, position)) is None


def test_no_result_is_too_old_while_none_is_owed() -> None:
    assert too_old(in_failure(age_us=None)) is None
    assert verdict(story(), "standing").outcome == "ok"


def test_a_result_is_owed_only_between_two_instants() -> None:
    """The failure is over at 1.5 s; bucket 7 ended at 0.8 s."""
    later = Owed(end_us(14), "c", "out", 800_000)
    assert "0.7s old" in (too_old(in_failure(later)) or "")
    before = Owed(end_us(7) + AGE_US, "c", "out", None)
    assert too_old(in_failure(before, later)) is None
    assert too_old(in_failure(before, Owed(later.at, "c", "out", 799_999))) is not None


def test_each_client_has_its_own_bound() -> None:
    """`d` receives its buckets 2 ms later than `c`."""

    def owed(age_us: int) -> str | None:
        clients = (("c", "out", BEST_US), ("d", "other", age_us))
        demands = [Owed(0, client, output, age) for client, output, age in clients]
        over = [Owed(end_us(BUCKETS - 1), client, output, None) for client, output, _ in clients]
        return too_old(story(*demands, *over))

    assert owed(BEST_US + 2_000) is None
    violation = owed(BEST_US + 1_999)
    assert violation is not None and "client d" in violation


def test_newest_age_us_returns_the_maximum_age_of_an_interval() -> None:
    index = Story(in_failure())
    consumer = index.consumers["c", "out"]
    assert newest_age_us(index, consumer, 0, end_us(6)) == BEST_US
    assert newest_age_us(index, consumer, end_us(7), end_us(9)) == 200_000
    assert newest_age_us(index, consumer, 0, END_US) == 800_000
