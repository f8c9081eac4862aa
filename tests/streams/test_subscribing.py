"""Subscribing to a replicated stream: real services, threads and connections, no network.

`core/test_subscription.py` tests the decisions; these tests check that they are carried out.
Borealis sections 3.3 and 3.5.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, StaleEpoch, Trimmed
from holdfast.storage import Added, Boundary, Ended, Log, Tentative
from holdfast.streams.delivery import Cursor, Delivery
from holdfast.streams.serving import Service
from holdfast.streams.subscribing import Subscriber
from holdfast.transport.in_process import InProcess
from holdfast.types import OutputState, SegmentId, Stability

STABLE = OutputState.STABLE
UP_FAILURE = OutputState.UP_FAILURE
STABILIZATION = OutputState.STABILIZATION
#: Time limit for every event in these tests.
LIMIT_S = 20.0


def rows(bucket: int, value: int) -> pa.Table:
    return pa.table(
        {"ts": pa.array([bucket], pa.timestamp("us", "UTC")), "value": pa.array([value])}
    )


class Replica:
    """A replica of the producer: its log and its service."""

    def __init__(self, root: Path, name: str, epochs: int = 1) -> None:
        for _ in range(epochs):
            self.log = Log.open(root / name, name, fsync="never")
            if len(self.log.streams()) == 0:
                self.log.open_stream("s", "ts timestamp, value bigint", "ts", 0)
            if self.log.epoch < epochs:
                self.log.close()
        self.acks: queue.Queue[tuple[int, int]] = queue.Queue()
        self.serve(STABLE)

    def serve(self, state: OutputState) -> None:
        self.service = Service(logs={"s": self.log}, heartbeat_s=0.02, trim_buckets=1)
        self.service.states["s"] = state
        self.service.on_ack.append(lambda stream, *positions: self.acks.put(positions))

    def connect(self) -> InProcess:
        return InProcess(self.service)

    def is_in(self, state: OutputState) -> None:
        self.service.states["s"] = state

    def put(self, *buckets: int) -> None:
        for bucket in buckets:
            segment = self.log.write(
                rows(bucket, bucket), SegmentId("s", 0, bucket), Stability.STABLE
            )
            self.log.commit("s", [segment], bucket)

    def write_tentative(self, *buckets: int) -> None:
        for bucket in buckets:
            id = SegmentId("s", 0, bucket, self.log.info("s").undos)
            segment = self.log.write(rows(bucket, -bucket), id, Stability.TENTATIVE)
            self.log.append(Added(segment), Tentative("s", bucket, bucket, ("far",)))

    def correct(self, *buckets: int) -> None:
        info = self.log.info("s")
        segments = [
            self.log.write(rows(b, b), SegmentId("s", 0, b, info.undos + 1), Stability.STABLE)
            for b in buckets
        ]
        self.log.append(*map(Added, segments), Boundary("s", buckets[-1]))

    def die(self) -> None:
        self.service.stopping.set()


class Counting(Service):
    """A service that counts its deliveries."""

    __slots__ = ("delivered",)

    def next(self, stream: str, cursor: Cursor) -> Delivery:
        self.delivered.release()
        return super().next(stream, cursor)


class Consumer:
    """A consumer that takes deliveries in its own thread and records them."""

    def __init__(
        self,
        replicas: dict[str, Replica],
        *,
        at: int | None = 0,
        position: Position | None = None,
        local_replica: str | None = None,
    ) -> None:
        self.subscription = Subscription(
            tuple(replicas),
            at,
            True,
            local_replica=local_replica,
            heartbeat_us=20_000,
            ask_us=20_000,
        )
        self.stop = threading.Event()
        self.switches: queue.Queue[str] = queue.Queue()
        self.taken: list[tuple[int, int]] = []
        self._news: queue.Queue[Delivery | BaseException] = queue.Queue()
        self.deliveries = 0
        #: Each connection uses the current service of a replica, also after a restart.
        producers = {
            name: (lambda replica=replica: replica.connect()) for name, replica in replicas.items()
        }
        self.subscriber = Subscriber(
            "s", "reader", self.subscription, producers, self.stop,
            switched=lambda replica, us: self.switches.put(replica),
        )  # fmt: skip
        if position is not None:
            self.subscriber.advanced(position)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for delivery in self.subscriber.deliveries():
                self.deliveries += 1
                self._news.put(delivery)
        except HoldfastError as err:
            self._news.put(err)
        else:
            self._news.put(StopIteration())

    def until(self, enough: Callable[[Delivery], bool]) -> Delivery:
        """The first delivery for which `enough` is true; all rows up to it are in `taken`."""
        while True:
            news = self._news.get(timeout=LIMIT_S)
            if isinstance(news, BaseException):
                raise news
            for number in range(len(news.segments)):
                bucket, value = news.segments[number].id.bucket, news.table(number)["value"]
                self.taken.append((bucket, value.to_pylist()[0]))
            if enough(news):
                return news

    def reads(self, replica: str) -> None:
        while self.switches.get(timeout=LIMIT_S) != replica:
            pass

    def ends(self) -> None:
        with pytest.raises(StopIteration):
            self.until(lambda delivery: False)

    def close(self) -> None:
        self.stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[dict[str, Replica]]:
    replicas_by_name = {name: Replica(tmp_path, name) for name in ("a", "b")}
    yield replicas_by_name
    for replica in replicas_by_name.values():
        replica.die()
        replica.log.close()


@contextmanager
def reading(replicas: dict[str, Replica], **options: object) -> Iterator[Consumer]:
    consumer = Consumer(replicas, **options)  # type: ignore[arg-type]
    try:
        yield consumer
    finally:
        consumer.close()


def upto(bucket: int) -> Callable[[Delivery], bool]:
    return lambda delivery: delivery.upto >= bucket


def tentative_upto(bucket: int) -> Callable[[Delivery], bool]:
    return lambda delivery: (delivery.tentative_upto or -1) >= bucket


def test_property_2_1_a_consumer_continues_at_the_other_replica_from_its_position(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    for replica in (a, b):
        replica.put(0, 1, 2)
    b.is_in(STABILIZATION)
    with reading(replicas) as consumer:
        consumer.reads("a")
        consumer.until(upto(2))
        b.is_in(STABLE)
        a.die()
        consumer.reads("b")
        b.put(3)
        consumer.until(upto(3))
    assert consumer.taken == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_3_3_a_consumer_switches_from_a_failed_replica_to_a_stable_one(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    b.is_in(STABILIZATION)
    for replica in (a, b):
        replica.put(0)
    with reading(replicas) as consumer:
        consumer.reads("a")
        a.is_in(UP_FAILURE)
        b.is_in(STABLE)
        consumer.reads("b")
        a.write_tentative(1)
        b.put(1)
        consumer.until(upto(1))
        b.put(2)
        consumer.until(upto(2))
    assert consumer.taken == [(0, 0), (1, 1), (2, 2)]


def test_property_2_4_one_replica_sends_corrections_while_the_other_sends_tentative_buckets(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    a.is_in(UP_FAILURE)
    b.is_in(STABILIZATION)
    for replica in (a, b):
        replica.put(0)
    with reading(replicas) as consumer:
        consumer.reads("a")
        a.write_tentative(1, 2)
        consumer.until(tentative_upto(2))
        b.write_tentative(1)  # not taken: tentative buckets of two replicas are never mixed
        b.correct(1)
        correction = consumer.until(upto(1))
        assert correction.tentative_upto is None
        a.write_tentative(3)
        consumer.until(tentative_upto(3))
        b.correct(2)
        consumer.until(upto(2))
    assert sorted(consumer.taken) == sorted([(0, 0), (1, -1), (2, -2), (1, 1), (3, -3), (2, 2)]), (
        "every tentative bucket of a and every correction of b, each exactly once"
    )


def test_property_2_2_switching_from_up_failure_to_stable_delivers_the_corrections(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    a.is_in(UP_FAILURE)
    b.is_in(STABILIZATION)
    a.put(0)
    a.write_tentative(1)
    with reading(replicas) as consumer:
        consumer.reads("a")
        consumer.until(tentative_upto(1))
        b.put(0, 1, 2)
        b.is_in(STABLE)
        consumer.reads("b")
        consumer.until(upto(2))
    assert consumer.taken[-2:] == [(1, 1), (2, 2)]
    assert consumer.taken.count((0, 0)) == 1


def test_property_2_3_switching_between_replicas_in_up_failure_repeats_no_tentative_bucket(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    for replica in (a, b):
        replica.is_in(UP_FAILURE)
        replica.put(0)
        replica.write_tentative(1, 2)
    with reading(replicas) as consumer:
        first = consumer.switches.get(timeout=LIMIT_S)
        consumer.until(tentative_upto(2))
        replicas[first].die()
        other = "b" if first == "a" else "a"
        consumer.reads(other)
        replicas[other].write_tentative(3)
        consumer.until(tentative_upto(3))
    assert consumer.taken == [(0, 0), (1, -1), (2, -2), (3, -3)]


def test_a_consumer_reconnects_to_a_restarted_replica(replicas: dict[str, Replica]) -> None:
    a, b = replicas.values()
    b.die()
    a.put(0)
    with reading(replicas) as consumer:
        consumer.reads("a")
        consumer.until(upto(0))
        a.die()
        b.serve(STABLE)
        b.put(0, 1)
        consumer.reads("b")
        consumer.until(upto(1))
    assert consumer.taken == [(0, 0), (1, 1)]


def test_a_consumer_with_a_local_replica_skips_unchanged_heartbeats(
    replicas: dict[str, Replica],
) -> None:
    """Passing the heartbeats of many streams through two threads each would be too expensive."""
    a, b = replicas.values()
    a.service = Counting(logs={"s": a.log}, heartbeat_s=0.001)
    a.service.delivered = threading.Semaphore(0)
    for replica in (a, b):
        replica.put(0)
    with reading(replicas, local_replica="a") as consumer:
        consumer.reads("a")
        for _ in range(50):
            assert a.service.delivered.acquire(timeout=LIMIT_S)
        for replica in (a, b):
            replica.put(1)
        consumer.until(upto(1))
        assert consumer.deliveries < 10
        a.is_in(UP_FAILURE)  # a change of state is an event, even without rows
        consumer.reads("b")
        b.put(2)
        consumer.until(upto(2))
    assert consumer.taken == [(0, 0), (1, 1), (2, 2)]


def test_acknowledgements_reach_every_replica(replicas: dict[str, Replica]) -> None:
    """Also a replica without consumers, which would otherwise retain everything forever."""
    for replica in replicas.values():
        replica.put(0, 1, 2, 3)
    with reading(replicas, at=4, position=Position(2, 1, 7)) as consumer:
        for replica in replicas.values():
            assert replica.acks.get(timeout=LIMIT_S) == (1, 2)
        consumer.subscriber.advanced(Position(3, 3, 7))
        for replica in replicas.values():
            assert replica.acks.get(timeout=LIMIT_S) == (3, 3)


def test_any_replica_refuses_a_replaced_consumer(replicas: dict[str, Replica]) -> None:
    a, b = replicas.values()
    for replica in (a, b):
        replica.put(0)
    b.log.acknowledge("s", "reader", 0, 0, epoch=8)
    with (
        reading(replicas, position=Position(0, 0, 7)) as consumer,
        pytest.raises(StaleEpoch, match="epoch 7"),
    ):
        consumer.until(upto(99))


def test_a_consumer_reads_buckets_that_one_replica_has_trimmed_from_the_other(
    replicas: dict[str, Replica],
) -> None:
    a, b = replicas.values()
    for replica in (a, b):
        replica.put(0, 1, 2)
    a.log.trim("s", 1)
    with reading(replicas) as consumer:
        consumer.until(upto(2))
    assert consumer.taken == [(0, 0), (1, 1), (2, 2)]


def test_buckets_that_all_replicas_have_trimmed_are_unobtainable(
    replicas: dict[str, Replica],
) -> None:
    for replica in replicas.values():
        replica.put(0, 1, 2)
        replica.log.trim("s", 1)
    with (
        reading(replicas) as consumer,
        pytest.raises(Trimmed, match="the buckets before 2 were released by all"),
    ):
        consumer.until(upto(2))


def test_a_subscription_tracks_the_epoch_of_each_replica_separately(tmp_path: Path) -> None:
    replicas = {"a": Replica(tmp_path, "a", epochs=5), "b": Replica(tmp_path, "b")}
    a, b = replicas.values()
    assert (a.log.epoch, b.log.epoch) == (5, 1)
    for replica in (a, b):
        replica.put(0)
    b.is_in(STABILIZATION)
    with reading(replicas) as consumer:
        consumer.reads("a")
        consumer.until(upto(0))
        b.is_in(STABLE)
        a.die()
        b.put(1)
        consumer.until(upto(1))
        assert consumer.subscription.epochs == {"a": 5, "b": 1}
    for replica in (a, b):
        replica.die()
        replica.log.close()


def test_the_stream_ends_when_any_replica_reports_its_end(replicas: dict[str, Replica]) -> None:
    a, b = replicas.values()
    a.is_in(UP_FAILURE)
    b.is_in(STABILIZATION)
    a.put(0)
    a.write_tentative(1)
    b.put(0, 1)
    b.log.append(Ended("s"))
    with reading(replicas) as consumer:
        assert consumer.until(lambda delivery: delivery.ended).upto == 1
        consumer.ends()
    assert (1, 1) in consumer.taken


def test_the_final_position_reaches_every_replica_after_the_end_of_the_stream(
    replicas: dict[str, Replica],
) -> None:
    """Also a replica that is not polled any more, which would otherwise retain the last buckets."""

    for replica in replicas.values():
        replica.put(0, 1)
        replica.log.append(Ended("s"))
    with reading(replicas, position=Position(1, -1, 7)) as consumer:
        consumer.ends()
        for replica in replicas.values():
            assert replica.acks.get(timeout=LIMIT_S) == (-1, 1)


def test_a_consumer_of_a_single_producer_takes_everything_in_every_state(tmp_path: Path) -> None:
    """A source, or a fragment with one replica, is read in any state."""
    only = Replica(tmp_path, "only")
    only.is_in(UP_FAILURE)
    only.put(0)
    only.write_tentative(1)
    with reading({"only": only}) as consumer:
        consumer.until(tentative_upto(1))
        only.correct(1)
        consumer.until(upto(1))
        only.die()
        only.serve(STABLE)
        only.put(2)
        consumer.until(upto(2))
    assert consumer.taken == [(0, 0), (1, -1), (1, 1), (2, 2)]
    only.die()
    only.log.close()
