"""A peer that hangs or is cut off is detected within `silence_s`; no call waits longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.config import Options
from holdfast.errors import InputError, TransportError
from holdfast.storage import Log
from holdfast.streams.calls import GetHosts, Ping
from holdfast.streams.delivery import Delivery
from holdfast.streams.serving import Service
from holdfast.transport.flight import PIECE_BYTES, FlightPeer, FlightServer
from holdfast.types import SegmentId, Stability
from holdfast.verify.chaos.proxy import Link, Proxies

SCHEMA = "ts timestamp, value bigint"
SILENCE_S = 0.6
#: Limit for the detection of a silent peer, on a busy machine.
NOTICED_S = 5.0


def rows(bucket: int, count: int = 3) -> pa.Table:
    times = pa.array([bucket * 1_000] * count, pa.timestamp("us", tz="UTC"))
    return pa.table({"ts": times, "value": pa.array(range(count), pa.int64())})


def put(log: Log, bucket: int, count: int = 3) -> None:
    segment = log.write(rows(bucket, count), SegmentId("s", 0, bucket), Stability.STABLE)
    log.commit("s", [segment], bucket)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log.open(tmp_path / "log", "owner", fsync="never")
    log.open_stream("s", SCHEMA, "ts", 0)
    yield log
    log.close()


@pytest.fixture
def link(log: Log) -> Iterator[Link]:
    server = FlightServer(Service(logs={"s": log, "unopened": log}, heartbeat_s=0.05))
    proxies = Proxies()
    yield proxies.link("server", "reader", server.address)
    proxies.close()
    server.stop()


@pytest.fixture
def peer(link: Link) -> Iterator[FlightPeer]:
    peer = FlightPeer(link.address, silence_s=SILENCE_S, by_reference=False)
    yield peer
    peer.close()
    assert "patience" not in [thread.name for thread in threading.enumerate()]


def test_silence_must_be_at_least_three_times_heartbeat() -> None:
    options = Options(heartbeat="200ms", silence="600ms")
    assert (options.heartbeat_s, options.silence_s) == (0.2, 0.6)
    with pytest.raises(InputError, match="silence: '500ms' must be at least three times heartbeat"):
        Options(heartbeat="200ms", silence="500ms")
    with pytest.raises(InputError, match="heartbeat: 'often' is not a duration"):
        Options(heartbeat="often")


def first(peer: FlightPeer) -> tuple[Iterator[Delivery], Delivery]:
    following = peer.follow("s", 0, threading.Event())
    return following, next(following)


@pytest.mark.parametrize("senders", [(), ("server",)], ids=["both ways", "answers only"])
def test_follow_fails_on_a_cut_link_and_continues_after_healing(
    log: Log, link: Link, peer: FlightPeer, senders: tuple[str, ...]
) -> None:
    put(log, 0)
    following, delivery = first(peer)
    assert delivery.upto == 0
    link.cut(*senders)
    put(log, 1)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"has sent nothing for 0\.6 s"):
        for _ in following:
            pass
    assert time.monotonic() - began < NOTICED_S
    link.heal()
    following = peer.follow("s", 1, threading.Event())
    assert next(following).upto == 1
    following.close()


def test_no_call_hangs_on_a_cut_link(link: Link, peer: FlightPeer) -> None:
    peer.call(Ping())
    link.cut()
    for call in (
        lambda: peer.call(GetHosts()),
        lambda: peer.acknowledge("s", "reader", 0, 0, 1),
        lambda: next(peer.follow("s", 0, threading.Event())),
    ):
        began = time.monotonic()
        with pytest.raises(TransportError, match="is unreachable or closed the connection"):
            call()
        assert time.monotonic() - began < NOTICED_S


def test_connecting_through_a_cut_link_does_not_hang(link: Link) -> None:
    link.cut()
    peer = FlightPeer(link.address, silence_s=SILENCE_S)
    began = time.monotonic()
    with pytest.raises(TransportError):
        next(peer.follow("s", 0, threading.Event()))
    assert time.monotonic() - began < NOTICED_S
    peer.close()


def test_a_broken_connection_is_detected_at_once(link: Link, peer: FlightPeer) -> None:
    following, _ = first(peer)
    link.reset()
    began = time.monotonic()
    with pytest.raises(TransportError, match="is unreachable or closed the connection"):
        for _ in following:
            pass
    assert time.monotonic() - began < SILENCE_S


def test_a_stream_without_new_buckets_sends_heartbeats(peer: FlightPeer) -> None:
    following, _ = first(peer)
    deadline_s = time.monotonic() + 3 * SILENCE_S
    while time.monotonic() < deadline_s:
        assert next(following).segments == ()
    following.close()


def test_a_stream_that_is_not_open_yet_sends_heartbeats(log: Log, peer: FlightPeer) -> None:
    opening = threading.Timer(3 * SILENCE_S, log.open_stream, ("unopened", SCHEMA, "ts", 5))
    opening.start()
    following = peer.follow("unopened", None, threading.Event())
    assert next(following).upto == 4
    following.close()
    opening.join()


def test_a_slow_consumer_does_not_take_its_peer_for_dead(log: Log, peer: FlightPeer) -> None:
    following, _ = first(peer)
    threading.Event().wait(3 * SILENCE_S)
    put(log, 0)
    assert any(delivery.segments for delivery in iter(lambda: next(following), None))
    following.close()


def test_a_segment_whose_transfer_takes_longer_than_silence_arrives(
    log: Log, link: Link, peer: FlightPeer
) -> None:
    count = 6 * PIECE_BYTES // 16
    put(log, 0, count)
    link.throttle(PIECE_BYTES / 1_000 / (SILENCE_S / 3), "server")
    began = time.monotonic()
    following, delivery = first(peer)
    assert time.monotonic() - began > SILENCE_S
    assert delivery.table(0).num_rows == count
    following.close()


def test_stopping_does_not_wait_for_the_peer(link: Link, peer: FlightPeer) -> None:
    stop = threading.Event()
    following = peer.follow("s", 0, stop)
    next(following)
    link.cut()
    stop.set()
    began = time.monotonic()
    assert all(delivery.segments == () for delivery in following)
    assert time.monotonic() - began < SILENCE_S
