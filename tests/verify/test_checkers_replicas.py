"""Between replicas: histories in which somebody counts on, or reads from, one that is of no use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.verify.history import Began, Deserted, Event, Made, Reading, Relied
from tests.verify.histories import RECOVERY_US, end_us, failed, story, verdict

DETECT_US = 50_000
#: When it begins, in these histories.
AT = end_us(5)


def judged(checker: str, *events: Event) -> str | None:
    def within(event: Event) -> Event:
        return replace(event, detect_us=DETECT_US) if isinstance(event, Began) else event

    return failed(story(*events, change=within)).get(checker)


# -- promises -----------------------------------------------------------------------------------


def relied(at: int, *sound: str, what: str = "answers", on: tuple[str, ...] = ("n2",)) -> Relied:
    return Relied(at, "n1", "out", what, on, sound)


def over(at: int, what: str = "answers") -> Relied:
    return Relied(at, "n1", "out", what)


@pytest.mark.parametrize("what", ["answers", "correction"])
def test_one_may_count_on_a_replica_that_is_sound(what: str) -> None:
    assert judged("promises", relied(AT, "n2", what=what), over(AT + 200_000, what)) is None


@pytest.mark.parametrize("what", ["answers", "correction"])
def test_one_that_is_gone_is_counted_on_until_that_is_noticed(what: str) -> None:
    alive, dead = relied(AT, "n2", what=what), relied(AT + 20_000, what=what)
    assert judged("promises", alive, dead, over(dead.at + DETECT_US, what)) is None
    found = judged("promises", alive, dead, over(dead.at + DETECT_US + 1, what))
    assert found == (f"n1 put off its {what} of out for 0.050001s, relying on n2: gone, or idle")


def test_it_is_counted_on_again_when_it_is_back() -> None:
    dead = [relied(AT), relied(AT + DETECT_US, "n2"), relied(AT + 60_000), over(AT + 110_000)]
    assert judged("promises", *dead) is None


def test_one_of_several_is_enough() -> None:
    both = ("n2", "n3")
    assert judged("promises", relied(AT, "n3", on=both), over(AT + 200_000)) is None
    assert judged("promises", relied(AT, on=both), over(AT + 200_000)) is not None


def test_a_promise_that_is_never_over_lasts_until_the_end() -> None:
    assert judged("promises", relied(AT)) is not None


def test_a_promise_to_wait_ends_by_itself() -> None:
    """However sound the one is that is waited for."""
    waits = relied(AT, "n2", what="correction")
    assert judged("promises", waits, over(AT + RECOVERY_US, "correction")) is None
    found = judged("promises", waits, over(AT + RECOVERY_US + 1, "correction"))
    assert found == ("n1 waited for n2 to correct out for 0.300001s in which it made no progress")
    # To be answered for is not to wait.
    assert judged("promises", relied(AT, "n2"), over(AT + 3 * RECOVERY_US)) is None


def test_one_waits_for_a_correction_as_long_as_it_makes_progress() -> None:
    def waits(at: int, reached: int) -> Relied:
        return replace(relied(at, "n2", what="correction"), reached=reached)

    slow = [waits(AT + n * RECOVERY_US, n) for n in range(4)]
    assert judged("promises", *slow, over(AT + 4 * RECOVERY_US, "correction")) is None
    assert judged("promises", *slow, over(AT + 4 * RECOVERY_US + 1, "correction")) is not None


def test_waiting_is_not_over_because_whoever_is_waited_for_comes_and_goes() -> None:
    waits = [relied(AT + n * 40_000, *["n2"][: n % 2], what="correction") for n in range(12)]
    assert "waited for n2" in (judged("promises", *waits) or "")


def test_replicas_do_not_leave_it_to_each_other_to_answer() -> None:
    """What all of them do at once needs no time to be noticed."""
    found = failed(story(Deserted(end_us(3), "main", "out")))
    assert found["available"] == "all replicas of main correct out at once"


# -- detected -----------------------------------------------------------------------------------


def reading(at: int, replica: str = "n1", bad: str = "", reader: str = "c") -> Reading:
    return Reading(at, reader, "out", replica, bad, DETECT_US if bad else 0)


def test_a_replica_that_is_of_no_use_is_left_in_time() -> None:
    dead = [reading(0), reading(AT, bad="it is dead")]
    assert judged("detected", *dead, reading(AT + DETECT_US, "n2")) is None
    found = judged("detected", *dead, reading(AT + DETECT_US + 1, "n2"))
    assert found == "c reads out from n1: it is dead for 0.050001s, 0.05s are granted"
    assert judged("detected", *dead) is not None  # it never is


def test_it_may_be_of_use_again() -> None:
    assert judged("detected", reading(AT, bad="it is cut off"), reading(AT + DETECT_US)) is None


def test_another_reason_does_not_make_it_better() -> None:
    changing = [
        reading(AT, bad="it stands still"),
        reading(AT + 40_000, bad="it is dead"),
        reading(AT + 80_000, "n2"),
    ]
    assert "it stands still for 0.08s" in (judged("detected", *changing) or "")


def test_another_one_that_is_no_better_has_a_time_of_its_own() -> None:
    events = [
        reading(AT, bad="it is dead"),
        reading(AT + 40_000, "n2", bad="it is cut off"),
        reading(AT + 80_000, "n3"),
    ]
    assert judged("detected", *events) is None


def test_who_reads_nothing_although_it_could_is_late_too() -> None:
    found = judged("detected", reading(AT, "", "nothing is read"), reading(AT + 60_000))
    assert found == "c reads out: nothing is read for 0.06s, 0.05s are granted"


def test_every_reader_has_to_notice() -> None:
    dead = [reading(AT, bad="it is dead", reader=who) for who in ("c", "d")]
    left = [reading(AT + 40_000, "n2", reader="c")]
    assert "d reads" in (judged("detected", *dead, *left) or "")
    assert verdict(story(), "detected").outcome == "ok"


# -- replicas that made different rows ------------------------------------------------------------


def made(node: str, at_s: float, bucket: int, checksum: str, epoch: int = 1) -> Made:
    return Made(int(at_s * 1e6), node, epoch, "twice", bucket, "STABLE", checksum)


def test_of_two_replicas_that_made_different_rows_one_is_soon_rebuilt() -> None:
    differ = [made("n1", 1, 3, "aa"), made("n2", 1, 3, "bb")]
    assert judged("detected", *differ, made("n1", 30, 9, "cc"), made("n2", 15, 8, "dd")) is None
    rebuilt = made("n2", 30, 9, "cc", epoch=2)
    assert judged("detected", *differ, made("n1", 30, 9, "cc"), rebuilt) is None
    found = judged("detected", *differ, made("n1", 30, 9, "cc"), made("n2", 17, 8, "dd"))
    assert found == ("n1 and n2 made different rows of bucket 3 of twice and both went on for 16s")
