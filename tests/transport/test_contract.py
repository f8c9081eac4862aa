"""One contract for both ways to carry: in-process and Flight, with and without shared storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import InputError, SegmentLost, SetupError, StaleEpoch, TransportError, Trimmed
from holdfast.storage import Added, Boundary, Ended, Log, Tentative
from holdfast.streams.calls import GetStreamStatus, StreamStatus
from holdfast.streams.delivery import Delivery, Peer
from holdfast.streams.serving import Service
from holdfast.transport import flight as flight_module
from holdfast.transport import wire
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.transport.in_process import InProcess
from holdfast.types import OutputState, SegmentId, Stability

SCHEMA = "ts timestamp, value bigint"


def rows(bucket: int, count: int = 3) -> pa.Table:
    times = pa.array([bucket * 1_000 + i for i in range(count)], pa.timestamp("us", tz="UTC"))
    return pa.table({"ts": times, "value": pa.array(range(count), pa.int64())})


def put(log: Log, bucket: int) -> None:
    segment = log.write(rows(bucket), SegmentId("s", 0, bucket), Stability.STABLE)
    log.commit("s", [segment], bucket)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log.open(tmp_path / "log", "owner", fsync="never")
    log.open_stream("s", SCHEMA, "ts", 0)
    yield log
    log.close()


@pytest.fixture
def service(log: Log) -> Service:
    return Service(logs={"s": log}, trim_buckets=1)


@pytest.fixture(params=["in-process", "flight", "flight without shared storage"])
def peer(
    service: Service, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Peer]:
    if request.param == "in-process":
        yield InProcess(service)
        service.stopping.set()
        return
    server = FlightServer(service)
    if "without" in request.param:
        machines = iter(range(1_000))
        monkeypatch.setattr(flight_module, "machine_id", lambda: f"machine {next(machines)}")
    client = FlightPeer(server.address)
    yield client
    client.close()
    server.stop()


def tables(delivery: Delivery) -> list[pa.Table]:
    return [delivery.table(number) for number in range(len(delivery.segments))]


def until(peer: Peer, from_bucket: int | None, upto: int) -> list[Delivery]:
    stop, found = threading.Event(), []
    for delivery in peer.follow("s", from_bucket, stop):
        found.append(delivery)
        if delivery.upto >= upto:
            stop.set()
            break
    return found


def test_follow_gives_every_bucket_from_the_one_asked_for(log: Log, peer: Peer) -> None:
    for bucket in range(5):
        put(log, bucket)
    found = until(peer, 2, 4)
    assert [s.id.bucket for d in found for s in d.segments] == [2, 3, 4]
    assert [t.to_pydict() for d in found for t in tables(d)] == [
        rows(bucket).to_pydict() for bucket in (2, 3, 4)
    ]
    assert found[-1].epoch == log.epoch


def test_follow_goes_on_with_what_is_appended_later(log: Log, peer: Peer) -> None:
    put(log, 0)
    stop, seen = threading.Event(), []
    for delivery in peer.follow("s", None, stop):
        seen += [segment.id.bucket for segment in delivery.segments]
        if len(seen) < 3:
            put(log, len(seen))
        else:
            stop.set()
            break
    assert seen == [0, 1, 2]


def test_empty_buckets_are_said_by_the_boundary_alone(log: Log, peer: Peer) -> None:
    log.commit("s", [], 1_000_000)
    (delivery,) = until(peer, 0, 1_000_000)
    assert (delivery.segments, delivery.upto) == ((), 1_000_000)


def test_the_end_is_said_and_ends_the_following(log: Log, peer: Peer) -> None:
    put(log, 0)
    log.append(Ended("s"))
    found = list(peer.follow("s", 0, threading.Event()))
    assert found[-1].ended
    assert found[-1].upto == 0


def test_what_was_trimmed_is_refused_with_the_oldest_bucket(log: Log, peer: Peer) -> None:
    for bucket in range(4):
        put(log, bucket)
    peer.acknowledge("s", "reader", received=3, needed=1, epoch=1)
    with pytest.raises(Trimmed, match="starts at bucket 2"):
        until(peer, 0, 3)
    assert [s.id.bucket for d in until(peer, None, 3) for s in d.segments] == [2, 3]


def test_nothing_is_trimmed_before_every_expected_reader_has_spoken(
    log: Log, service: Service, peer: Peer
) -> None:
    service.readers["s"] = {"one", "two"}
    put(log, 0)
    peer.acknowledge("s", "one", received=0, needed=0, epoch=1)
    assert log.info("s").trimmed_upto == -1
    peer.acknowledge("s", "two", received=0, needed=0, epoch=1)
    assert log.info("s").trimmed_upto == 0


def test_a_zombie_reader_is_refused(log: Log, peer: Peer) -> None:
    put(log, 0)
    peer.acknowledge("s", "reader", received=0, needed=-1, epoch=2)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        peer.acknowledge("s", "reader", received=0, needed=0, epoch=1)


# -- tentative buckets (Borealis sections 3.1, 3.4.2) ---------------------------------------------

EVERYTHING = -(2**62)


def guess(
    log: Log, since: int, upto: int, *with_rows: int, missing: str = "far",
    shares: tuple[float, float] = (0.5, 0.25),
) -> None:  # fmt: skip
    undos = log.info("s").undos
    segments = [
        log.write(rows(bucket, 2), SegmentId("s", 0, bucket, undos), Stability.TENTATIVE)
        for bucket in with_rows
    ]
    added = [Added(segment) for segment in segments]
    log.append(*added, Tentative("s", since, upto, (missing,), *shares))


def correct(log: Log, *buckets: int) -> None:
    """As SOutput does: the corrections and the boundary that replaces the guesses are one append;
    then their files go. Only the last bucket has rows."""
    id = SegmentId("s", 0, buckets[-1], log.info("s").undos + 1)
    segment = log.write(rows(buckets[-1]), id, Stability.STABLE)
    replaced, _ = log.tentative("s", upto=buckets[-1])
    log.append(Added(segment), Boundary("s", buckets[-1]))
    log.discard(replaced)


class Reading:
    """A reader's end of a connection."""

    def __init__(self, peer: Peer, at: int | None, tentative_after: int | None) -> None:
        self.stop = threading.Event()
        self._deliveries = peer.follow("s", at, self.stop, tentative_after)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._deliveries.close()  # type: ignore[attr-defined]

    def news(self) -> Delivery:
        """The next delivery that is more than a sign of life."""
        for delivery in self._deliveries:
            if delivery.upto >= delivery.since or delivery.tentative_upto is not None:
                return delivery
        raise AssertionError("the connection is over")


def buckets(delivery: Delivery) -> list[tuple[int, str]]:
    return [(segment.id.bucket, segment.stability.value) for segment in delivery.segments]


def test_3_1_tentative_buckets_come_after_the_stable_ones_and_say_what_they_lack(
    log: Log, peer: Peer
) -> None:
    put(log, 0)
    guess(log, 1, 2, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        first = reading.news()
        assert buckets(first) == [(0, "STABLE"), (2, "TENTATIVE")]
        assert (first.since, first.upto, first.tentative_upto) == (0, 0, 2)
        assert (first.missing, first.partial) == (("far",), (0.5, 0.25))
        assert [t.num_rows for t in tables(first)] == [3, 2]
        assert tables(first)[1].to_pydict() == rows(2, 2).to_pydict()
        assert first.info is not None and first.info.tentative_upto == 2
        guess(log, 3, 3, missing="farther", shares=(1.0, 0.9))  # a tentative bucket without rows
        then = reading.news()
        assert (buckets(then), then.tentative_upto, then.missing) == ([], 3, ("farther",))
        assert (then.since, then.upto, then.partial) == (1, 0, (1.0, 0.9))


def test_3_1_buckets_that_are_not_equally_partial_come_one_after_the_other(
    log: Log, peer: Peer
) -> None:
    """Each with what it lacks itself, also for who connects late."""
    for bucket in (0, 1):
        guess(log, bucket, bucket, shares=(0.5, 0.9))
    guess(log, 2, 2, missing="farther", shares=(0.75, 0.1))
    with Reading(peer, 0, EVERYTHING) as reading:
        told = [reading.news() for _ in range(2)]
    assert [(one.tentative_upto, one.missing, one.partial) for one in told] == [
        (1, ("far",), (0.5, 0.9)),
        (2, ("farther",), (0.75, 0.1)),
    ]


def test_stable_buckets_say_how_much_of_their_time_was_spent(
    log: Log, service: Service, peer: Peer
) -> None:
    """Whoever reads them holds them only for the rest of it."""
    put(log, 0)
    with Reading(peer, 0, EVERYTHING) as reading:
        assert reading.news().spent_us == 0
        service.spent_us["s"] = 1_250_000
        put(log, 1)
        assert reading.news().spent_us == 1_250_000


def test_3_4_2_corrections_come_in_place_of_what_was_tentative(log: Log, peer: Peer) -> None:
    put(log, 0)
    guess(log, 1, 2, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        reading.news()
        correct(log, 1, 2)
        then = reading.news()
        assert (then.since, then.upto, then.tentative_upto) == (1, 2, None)
        assert buckets(then) == [(2, "STABLE")]
        assert then.segments[0].id.version == 1
        assert tables(then)[0].to_pydict() == rows(2).to_pydict()


def test_what_is_tentative_beyond_a_correction_is_not_given_a_second_time(
    log: Log, peer: Peer
) -> None:
    guess(log, 0, 2, 1, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        reading.news()
        correct(log, 0)
        then = reading.news()
        assert (buckets(then), then.tentative_upto) == ([(0, "STABLE")], None)
        guess(log, 3, 3, 3)
        then = reading.news()
        assert (buckets(then), then.tentative_upto) == ([(3, "TENTATIVE")], 3)


def test_whoever_comes_new_in_a_correction_gets_what_stands(log: Log, peer: Peer) -> None:
    guess(log, 0, 2, 1, 2)
    correct(log, 0, 1)
    with Reading(peer, 0, EVERYTHING) as reading:
        first = reading.news()
        assert buckets(first) == [(1, "STABLE"), (2, "TENTATIVE")]
        assert (first.upto, first.tentative_upto) == (1, 2)


def test_property_2_3_a_new_reader_gets_only_what_is_younger(log: Log, peer: Peer) -> None:
    put(log, 0)
    guess(log, 1, 2, 1, 2)
    guess(log, 3, 4, 3, 4, missing="farther")
    with Reading(peer, 1, 2) as reading:
        first = reading.news()
        assert buckets(first) == [(3, "TENTATIVE"), (4, "TENTATIVE")]
        assert (first.tentative_upto, first.missing) == (4, ("farther",))
    with Reading(peer, 1, 4) as reading:
        guess(log, 5, 5)
        assert reading.news().tentative_upto == 5


def test_3_1_who_does_not_tolerate_inconsistency_sees_none(log: Log, peer: Peer) -> None:
    put(log, 0)
    guess(log, 1, 2, 2)
    found: list[Delivery] = []
    with Reading(peer, 0, None) as reading:
        found.append(reading.news())
        guess(log, 3, 3, 3)
        correct(log, 1, 2, 3)
        while found[-1].upto < 3:
            found.append(reading.news())
    assert [b for d in found for b in buckets(d)] == [(0, "STABLE"), (3, "STABLE")]
    assert {d.tentative_upto for d in found} == {None}
    assert {d.missing for d in found} == {()}


def test_3_3_a_replica_says_how_it_stands_with_each_delivery_and_when_asked(
    log: Log, service: Service, peer: Peer
) -> None:
    def stands() -> tuple[str | None, int | None, int | None]:
        answer = peer.call(GetStreamStatus("s"))
        return answer.state, answer.upto, answer.tentative_upto

    put(log, 0)
    assert stands() == ("STABLE", 0, None)
    service.states["s"] = OutputState.UP_FAILURE
    guess(log, 1, 2)
    assert stands() == ("UP_FAILURE", 0, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        assert reading.news().state is OutputState.UP_FAILURE
        service.states["s"] = OutputState.STABILIZATION
        correct(log, 1, 2)
        assert reading.news().state is OutputState.STABILIZATION
    assert stands() == ("STABILIZATION", 2, None)


def test_who_asks_how_a_replica_stands_says_how_far_it_is(log: Log, peer: Peer) -> None:
    put(log, 0)
    answer = peer.call(GetStreamStatus("s", ("reader", 0, -1, 2)))
    assert (answer.state, answer.upto) == (OutputState.STABLE, 0)
    assert log.position("s", "reader") == (0, -1, 2)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        peer.call(GetStreamStatus("s", ("reader", 0, 0, 1)))


def test_a_stream_that_is_not_opened_yet_stands_nowhere(
    log: Log, service: Service, peer: Peer
) -> None:
    service.logs["later"] = log
    assert peer.call(GetStreamStatus("later")) == StreamStatus()
    with pytest.raises(InputError, match="no stream 'nope'"):
        peer.call(GetStreamStatus("nope"))


def test_rows_that_are_replaced_before_they_are_read_are_asked_for_again(
    log: Log, peer: Peer
) -> None:
    guess(log, 0, 0, 0)
    with Reading(peer, 0, EVERYTHING) as reading:
        delivery = reading.news()
        correct(log, 0)
        if delivery.tables:  # they came by value
            assert tables(delivery)[0].num_rows == 2
        else:
            with pytest.raises(TransportError, match="taken back"):
                tables(delivery)


def test_the_end_comes_after_the_corrections(log: Log, peer: Peer) -> None:
    guess(log, 0, 1, 1)
    correct(log, 0, 1)
    log.append(Ended("s"))
    *_, last = peer.follow("s", 0, threading.Event(), EVERYTHING)
    assert last.ended and buckets(last) == [(1, "STABLE")]
    assert last.tentative_upto is None


def test_unknown_streams_and_sources_are_told(peer: Peer) -> None:
    with pytest.raises(InputError, match="no stream 'nope'"):
        next(iter(peer.follow("nope", 0, threading.Event())))
    with pytest.raises(InputError, match="no source 'nope'"):
        peer.push("nope", rows(0), None, False)


def test_push_brings_the_rows_and_the_token(service: Service, peer: Peer) -> None:
    got: list[tuple[Any, ...]] = []
    service.pushes["src"] = lambda table, token, flush: got.append((table, token, flush))
    peer.push("src", rows(3), "42", True)
    ((table, token, flush),) = got
    assert (table.to_pydict(), token, flush) == (rows(3).to_pydict(), "42", True)


def test_a_peer_that_is_not_there_is_a_transport_error() -> None:
    peer = FlightPeer("127.0.0.1:1")
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1 cannot be reached"):
        peer.streams()


def test_a_port_in_use_says_so(service: Service) -> None:
    server = FlightServer(service)
    try:
        with pytest.raises(SetupError, match="port in use"):
            FlightServer(service, port=server.port)
    finally:
        server.stop()


def test_a_damaged_arrival_is_noticed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    put(log, 0)
    service = Service(logs={"s": log})
    server = FlightServer(service)
    monkeypatch.setattr(flight_module, "machine_id", iter(map(str, range(9))).__next__)
    true_read = log.read
    monkeypatch.setattr(
        log, "read", lambda segment: true_read(segment).set_column(
            1, "value", pa.array([7, 7, 7], pa.int64())
        )
    )  # fmt: skip
    try:
        with pytest.raises(TransportError, match="damaged"):
            until(FlightPeer(server.address), 0, 0)
    finally:
        server.stop()


def test_messages_of_another_format_or_kind_are_refused() -> None:
    with pytest.raises(TransportError, match="same version on both sides"):
        wire.decode(b'{"v":999,"kind":"ack"}', "ack")
    with pytest.raises(TransportError, match="speaks format True"):
        wire.decode(b'{"v":true,"kind":"ack"}', "ack")
    with pytest.raises(TransportError, match="expected a 'ack'"):
        wire.decode(wire.encode("other", {}), "ack")
    with pytest.raises(TransportError, match="not JSON"):
        wire.decode(b"\x80\x04pickle", "ack")
    with pytest.raises(InputError, match="not JSON"):
        wire.decode(b"[" * 100_000, "ack", error=InputError)
    for message in (b"7", b"null", b"[]", b'{"kind":{}}', b"{}"):
        with pytest.raises(TransportError, match="expected a 'ack'"):
            wire.decode(message, "ack")


def test_only_what_is_offered_is_fetched_and_byte_for_byte(tmp_path: Path) -> None:
    service = Service()
    server = FlightServer(service)
    peer = FlightPeer(server.address)
    try:
        data = bytes(range(256)) * 5_000  # more than one piece
        (tmp_path / "there").write_bytes(data)
        (tmp_path / "empty").write_bytes(b"")
        service.offered = {n: str(tmp_path / n) for n in ("there", "empty", "deleted")}
        into = tmp_path / "here"
        for name, content in (("there", data), ("empty", b"")):
            peer.fetch(name, str(into))
            assert into.read_bytes() == content
        with pytest.raises(TransportError, match="is gone"):
            peer.fetch("deleted", str(into))
        with pytest.raises(TransportError, match="not offered"):
            peer.fetch("other", str(into))
    finally:
        peer.close()
        server.stop()


@pytest.mark.parametrize("harm", ["deleted", "cut off"])
def test_a_segment_that_is_gone_is_said_so_to_the_reader_and_to_its_owner(
    log: Log, service: Service, peer: Peer, harm: str
) -> None:
    """The reader may find it at another replica; whose log it is may be rebuilt."""
    put(log, 0)
    put(log, 1)
    file = Path(log.absolute(log.segments("s", 1, 1)[0]))
    if harm == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-7])
    told: list[str] = []
    service.on_damage.append(lambda stream, err: told.append(f"{stream}: {err}"))
    with pytest.raises(SegmentLost, match=r"b1\.p0"):
        until(peer, 1, 1)
    assert told and told[0].startswith("s: ") and str(file) in told[0]
