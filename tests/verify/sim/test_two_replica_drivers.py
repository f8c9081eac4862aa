"""As `test_two_drivers`, for promises between replicas that correct their results: deliveries, the
requests of peers and their replies are replayed with the threads of production and with the
simulator's driver, on the simulated engine. The peers, the consumers and the end of each step are
scripted."""

from __future__ import annotations

import heapq
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holdfast.core import progress_events as core
from holdfast.core.progress import Progress
from holdfast.errors import HoldfastError, TransportError
from holdfast.model.fragments import fragments, peers_of
from holdfast.node import executor
from holdfast.node.node import Node
from holdfast.node.node_events import Asked, Event, Finished, Replied
from holdfast.storage import Log
from holdfast.streams.calls import Postpone, Postponement
from holdfast.streams.serving import Service
from holdfast.transport.in_process import InProcess
from holdfast.verify.history import History
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulated_engine import EngineTwin, MemoryInputs
from holdfast.verify.sim.simulated_process import Wiring, memory_log
from holdfast.verify.sim.tables import RowSegments
from holdfast.verify.sim.world import World
from tests.verify.sim.recording import FOLDER, Expected, Line, Section, read, write
from tests.verify.sim.recording_promises import (
    BUCKET_US,
    OPTIONS,
    SEED,
    delivery_of,
    name_of,
    network,
    postpone_of,
    record_promises,
    reply_of,
    without_duration,
)
from tests.verify.sim.scripted import LIMIT_S, Replies

RECORDED = read(FOLDER / "promises.jsonl")
WIRING = Wiring(network())
(FRAGMENT,) = fragments(WIRING.network)


class Watched(Progress):
    expected: Expected

    def handle(self, event: core.Event) -> list[core.Action]:
        actions = super().handle(event)
        self.expected.compare(without_duration(event), actions)
        return actions


def is_reply(event: Event, to: Postpone, of: str) -> bool:
    return isinstance(event, Replied) and (event.asked, event.peer) == (to, of)


# -- threads --------------------------------------------------------------------------------------


class ScriptedPeer:
    """Another replica as seen through the transport."""

    def __init__(self, name: str, replies: Replies) -> None:
        self.name, self._replies = name, replies

    def call(self, request: Postpone) -> Any:
        return self._replies.wait(self.name, request)


class Threads:
    """The driver of production: real threads send requests, reply and run steps; the event loop
    takes their events at the times of the script. A step runs at once, but its end is delivered at
    the time of the script."""

    def __init__(self, section: Section, folder: Path) -> None:
        self.now, name = 0, section.setup["name"]
        disk, self._replies, self._service = MemoryDisk(Random(0)), Replies(), Service()
        root = str(folder / name)
        log = Log.open(root, name, fsync="always", disk=disk, segments=RowSegments())
        log.raise_epoch(1)
        engine: Any = EngineTwin(
            WIRING.network, disk, f"{root}/state", buckets_max=section.setup["buckets_max"]
        )
        nowhere: Any = {stream: {"nobody": None} for stream in FRAGMENT.inputs}
        peers: Any = {
            peer: lambda peer=peer: ScriptedPeer(peer, self._replies)
            for peer in peers_of(WIRING.network, name)
        }
        self._node = Node(
            name, FRAGMENT, engine, log, self._service, nowhere, OPTIONS, peers,
            clock=lambda: self.now,
        )  # fmt: skip
        self._node.performer.inputs = MemoryInputs(disk)
        self._node._workers = ThreadPoolExecutor(1)  # the disk supports only one thread
        self._node.answer_calls()
        for stream in FRAGMENT.outputs:
            self._service.consumers[stream] = set(WIRING.consumers[stream])
        self.core = self._node.performer.core
        #: Events that have arrived but were not taken yet.
        self._received_events: list[Event] = []

    def bring(self, line: Line) -> None:
        self.now, performer = line.at, self._node.performer
        match line.raw:
            case {"began": _}:
                performer.take(core.Began(self.now))
            case {"delivered": _}:
                performer.receive(delivery_of(line.raw))
            case {"asked": asks, **more}:
                self._asked(postpone_of(asks), more["reply"])
            case {"replied": peer, "to": to}:
                request, reply = postpone_of(to), reply_of(line.raw)
                self._replies.to(peer, request).put(reply)
                performer.take(self._next(lambda event: is_reply(event, request, peer)))
            case {"acknowledged": output, "upto": [needed, received]}:
                for notify in self._service.on_ack:
                    notify(output, needed, received)
                performer.take(self._next(lambda event: isinstance(event, core.Acknowledged)))
            case {"took": name}:
                performer.take(self._next(lambda event: name_of(event) == name))
        for _ in range(
            sum(action.startswith(("Run(", "RunTentative(")) for action in line.actions)
        ):
            self._received_events.append(
                self._from_threads(lambda event: isinstance(event, Finished))
            )

    def _asked(self, asks: Postpone, expected: dict[str, Any]) -> None:
        """Calls the service in a thread of the server, which waits for the event loop."""
        replies: queue.Queue[Postponement] = queue.Queue()
        peer = InProcess(self._service)
        asking = threading.Thread(target=lambda: replies.put(peer.call(asks)), daemon=True)
        asking.start()
        self._node.performer.take(self._next(lambda event: isinstance(event, Asked)))
        assert replies.get(timeout=LIMIT_S) == reply_of({"reply": expected})

    def _next(self, wanted: Any) -> Event:
        """The wanted event: it has arrived before, is due now, or arrives later."""
        for number, event in enumerate(self._received_events):
            if wanted(event):
                return self._received_events.pop(number)
        return self._from_threads(wanted)

    def _from_threads(self, wanted: Any) -> Event:
        while True:
            timers = self._node._timers
            if not (timers and timers[0][0] <= self.now) and self._node._events.empty():
                event = self._node._events.get(timeout=LIMIT_S)
            else:
                event = self._node._next()
            assert event is not None
            if wanted(event):
                return event
            self._received_events.append(event)

    def close(self) -> None:
        self._replies.close()
        self._node.stop()


# -- virtual time ---------------------------------------------------------------------------------


class Somebody:
    """The remote end of the network, or the controller: returns the request that it received."""

    is_up = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.performer = self.comparison = self

    def postpone(self, asks: Postpone) -> tuple[str, Postpone]:
        return self.name, asks

    def digests(self) -> tuple[str, None]:
        return self.name, None

    def where(self, name: str, *, catching_up: bool = False) -> str:
        return name

    def locate(self, stream: str) -> Any:
        raise TransportError("deliveries come from the script")


class ScriptedWire:
    """The network of the simulator: holds requests until the script replies. Also the host of the
    node, which reports nothing."""

    def __init__(self, world: World) -> None:
        self.world, self.wire = world, self
        self.asked: dict[tuple[str, Postpone | None], list[tuple[Any, Any]]] = {}

    def ask_controller(self, process: object, ask: Any, reply: Any, failed: Any) -> None:
        try:
            reply(ask(Somebody("controller")))
        except TransportError as err:
            failed(err)

    def resolve(self, address: str) -> Somebody:
        return Somebody(address)

    def request(self, process: object, server: Any, ask: Any, reply: Any, failed: Any) -> None:
        self.asked.setdefault(ask(server), []).append((reply, failed))


class VirtualTime:
    """The driver of the simulator. With the seed of the recording, its steps take the same time."""

    def __init__(self, section: Section, folder: Path) -> None:
        self._world = World(f"lab/{SEED}")
        self._wire: Any = ScriptedWire(self._world)
        name = section.setup["name"]
        self._node = NodeProcess(self._wire, WIRING, FRAGMENT, name, OPTIONS, History())
        self._node.alive, self._node._bucket_us = True, BUCKET_US
        self._node.log = memory_log(self._node, name)
        self._node.log.raise_epoch(1)
        self.core: Any = None

    def bring(self, line: Line) -> None:
        node = self._node
        match line.raw:
            case {"with": _}:
                return
            case {"took": _}:
                self._fire(line)
                return
        self._let_pass(line.at)
        match line.raw:
            case {"began": _}:
                node.up()
                self.core = node.performer.core
            case {"delivered": _}:
                node.performer.receive(delivery_of(line.raw))
            case {"asked": asks, "reply": reply}:
                assert node.postpone(postpone_of(asks)) == reply_of({"reply": reply})
            case {"replied": peer, "to": to}:
                replied, failed = self._wire.asked[peer, postpone_of(to)].pop(0)
                reply = reply_of(line.raw)
                (failed if isinstance(reply, HoldfastError) else replied)(reply)
            case {"acknowledged": output, "upto": [needed, received]}:
                for notify in node.service.on_ack:
                    notify(output, needed, received)
                self._fire(line)

    def _let_pass(self, at: int) -> None:
        """Runs the earlier timers of the node that cause no recorded event."""
        while self._world._heap and self._world._heap[0][0] < at:
            self._next()
        self._world.now = at

    def _fire(self, line: Line) -> None:
        """Advances time until the machine receives an event."""
        before = len(self.core.expected.left)
        while line.event is not None and len(self.core.expected.left) == before:
            due = self._world._heap[0][0]
            assert due <= line.at, f"nothing is due at {line.at}"
            self._next()

    def _next(self) -> None:
        self._world.now, _, _, _, fn = heapq.heappop(self._world._heap)
        fn()

    def close(self) -> None:
        pass


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("driver", [Threads, VirtualTime])
def test_both_drivers_of_a_replica_match_the_recording(
    driver: type[Threads] | type[VirtualTime],
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = RECORDED[number]
    monkeypatch.setattr(executor, "Progress", Watched)
    monkeypatch.setattr(Watched, "expected", Expected(section), raising=False)
    replay = driver(section, tmp_path)
    try:
        for line in section.lines:
            replay.bring(line)
        assert replay.core.expected.left == [], "the recording has further events"
    finally:
        replay.close()


def test_the_recording_matches_the_current_code(tmp_path: Path) -> None:
    """If this fails: python -m tests.verify.sim.recording"""
    write(tmp_path / "now.jsonl", record_promises())
    assert read(tmp_path / "now.jsonl") == RECORDED


def test_the_recording_contains_every_kind_of_event() -> None:
    text = " ".join(f"{line.event} {line.actions}" for s in RECORDED for line in s.lines)
    for fragment in (
        "Ask(", "done=True", "started=True", "answer='answering'", "answer='refused'",
        "answer='away'", "Enter(", "RunTentative(", "Leave(", "STABILIZATION", "Checkpoint(",
        "CheckpointDone(",
    ):  # fmt: skip
        assert fragment in text
    assert any("error" in line.raw for s in RECORDED for line in s.lines)
