"""Checkers of delivered rows: each history is broken for one checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast.verify.checkers import check
from holdfast.verify.history import (
    Accepted,
    Began,
    Closed,
    Concluded,
    Event,
    Finished,
    Given,
    History,
    Ideal,
    Made,
    Progressed,
    Promised,
)
from tests.verify.histories import (
    BROKE,
    BUCKETS,
    EMPTY,
    END_US,
    HEALED,
    HEALED_US,
    RECOVERY_US,
    WIDTH_US,
    end_us,
    failed,
    given_as,
    of_bucket,
    rows,
    story,
    tentative_of,
    unsettled,
    verdict,
)

# -- lost, doubled, wrong -----------------------------------------------------------------------


def test_a_row_that_was_not_delivered_is_lost() -> None:
    violations = failed(story(change=given_as(7, rows(7)[1:])))
    assert violations.keys() == {"lost", "contract"}
    assert violations["lost"] == f"output out at client c: missing in bucket 7: {rows(7)[0]}"
    assert "loss is 0.00526316, promised at most 0" in violations["contract"]


def test_a_lost_bucket_is_reported_with_three_of_its_rows() -> None:
    lost = verdict(story(without=of_bucket(Given, 7)), "lost")
    assert lost.outcome == "failed" and lost.at == end_us(7)
    assert all(str(row) in lost.why for row in rows(7)[:3])
    assert lost.why.endswith("and 7 more")
    three = verdict(story(change=given_as(7, rows(7)[3:])), "lost")
    assert three.why.endswith(str(rows(7)[2]))


def test_a_client_that_received_nothing_lost_all_rows() -> None:
    def for_d(event: Event) -> bool:
        return isinstance(event, Given | Progressed) and event.client == "d"

    violations = failed(story(without=for_d))
    assert violations.keys() == {"lost", "delay", "contract"}
    assert "(and 18 more)" in violations["lost"]


def test_rows_of_open_buckets_are_not_lost() -> None:
    def late(event: Event) -> bool:
        return isinstance(event, Closed | Given | Progressed) and (
            getattr(event, "bucket", getattr(event, "upto", 0)) >= 15
        )

    assert failed(story(without=late)) == {}


def test_the_last_closed_bucket_must_be_delivered() -> None:
    last = BUCKETS - 1
    history = story(without=lambda e: of_bucket(Given, last)(e) or of_bucket(Progressed, last)(e))
    assert failed(history).keys() == {"lost", "delay", "contract"}


def test_rows_delivered_beyond_the_last_closed_bucket_are_checked() -> None:
    def open_(event: Event) -> bool:
        return isinstance(event, Closed) and event.upto >= 15

    assert {v.outcome for v in check(story(without=open_), monitored=True)} == {"ok"}
    violations = failed(story(without=open_, change=given_as(17, (*rows(17), ("odd",)))))
    assert violations.keys() == {"wrong", "contract"}


def test_a_bucket_is_closed_when_all_sources_have_closed_it() -> None:
    """Source `two` stops after bucket 14: its output waits, the other output does not."""

    def waits(event: Event) -> bool:
        of_two = isinstance(event, Closed) and event.source == "two"
        of_out = isinstance(event, Given | Progressed) and event.output == "out"
        at = getattr(event, "bucket", getattr(event, "upto", 0))
        return (of_two or of_out) and at >= 15

    assert failed(story(without=waits)) == {}
    assert failed(story(without=lambda e: waits(e) and not isinstance(e, Closed))).keys() == {
        "lost", "delay", "contract",
    }  # fmt: skip


def test_a_run_that_did_not_settle_in_time_fails_lost() -> None:
    idle = unsettled(HEALED_US + RECOVERY_US)

    def in_transit(event: Event) -> bool:
        """Everything after bucket 6 is still in transit at the end."""
        late = isinstance(event, Given | Progressed | Accepted | Made)
        return event.at > HEALED_US + RECOVERY_US or (late and event.at > 7 * WIDTH_US + 50_000)

    for settled_by_us, outcome in ((0, "unknown"), (1, "failed")):
        end = unsettled(HEALED_US + RECOVERY_US + settled_by_us)
        history = story(BROKE, HEALED, without=unheard_but_end(in_transit), change=end)
        assert verdict(history, "lost").outcome == outcome
        assert verdict(history, "contract").outcome == "unknown"
        assert not failed(history).keys() - {"lost"}
    # A missing bucket that the client knows to be complete is lost in any case.
    known_complete = story(without=of_bucket(Given, 2), change=idle)
    assert "bucket 2" in verdict(known_complete, "lost").why


def unheard_but_end(dropped: Callable[[Event], bool]) -> Callable[[Event], bool]:
    return lambda event: not isinstance(event, Finished) and dropped(event)


def test_a_run_without_an_end_did_not_settle() -> None:
    lost = verdict(story(without=lambda event: isinstance(event, Finished)), "lost")
    assert (lost.outcome, lost.at) == ("failed", end_us(19) + 12_001)


def test_a_row_delivered_twice_in_its_bucket_is_doubled() -> None:
    violations = failed(story(change=given_as(7, (*rows(7), rows(7)[0]))))
    assert violations.keys() == {"doubled", "contract"}
    assert str(rows(7)[0]) in violations["doubled"]


def test_a_bucket_delivered_twice_is_doubled() -> None:
    violations = failed(story(Given(END_US - 5, "c", "out", 7, rows(7))))
    assert violations.keys() == {"doubled", "order", "contract"}
    at_once = Given(end_us(7) + 10_000, "c", "out", 7, rows(7))
    assert failed(story(at_once)).keys() == {"doubled", "order", "contract"}


def test_equal_rows_are_compared_by_their_count() -> None:
    def thrice(event: Event) -> Event:
        """The ideal contains the same row three times in bucket 3 of every output."""
        if isinstance(event, Ideal) and event.bucket == 3:
            return replace(event, rows=((1,),) * 3)
        return event

    def given_times(times: int) -> History:
        return story(
            change=lambda event: (
                replace(event, rows=((1,),) * times)
                if isinstance(event, Given) and event.bucket == 3
                else thrice(event)
            )
        )

    assert failed(given_times(3)) == {}
    assert failed(given_times(2)).keys() == {"lost", "contract"}
    assert failed(given_times(4)).keys() == {"doubled", "contract"}


def test_a_duplicate_row_does_not_replace_a_lost_row() -> None:
    one, two = rows(3)[:2]
    ideal = Ideal(end_us(3), "out", 3, (one, one, two))
    history = story(ideal, without=of_bucket(Ideal, 3), change=given_as(3, (one, two, two)))
    violations = failed(history)
    assert violations.keys() == {"lost", "doubled", "contract"}
    assert str(one) in violations["lost"] and str(two) in violations["doubled"]


def test_a_row_that_the_ideal_does_not_contain_is_wrong() -> None:
    odd = (1, "odd", 0.0)
    violations = failed(story(change=given_as(7, (*rows(7), odd, odd))))
    assert violations.keys() == {"wrong", "contract"}
    assert str(odd) in violations["wrong"] and "bucket 7" in violations["wrong"]


def test_a_row_in_the_wrong_bucket_is_both_lost_and_wrong() -> None:
    moved = rows(7)[0]
    history = story(
        change=lambda event: given_as(8, (*rows(8), moved))(given_as(7, rows(7)[1:])(event))
    )
    assert failed(history).keys() == {"lost", "wrong", "contract"}


def test_a_contract_may_allow_loss_and_error() -> None:
    def lax(event: Event) -> Event:
        return replace(event, loss=0.1, error=0.1) if isinstance(event, Promised) else event

    history = story(change=lambda event: lax(given_as(7, (*rows(7)[1:], ("odd",)))(event)))
    assert failed(history).keys() == {
        "lost",
        "wrong",
    }  # the contract holds, although rows are missing and wrong


# -- undone, corrected, order -------------------------------------------------------------------


def test_a_stable_bucket_must_not_arrive_again_with_different_rows() -> None:
    history = story(Given(end_us(7) + 10_001, "c", "out", 7, rows(7)[1:]))
    assert "stable bucket 7 arrived again with different rows" in failed(history)["undone"]


def tentatively(*correction: Event) -> History:
    """Bucket 7 arrives as tentative, and afterwards only as the given events say."""
    wrong = tentative_of(end_us(7) + 2_000, 7, rows(7)[2:])
    later = of_bucket(Given, 7)
    return story(
        replace(BROKE, at=end_us(7)),
        replace(HEALED, at=end_us(7)),
        wrong,
        *correction,
        without=later,
    )


def test_a_tentative_bucket_must_be_corrected() -> None:
    stable = Given(end_us(7) + 9_000, "c", "out", 7, rows(7), "STABLE", 1)
    newer = Given(end_us(7) + 5_000, "c", "out", 7, rows(7), "TENTATIVE", 1, replaces=True)
    assert failed(tentatively(stable)) == {}
    assert failed(tentatively(newer, stable)) == {}
    assert "stays tentative" in failed(tentatively(newer))["corrected"]
    violations = failed(tentatively())
    assert violations.keys() == {"corrected", "lost", "contract"}
    assert violations["corrected"] == "output out at client c: bucket 7 stays tentative"


def test_a_tentative_bucket_may_be_corrected_to_an_empty_one() -> None:
    """The application must receive the stable bucket without rows; a position is not enough."""
    wrong = tentative_of(end_us(EMPTY) + 2_000, EMPTY, rows(7))
    empty = Given(end_us(EMPTY) + 5_000, "c", "out", EMPTY, (), replaces=True)
    assert failed(story(wrong, empty)) == {}
    assert failed(story(wrong)).keys() == {"corrected"}
    last = tentative_of(END_US - 9, BUCKETS, rows(7))
    position = Progressed(END_US - 7, "c", "out", BUCKETS)
    stays = {"corrected": "output out at client c: bucket 20 stays tentative"}
    assert failed(story(last)) == failed(story(last, position)) == stays
    stable = Given(END_US - 8, "c", "out", BUCKETS, (), replaces=True)
    assert failed(story(last, stable, position)) == {}


def announced(*extra: Event) -> str | None:
    """The verdict of `corrected` if clients report replacements and REC_DONE."""

    def announcing(event: Event) -> Event:
        return replace(event, announces=True) if isinstance(event, Began) else event

    tentative = tentative_of(end_us(7) + 2_000, 7, rows(7)[2:])
    history = story(tentative, *extra, without=of_bucket(Given, 7), change=announcing)
    return failed(history).get("corrected")


def test_a_client_reports_replacements_and_rec_done() -> None:
    stable = Given(end_us(7) + 9_000, "c", "out", 7, rows(7), replaces=True)
    done = Concluded(end_us(7) + 9_500, "c", "out", 7)
    assert announced(stable, done) is None
    client = "output out at client c: "
    newer = Given(end_us(7) + 5_000, "c", "out", 7, rows(7), "TENTATIVE", 1, replaces=True)
    assert announced(newer, stable, done) is None
    unmarked_tentative = announced(replace(newer, replaces=False), stable, done)
    assert (
        unmarked_tentative
        == f"{client}bucket 7 replaces a tentative bucket, but is not marked as a replacement"
    )
    unmarked_stable = announced(replace(stable, replaces=False), done)
    assert (
        unmarked_stable
        == f"{client}bucket 7 replaces a tentative bucket, but is not marked as a replacement"
    )
    never = announced(stable)
    assert never == f"{client}all buckets are stable, but REC_DONE never arrived"
    early = announced(replace(done, at=end_us(7) + 3_000), stable, done)
    assert early == f"{client}REC_DONE while bucket 7 stays tentative"


def test_corrected_is_unknown_in_a_run_that_did_not_settle() -> None:
    last = tentative_of(END_US - 9, BUCKETS, rows(7))
    assert verdict(story(last, change=unsettled(END_US)), "corrected").outcome == "unknown"
    assert verdict(story(change=unsettled(END_US)), "corrected").outcome == "ok"


def test_stable_bucket_numbers_increase() -> None:
    def swapped(event: Event) -> Event:
        if isinstance(event, Given) and event.bucket == 7:
            return replace(event, at=end_us(8) + 20_000)
        return event

    violations = failed(story(change=swapped))
    assert violations.keys() == {"order", "contract"}
    assert "bucket 7 arrived after bucket 8" in violations["order"]


def test_the_stable_position_never_decreases() -> None:
    violations = failed(story(Progressed(END_US, "c", "out", 12)))
    assert violations == {"order": "output out at client c: stable position fell from 19 to 12"}
    assert failed(story(Progressed(END_US, "c", "out", 19))) == {}


def hint(bucket: int, after_us: int) -> Given:
    """A tentative bucket, `after_us` after its end."""
    return tentative_of(end_us(bucket) + after_us, bucket, rows(bucket)[1:])


def test_property_2_no_tentative_bucket_is_delivered_twice() -> None:
    """No older version arrives after a newer one; a newer version replaces an older one."""
    assert failed(story(hint(7, 1_000), hint(8, 1_000))) == {}
    twice = failed(story(hint(7, 1_000), hint(7, 2_000)))
    assert twice == {
        "order": "output out at client c: tentative bucket 7 arrived again: version 0 after 0"
    }
    newer = replace(hint(7, 2_000), version=3)
    assert failed(story(hint(7, 1_000), newer)) == {}
    older = failed(story(hint(7, 1_000), newer, replace(hint(7, 3_000), version=2)))
    assert older["order"].endswith("version 2 after 3")


def test_a_newer_version_may_arrive_for_any_unstable_bucket() -> None:
    """Buckets 6 and 7 are tentative; then a new version of bucket 6 arrives."""
    late = story(
        replace(hint(6, 1_000), at=end_us(7) - 5_000),
        replace(hint(7, 0), at=end_us(7) - 4_000),
        replace(hint(6, 0), at=end_us(7) - 3_000, version=1),
        without=lambda e: of_bucket(Progressed, 6)(e) or of_bucket(Given, 6)(e),
    )
    assert "order" not in failed(late)


def test_no_tentative_bucket_arrives_after_its_stable_version() -> None:
    """The client knows 10 ms after the end of bucket 7 that the bucket is complete."""
    newer = replace(hint(7, 12_000), version=9)
    violations = failed(story(newer))
    assert violations["order"] == (
        "output out at client c: tentative bucket 7 arrived, but the output is stable up to 7"
    )
    # The same holds for a complete bucket without rows.
    empty = tentative_of(end_us(EMPTY) + 12_000, EMPTY, rows(7))
    violations = failed(story(empty))
    assert "order" in violations


# -- contract -----------------------------------------------------------------------------------


def test_order_across_outputs_is_judged_over_all_outputs() -> None:
    """`other` promises this order, and receives bucket 8 before `out` receives bucket 7."""

    def late(event: Event) -> Event:
        affected = of_bucket(Given, 7)(event) or of_bucket(Progressed, 7)(event)
        return replace(event, at=end_us(8) + 5_000) if affected else event

    def early(event: Event) -> Event:
        affected = of_bucket(Given, 8, "other")(event) or of_bucket(Progressed, 8, "other")(event)
        return replace(event, at=end_us(8) + 3_000) if affected else event

    trouble = (replace(BROKE, at=end_us(7)), replace(HEALED, at=end_us(7)))
    history = story(*trouble, change=lambda event: early(late(event)))
    violations = failed(history)
    assert violations == {
        "contract": "output other at client d: order across outputs: 10 rows arrived too early"
    }

    def inter(event: Event) -> Event:
        return replace(event, order="inter") if isinstance(event, Promised) else event

    both = failed(story(*trouble, change=lambda event: inter(early(late(event)))))
    assert both["contract"].endswith("(and 1 more)")

    def intra(event: Event) -> Event:
        return replace(event, order="intra") if isinstance(event, Promised) else event

    assert failed(story(*trouble, change=lambda event: intra(early(late(event))))) == {}


def test_a_contract_may_promise_no_order() -> None:
    def swapped(event: Event) -> Event:
        if isinstance(event, Given) and event.bucket == 7:
            return replace(event, at=end_us(8) + 20_000)
        return replace(event, order="none") if isinstance(event, Promised) else event

    assert failed(story(change=swapped)).keys() == {"order"}
