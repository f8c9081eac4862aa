"""As `test_two_drivers`, for the catch-up of a replica of a pair: replies of producers and of the
peer, and the bytes of every piece, are replayed with the threads of production and with the
simulator's driver. The producers, the peer and the disk faults are scripted; fetched pieces are
verified and installed on an in-memory disk."""

from __future__ import annotations

import heapq
import queue
import threading
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from holdfast.cluster import rebuild as threads
from holdfast.config import Options
from holdfast.core.catch_up import CatchUp
from holdfast.core.catch_up_events import Action, Event
from holdfast.errors import HoldfastError, StateLost
from holdfast.model.fragments import fragment_of, fragments
from holdfast.node.state_transfer import Staging
from holdfast.node.transfer_events import Began, RawEvent
from holdfast.storage import Log
from holdfast.storage.files import put_file
from holdfast.streams.calls import Done, ReleaseState, RenewState
from holdfast.verify.history import History
from holdfast.verify.sim import simulated_catch_up
from holdfast.verify.sim.links import Link
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulated_process import Wiring, memory_log
from holdfast.verify.sim.tables import RowSegments
from holdfast.verify.sim.world import World
from tests.verify.sim.recording import FOLDER, Expected, Line, Section, read, write
from tests.verify.sim.recording_catch_up import (
    NETWORK,
    catch_up_of,
    record_catch_ups,
    reply_of,
    set_trouble,
)
from tests.verify.sim.scripted import LIMIT_S, Replies

RECORDED = read(FOLDER / "catch_ups.jsonl")
WIRING = Wiring(NETWORKS[NETWORK]())
FRAGMENTS = {fragment.name: fragment for fragment in fragments(WIRING.network)}


class Watched(CatchUp):
    expected: Expected

    def handle(self, event: Event) -> list[Action]:
        actions = super().handle(event)
        self.expected.compare(event, actions)
        return actions


def watched(section: Section) -> Watched:
    core = catch_up_of(Watched, section.setup)
    assert isinstance(core, Watched)
    core.expected = Expected(section)
    return core


def question_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """The receiver and the content of a request."""
    match fields:
        case {"held": [stream, producer]}:
            return producer, "hold", stream
        case {"offered": peer}:
            return peer, "state"
        case {"fetched": piece, "of": peer}:
            return peer, "piece", piece
    raise AssertionError(fields)


# -- threads --------------------------------------------------------------------------------------


class ScriptedPeer:
    """A producer, or the peer, as seen through the transport."""

    def __init__(self, name: str, replies: Replies, disk: MemoryDisk) -> None:
        self.name, self._replies, self._disk = name, replies, disk

    def call(self, request: Any) -> Any:
        if isinstance(request, RenewState | ReleaseState):
            return Done()
        question = ("hold", request.stream) if hasattr(request, "stream") else ("state",)
        return self._replies.wait(self.name, *question)

    def fetch(self, name: str, into: str) -> None:
        put_file(into, self._replies.wait(self.name, "piece", name), fsync=False, disk=self._disk)

    def close(self) -> None:
        pass


class Threads:
    def __init__(self, section: Section) -> None:
        setup, self.now = section.setup, 0
        name = setup["name"]
        self._replies, self.disk = Replies(), MemoryDisk(Random(0))
        self._own = self._open(f"/{name}", name)
        self._own.raise_epoch(setup["epoch"])
        self.core = watched(section)

        def connect(to: str) -> Any:
            return lambda: ScriptedPeer(to, self._replies, self.disk)

        producers = setup["producers"].items()
        self._driver = threads.Rebuild(
            name, setup["epoch"], FRAGMENTS[fragment_of(name)].paths, self._own, {},
            {stream: {name: connect(name) for name in names} for stream, names in producers},
            {peer: connect(peer) for peer in setup["peers"]},
            Staging(f"/{name}", self.disk, RowSegments()), lambda folder: self._open(folder, name),
            listen_on="127.0.0.1", stop=threading.Event(), clock=lambda: self.now,
        )  # fmt: skip
        self._driver._core = self.core

    def _open(self, folder: str, name: str) -> Log:
        return Log.open(folder, name, fsync="always", archive=False, disk=self.disk,
                        segments=RowSegments())  # fmt: skip

    def bring(self, line: Line) -> None:
        """Passes the event through the transport and the threads that wait for it."""
        self.now = line.at
        self._driver.step(self._happens(line))

    def _happens(self, line: Line) -> RawEvent:
        match line.raw:
            case {"began": _}:
                return Began()
            case {"rang": _}:
                due = self._driver._wakes
                assert due and due[0] <= self.now, f"no timer is due at {self.now}"
                return self._driver._next()
            case {"installed": _}:
                pass
            case fields:
                return self._reply(fields)
        return self._driver._happened.get(timeout=LIMIT_S)

    def _reply(self, fields: dict[str, Any]) -> RawEvent:
        replies = self._replies.to(*question_of(fields))
        replies.put(reply_of(fields))
        event = self._driver._happened.get(timeout=LIMIT_S)
        with suppress(queue.Empty):  # no request was sent: the disk was full before
            replies.get_nowait()
        return event

    def close(self) -> None:
        self._replies.close()
        self._driver._workers.shutdown(wait=False, cancel_futures=True)
        self._driver._server.stop()


# -- virtual time ---------------------------------------------------------------------------------


class Somebody:
    """The remote end of the network: returns the request that it received."""

    def __init__(self, name: str) -> None:
        self.name, self.now = name, 0
        self.world = self.service = self.performer = self

    def held(self, request: Any, at: int) -> tuple[str, ...]:
        return self.name, "hold", request.stream

    def offer_state(self, newcomer: str) -> tuple[str, ...]:
        return self.name, "state"

    def piece(self, name: str) -> tuple[str, ...]:
        return self.name, "piece", name

    def take(self, event: object) -> tuple[str, ...]:
        return self.name, "reported"

    def where(self, name: str, *, catching_up: bool = False) -> str:
        return name

    def locate(self, stream: str) -> dict[str, str]:
        return {}  # the replica is up and begins to read: the recording is over


class ScriptedWire:
    """The network of the simulator: holds requests until the script replies. Also the host of the
    node, which reports nothing."""

    def __init__(self, world: World) -> None:
        self.world, self.wire, self.chance = world, self, self
        self.asked: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}

    def random(self) -> float:
        return 0.0  # pieces take only the time of the script

    def link(self, a: str, b: str) -> Any:
        return Link()

    def ask_controller(self, process: object, ask: Any, reply: Any, failed: Any) -> None:
        reply(ask(Somebody("controller")))

    def resolve(self, address: str | None) -> Somebody | None:
        return None if address is None else Somebody(address)

    def request(self, process: object, server: Any, ask: Any, reply: Any, failed: Any) -> None:
        self.asked.setdefault(ask(server), []).append((reply, failed))

    def wake(self) -> None:
        pass


class VirtualTime:
    def __init__(self, section: Section) -> None:
        setup = section.setup
        self._world = World("two drivers")
        self._wire: Any = ScriptedWire(self._world)
        name = setup["name"]
        self._node = NodeProcess(
            self._wire, WIRING, FRAGMENTS[fragment_of(name)], name, Options(), History()
        )
        self._node.alive, self._node.chance = True, self._wire
        self._node.log = memory_log(self._node, name)
        self._node.log.raise_epoch(setup["epoch"])
        self.disk = self._node.disk
        self.core = watched(section)
        self._driver = simulated_catch_up.Rebuild(self._node, self._node._staging)
        self._driver.core = self.core

    def bring(self, line: Line) -> None:
        self._world.now = line.at
        match line.raw:
            case {"began": _}:
                self._driver.begin()
            case {"installed": _}:
                pass  # at once
            case {"rang": _}:
                self._fire()
            case fields:
                replied, failed = self._wire.asked[question_of(fields)].pop(0)
                reply = reply_of(fields)
                (failed if isinstance(reply, HoldfastError) else replied)(reply)
                if "data" in fields:
                    self._fire()

    def _fire(self) -> None:
        due, _, _, _, fn = heapq.heappop(self._world._heap)
        assert due <= self._world.now, f"nothing is due at {self._world.now}"
        fn()

    def close(self) -> None:
        pass


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("driver", [Threads, VirtualTime])
def test_both_drivers_of_a_catch_up_match_the_recording(
    driver: type[Threads] | type[VirtualTime], number: int
) -> None:
    section = RECORDED[number]
    replay = driver(section)
    try:
        for line in section.lines:
            set_trouble(replay.disk, line.raw.get("disk", []))
            if any(action.startswith("GiveUp(") for action in line.actions):
                with pytest.raises(StateLost):
                    replay.bring(line)
            else:
                replay.bring(line)
        assert replay.core.expected.left == [], "the recording has further events"
    finally:
        replay.close()


def test_the_recording_matches_the_current_code(tmp_path: Any) -> None:
    """If this fails: python -m tests.verify.sim.recording"""
    write(tmp_path / "now.jsonl", record_catch_ups())
    assert read(tmp_path / "now.jsonl") == RECORDED


def test_the_recording_contains_every_kind_of_event() -> None:
    text = " ".join(f"{line.event} {line.actions}" for s in RECORDED for line in s.lines)
    for kind in (
        "Held", "Unreachable", "HasState", "Waits", "FetchFailed", "gone=True", "full=True",
        "InstallFailed", "Installed", "Renew", "Release", "Discard", "GiveUp",
        "ComeUp(source='peer'", "ComeUp(source='own'",
    ):  # fmt: skip
        assert kind in text
