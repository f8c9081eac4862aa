"""One contract for both ways to carry: in-process and Flight, with and without shared storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast.errors import InputError, SetupError, StaleEpoch, TransportError, Trimmed
from holdfast.log import Ended, Log
from holdfast.transport import flight as flight_module
from holdfast.transport import wire
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.transport.service import Delivery, InProcess, Peer, Service
from holdfast.types import SegmentId, Stability

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


def test_unknown_streams_sources_and_actions_are_told(peer: Peer) -> None:
    with pytest.raises(InputError, match="no stream 'nope'"):
        next(iter(peer.follow("nope", 0, threading.Event())))
    with pytest.raises(InputError, match="no source 'nope'"):
        peer.push("nope", rows(0), None, False)
    with pytest.raises(InputError, match="no action"):
        peer.call("nope", {})


def test_push_brings_the_rows_and_the_token(service: Service, peer: Peer) -> None:
    got: list[tuple[Any, ...]] = []
    service.pushes["src"] = lambda table, token, flush: got.append((table, token, flush))
    peer.push("src", rows(3), "42", True)
    ((table, token, flush),) = got
    assert (table.to_pydict(), token, flush) == (rows(3).to_pydict(), "42", True)


def test_calls_carry_plain_data(service: Service, peer: Peer) -> None:
    service.calls["double"] = lambda body: {"twice": 2 * body["x"]}
    assert peer.call("double", {"x": 21})["twice"] == 42


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
    with pytest.raises(TransportError, match="expected a 'ack'"):
        wire.decode(wire.encode("other", {}), "ack")
    with pytest.raises(TransportError, match="not JSON"):
        wire.decode(b"\x80\x04pickle", "ack")
