"""What clients were given, held against the ideal: histories broken for one checker each."""

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
    Promised,
    Told,
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
    guess_of,
    of_bucket,
    rows,
    story,
    unsettled,
    verdict,
)

# -- lost, doubled, wrong -----------------------------------------------------------------------


def test_a_row_that_was_not_given_is_lost() -> None:
    found = failed(story(change=given_as(7, rows(7)[1:])))
    assert found.keys() == {"lost", "contract"}
    assert found["lost"] == f"output out at client c lacks of bucket 7: {rows(7)[0]}"
    assert "loss 0.00526316 instead of 0" in found["contract"]


def test_a_bucket_that_was_not_given_is_lost_with_three_rows_named() -> None:
    found = verdict(story(without=of_bucket(Given, 7)), "lost")
    assert found.outcome == "failed" and found.at == end_us(7)
    assert all(str(row) in found.why for row in rows(7)[:3])
    assert found.why.endswith("and 7 more")
    three = verdict(story(change=given_as(7, rows(7)[3:])), "lost")
    assert three.why.endswith(str(rows(7)[2]))


def test_a_client_that_got_nothing_has_lost_everything() -> None:
    def for_d(event: Event) -> bool:
        return isinstance(event, Given | Told) and event.client == "d"

    found = failed(story(without=for_d))
    assert found.keys() == {"lost", "delay", "contract"}
    assert "(and 18 more)" in found["lost"]


def test_rows_of_buckets_that_were_not_closed_are_not_lost() -> None:
    def late(event: Event) -> bool:
        return isinstance(event, Closed | Given | Told) and (
            getattr(event, "bucket", getattr(event, "upto", 0)) >= 15
        )

    assert failed(story(without=late)) == {}


def test_the_last_closed_bucket_counts() -> None:
    last = BUCKETS - 1
    history = story(without=lambda e: of_bucket(Given, last)(e) or of_bucket(Told, last)(e))
    assert failed(history).keys() == {"lost", "delay", "contract"}


def test_what_is_given_beyond_the_last_closed_bucket_is_ideal_or_not_all_the_same() -> None:
    def open_(event: Event) -> bool:
        return isinstance(event, Closed) and event.upto >= 15

    assert {v.outcome for v in check(story(without=open_), monitored=True)} == {"ok"}
    found = failed(story(without=open_, change=given_as(17, (*rows(17), ("odd",)))))
    assert found.keys() == {"wrong", "contract"}


def test_a_bucket_is_closed_when_every_source_closed_it() -> None:
    """Source `two` stops after bucket 14: its output waits, the other one does not."""

    def waits(event: Event) -> bool:
        of_two = isinstance(event, Closed) and event.source == "two"
        of_out = isinstance(event, Given | Told) and event.output == "out"
        at = getattr(event, "bucket", getattr(event, "upto", 0))
        return (of_two or of_out) and at >= 15

    assert failed(story(without=waits)) == {}
    assert failed(story(without=lambda e: waits(e) and not isinstance(e, Closed))).keys() == {
        "lost", "delay", "contract",
    }  # fmt: skip


def test_a_run_that_should_have_settled_has_lost_something() -> None:
    idle = unsettled(HEALED_US + RECOVERY_US)

    def unheard(event: Event) -> bool:
        """Everything after bucket 6 is still on its way at the end."""
        late = isinstance(event, Given | Told | Accepted | Made)
        return event.at > HEALED_US + RECOVERY_US or (late and event.at > 7 * WIDTH_US + 50_000)

    for settled_by_us, outcome in ((0, "unknown"), (1, "failed")):
        end = unsettled(HEALED_US + RECOVERY_US + settled_by_us)
        history = story(BROKE, HEALED, without=unheard_but_end(unheard), change=end)
        assert verdict(history, "lost").outcome == outcome
        assert verdict(history, "contract").outcome == "unknown"
        assert not failed(history).keys() - {"lost"}
    # A bucket that the client was told is whole is lost for certain.
    told = story(without=of_bucket(Given, 2), change=idle)
    assert "bucket 2" in verdict(told, "lost").why


def unheard_but_end(unheard: Callable[[Event], bool]) -> Callable[[Event], bool]:
    return lambda event: not isinstance(event, Finished) and unheard(event)


def test_a_run_without_an_end_did_not_settle() -> None:
    found = verdict(story(without=lambda event: isinstance(event, Finished)), "lost")
    assert (found.outcome, found.at) == ("failed", end_us(19) + 12_001)


def test_a_row_given_twice_in_its_bucket_is_doubled() -> None:
    found = failed(story(change=given_as(7, (*rows(7), rows(7)[0]))))
    assert found.keys() == {"doubled", "contract"}
    assert str(rows(7)[0]) in found["doubled"]


def test_a_bucket_given_twice_is_doubled() -> None:
    found = failed(story(Given(END_US - 5, "c", "out", 7, rows(7))))
    assert found.keys() == {"doubled", "order", "contract"}
    at_once = Given(end_us(7) + 10_000, "c", "out", 7, rows(7))
    assert failed(story(at_once)).keys() == {"doubled", "order", "contract"}


def test_equal_rows_are_counted() -> None:
    def thrice(event: Event) -> Event:
        """Bucket 3 of every output has one row, ideally three times."""
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


def test_one_row_too_often_does_not_make_up_for_another() -> None:
    one, two = rows(3)[:2]
    ideal = Ideal(end_us(3), "out", 3, (one, one, two))
    history = story(ideal, without=of_bucket(Ideal, 3), change=given_as(3, (one, two, two)))
    found = failed(history)
    assert found.keys() == {"lost", "doubled", "contract"}
    assert str(one) in found["lost"] and str(two) in found["doubled"]


def test_a_row_the_ideal_does_not_have_is_wrong() -> None:
    odd = (1, "odd", 0.0)
    found = failed(story(change=given_as(7, (*rows(7), odd, odd))))
    assert found.keys() == {"wrong", "contract"}
    assert str(odd) in found["wrong"] and "bucket 7" in found["wrong"]


def test_a_row_in_another_bucket_is_lost_here_and_wrong_there() -> None:
    moved = rows(7)[0]
    history = story(
        change=lambda event: given_as(8, (*rows(8), moved))(given_as(7, rows(7)[1:])(event))
    )
    assert failed(history).keys() == {"lost", "wrong", "contract"}


def test_a_loss_may_be_promised() -> None:
    def lax(event: Event) -> Event:
        return replace(event, loss=0.1, error=0.1) if isinstance(event, Promised) else event

    history = story(change=lambda event: lax(given_as(7, (*rows(7)[1:], ("odd",)))(event)))
    assert failed(history).keys() == {"lost", "wrong"}  # the contract holds, the rows do not


# -- undone, corrected, order -------------------------------------------------------------------


def test_stable_rows_do_not_come_again_as_others() -> None:
    history = story(Given(end_us(7) + 10_001, "c", "out", 7, rows(7)[1:]))
    assert "bucket 7 was stable and came again" in failed(history)["undone"]


def tentatively(*correction: Event) -> History:
    """Bucket 7 comes tentatively first, and then only what is given here."""
    wrong = guess_of(end_us(7) + 2_000, 7, rows(7)[2:])
    later = of_bucket(Given, 7)
    return story(
        replace(BROKE, at=end_us(7)),
        replace(HEALED, at=end_us(7)),
        wrong,
        *correction,
        without=later,
    )


def test_tentative_rows_are_corrected() -> None:
    stable = Given(end_us(7) + 9_000, "c", "out", 7, rows(7), "STABLE", 1)
    newer = Given(end_us(7) + 5_000, "c", "out", 7, rows(7), "TENTATIVE", 1, replaces=True)
    assert failed(tentatively(stable)) == {}
    assert failed(tentatively(newer, stable)) == {}
    assert "stays tentative" in failed(tentatively(newer))["corrected"]
    found = failed(tentatively())
    assert found.keys() == {"corrected", "lost", "contract"}
    assert found["corrected"] == "output out at client c: bucket 7 stays tentative"


def test_a_tentative_bucket_may_turn_out_to_be_empty() -> None:
    """The application is given the stable bucket without rows; to know how far is not enough."""
    wrong = guess_of(end_us(EMPTY) + 2_000, EMPTY, rows(7))
    empty = Given(end_us(EMPTY) + 5_000, "c", "out", EMPTY, (), replaces=True)
    assert failed(story(wrong, empty)) == {}
    assert failed(story(wrong)).keys() == {"corrected"}
    last = guess_of(END_US - 9, BUCKETS, rows(7))
    told = Told(END_US - 7, "c", "out", BUCKETS)
    stays = {"corrected": "output out at client c: bucket 20 stays tentative"}
    assert failed(story(last)) == failed(story(last, told)) == stays
    stable = Given(END_US - 8, "c", "out", BUCKETS, (), replaces=True)
    assert failed(story(last, stable, told)) == {}


def announced(*more: Event) -> str | None:
    """What is judged where clients are asked for what they say."""

    def asked(event: Event) -> Event:
        return replace(event, announces=True) if isinstance(event, Began) else event

    guess = guess_of(end_us(7) + 2_000, 7, rows(7)[2:])
    history = story(guess, *more, without=of_bucket(Given, 7), change=asked)
    return failed(history).get("corrected")


def test_a_client_says_what_takes_the_place_of_a_guess_and_when_all_is_stable() -> None:
    stable = Given(end_us(7) + 9_000, "c", "out", 7, rows(7), replaces=True)
    done = Concluded(end_us(7) + 9_500, "c", "out", 7)
    assert announced(stable, done) is None
    who = "output out at client c: "
    newer = Given(end_us(7) + 5_000, "c", "out", 7, rows(7), "TENTATIVE", 1, replaces=True)
    assert announced(newer, stable, done) is None
    unsaid = announced(replace(newer, replaces=False), stable, done)
    assert unsaid == f"{who}bucket 7 replaces a guess and does not say so"
    silent = announced(replace(stable, replaces=False), done)
    assert silent == f"{who}bucket 7 replaces a guess and does not say so"
    never = announced(stable)
    assert never == f"{who}all of it is stable, and REC_DONE never came"
    early = announced(replace(done, at=end_us(7) + 3_000), stable, done)
    assert early == f"{who}REC_DONE while bucket 7 stays tentative"


def test_whether_tentative_rows_would_have_been_corrected_is_unknown_in_the_middle() -> None:
    last = guess_of(END_US - 9, BUCKETS, rows(7))
    assert verdict(story(last, change=unsettled(END_US)), "corrected").outcome == "unknown"
    assert verdict(story(change=unsettled(END_US)), "corrected").outcome == "ok"


def test_buckets_rise() -> None:
    def swapped(event: Event) -> Event:
        if isinstance(event, Given) and event.bucket == 7:
            return replace(event, at=end_us(8) + 20_000)
        return event

    found = failed(story(change=swapped))
    assert found.keys() == {"order", "contract"}
    assert "got bucket 7 after 8" in found["order"]


def test_nobody_is_told_less_than_before() -> None:
    found = failed(story(Told(END_US, "c", "out", 12)))
    assert found == {"order": "output out at client c was told 12 after 19"}
    assert failed(story(Told(END_US, "c", "out", 19))) == {}


def hint(bucket: int, after_us: int) -> Given:
    """A tentative bucket, so long after its end."""
    return guess_of(end_us(bucket) + after_us, bucket, rows(bucket)[1:])


def test_property_2_no_tentative_bucket_is_given_twice() -> None:
    """Nor an older version after a newer one; a newer one replaces what was given before."""
    assert failed(story(hint(7, 1_000), hint(8, 1_000))) == {}
    twice = failed(story(hint(7, 1_000), hint(7, 2_000)))
    assert twice == {
        "order": "output out at client c got bucket 7 as tentative again, as version 0 after 0"
    }
    newer = replace(hint(7, 2_000), version=3)
    assert failed(story(hint(7, 1_000), newer)) == {}
    older = failed(story(hint(7, 1_000), newer, replace(hint(7, 3_000), version=2)))
    assert older["order"].endswith("as version 2 after 3")


def test_what_is_newer_may_come_for_any_bucket_that_is_not_stable() -> None:
    """Buckets 6 and 7 are guessed, then 6 again, which stays below 7."""
    late = story(
        replace(hint(6, 1_000), at=end_us(7) - 5_000),
        replace(hint(7, 0), at=end_us(7) - 4_000),
        replace(hint(6, 0), at=end_us(7) - 3_000, version=1),
        without=lambda e: of_bucket(Told, 6)(e) or of_bucket(Given, 6)(e),
    )
    assert "order" not in failed(late)


def test_nothing_is_tentative_where_something_stable_is() -> None:
    """Bucket 7 is told at 10 ms after its end."""
    newer = replace(hint(7, 12_000), version=9)
    found = failed(story(newer))
    assert found["order"] == (
        "output out at client c got bucket 7 as tentative, and was stable up to 7"
    )
    # Also what was told to be complete and has no rows.
    empty = guess_of(end_us(EMPTY) + 12_000, EMPTY, rows(7))
    found = failed(story(empty))
    assert "order" in found


# -- contract -----------------------------------------------------------------------------------


def test_order_across_outputs_is_seen_with_all_of_them() -> None:
    """`other` promises it, and gets bucket 8 before `out` gets bucket 7."""

    def late(event: Event) -> Event:
        hit = of_bucket(Given, 7)(event) or of_bucket(Told, 7)(event)
        return replace(event, at=end_us(8) + 5_000) if hit else event

    def early(event: Event) -> Event:
        hit = of_bucket(Given, 8, "other")(event) or of_bucket(Told, 8, "other")(event)
        return replace(event, at=end_us(8) + 3_000) if hit else event

    trouble = (replace(BROKE, at=end_us(7)), replace(HEALED, at=end_us(7)))
    history = story(*trouble, change=lambda event: early(late(event)))
    found = failed(history)
    assert found == {"contract": "output other at client d: 10 rows of all outputs came too early"}

    def inter(event: Event) -> Event:
        return replace(event, order="inter") if isinstance(event, Promised) else event

    both = failed(story(*trouble, change=lambda event: inter(early(late(event)))))
    assert both["contract"].endswith("(and 1 more)")

    def intra(event: Event) -> Event:
        return replace(event, order="intra") if isinstance(event, Promised) else event

    assert failed(story(*trouble, change=lambda event: intra(early(late(event))))) == {}


def test_no_order_may_be_promised() -> None:
    def swapped(event: Event) -> Event:
        if isinstance(event, Given) and event.bucket == 7:
            return replace(event, at=end_us(8) + 20_000)
        return replace(event, order="none") if isinstance(event, Promised) else event

    assert failed(story(change=swapped)).keys() == {"order"}
