"""A peer describes the state that it offers. Only this state is written to the disk of the
newcomer, and it replaces the old storage in one step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.state import Chunk, Version
from holdfast.errors import LogCorrupted, TransportError
from holdfast.model.fragments import fragments
from holdfast.node.state_transfer import Fingerprints, Staging, check_offer, describe
from holdfast.storage import Log
from holdfast.streams.calls import GetState, Moving, OfferedState, StateFile
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.types import Segment, SegmentId, Stability
from holdfast.verify.sim.simulated_disk import Crashed, MemoryDisk
from holdfast.verify.sim.tables import Rows, RowSegments

network = hf.Network("net", bucket="100ms")
tap = network.source("tap", "ts timestamp, value long", time="ts")
network.output("out", tap.filter("value > 0"))
PATHS = fragments(network)[0].paths


def other_stream(moving: Moving) -> Moving:
    segment = Segment(SegmentId("../x", 0, 3), Stability.STABLE, "segments/x", 2, "0f", 7, 9, 1)
    return replace(moving, results=(replace(moving.results[0], segments=(segment,)),))


def other_body(moving: Moving, **changed: Any) -> Moving:
    return replace(moving, body=moving.body | changed)


LIES = {
    "another path": lambda moving: replace(moving, path="../out"),
    "another stream": lambda moving: replace(
        moving, results=(replace(moving.results[0], stream="../out"),)
    ),
    "a segment of another stream": other_stream,
    "no results": lambda moving: replace(moving, results=()),
    "a file too many": lambda moving: replace(moving, files=(*moving.files, "out/b")),
    "a file too few": lambda moving: replace(moving, files=()),
    "a version that refers to files of others": lambda moving: other_body(
        moving, edges={"w:0": [{"file": "../x", "lo": 0, "hi": 1, "rows": 1, "buckets": []}]}
    ),
    "no version": lambda moving: replace(moving, body={}),
    "a version of another shape": lambda moving: other_body(moving, panes=[1]),
    "chunks of another shape": lambda moving: other_body(moving, panes={"w": [7]}),
    "shards of another shape": lambda moving: other_body(moving, shards={"w": {"x": [7]}}),
}


@pytest.fixture
def moving(tmp_path: Path) -> Moving:
    log = Log.open(tmp_path / "log", "main", fsync="never")
    log.open_stream("out", "ts timestamp", "ts", 0)
    version = Version("out", 3, panes={"w": (Chunk("out/a", 1, 3, 7, (1, 3)),)})
    moving = describe(log, version, ["out"])
    log.close()
    return moving


def offer(moving: Moving) -> OfferedState:
    return OfferedState("state", (moving,), tuple(StateFile(f, 1, "0f") for f in moving.files))


def test_the_described_state_of_a_replica_is_accepted(moving: Moving) -> None:
    check_offer(offer(moving), PATHS)


@pytest.mark.parametrize("lie", LIES)
def test_an_offer_that_is_no_state_of_this_node_is_refused(moving: Moving, lie: str) -> None:
    with pytest.raises(TransportError, match=r"the peer offered unusable state: expected .*found"):
        check_offer(offer(LIES[lie](moving)), PATHS)


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "out of the folder"])
def test_an_offered_file_outside_the_folder_is_never_written(
    moving: Moving, tmp_path: Path, absolute: bool
) -> None:
    """Over Flight, from a Holdfast server with a malicious handler."""
    payload, target = tmp_path / "payload", tmp_path / "victim"
    payload.write_text("echo pwned\n")
    folder = tmp_path / "node" / "state"
    name = str(target) if absolute else os.path.relpath(target, folder)
    service = Service(offered={name: str(payload), os.path.join("state", name): str(payload)})
    service.handle(GetState, lambda _: OfferedState("state", (replace(moving, files=(name,)),)))
    server = FlightServer(service)
    peer = FlightPeer(server.address)
    try:
        with pytest.raises(TransportError, match="the name of a file inside the folder"):
            peer.call(GetState("main@2"))
        with pytest.raises(TransportError, match="expected a file inside its folder"):
            peer.fetch(name, str(folder / "file"))
        assert not target.exists()
    finally:
        peer.close()
        server.stop()


# -- replacing the storage ------------------------------------------------------------------------


def memory_log(disk: MemoryDisk, folder: str) -> Log:
    return Log.open(folder, "main", fsync="always", disk=disk, segments=RowSegments())


def rows_of(log: Log) -> list[Any]:
    info = log.info("out")
    return [log.read(s).rows for s in log.segments("out", info.trimmed_upto + 1, 99)]


def write(log: Log, bucket: int, value: int) -> None:
    rows = Rows([(bucket, value)])
    log.commit("out", [log.write(rows, SegmentId("out", 0, bucket), Stability.STABLE)], bucket)


def peer_state(disk: MemoryDisk) -> tuple[OfferedState, dict[str, bytes]]:
    """State of a replica that computed three buckets, trimmed the first, and has one state file."""
    log = memory_log(disk, "/peer")
    log.open_stream("out", "ts timestamp", "ts", 0)
    for bucket in range(3):
        write(log, bucket, 10 + bucket)
    log.trim("out", 0)
    disk.put("/peer/state/x", b"state", fsync=False)
    version = Version("out", 2, edges={"w:0": (Chunk("x", 1, 2, 7),)}, needs_from=3)
    moving = describe(log, version, ["out"])
    offered = OfferedState("state", (moving,), Fingerprints("/peer/state", disk).of([moving]))
    check_offer(offered, PATHS)
    names = ["state/x", *(segment.path for segment in moving.results[0].segments)]
    return offered, {name: disk.read(f"/peer/{name}") for name in names}


def move(disk: MemoryDisk, own: Log, offered: OfferedState, files: dict[str, bytes]) -> None:
    staging = Staging("/main", disk, RowSegments())
    for piece in staging.expect(offered):
        disk.put(staging.place(piece), files[piece.name], fsync=False)
        staging.verify(piece)
    staging.install(lambda folder: memory_log(disk, folder), own.epoch)
    own.close()
    staging.replace()


def with_own_log(disk: MemoryDisk) -> Log:
    own = memory_log(disk, "/main")
    own.raise_epoch(5)
    own.open_stream("out", "ts timestamp", "ts", 0)
    write(own, 0, 77)
    return own


def test_fetched_files_become_the_storage_of_the_replica() -> None:
    disk = MemoryDisk(Random(1))
    own, (offered, files) = with_own_log(disk), peer_state(disk)
    move(disk, own, offered, files)
    log = memory_log(disk, "/main")
    assert log.epoch == 5, "the epoch of the instance that was caught up"
    assert rows_of(log) == [((1, 11),), ((2, 12),)]
    assert log.info("out").trimmed_upto == 0
    assert [bucket for bucket, _ in log.states("out")] == [2]
    assert disk.files("/main/state") == {"x": 5}
    assert not disk.exists("/main.new") and not disk.exists("/main.old")


@pytest.mark.parametrize("name", ["state/x", "segments"])
def test_a_damaged_piece_is_refused(name: str) -> None:
    disk = MemoryDisk(Random(1))
    offered, files = peer_state(disk)
    damaged = next(file for file in files if file.startswith(name))
    files[damaged] = files[damaged][:-1] + b"?"
    with pytest.raises(LogCorrupted):
        move(disk, with_own_log(disk), offered, files)
    assert rows_of(memory_log(crashed(disk, power=False), "/main")) == [((0, 77),)]


def crashed(disk: MemoryDisk, *, power: bool) -> MemoryDisk:
    disk.crash(power=power)
    Staging("/main", disk, RowSegments()).settle()
    return disk


def test_a_crash_at_any_moment_leaves_the_old_storage_or_the_new_one() -> None:
    contents = []
    for number in range(1, 200):
        disk = MemoryDisk(Random(number))
        own, (offered, files) = with_own_log(disk), peer_state(disk)
        disk.crash_after = number
        try:
            move(disk, own, offered, files)
        except Crashed:
            log = memory_log(crashed(disk, power=True), "/main")
            contents.append(rows_of(log))
            assert not disk.exists("/main.new") and not disk.exists("/main.old")
            if len(contents[-1]) == 2:
                assert disk.files("/main/state") == {"x": 5}
        else:
            break
    old, new = [((0, 77),)], [((1, 11),), ((2, 12),)]
    assert number > 10 and all(rows in (old, new) for rows in contents)
    assert contents[0] == old and contents[-1] == new
