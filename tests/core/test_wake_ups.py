"""One tick per wake-up, and no tick that is still needed is lost."""

from __future__ import annotations

from holdfast.core.wake_ups import Alarm


def test_one_tick_before_the_deadline_is_enough() -> None:
    alarm = Alarm()
    assert alarm.needs(0, 100)
    assert not alarm.needs(0, 100) and not alarm.needs(50, 200)
    assert alarm.needs(50, 90), "an earlier deadline needs a tick of its own"


def test_a_tick_that_arrived_early_is_requested_again() -> None:
    alarm = Alarm()
    alarm.needs(0, 100)
    alarm.rang()
    assert alarm.needs(99, 100)


def test_an_overdue_tick_is_not_relied_on() -> None:
    alarm = Alarm()
    alarm.needs(0, 100)
    assert alarm.needs(150, 200)
    alarm.rang()  # the tick of 100, late
    assert not alarm.needs(151, 200), "the tick of 200 is still pending"
