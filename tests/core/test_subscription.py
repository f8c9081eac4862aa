"""Transcripts of a subscription whose connections open and close."""

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


def handle(machine: Subscription, *events: Event) -> list[Action]:
    """Actions of the last event, without wake-ups and reports."""
    actions: list[Action] = []
    for event in events:
        actions = machine.handle(event)
    return [a for a in actions if not isinstance(a, Wake | Lost | Switched)]


def came(at: int, connection: int, since: int, upto: int, epoch: int = 1) -> Delivered:
    return Delivered(at, connection, epoch, since, upto, STABLE)


# -- one producer ---------------------------------------------------------------------------------


def test_a_new_connection_continues_after_the_last_received_bucket() -> None:
    machine = Subscription(("s",))
    assert handle(machine, Begin(0)) == [Connect(1, "s", None, None)]  # from the oldest bucket
    assert handle(machine, came(1, 1, 5, 7)) == [Take(1, None, None)]
    handle(machine, Taken(2, 7), Disconnected(3, 1))
    assert handle(machine, Tick(3 + RETRY_US)) == [Connect(2, "s", 8, None)]


def test_a_bucket_that_was_taken_is_not_taken_again() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0))
    assert handle(machine, came(1, 1, 6, 8)) == [Take(1, stable_from=8, tentative_after=None)]
    handle(machine, Taken(2, 8), Taken(3, 7))  # a late event for an older bucket
    assert machine.at == 9


def test_a_delivery_with_a_gap_is_refused() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0))
    assert handle(machine, came(1, 1, 9, 9)) == [Disconnect(1)]
    assert handle(machine, Tick(1 + RETRY_US)) == [Connect(2, "s", 8, None)]


def test_a_delivery_of_an_instance_with_an_older_epoch_is_refused() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0), came(1, 1, 8, 8, epoch=3), Taken(2, 8), Disconnected(3, 1))
    handle(machine, Tick(3 + RETRY_US))
    assert handle(machine, came(60_000, 2, 9, 9, epoch=2)) == [Disconnect(2)]
    assert machine.epochs == {"s": 3}


def test_connection_attempts_to_an_unreachable_producer_back_off() -> None:
    machine, now, pauses = Subscription(("s",), 8), 0, []
    handle(machine, Begin(0))
    for number in range(1, 6):
        (wake,) = [a for a in machine.handle(Disconnected(now, number)) if isinstance(a, Wake)]
        pauses.append(wake.at - now)
        now = wake.at
        assert handle(machine, Tick(now)) == [Connect(number + 1, "s", 8, None)]
    assert pauses == [RETRY_US, 2 * RETRY_US, 4 * RETRY_US, RETRY_US_MAX, RETRY_US_MAX]
    handle(machine, came(now, 6, 8, 8))  # the producer delivered
    (wake,) = [a for a in machine.handle(Disconnected(now, 6)) if isinstance(a, Wake)]
    assert wake.at - now == RETRY_US


def test_a_new_position_is_sent_to_the_only_producer_at_once_and_once() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0))
    assert handle(machine, Advanced(1, NINE)) == [Poll("s", NINE)]
    assert handle(machine, Tick(2)) == []
    later = NINE._replace(received=12)
    assert handle(machine, Advanced(3, later)) == []  # the first poll is not answered yet
    assert handle(machine, Reported(4, "s", Status(STABLE, 12))) == [Poll("s", later)]
    assert handle(machine, Reported(5, "s", Status(STABLE, 12)), Tick(10**9)) == []


def test_a_position_that_did_not_arrive_is_sent_again() -> None:
    machine = Subscription(("s",), 8, heartbeat_us=100)
    handle(machine, Begin(0), Advanced(1, NINE))
    assert handle(machine, Unreachable(2, "s")) == []
    assert handle(machine, Tick(101)) == []
    assert handle(machine, Tick(102)) == [Poll("s", NINE)]


def test_the_position_is_sent_again_after_a_reconnect() -> None:
    """The producer may have been restarted without the position of the consumer."""
    machine = Subscription(("s",), 10)
    handle(machine, Begin(0), Advanced(1, NINE), Reported(2, "s", Status(STABLE, 9)))
    handle(machine, Disconnected(3, 1))
    assert handle(machine, Tick(3 + RETRY_US)) == [Connect(2, "s", 10, None), Poll("s", NINE)]


def test_buckets_that_the_only_producer_has_deleted_are_unobtainable() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0))
    assert handle(machine, Disconnected(1, 1, trimmed=True)) == [Disconnect(1), Unobtainable()]


def test_a_consumer_without_space_reconnects_after_a_pause() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0), came(1, 1, 8, 8))
    assert handle(machine, Full(2)) == [Disconnect(1)]
    assert handle(machine, Tick(1 + FULL_US)) == []
    assert handle(machine, Tick(2 + FULL_US)) == [Connect(2, "s", 8, None)]


def test_events_of_a_closed_connection_are_ignored() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0), Disconnected(1, 1))
    assert handle(machine, came(2, 1, 8, 8)) == []
    assert handle(machine, Disconnected(3, 1)) == []


# -- replicas -------------------------------------------------------------------------------------


def both(**options: int) -> Subscription:
    """Two replicas, polled every 100. Both answered at 0, and the consumer reads `a`."""
    machine = Subscription(("a", "b"), 8, heartbeat_us=100, **options)  # type: ignore[arg-type]
    assert handle(machine, Begin(0)) == [Poll("a", None), Poll("b", None)]
    assert handle(machine, Reported(0, "a", Status(STABLE, 7))) == [Connect(1, "a", 8, None)]
    assert handle(machine, Reported(0, "b", Status(STABLE, 7))) == []
    return machine


def test_a_replica_is_polled_once_per_heartbeat_and_not_before_it_has_answered() -> None:
    machine = both()
    assert handle(machine, Tick(99)) == []
    assert handle(machine, Tick(100)) == [Poll("a", None), Poll("b", None)]
    assert handle(machine, Tick(300)) == []  # neither has answered
    assert handle(machine, Reported(310, "a", Status(STABLE, 8))) == []
    assert handle(machine, Tick(410)) == [Poll("a", None)]


def test_with_a_local_replica_peers_are_polled_rarely_and_it_only_for_a_new_position() -> None:
    machine = Subscription(("a", "b"), 8, local_replica="a", heartbeat_us=100, ask_us=2_000)
    handle(
        machine, Begin(0), Reported(0, "a", Status(STABLE, 7)), Reported(0, "b", Status(STABLE, 7))
    )
    assert handle(machine, Tick(1_999)) == []
    assert handle(machine, Tick(2_000)) == [Poll("b", None)]
    handle(machine, Reported(2_010, "b", Status(STABLE, 8)), Advanced(2_020, NINE))
    assert handle(machine, Tick(4_010)) == [Poll("a", NINE), Poll("b", NINE)]


def test_the_position_is_sent_to_every_replica_even_if_it_is_not_read() -> None:
    machine = both()
    handle(machine, Advanced(10, NINE))
    assert handle(machine, Tick(100)) == [Poll("a", NINE), Poll("b", NINE)]
    handle(machine, Reported(110, "a", Status(STABLE, 9)), Unreachable(110, "b"))
    assert handle(machine, Tick(210)) == [Poll("a", None), Poll("b", NINE)]


def test_a_consumer_leaves_an_unreachable_replica_at_once() -> None:
    machine = both()
    handle(machine, Tick(100))
    assert handle(machine, Unreachable(110, "a")) == [Disconnect(1), Connect(2, "b", 8, None)]


def test_a_consumer_leaves_a_replica_that_has_not_opened_the_stream() -> None:
    machine = both()
    handle(machine, Tick(100))
    assert handle(machine, Reported(110, "a", None)) == [Disconnect(1), Connect(2, "b", 8, None)]


def test_buckets_that_one_replica_has_deleted_are_read_from_another() -> None:
    machine = both()
    actions = handle(machine, Disconnected(10, 1, trimmed=True))
    assert actions == [Disconnect(1), Connect(2, "b", 8, None)]
    assert handle(machine, Disconnected(20, 2, trimmed=True)) == [Disconnect(2), Unobtainable()]


def test_a_replica_that_delivers_again_no_longer_counts_as_trimmed() -> None:
    machine = both()
    handle(machine, Disconnected(10, 1, trimmed=True), Tick(100))
    handle(machine, Reported(110, "a", Status(STABLE, 20)))
    assert handle(machine, came(120, 3, 8, 20)) == [Take(3, 8, None)]
    handle(machine, Taken(130, 20), Disconnected(140, 3))
    handle(machine, Tick(240), Reported(250, "b", Status(STABLE, 20)))
    assert handle(machine, Disconnected(260, 4, trimmed=True)) == [Disconnect(4)]


def test_each_replica_has_its_own_epochs() -> None:
    """Replicas restart independently: an epoch that is old for one may be new for another."""
    machine = both()
    handle(machine, came(1, 1, 8, 8, epoch=7), Taken(2, 8), Unreachable(3, "a"))
    assert handle(machine, came(4, 2, 9, 9, epoch=1)) == [Take(2, 9, None)]
    assert machine.epochs == {"a": 7, "b": 1}


def test_the_epoch_of_a_refused_delivery_is_not_recorded() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0), came(1, 1, 9, 9, epoch=5))  # a gap
    assert machine.epochs == {}


def test_a_consumer_without_space_polls_no_replica_during_the_pause() -> None:
    machine = both()
    handle(machine, came(1, 1, 8, 8))
    assert handle(machine, Full(2)) == [Disconnect(1)]
    assert handle(machine, Tick(FULL_US)) == []
    assert handle(machine, Tick(2 + FULL_US)) == [Poll("a", None), Poll("b", None)]
    report = Reported(FULL_US + 10, "b", Status(STABLE, 9))
    assert handle(machine, report) == [Connect(2, "b", 8, None)]


# -- tentative buckets (Borealis section 3.5) -----------------------------------------------------


def test_a_consumer_of_stable_buckets_requests_no_tentative_buckets() -> None:
    machine = Subscription(("s",), 8)
    assert handle(machine, Begin(0)) == [Connect(1, "s", 8, tentative_after=None)]
    assert handle(machine, came(1, 1, 8, 8)) == [Take(1, 8, tentative_after=None)]


def test_property_2_3_a_tentative_bucket_is_taken_once_from_whichever_replica() -> None:
    """The bucket number is t_max: every row of the bucket has this time or an earlier one."""
    machine = Subscription(("s",), 8, tentative=True)
    assert handle(machine, Begin(0)) == [Connect(1, "s", 8, NOTHING)]  # every tentative bucket
    handle(machine, came(1, 1, 8, 7), Taken(2, 7, tentative_upto=10), Taken(3, 7, tentative_upto=9))
    handle(machine, Disconnected(4, 1))
    assert handle(machine, Tick(4 + RETRY_US)) == [Connect(2, "s", 8, 10)]
    assert handle(machine, came(60_000, 2, 8, 7)) == [Take(2, 8, 10)]


def test_a_tentative_bucket_does_not_advance_the_stable_position() -> None:
    """The stable bucket is taken although its tentative version was taken before."""
    machine = Subscription(("s",), 8, tentative=True)
    handle(machine, Begin(0), came(1, 1, 8, 7), Taken(2, 7, tentative_upto=12))
    assert machine.at == 8
    assert handle(machine, came(3, 1, 8, 9)) == [Take(1, 8, 12)]


# -- the end of a stream --------------------------------------------------------------------------


def test_every_replica_receives_the_final_position_at_the_end_of_the_stream() -> None:
    machine = both()
    handle(machine, Advanced(10, NINE), came(20, 1, 8, 9))
    assert handle(machine, Taken(30, 9, ended=True)) == [
        Disconnect(1),
        Poll("a", NINE),
        Poll("b", NINE),
    ]
    assert handle(machine, Reported(40, "a", Status(STABLE, 9))) == []
    assert handle(machine, Unreachable(50, "b"), Tick(150)) == [Poll("b", NINE)]
    assert handle(machine, Reported(160, "b", Status(STABLE, 9))) == [Finished()]


def test_a_permanently_unreachable_replica_does_not_prevent_the_end() -> None:
    machine, now = both(), 30
    handle(machine, Advanced(10, NINE), came(20, 1, 8, 9))
    handle(machine, Taken(now, 9, ended=True), Reported(40, "a", Status(STABLE, 9)))
    for attempt in range(LAST_WORDS):
        assert Finished() not in handle(machine, Tick(now)), attempt
        now += 100
        actions = handle(machine, Unreachable(now, "b"))
        now += 100
    assert actions == [Finished()]


def test_a_consumer_without_a_position_finishes_at_the_end_of_the_stream() -> None:
    machine = Subscription(("s",), 8)
    handle(machine, Begin(0), came(1, 1, 8, 8))
    assert handle(machine, Taken(2, 8, ended=True)) == [Disconnect(1), Finished()]


@pytest.mark.parametrize("replicas", [("s",), ("a", "b")])
def test_nothing_is_read_after_the_end(replicas: tuple[str, ...]) -> None:
    machine = Subscription(replicas, 8)
    handle(machine, Begin(0), *(Reported(0, r, Status(STABLE, 7)) for r in replicas))
    handle(machine, came(1, 1, 8, 8), Taken(2, 8, ended=True))
    assert handle(machine, came(3, 1, 9, 9)) == [Finished()]
    assert not any(isinstance(a, Connect) for a in handle(machine, Tick(10**9)))
