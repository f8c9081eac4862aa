"""No protocol decision is made outside `core/`: a recording is replayed with the driver of
production and the driver of the simulator, and both produce the recorded events and actions, one by
one. Only the transport is scripted (`tests/verify/sim/recording.py` describes the files)."""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.core.subscription import Action, Connect, Event, Subscription
from holdfast.errors import HoldfastError, StorageFull, TransportError
from holdfast.streams.delivery import Delivery
from holdfast.streams.subscribing import Subscriber
from holdfast.streams.subscription_events import Broke, Came, Moved, Polled, Rang, RawEvent
from holdfast.verify.sim.links import Link, Server
from holdfast.verify.sim.simulated_subscriber import Connection, Follower
from holdfast.verify.sim.world import Process, World
from tests.verify.sim.recording import (
    FOLDER,
    Line,
    Section,
    raw_event_of,
    read,
    record,
    subscription_of,
    write,
)

#: Time limit of a single wait; exceeded only if a test is broken.
LIMIT_S = 20.0

RECORDED = read(FOLDER / "subscriptions.jsonl")


class Watched(Subscription):
    """Compares its events and actions with the recording, one by one."""

    def watch(self, section: Section) -> None:
        self.answered: list[Action] = []
        self.left = [(ln.event, ln.actions) for ln in section.lines if ln.event is not None]
        self.left.reverse()

    def handle(self, event: Event) -> list[Action]:
        actions = super().handle(event)
        self.answered += actions
        assert (repr(event), list(map(repr, actions))) == self.left.pop()
        return actions


# -- threads --------------------------------------------------------------------------------------


class ScriptedPeer:
    """A replica as seen through the transport: replies and deliveries come from the script."""

    def __init__(self) -> None:
        self.replies: queue.Queue[Any] = queue.Queue()
        #: The deliveries of each connection, in the order of the connections.
        self.opened: queue.Queue[queue.Queue[Any]] = queue.Queue()

    def call(self, request: object) -> Any:
        reply = self.replies.get(timeout=LIMIT_S)
        if isinstance(reply, HoldfastError):
            raise reply
        return reply

    def follow(self, *options: object) -> Iterator[Delivery]:
        deliveries: queue.Queue[Any] = queue.Queue()
        self.opened.put(deliveries)
        while (item := deliveries.get(timeout=LIMIT_S)) is not None:
            if isinstance(item, HoldfastError):
                raise item
            yield item

    def close(self) -> None:
        pass


class Threads:
    """The driver of production: real threads, and the clock of the recording."""

    def __init__(self, section: Section) -> None:
        self.now, setup = 0, section.setup
        self.subscription = subscription_of(Watched, setup)
        assert isinstance(self.subscription, Watched)
        self.subscription.watch(section)
        self._peers = {name: ScriptedPeer() for name in setup["replicas"]}
        self._lines: dict[int, queue.Queue[Any]] = {}
        producers: Any = {name: (lambda peer=peer: peer) for name, peer in self._peers.items()}
        self._driver = Subscriber(
            setup["stream"], setup["consumer"], self.subscription, producers, threading.Event(),
            clock=lambda: self.now,
        )  # fmt: skip

    def play(self, section: Section) -> None:
        lines = iter(section.lines)
        for line in lines:
            self.now = line.at
            raw = raw_event_of(section.setup["stream"], line.raw)
            assert not isinstance(raw, bool)
            for _ in self._driver.step(self._bring(raw)):
                consumed = raw_event_of(section.setup["stream"], next(lines).raw)
                assert isinstance(consumed, bool)
                self._driver._full = not consumed
            self._open()

    def _bring(self, raw: RawEvent) -> RawEvent:
        """Passes the event through the transport and the threads that listen to it."""
        match raw:
            case Polled():
                self._peers[raw.replica].replies.put(raw.reply)
            case Came():
                self._lines[raw.connection].put(raw.delivery)
            case Broke():
                self._lines[raw.connection].put(raw.error)
            case Moved():
                self._driver.advanced(raw.position)
            case Rang():
                rang = self._driver._next()
                assert rang == Rang(), f"no timer is due at {self.now}"
                return rang
            case _:
                return raw
        return self._driver._events.get(timeout=LIMIT_S)

    def _open(self) -> None:
        for action in self.subscription.answered:
            if isinstance(action, Connect) and action.connection not in self._lines:
                opened = self._peers[action.replica].opened
                self._lines[action.connection] = opened.get(timeout=LIMIT_S)

    def close(self) -> None:
        for line in self._lines.values():
            line.put(None)
        for peer in self._peers.values():
            peer.replies.put(TransportError("over"))
        self._driver._polling.shutdown(wait=False, cancel_futures=True)


# -- virtual time ---------------------------------------------------------------------------------


class ScriptedWire:
    """The network of the simulator: holds requests until the script replies."""

    def __init__(self, world: World) -> None:
        self._servers: dict[str, Server] = {}
        self.polls: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {}
        self.connects: dict[str, list[tuple[Callable[[Any], None], Callable[[Any], None]]]] = {}
        self._world = world

    def ask_controller(self, process: Process, ask: Any, reply: Any, failed: Any) -> None:
        class Located(dict[str, str]):
            def get(self, name: str, default: Any = None) -> str:  # type: ignore[override]
                return name

        reply(Located())

    def link(self, a: str, b: str) -> Link:
        return Link()

    def resolve(self, address: str | None) -> Server | None:
        if address is not None and address not in self._servers:
            self._servers[address] = Server(self._world, address, self)  # type: ignore[arg-type]
        return self._servers.get(address or "")

    def request(
        self, process: Process, server: Server, ask: Any, reply: Any, failed: Any, *,
        repeatable: bool = False,
    ) -> None:  # fmt: skip
        if repeatable:
            self.polls[server.name] = reply, failed
        else:
            self.connects.setdefault(server.name, []).append((reply, failed))


class VirtualTime:
    """The driver of the simulator."""

    def __init__(self, section: Section) -> None:
        setup = section.setup
        self._world = World("two drivers")
        self._consumer = Process(self._world, setup["consumer"])
        self._consumer.alive = True
        self.subscription = subscription_of(Watched, setup)
        assert isinstance(self.subscription, Watched)
        self.subscription.watch(section)
        self._wire = ScriptedWire(self._world)
        self._consumes: Callable[[], None] = lambda: None
        self._driver = Follower(
            self._consumer, self._wire, setup["stream"], self.subscription,  # type: ignore[arg-type]
            lambda delivery: self._consumes(),
        )  # fmt: skip
        self._failing: dict[int, Callable[[Any], None]] = {}
        self._connections: dict[int, Connection] = {}

    def play(self, section: Section) -> None:
        lines = iter(section.lines)

        def consumes() -> None:
            if not next(lines).raw["consumed"]:
                raise StorageFull("no space")

        self._consumes = consumes
        for line in lines:
            self._world.now = line.at
            raw = raw_event_of(section.setup["stream"], line.raw)
            assert not isinstance(raw, bool)
            self._bring(line, raw)
            self._open()

    def _bring(self, line: Line, raw: RawEvent) -> None:
        match raw:
            case Polled(replica, reply):
                replied, failed = self._wire.polls.pop(replica)
                (failed if isinstance(reply, HoldfastError) else replied)(reply)
            case Came():
                self._driver.arrive(self._connections[raw.connection], raw.delivery)
            case Broke():
                self._failing[raw.connection](raw.error)
            case Moved():
                self._driver.advanced(raw.position)
                self._fire(line.at)
            case Rang():
                self._fire(line.at)
            case _:
                self._driver.step(raw)

    def _fire(self, at: int) -> None:
        due, _, _, _, fn = heapq.heappop(self._world._heap)
        assert due <= at, f"no timer is due at {at}"
        fn()

    def _open(self) -> None:
        for action in self.subscription.answered:
            if isinstance(action, Connect) and action.connection not in self._connections:
                server = self._wire.resolve(action.replica)
                assert server is not None
                self._failing[action.connection] = self._wire.connects[action.replica].pop(0)[1]
                self._connections[action.connection] = Connection(
                    self._driver, server, self._driver.stream, action.connection
                )

    def close(self) -> None:
        pass


# -- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("driver", [Threads, VirtualTime])
def test_both_drivers_of_a_subscription_match_the_recording(
    driver: type[Threads] | type[VirtualTime], number: int
) -> None:
    section = RECORDED[number]
    replay = driver(section)
    try:
        replay.play(section)
        assert isinstance(replay.subscription, Watched)
        assert replay.subscription.left == [], "the recording has further events"
    finally:
        replay.close()


def test_the_recording_matches_the_current_code(tmp_path: Any) -> None:
    """If this fails: python -m tests.verify.sim.recording"""
    write(tmp_path / "now.jsonl", record())
    assert read(tmp_path / "now.jsonl") == RECORDED


def test_the_recording_contains_every_kind_of_event() -> None:
    text = " ".join(f"{line.event} {line.actions}" for s in RECORDED for line in s.lines)
    for kind in ("Unreachable", "Disconnected", "Full", "Finished", "Switched", "Lost", "Tick"):
        assert f"{kind}(" in text
    assert "arrived damaged" in (FOLDER / "subscriptions.jsonl").read_text()
