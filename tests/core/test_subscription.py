"""A subscription through connections that come and go, as transcripts."""

from __future__ import annotations

import pytest

from holdfast.core.replica_selector import NOTHING, Status
from holdfast.core.subscription import (
    FULL_US,
    LAST_WORDS,
    RETRY_US,
    RETRY_US_MAX,
    Action,
    Advanced,
    Begin,
    Connect,
    Delivered,
    Disconnect,
    Disconnected,
    Event,
    Finished,
    Full,
    Lost,
    Poll,
    Position,
    Reported,
    Subscription,
    Switched,
    Take,
    Taken,
    Tick,
    Unobtainable,
    Unreachable,
    Wake,
)
from holdfast.types import OutputState

STABLE = OutputState.STABLE
NINE = Position(9, 8, 1)


def said(machine: Subscription, *events: Event) -> list[Action]:
    """What the last event gives, without what only time is asked for and people are told."""
    actions: list[Action] = []
    for event in events:
        actions = machine.handle(event)
    return [a for a in actions if not isinstance(a, Wake | Lost | Switched)]


def came(at: int, connection: int, since: int, upto: int, epoch: int = 1) -> Delivered:
    return Delivered(at, connection, epoch, since, upto, STABLE)


# -- one producer ---------------------------------------------------------------------------------


def test_a_new_connection_goes_on_where_the_last_one_got_to() -> None:
    machine = Subscription(("s",))
    assert said(machine, Begin(0)) == [Connect(1, "s", None, None)]  # the oldest there is
    assert said(machine, came(1, 1, 5, 7)) == [Take(1, None, None)]
    said(machine, Taken(2, 7), Disconnected(3, 1))
    assert said(machine, Tick(3 + RETRY_US)) == [Connect(2, "s", 8, None)]


def test_what_was_taken_is_not_taken_again() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0))
    assert said(machine, came(1, 1, 6, 8)) == [Take(1, stable_from=8, tentative_after=None)]
    said(machine, Taken(2, 8), Taken(3, 7))  # late news of what is known
    assert machine.at == 9


def test_a_gap_is_refused() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0))
    assert said(machine, came(1, 1, 9, 9)) == [Disconnect(1)]
    assert said(machine, Tick(1 + RETRY_US)) == [Connect(2, "s", 8, None)]


def test_an_instance_older_than_one_already_heard_is_not_believed() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0), came(1, 1, 8, 8, epoch=3), Taken(2, 8), Disconnected(3, 1))
    said(machine, Tick(3 + RETRY_US))
    assert said(machine, came(60_000, 2, 9, 9, epoch=2)) == [Disconnect(2)]
    assert machine.epochs == {"s": 3}


def test_a_producer_that_does_not_answer_is_not_asked_all_the_time() -> None:
    machine, now, pauses = Subscription(("s",), 8), 0, []
    said(machine, Begin(0))
    for number in range(1, 6):
        (wake,) = [a for a in machine.handle(Disconnected(now, number)) if isinstance(a, Wake)]
        pauses.append(wake.at - now)
        now = wake.at
        assert said(machine, Tick(now)) == [Connect(number + 1, "s", 8, None)]
    assert pauses == [RETRY_US, 2 * RETRY_US, 4 * RETRY_US, RETRY_US_MAX, RETRY_US_MAX]
    said(machine, came(now, 6, 8, 8))  # somebody spoke
    (wake,) = [a for a in machine.handle(Disconnected(now, 6)) if isinstance(a, Wake)]
    assert wake.at - now == RETRY_US


def test_the_only_producer_is_told_a_new_position_at_once_and_once() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0))
    assert said(machine, Advanced(1, NINE)) == [Poll("s", NINE)]
    assert said(machine, Tick(2)) == []
    later = NINE._replace(received=12)
    assert said(machine, Advanced(3, later)) == []  # the answer to the first comes first
    assert said(machine, Reported(4, "s", Status(STABLE, 12))) == [Poll("s", later)]
    assert said(machine, Reported(5, "s", Status(STABLE, 12)), Tick(10**9)) == []


def test_a_position_that_did_not_arrive_is_told_again() -> None:
    machine = Subscription(("s",), 8, heartbeat_us=100)
    said(machine, Begin(0), Advanced(1, NINE))
    assert said(machine, Unreachable(2, "s")) == []
    assert said(machine, Tick(101)) == []
    assert said(machine, Tick(102)) == [Poll("s", NINE)]


def test_a_producer_that_is_connected_to_again_is_told_the_position_again() -> None:
    """It may have been restarted, and not know how far the consumer is."""
    machine = Subscription(("s",), 10)
    said(machine, Begin(0), Advanced(1, NINE), Reported(2, "s", Status(STABLE, 9)))
    said(machine, Disconnected(3, 1))
    assert said(machine, Tick(3 + RETRY_US)) == [Connect(2, "s", 10, None), Poll("s", NINE)]


def test_what_the_only_producer_has_deleted_cannot_be_had() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0))
    assert said(machine, Disconnected(1, 1, trimmed=True)) == [Disconnect(1), Unobtainable()]


def test_a_consumer_without_space_is_left_alone_for_a_while() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0), came(1, 1, 8, 8))
    assert said(machine, Full(2)) == [Disconnect(1)]
    assert said(machine, Tick(1 + FULL_US)) == []
    assert said(machine, Tick(2 + FULL_US)) == [Connect(2, "s", 8, None)]


def test_news_of_a_connection_that_was_given_up_is_no_news() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0), Disconnected(1, 1))
    assert said(machine, came(2, 1, 8, 8)) == []
    assert said(machine, Disconnected(3, 1)) == []


# -- replicas -------------------------------------------------------------------------------------


def both(**more: int) -> Subscription:
    """Two replicas that are asked every 100, and both answered at 0: `a` is read."""
    machine = Subscription(("a", "b"), 8, heartbeat_us=100, **more)  # type: ignore[arg-type]
    assert said(machine, Begin(0)) == [Poll("a", None), Poll("b", None)]
    assert said(machine, Reported(0, "a", Status(STABLE, 7))) == [Connect(1, "a", 8, None)]
    assert said(machine, Reported(0, "b", Status(STABLE, 7))) == []
    return machine


def test_replicas_are_asked_as_often_as_they_give_heartbeats_and_not_before_they_answered() -> None:
    machine = both()
    assert said(machine, Tick(99)) == []
    assert said(machine, Tick(100)) == [Poll("a", None), Poll("b", None)]
    assert said(machine, Tick(300)) == []  # neither has answered
    assert said(machine, Reported(310, "a", Status(STABLE, 8))) == []
    assert said(machine, Tick(410)) == [Poll("a", None)]


def test_with_a_home_the_others_are_asked_seldom_and_home_only_to_tell_it_something() -> None:
    machine = Subscription(("a", "b"), 8, home="a", heartbeat_us=100, ask_us=2_000)
    said(
        machine, Begin(0), Reported(0, "a", Status(STABLE, 7)), Reported(0, "b", Status(STABLE, 7))
    )
    assert said(machine, Tick(1_999)) == []
    assert said(machine, Tick(2_000)) == [Poll("b", None)]
    said(machine, Reported(2_010, "b", Status(STABLE, 8)), Advanced(2_020, NINE))
    assert said(machine, Tick(4_010)) == [Poll("a", NINE), Poll("b", NINE)]


def test_every_replica_is_told_the_position_also_the_one_that_nobody_reads() -> None:
    machine = both()
    said(machine, Advanced(10, NINE))
    assert said(machine, Tick(100)) == [Poll("a", NINE), Poll("b", NINE)]
    said(machine, Reported(110, "a", Status(STABLE, 9)), Unreachable(110, "b"))
    assert said(machine, Tick(210)) == [Poll("a", None), Poll("b", NINE)]


def test_a_replica_that_does_not_answer_is_left_at_once() -> None:
    machine = both()
    said(machine, Tick(100))
    assert said(machine, Unreachable(110, "a")) == [Disconnect(1), Connect(2, "b", 8, None)]


def test_a_replica_that_has_not_opened_the_stream_is_not_read() -> None:
    machine = both()
    said(machine, Tick(100))
    assert said(machine, Reported(110, "a", None)) == [Disconnect(1), Connect(2, "b", 8, None)]


def test_what_one_has_deleted_another_may_still_have() -> None:
    machine = both()
    gone = said(machine, Disconnected(10, 1, trimmed=True))
    assert gone == [Disconnect(1), Connect(2, "b", 8, None)]
    assert said(machine, Disconnected(20, 2, trimmed=True)) == [Disconnect(2), Unobtainable()]


def test_one_that_delivers_again_has_not_deleted_what_is_wanted() -> None:
    machine = both()
    said(machine, Disconnected(10, 1, trimmed=True), Tick(100))
    said(machine, Reported(110, "a", Status(STABLE, 20)))
    assert said(machine, came(120, 3, 8, 20)) == [Take(3, 8, None)]
    said(machine, Taken(130, 20), Disconnected(140, 3))
    said(machine, Tick(240), Reported(250, "b", Status(STABLE, 20)))
    assert said(machine, Disconnected(260, 4, trimmed=True)) == [Disconnect(4)]


def test_each_replica_has_epochs_of_its_own() -> None:
    """They are restarted one by one: what is old of one may be new of another."""
    machine = both()
    said(machine, came(1, 1, 8, 8, epoch=7), Taken(2, 8), Unreachable(3, "a"))
    assert said(machine, came(4, 2, 9, 9, epoch=1)) == [Take(2, 9, None)]
    assert machine.epochs == {"a": 7, "b": 1}


def test_whoever_is_refused_is_not_remembered() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0), came(1, 1, 9, 9, epoch=5))  # a gap
    assert machine.epochs == {}


def test_a_consumer_without_space_asks_nobody_for_a_while() -> None:
    machine = both()
    said(machine, came(1, 1, 8, 8))
    assert said(machine, Full(2)) == [Disconnect(1)]
    assert said(machine, Tick(FULL_US)) == []
    assert said(machine, Tick(2 + FULL_US)) == [Poll("a", None), Poll("b", None)]
    answered = Reported(FULL_US + 10, "b", Status(STABLE, 9))
    assert said(machine, answered) == [Connect(2, "b", 8, None)]


# -- tentative buckets (Borealis section 3.5) -----------------------------------------------------


def test_who_wants_only_what_is_stable_asks_for_nothing_else() -> None:
    machine = Subscription(("s",), 8)
    assert said(machine, Begin(0)) == [Connect(1, "s", 8, tentative_after=None)]
    assert said(machine, came(1, 1, 8, 8)) == [Take(1, 8, tentative_after=None)]


def test_property_2_3_a_tentative_bucket_is_taken_once_whoever_gives_it() -> None:
    """The bucket is t_max: whatever went into it has this time, or an earlier one."""
    machine = Subscription(("s",), 8, tentative=True)
    assert said(machine, Begin(0)) == [Connect(1, "s", 8, NOTHING)]  # everything there is
    said(machine, came(1, 1, 8, 7), Taken(2, 7, tentative_upto=10), Taken(3, 7, tentative_upto=9))
    said(machine, Disconnected(4, 1))
    assert said(machine, Tick(4 + RETRY_US)) == [Connect(2, "s", 8, 10)]
    assert said(machine, came(60_000, 2, 8, 7)) == [Take(2, 8, 10)]


def test_taking_something_tentative_is_no_progress() -> None:
    """What comes as stable is new, although it was there before."""
    machine = Subscription(("s",), 8, tentative=True)
    said(machine, Begin(0), came(1, 1, 8, 7), Taken(2, 7, tentative_upto=12))
    assert machine.at == 8
    assert said(machine, came(3, 1, 8, 9)) == [Take(1, 8, 12)]


# -- the end --------------------------------------------------------------------------------------


def test_when_a_stream_was_read_to_its_end_every_replica_hears_so() -> None:
    machine = both()
    said(machine, Advanced(10, NINE), came(20, 1, 8, 9))
    assert said(machine, Taken(30, 9, ended=True)) == [
        Disconnect(1),
        Poll("a", NINE),
        Poll("b", NINE),
    ]
    assert said(machine, Reported(40, "a", Status(STABLE, 9))) == []
    assert said(machine, Unreachable(50, "b"), Tick(150)) == [Poll("b", NINE)]
    assert said(machine, Reported(160, "b", Status(STABLE, 9))) == [Finished()]


def test_one_that_is_gone_for_good_does_not_keep_the_end_from_coming() -> None:
    machine, now = both(), 30
    said(machine, Advanced(10, NINE), came(20, 1, 8, 9))
    said(machine, Taken(now, 9, ended=True), Reported(40, "a", Status(STABLE, 9)))
    for tried in range(LAST_WORDS):
        assert Finished() not in said(machine, Tick(now)), tried
        now += 100
        last = said(machine, Unreachable(now, "b"))
        now += 100
    assert last == [Finished()]


def test_a_consumer_that_has_nothing_to_tell_is_done_at_the_end() -> None:
    machine = Subscription(("s",), 8)
    said(machine, Begin(0), came(1, 1, 8, 8))
    assert said(machine, Taken(2, 8, ended=True)) == [Disconnect(1), Finished()]


@pytest.mark.parametrize("replicas", [("s",), ("a", "b")])
def test_after_the_end_nothing_is_read(replicas: tuple[str, ...]) -> None:
    machine = Subscription(replicas, 8)
    said(machine, Begin(0), *(Reported(0, r, Status(STABLE, 7)) for r in replicas))
    said(machine, came(1, 1, 8, 8), Taken(2, 8, ended=True))
    assert said(machine, came(3, 1, 9, 9)) == [Finished()]
    assert not any(isinstance(a, Connect) for a in said(machine, Tick(10**9)))
