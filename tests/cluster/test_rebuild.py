"""A replica catches up over Flight, with threads: from its peer, from its own disk, or not at all.
`tests/core/test_catch_up.py` tests the decisions; this file tests how they are carried out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.cluster.rebuild import Rebuild
from holdfast.core.catch_up_events import ComeUp, Piece
from holdfast.engine.state import Chunk, Version
from holdfast.errors import LogError, StaleEpoch, StateLost, TransportError
from holdfast.model.fragments import fragments
from holdfast.node.state_transfer import Fingerprints, Staging, describe, own_paths
from holdfast.storage import Log
from holdfast.streams.calls import Done, GetState, OfferedState, ReleaseState
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.types import SegmentId, Stability

network = hf.Network("net", bucket="100ms")
tap = network.source("tap", "ts timestamp, value long", time="ts")
network.output("out", tap.filter("value > 0"))
PATHS = fragments(network)[0].paths
SCHEMA = "ts timestamp, value long"
EPOCH = 5


def rows(value: int) -> pa.Table:
    return pa.table({"ts": pa.array([value], pa.timestamp("us", "UTC")), "value": [value]})


def fill(log: Log, stream: str, upto: int, value: int = 0) -> Log:
    log.open_stream(stream, SCHEMA, "ts", 0)
    for bucket in range(upto + 1):
        segment = log.write(rows(value + bucket), SegmentId(stream, 0, bucket), Stability.STABLE)
        log.commit(stream, [segment], bucket)
    return log


class Station:
    """A producer, and a peer that offers its state; both over Flight."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stop = folder, threading.Event()
        self.producer = self._service("tap")
        self.peer = self._service("main@2")
        self.released = threading.Event()
        self.peer.handle(ReleaseState, self._release)
        self.answer: Callable[[], OfferedState] = lambda: OfferedState("not-ready", why="not yet")
        self.peer.handle(GetState, lambda ask: self.answer())
        self.servers = [FlightServer(self.producer), FlightServer(self.peer)]
        fill(self.producer.logs["tap"], "tap", 9)
        self.own = Log.open(folder / "main", "main", fsync="never")
        self.own.raise_epoch(EPOCH)

    def _service(self, name: str) -> Service:
        return Service({name: Log.open(self.folder / name, name, fsync="never")})

    def _release(self, _: ReleaseState) -> Done:
        self.released.set()
        return Done()

    def give(self, upto: int = 6) -> None:
        """Let the peer offer the state after bucket `upto`, and its results up to this bucket."""
        log = fill(self.peer.logs["main@2"], "out", upto, 100)
        (self.folder / "main@2" / "state" / "x").write_bytes(b"state")
        version = Version("out", upto, edges={"w:0": (Chunk("x", 1, 2, 7),)}, needs_from=upto)
        moving = describe(log, version, ["out"])
        files = Fingerprints(str(self.folder / "main@2" / "state")).of([moving])
        names = ["state/x", *(s.path for s in moving.results[0].segments)]
        self.peer.offered = {name: str(self.folder / "main@2" / name) for name in names}
        self.answer = lambda: OfferedState("state", (moving,), files)

    def trim(self, upto: int) -> None:
        self.producer.logs["tap"].trim("tap", upto)

    def rebuild(self, staging: type[Staging] = Staging) -> ComeUp:
        def connect(server: FlightServer) -> Callable[[], FlightPeer]:
            return lambda: FlightPeer(server.address, silence_s=1.0)

        producer, peer = self.servers
        folder = str(self.folder / "main")
        return Rebuild(
            "main", EPOCH, PATHS, self.own, own_paths(self.own, PATHS, lambda version: None),
            {"tap": {"tap": connect(producer)}}, {"main@2": connect(peer)},
            staging(folder), lambda inside: Log.open(inside, "main", fsync="never"),
            listen_on="127.0.0.1", stop=self.stop,
        ).run()  # fmt: skip

    def end(self) -> None:
        for server in self.servers:
            server.stop()
        for log in (self.own, *self.producer.logs.values(), *self.peer.logs.values()):
            log.close()


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    station = Station(tmp_path)
    yield station
    station.end()


def test_a_replica_is_rebuilt_from_its_peer(station: Station) -> None:
    station.trim(5)
    station.give()
    assert station.rebuild().source == "peer"
    assert station.released.is_set()
    with pytest.raises(StaleEpoch):  # the producer retains rows for this epoch
        station.producer.hold("tap", "main", EPOCH - 1, 0)
    station.own = log = Log.open(station.folder / "main", "main", fsync="never")
    assert log.epoch == EPOCH
    assert [log.read(s)["value"][0].as_py() for s in log.segments("out", 0, 9)] == [
        *range(100, 107)
    ]
    assert [bucket for bucket, _ in log.states("out")] == [6]
    assert (station.folder / "main" / "state" / "x").read_bytes() == b"state"
    assert sorted(path.name for path in station.folder.iterdir()) == ["main", "main@2", "tap"]


def test_a_replica_requests_the_state_again_if_a_piece_is_gone(station: Station) -> None:
    station.trim(5)
    station.give()
    offered, answer = station.peer.offered, station.answer
    requests = 0

    def reply() -> OfferedState:
        nonlocal requests
        requests += 1
        station.peer.offered = offered if requests > 1 else {"state/x": offered["state/x"]}
        return answer()

    station.answer = reply
    assert station.rebuild().source == "peer"
    assert requests == 2


def test_a_replica_without_a_reachable_peer_starts_from_its_own_disk(station: Station) -> None:
    fill(station.own, "out", 6)
    version = Version("out", 6, needs_from=6)
    station.own.save_state("out", 6, version.body(), [])
    station.trim(5)
    station.servers[1].stop()
    assert station.rebuild().source == "own"
    assert station.own.info("out").complete_upto == 6, (
        "the log of the replica is unchanged and open"
    )


def test_state_lost_on_both_replicas_is_reported_at_once(station: Station) -> None:
    station.trim(5)
    station.answer = lambda: OfferedState("waits", own=False)
    with pytest.raises(StateLost, match=r"its own disk has no checkpoint of 'out'. Restore"):
        station.rebuild()


def test_a_replaced_replica_stops(station: Station) -> None:
    station.producer.hold("tap", "main", EPOCH + 1, 0)
    with pytest.raises(StaleEpoch, match="the older instance must stop"):
        station.rebuild()


def test_a_replica_starts_again_if_its_storage_cannot_be_replaced(station: Station) -> None:
    class Stuck(Staging):
        def replace(self) -> None:
            raise LogError("the device does not answer")

    station.give()
    with pytest.raises(
        TransportError, match=r"'main' could not install .* starts again: the device"
    ):
        station.rebuild(Stuck)


def test_an_unexpected_error_ends_the_rebuild(station: Station) -> None:
    """Regression: the error was lost in a worker thread, and the replica waited forever."""

    class Odd(Staging):
        def verify(self, piece: Piece) -> None:
            raise ValueError("odd")

    station.give()
    with pytest.raises(ValueError, match="odd"):
        station.rebuild(Odd)


def test_a_rebuild_can_be_stopped_while_it_waits(station: Station) -> None:
    threading.Timer(0.3, station.stop.set).start()
    station.trim(5)
    with pytest.raises(TransportError, match="stopped before it had started"):
        station.rebuild()
