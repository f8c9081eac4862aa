"""What users notice: how old the newest standing result gets."""

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
    Told,
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

#: Of the good run: a bucket is there 10 ms after its end, when the one before is 110 ms old, and an
#: empty one is told of a microsecond later.
BEST_US = WIDTH_US + 10_001
AGE_US = 150_000


def in_failure(*more: Event, age_us: int | None = AGE_US, stable_from: int = 15) -> History:
    """Owed from bucket 5 on; from bucket 8 to 14 nothing is stable, and is given at 1.6 s."""

    def gone(event: Event) -> bool:
        late = isinstance(event, Given | Told) and event.client == "c"
        return late and 8 <= getattr(event, "bucket", getattr(event, "upto", 0)) < stable_from

    made_good = [
        Given(end_us(stable_from), "c", "out", bucket, rows(bucket))
        for bucket in range(8, stable_from)
    ]
    told = Told(end_us(stable_from), "c", "out", stable_from - 1)
    return story(
        Owed(end_us(4), "c", "out", age_us),
        Owed(end_us(BUCKETS - 2), "c", "out", None),
        Broke(BROKE_US, "cut", "one->n1"),
        Healed(end_us(14), "cut", "one->n1"),
        *made_good,
        told,
        *more,
        without=gone,
    )


def guess(bucket: int, after_us: int = 20_000, version: int = 0) -> Given:
    at = end_us(bucket) + after_us
    return Given(at, "c", "out", bucket, rows(bucket)[2:], "TENTATIVE", version)


GUESSES = [guess(bucket) for bucket in range(8, 15)]


def too_old(history: History) -> str | None:
    return failed(history).get("standing")


def test_in_a_failure_tentative_results_are_young_enough() -> None:
    assert too_old(in_failure(*GUESSES)) is None


def test_without_any_results_the_newest_one_gets_too_old() -> None:
    """Bucket 7 is the last one, and bucket 14 comes when it is 0.8 s old."""
    found = verdict(in_failure(), "standing")
    assert found.outcome == "failed" and found.at == end_us(7) + AGE_US
    assert found.why == (
        "output out at client c: the newest result that stands was 0.8s old, and 0.15s are granted"
    )


@pytest.mark.parametrize(("after_us", "old"), [(50_000, False), (50_001, True)])
def test_a_single_bucket_that_is_late_makes_the_one_before_too_old(
    after_us: int, old: bool
) -> None:
    late = [g if g.bucket != 10 else guess(10, after_us) for g in GUESSES]
    assert bool(too_old(in_failure(*late))) is old


def test_stable_news_of_an_older_bucket_makes_nothing_older() -> None:
    told = Told(end_us(13) + 40_000, "c", "out", 8)
    assert too_old(in_failure(*GUESSES, told)) is None


@pytest.mark.parametrize("stability", ["TENTATIVE", "STABLE"])
def test_what_is_replaced_stands_even_by_a_bucket_without_rows(stability: str) -> None:
    at = end_us(13) + 40_000
    again = Given(at, "c", "out", 13, (), stability, 1, replaces=True)
    assert too_old(in_failure(*GUESSES, again)) is None


def test_a_newer_version_of_an_older_bucket_makes_nothing_older() -> None:
    assert too_old(in_failure(*GUESSES, guess(9, 220_000, version=1))) is None


def test_tentative_buckets_without_rows_stand_too() -> None:
    """Of them a client only knows how far the output is."""
    guessed = [g for g in GUESSES if g.bucket != 10]
    assert too_old(in_failure(*guessed)) is not None
    known = Hinted(end_us(10) + 20_000, "c", "out", 10)
    assert too_old(in_failure(*guessed, known)) is None


def test_where_nothing_is_owed_nothing_is_too_old() -> None:
    assert too_old(in_failure(age_us=None)) is None
    assert verdict(story(), "standing").outcome == "ok"


def test_it_is_owed_from_one_instant_to_another() -> None:
    """The failure is over at 1.5 s; bucket 7 ended at 0.8 s."""
    later = Owed(end_us(14), "c", "out", 800_000)
    assert "0.7s old" in (too_old(in_failure(later)) or "")
    before = Owed(end_us(7) + AGE_US, "c", "out", None)
    assert too_old(in_failure(before, later)) is None
    assert too_old(in_failure(before, Owed(later.at, "c", "out", 799_999))) is not None


def test_it_is_owed_to_one_client() -> None:
    """`d` gets its buckets 2 ms later than `c`."""

    def owed(age_us: int) -> str | None:
        clients = (("c", "out", BEST_US), ("d", "other", age_us))
        told = [Owed(0, client, output, age) for client, output, age in clients]
        over = [Owed(end_us(BUCKETS - 1), client, output, None) for client, output, _ in clients]
        return too_old(story(*told, *over))

    assert owed(BEST_US + 2_000) is None
    found = owed(BEST_US + 1_999)
    assert found is not None and "client d" in found


def test_how_old_the_newest_result_gets_can_be_asked() -> None:
    told = Story(in_failure())
    reader = told.readers["c", "out"]
    assert newest_age_us(told, reader, 0, end_us(6)) == BEST_US
    assert newest_age_us(told, reader, end_us(7), end_us(9)) == 200_000
    assert newest_age_us(told, reader, 0, END_US) == 800_000
