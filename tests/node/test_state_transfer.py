"""A peer describes the state that it gives; nothing else than that state is written here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.engine.state import Chunk, Version
from holdfast.errors import TransportError
from holdfast.model.fragments import fragments
from holdfast.node.state_transfer import check_offer, describe
from holdfast.storage import Log
from holdfast.streams.calls import GetState, Moving, OfferedState
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.types import Segment, SegmentId, Stability

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
    found = describe(log, version, ["out"])
    log.close()
    return found


def test_what_a_replica_describes_is_taken(moving: Moving) -> None:
    check_offer(moving, PATHS)


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_state_of_this_node_is_refused(moving: Moving, lie: str) -> None:
    with pytest.raises(TransportError, match=r"a state to rebuild from: expected .*found"):
        check_offer(LIES[lie](moving), PATHS)


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "out of the folder"])
def test_a_replica_that_offers_files_of_others_gets_nothing_written(
    moving: Moving, tmp_path: Path, absolute: bool
) -> None:
    """Over Flight, from a server of ours whose handler was made to lie."""
    payload, target = tmp_path / "payload", tmp_path / "victim"
    payload.write_text("echo pwned\n")
    folder = tmp_path / "node" / "state"
    name = str(target) if absolute else os.path.relpath(target, folder)
    service = Service(offered={name: str(payload), os.path.join("state", name): str(payload)})
    service.handle(GetState, lambda _: OfferedState((replace(moving, files=(name,)),)))
    server = FlightServer(service)
    peer = FlightPeer(server.address)
    try:
        with pytest.raises(TransportError, match="the name of a file inside the folder"):
            peer.call(GetState())
        with pytest.raises(TransportError, match="expected a file inside its folder"):
            peer.fetch(name, str(folder / "file"))
        assert not target.exists()
    finally:
        peer.close()
        server.stop()
