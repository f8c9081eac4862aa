"""Checkers between replicas: histories in which a process relies on an unusable replica or reads
from one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.verify.history import Began, Deserted, Event, Made, Reading, Relied
from tests.verify.histories import RECOVERY_US, end_us, failed, story, verdict

DETECT_US = 50_000
#: When the reliance or the fault begins in these histories.
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
def test_a_replica_may_rely_on_a_sound_peer(what: str) -> None:
    assert judged("promises", relied(AT, "n2", what=what), over(AT + 200_000, what)) is None


@pytest.mark.parametrize("what", ["answers", "correction"])
def test_a_replica_may_rely_on_a_dead_peer_only_until_detection(what: str) -> None:
    alive, dead = relied(AT, "n2", what=what), relied(AT + 20_000, what=what)
    assert judged("promises", alive, dead, over(dead.at + DETECT_US, what)) is None
    violation = judged("promises", alive, dead, over(dead.at + DETECT_US + 1, what))
    assert violation == (
        f"n1 postponed its {what} of out for 0.050001s, relying on n2: dead or idle"
    )


def test_a_replica_may_rely_on_a_peer_that_returned() -> None:
    dead = [relied(AT), relied(AT + DETECT_US, "n2"), relied(AT + 60_000), over(AT + 110_000)]
    assert judged("promises", *dead) is None


def test_one_sound_peer_of_several_is_enough() -> None:
    both = ("n2", "n3")
    assert judged("promises", relied(AT, "n3", on=both), over(AT + 200_000)) is None
    assert judged("promises", relied(AT, on=both), over(AT + 200_000)) is not None


def test_a_reliance_without_an_end_lasts_until_the_end_of_the_run() -> None:
    assert judged("promises", relied(AT)) is not None


def test_a_promise_to_wait_expires() -> None:
    """Even if the awaited replica is alive and reachable."""
    waits = relied(AT, "n2", what="correction")
    assert judged("promises", waits, over(AT + RECOVERY_US, "correction")) is None
    violation = judged("promises", waits, over(AT + RECOVERY_US + 1, "correction"))
    assert violation == ("n1 waited for n2 to correct out for 0.300001s without progress")
    # A replica that relies on the answers of another one does not wait for a correction.
    assert judged("promises", relied(AT, "n2"), over(AT + 3 * RECOVERY_US)) is None


def test_a_replica_waits_for_a_correction_that_makes_progress() -> None:
    def waits(at: int, reached: int) -> Relied:
        return replace(relied(at, "n2", what="correction"), reached=reached)

    slow = [waits(AT + n * RECOVERY_US, n) for n in range(4)]
    assert judged("promises", *slow, over(AT + 4 * RECOVERY_US, "correction")) is None
    assert judged("promises", *slow, over(AT + 4 * RECOVERY_US + 1, "correction")) is not None


def test_a_wait_continues_while_the_awaited_peer_fails_and_returns() -> None:
    waits = [relied(AT + n * 40_000, *["n2"][: n % 2], what="correction") for n in range(12)]
    assert "waited for n2" in (judged("promises", *waits) or "")


def test_replicas_must_not_all_correct_at_the_same_time() -> None:
    """There is no detection time: the replicas themselves decide to correct."""
    violations = failed(story(Deserted(end_us(3), "main", "out")))
    assert violations["available"] == "all replicas of main correct out at the same time"


# -- detected -----------------------------------------------------------------------------------


def reading(at: int, replica: str = "n1", bad: str = "", consumer: str = "c") -> Reading:
    return Reading(at, consumer, "out", replica, bad, DETECT_US if bad else 0)


def test_a_consumer_leaves_an_unusable_replica_in_time() -> None:
    dead = [reading(0), reading(AT, bad="it is dead")]
    assert judged("detected", *dead, reading(AT + DETECT_US, "n2")) is None
    violation = judged("detected", *dead, reading(AT + DETECT_US + 1, "n2"))
    assert violation == "c reads out from n1: it is dead for 0.050001s, allowed: 0.05s"
    assert judged("detected", *dead) is not None  # the consumer never leaves the replica


def test_a_replica_may_become_usable_again() -> None:
    assert judged("detected", reading(AT, bad="it is cut off"), reading(AT + DETECT_US)) is None


def test_another_reason_does_not_restart_the_detection_time() -> None:
    changing = [
        reading(AT, bad="it is paused"),
        reading(AT + 40_000, bad="it is dead"),
        reading(AT + 80_000, "n2"),
    ]
    assert "it is paused for 0.08s" in (judged("detected", *changing) or "")


def test_each_unusable_replica_has_its_own_detection_time() -> None:
    events = [
        reading(AT, bad="it is dead"),
        reading(AT + 40_000, "n2", bad="it is cut off"),
        reading(AT + 80_000, "n3"),
    ]
    assert judged("detected", *events) is None


def test_a_consumer_that_reads_no_replica_is_detected() -> None:
    violation = judged("detected", reading(AT, "", "nothing is read"), reading(AT + 60_000))
    assert violation == "c reads out: nothing is read for 0.06s, allowed: 0.05s"


def test_every_consumer_must_leave_an_unusable_replica() -> None:
    dead = [reading(AT, bad="it is dead", consumer=client) for client in ("c", "d")]
    switched = [reading(AT + 40_000, "n2", consumer="c")]
    assert "d reads" in (judged("detected", *dead, *switched) or "")
    assert verdict(story(), "detected").outcome == "ok"


# -- replicas that produced different rows --------------------------------------------------------


def made(node: str, at_s: float, bucket: int, checksum: str, epoch: int = 1) -> Made:
    return Made(int(at_s * 1e6), node, epoch, "twice", bucket, "STABLE", checksum)


def test_one_of_two_replicas_with_different_rows_is_soon_rebuilt() -> None:
    differ = [made("n1", 1, 3, "aa"), made("n2", 1, 3, "bb")]
    assert judged("detected", *differ, made("n1", 30, 9, "cc"), made("n2", 15, 8, "dd")) is None
    rebuilt = made("n2", 30, 9, "cc", epoch=2)
    assert judged("detected", *differ, made("n1", 30, 9, "cc"), rebuilt) is None
    violation = judged("detected", *differ, made("n1", 30, 9, "cc"), made("n2", 17, 8, "dd"))
    assert violation == (
        "n1 and n2 produced different rows of bucket 3 of twice and both continued for 16s"
    )
