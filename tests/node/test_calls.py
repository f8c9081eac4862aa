"""Requests of other processes never stop a node; the loop of a node (no JVM: the engine's twin)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import monotonic_us
from holdfast.config import Options
from holdfast.errors import InputError
from holdfast.model.fragments import fragments
from holdfast.node.node import Node
from holdfast.node.node_events import StateRenewed
from holdfast.storage import Log
from holdfast.streams.calls import GetState, Postpone, Request
from holdfast.streams.serving import Service
from holdfast.transport.flight import FlightPeer, FlightServer
from holdfast.transport.in_process import InProcess
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulated_engine import EngineTwin


class Served:
    """A running node, its server, and a peer that calls the node."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], int] | None = None, start: bool = True
    ) -> None:
        network = hf.Network("net", bucket="100ms")
        tap = network.source("tap", "ts timestamp, key long, value long", time="ts")
        network.output("out", tap.filter("value > 0"))
        upstream, service = Service(), Service()
        self._logs = [Log.open(folder / name, name, fsync="never") for name in ("tap", "main")]
        upstream.logs["tap"] = self._logs[0]
        disk = MemoryDisk(Random(0))
        disk.make_folder("/state", fsync=False)
        engine: Any = EngineTwin(network, disk, "/state")
        self.node = Node(
            "main", fragments(network)[0], engine, self._logs[1], service,
            {"tap": {"tap": lambda: InProcess(upstream)}}, Options(),
            {"main@2": lambda: InProcess(upstream)}, clock=clock or monotonic_us,
        )  # fmt: skip
        self.node.answer_calls()
        if start:
            self.node.start()
        self.server = FlightServer(service)
        self.peer = FlightPeer(self.server.address)

    def end(self) -> None:
        self.peer.close()
        self.server.stop()
        self.node.stop()
        for log in self._logs:
            log.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.end()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            Postpone("nope", "main@2", 1, 5, True, False),
            r"expected one of its paths \(out\), found 'nope'",
        ),
        (
            Postpone("out", "stranger", 1, 5, True, False),
            r"expected one of its peers \(main@2\), found 'stranger'",
        ),
        (GetState("stranger"), r"expected one of its peers \(main@2\), found 'stranger'"),
    ],
)
def test_a_request_with_unknown_names_is_refused_and_does_not_stop_the_node(
    served: Served, request_: Request[Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        served.peer.call(request_)
    # The loop still answers; no input has arrived yet.
    assert served.peer.call(GetState("main@2")).answer == "began-empty"
    assert served.node.failure is None


def test_a_request_with_known_names_is_answered(served: Served) -> None:
    assert served.peer.call(Postpone("out", "main@2", 1, 5, True, False)).answer == "away"
    assert served.node.failure is None


# -- the loop -------------------------------------------------------------------------------------


def test_timed_events_are_taken_in_order_of_their_due_times(tmp_path: Path) -> None:
    now = 0
    served = Served(tmp_path, clock=lambda: now, start=False)
    try:
        node = served.node
        node.post(StateRenewed("later"), 2.0)
        node.post(StateRenewed("sooner"), 1.0)
        node.post(StateRenewed("now"))
        assert node._next() == StateRenewed("now")
        now = 2_000_000
        assert [node._next(), node._next()] == [StateRenewed("sooner"), StateRenewed("later")]
    finally:
        served.end()


def test_a_timer_wakes_the_waiting_loop(tmp_path: Path) -> None:
    served = Served(tmp_path, start=False)
    try:
        served.node.post(StateRenewed("soon"), 0.02)
        assert served.node._next() == StateRenewed("soon")
    finally:
        served.end()
