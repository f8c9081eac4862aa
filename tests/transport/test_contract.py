"""One contract for both transports: in-process and Flight, with and without shared storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import InputError, SegmentLost, SetupError, StaleEpoch, TransportError, Trimmed
from holdfast.storage import Added, Boundary, Ended, Log, Tentative
from holdfast.streams.calls import FolderMark, GetStreamStatus, StreamStatus
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
        real = flight_module.sees_file
        monkeypatch.setattr(
            flight_module, "sees_file", lambda mark: real(replace(mark, content="another machine"))
        )
    client = FlightPeer(server.address)
    yield client
    client.close()
    server.stop()


def tables(delivery: Delivery) -> list[pa.Table]:
    return [delivery.table(number) for number in range(len(delivery.segments))]


def until(peer: Peer, from_bucket: int | None, upto: int) -> list[Delivery]:
    stop, deliveries = threading.Event(), []
    for delivery in peer.follow("s", from_bucket, stop):
        deliveries.append(delivery)
        if delivery.upto >= upto:
            stop.set()
            break
    return deliveries


def test_follow_delivers_every_bucket_from_the_requested_one_on(log: Log, peer: Peer) -> None:
    for bucket in range(5):
        put(log, bucket)
    deliveries = until(peer, 2, 4)
    assert [s.id.bucket for d in deliveries for s in d.segments] == [2, 3, 4]
    assert [t.to_pydict() for d in deliveries for t in tables(d)] == [
        rows(bucket).to_pydict() for bucket in (2, 3, 4)
    ]
    assert deliveries[-1].epoch == log.epoch


def test_follow_continues_with_buckets_that_are_appended_later(log: Log, peer: Peer) -> None:
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


def test_empty_buckets_are_delivered_as_a_boundary_without_segments(log: Log, peer: Peer) -> None:
    log.commit("s", [], 1_000_000)
    (delivery,) = until(peer, 0, 1_000_000)
    assert (delivery.segments, delivery.upto) == ((), 1_000_000)


def test_the_end_of_a_stream_is_delivered_and_ends_follow(log: Log, peer: Peer) -> None:
    put(log, 0)
    log.append(Ended("s"))
    deliveries = list(peer.follow("s", 0, threading.Event()))
    assert deliveries[-1].ended
    assert deliveries[-1].upto == 0


def test_following_trimmed_buckets_is_refused_with_the_oldest_available_bucket(
    log: Log, peer: Peer
) -> None:
    for bucket in range(4):
        put(log, bucket)
    peer.acknowledge("s", "reader", received=3, needed=1, epoch=1)
    with pytest.raises(Trimmed, match="the buckets before 2 were released by all"):
        until(peer, 0, 3)
    assert [s.id.bucket for d in until(peer, None, 3) for s in d.segments] == [2, 3]


def test_nothing_is_trimmed_before_every_expected_consumer_has_acknowledged(
    log: Log, service: Service, peer: Peer
) -> None:
    service.consumers["s"] = {"one", "two"}
    put(log, 0)
    peer.acknowledge("s", "one", received=0, needed=0, epoch=1)
    assert log.info("s").trimmed_upto == -1
    peer.acknowledge("s", "two", received=0, needed=0, epoch=1)
    assert log.info("s").trimmed_upto == 0


def test_a_zombie_consumer_is_refused(log: Log, peer: Peer) -> None:
    put(log, 0)
    peer.acknowledge("s", "reader", received=0, needed=-1, epoch=2)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        peer.acknowledge("s", "reader", received=0, needed=0, epoch=1)


# -- tentative buckets (Borealis sections 3.1, 3.4.2) ---------------------------------------------

EVERYTHING = -(2**62)


def write_tentative(
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
    """As SOutput does: one append adds the corrections and the boundary that replaces the tentative
    buckets; then the tentative files are deleted. Only the last bucket has rows."""
    id = SegmentId("s", 0, buckets[-1], log.info("s").undos + 1)
    segment = log.write(rows(buckets[-1]), id, Stability.STABLE)
    replaced, _ = log.tentative("s", upto=buckets[-1])
    log.append(Added(segment), Boundary("s", buckets[-1]))
    log.discard(replaced)


class Reading:
    """The consumer's end of a connection."""

    def __init__(self, peer: Peer, at: int | None, tentative_after: int | None) -> None:
        self.stop = threading.Event()
        self._deliveries = peer.follow("s", at, self.stop, tentative_after)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._deliveries.close()  # type: ignore[attr-defined]

    def news(self) -> Delivery:
        """The next delivery that is more than a heartbeat."""
        for delivery in self._deliveries:
            if delivery.upto >= delivery.since or delivery.tentative_upto is not None:
                return delivery
        raise AssertionError("the connection has ended")


def buckets(delivery: Delivery) -> list[tuple[int, str]]:
    return [(segment.id.bucket, segment.stability.value) for segment in delivery.segments]


def test_3_1_tentative_buckets_follow_the_stable_ones_and_name_their_missing_inputs(
    log: Log, peer: Peer
) -> None:
    put(log, 0)
    write_tentative(log, 1, 2, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        first = reading.news()
        assert buckets(first) == [(0, "STABLE"), (2, "TENTATIVE")]
        assert (first.since, first.upto, first.tentative_upto) == (0, 0, 2)
        assert (first.missing, first.partial) == (("far",), (0.5, 0.25))
        assert [t.num_rows for t in tables(first)] == [3, 2]
        assert tables(first)[1].to_pydict() == rows(2, 2).to_pydict()
        assert first.info is not None and first.info.tentative_upto == 2
        write_tentative(
            log, 3, 3, missing="farther", shares=(1.0, 0.9)
        )  # a tentative bucket without rows
        then = reading.news()
        assert (buckets(then), then.tentative_upto, then.missing) == ([], 3, ("farther",))
        assert (then.since, then.upto, then.partial) == (1, 0, (1.0, 0.9))


def test_3_1_tentative_buckets_that_are_not_equally_partial_are_delivered_separately(
    log: Log, peer: Peer
) -> None:
    """Each delivery names its own missing inputs, also for a consumer that connects late."""
    for bucket in (0, 1):
        write_tentative(log, bucket, bucket, shares=(0.5, 0.9))
    write_tentative(log, 2, 2, missing="farther", shares=(0.75, 0.1))
    with Reading(peer, 0, EVERYTHING) as reading:
        deliveries = [reading.news() for _ in range(2)]
    assert [
        (delivery.tentative_upto, delivery.missing, delivery.partial) for delivery in deliveries
    ] == [
        (1, ("far",), (0.5, 0.9)),
        (2, ("farther",), (0.75, 0.1)),
    ]


def test_stable_buckets_carry_the_delay_that_was_spent_upstream(
    log: Log, service: Service, peer: Peer
) -> None:
    """A consumer may hold the buckets only for the rest of `max_delay`."""
    put(log, 0)
    with Reading(peer, 0, EVERYTHING) as reading:
        assert reading.news().spent_us == 0
        service.spent_us["s"] = 1_250_000
        put(log, 1)
        assert reading.news().spent_us == 1_250_000


def test_3_4_2_corrections_replace_tentative_buckets(log: Log, peer: Peer) -> None:
    put(log, 0)
    write_tentative(log, 1, 2, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        reading.news()
        correct(log, 1, 2)
        then = reading.news()
        assert (then.since, then.upto, then.tentative_upto) == (1, 2, None)
        assert buckets(then) == [(2, "STABLE")]
        assert then.segments[0].id.version == 1
        assert tables(then)[0].to_pydict() == rows(2).to_pydict()


def test_tentative_buckets_after_a_correction_are_not_delivered_twice(log: Log, peer: Peer) -> None:
    write_tentative(log, 0, 2, 1, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        reading.news()
        correct(log, 0)
        then = reading.news()
        assert (buckets(then), then.tentative_upto) == ([(0, "STABLE")], None)
        write_tentative(log, 3, 3, 3)
        then = reading.news()
        assert (buckets(then), then.tentative_upto) == ([(3, "TENTATIVE")], 3)


def test_a_consumer_that_connects_during_a_correction_gets_corrected_and_tentative_buckets(
    log: Log, peer: Peer
) -> None:
    write_tentative(log, 0, 2, 1, 2)
    correct(log, 0, 1)
    with Reading(peer, 0, EVERYTHING) as reading:
        first = reading.news()
        assert buckets(first) == [(1, "STABLE"), (2, "TENTATIVE")]
        assert (first.upto, first.tentative_upto) == (1, 2)


def test_property_2_3_a_new_consumer_gets_only_newer_tentative_buckets(
    log: Log, peer: Peer
) -> None:
    put(log, 0)
    write_tentative(log, 1, 2, 1, 2)
    write_tentative(log, 3, 4, 3, 4, missing="farther")
    with Reading(peer, 1, 2) as reading:
        first = reading.news()
        assert buckets(first) == [(3, "TENTATIVE"), (4, "TENTATIVE")]
        assert (first.tentative_upto, first.missing) == (4, ("farther",))
    with Reading(peer, 1, 4) as reading:
        write_tentative(log, 5, 5)
        assert reading.news().tentative_upto == 5


def test_3_1_a_consumer_that_tolerates_no_inconsistency_gets_no_tentative_buckets(
    log: Log, peer: Peer
) -> None:
    put(log, 0)
    write_tentative(log, 1, 2, 2)
    deliveries: list[Delivery] = []
    with Reading(peer, 0, None) as reading:
        deliveries.append(reading.news())
        write_tentative(log, 3, 3, 3)
        correct(log, 1, 2, 3)
        while deliveries[-1].upto < 3:
            deliveries.append(reading.news())
    assert [b for d in deliveries for b in buckets(d)] == [(0, "STABLE"), (3, "STABLE")]
    assert {d.tentative_upto for d in deliveries} == {None}
    assert {d.missing for d in deliveries} == {()}


def test_3_3_a_replica_reports_its_status_with_each_delivery_and_on_request(
    log: Log, service: Service, peer: Peer
) -> None:
    def status() -> tuple[str | None, int | None, int | None]:
        answer = peer.call(GetStreamStatus("s"))
        return answer.state, answer.upto, answer.tentative_upto

    put(log, 0)
    assert status() == ("STABLE", 0, None)
    service.states["s"] = OutputState.UP_FAILURE
    write_tentative(log, 1, 2)
    assert status() == ("UP_FAILURE", 0, 2)
    with Reading(peer, 0, EVERYTHING) as reading:
        assert reading.news().state is OutputState.UP_FAILURE
        service.states["s"] = OutputState.STABILIZATION
        correct(log, 1, 2)
        assert reading.news().state is OutputState.STABILIZATION
    assert status() == ("STABILIZATION", 2, None)


def test_a_status_request_carries_the_position_of_the_consumer(log: Log, peer: Peer) -> None:
    put(log, 0)
    answer = peer.call(GetStreamStatus("s", ("reader", 0, -1, 2)))
    assert (answer.state, answer.upto) == (OutputState.STABLE, 0)
    assert log.position("s", "reader") == (0, -1, 2)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        peer.call(GetStreamStatus("s", ("reader", 0, 0, 1)))


def test_a_stream_that_is_not_open_yet_has_an_empty_status(
    log: Log, service: Service, peer: Peer
) -> None:
    service.logs["later"] = log
    assert peer.call(GetStreamStatus("later")) == StreamStatus()
    with pytest.raises(InputError, match="no stream 'nope'"):
        peer.call(GetStreamStatus("nope"))


def test_rows_replaced_before_they_are_read_raise_transport_error(log: Log, peer: Peer) -> None:
    write_tentative(log, 0, 0, 0)
    with Reading(peer, 0, EVERYTHING) as reading:
        delivery = reading.news()
        correct(log, 0)
        if delivery.tables:  # the rows were sent by value
            assert tables(delivery)[0].num_rows == 2
        else:
            with pytest.raises(TransportError, match="replaced"):
                tables(delivery)


def test_the_end_of_a_stream_is_delivered_after_the_corrections(log: Log, peer: Peer) -> None:
    write_tentative(log, 0, 1, 1)
    correct(log, 0, 1)
    log.append(Ended("s"))
    *_, last = peer.follow("s", 0, threading.Event(), EVERYTHING)
    assert last.ended and buckets(last) == [(1, "STABLE")]
    assert last.tentative_upto is None


def test_unknown_streams_and_sources_are_refused(peer: Peer) -> None:
    with pytest.raises(InputError, match="no stream 'nope'"):
        next(iter(peer.follow("nope", 0, threading.Event())))
    with pytest.raises(InputError, match="no source 'nope'"):
        peer.push("nope", rows(0), None, False)


def test_push_delivers_the_rows_and_the_token(service: Service, peer: Peer) -> None:
    pushed: list[tuple[Any, ...]] = []
    service.pushes["src"] = lambda table, token, flush: pushed.append((table, token, flush))
    peer.push("src", rows(3), "42", True)
    ((table, token, flush),) = pushed
    assert (table.to_pydict(), token, flush) == (rows(3).to_pydict(), "42", True)


def test_an_unreachable_peer_raises_transport_error() -> None:
    peer = FlightPeer("127.0.0.1:1")
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1 is unreachable"):
        peer.streams()


def test_a_consumer_sees_a_storage_only_by_the_content_of_its_file(
    log: Log, tmp_path: Path
) -> None:
    service = Service(logs={"s": log})
    mark = FolderMark(**service.answer("folder-mark", {"stream": "s"}))
    assert flight_module.sees_file(mark)
    assert not flight_module.sees_file(replace(mark, content=mark.content[:-1]))
    assert not flight_module.sees_file(replace(mark, file=str(tmp_path)))
    assert not flight_module.sees_file(replace(mark, file="/nowhere\0"))
    assert not flight_module.sees_file(FolderMark("", ""))
    # Another process that serves a copy of the storage has another content.
    assert FolderMark(**Service(logs={"s": log}).answer("folder-mark", {"stream": "s"})) != mark
    assert not flight_module.sees_file(mark)


def test_a_port_in_use_is_reported(service: Service) -> None:
    server = FlightServer(service)
    try:
        with pytest.raises(SetupError, match="port in use"):
            FlightServer(service, port=server.port)
    finally:
        server.stop()


def test_rows_damaged_in_transit_are_detected(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    put(log, 0)
    service = Service(logs={"s": log})
    server = FlightServer(service)
    monkeypatch.setattr(flight_module, "sees_file", lambda _: False)
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
    with pytest.raises(TransportError, match="same version of Holdfast on both sides"):
        wire.decode(b'{"v":999,"kind":"ack"}', "ack")
    with pytest.raises(TransportError, match="uses wire format True"):
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


def test_only_offered_files_are_fetched_and_arrive_byte_for_byte(tmp_path: Path) -> None:
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
        with pytest.raises(TransportError, match="can no longer be read"):
            peer.fetch("deleted", str(into))
        with pytest.raises(TransportError, match="not offered"):
            peer.fetch("other", str(into))
    finally:
        peer.close()
        server.stop()


@pytest.mark.parametrize("harm", ["deleted", "cut off"])
def test_a_lost_segment_is_reported_to_the_consumer_and_to_the_owner_of_the_log(
    log: Log, service: Service, peer: Peer, harm: str
) -> None:
    """The consumer may read the segment from another replica; the owner may be rebuilt."""
    put(log, 0)
    put(log, 1)
    file = Path(log.absolute(log.segments("s", 1, 1)[0]))
    if harm == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-7])
    reports: list[str] = []
    service.on_damage.append(lambda stream, err: reports.append(f"{stream}: {err}"))
    with pytest.raises(SegmentLost, match=r"b1\.p0"):
        until(peer, 1, 1)
    assert reports and reports[0].startswith("s: ") and str(file) in reports[0]
