"""As `test_two_drivers`, for hosts: replies of the controller and events of nodes are replayed with
the threads of production and with the simulator's driver. The controller and the threads that run
nodes are scripted."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.cluster.host_loop import HostLoop
from holdfast.core.hosts import Action, Event, Host, StartNode
from holdfast.errors import HoldfastError
from holdfast.streams.calls import Instance, Register, Registration
from holdfast.verify.sim.host_process import STOPPING_US, HostProcess
from holdfast.verify.sim.world import World
from tests.verify.sim.recording import FOLDER, Section, error_of, read, record_hosts, write

LIMIT_S = 20.0
RECORDED = read(FOLDER / "hosts.jsonl")


class Watched(Host):
    """Compares its events and actions with the recording, one by one."""

    def __init__(self, section: Section) -> None:
        super().__init__(section.setup["at"], lambda node: True)
        self.left = [(line.event, line.actions) for line in reversed(section.lines)]

    def handle(self, event: Event) -> list[Action]:
        actions = super().handle(event)
        assert (repr(event), list(map(repr, actions))) == self.left.pop()
        return actions


def reply_of(fields: dict[str, Any]) -> Registration | HoldfastError:
    if "error" in fields:
        return error_of(fields["error"])
    return Registration(
        current=fields["current"], consumers={}, statuses={}, assigned=tuple(fields["assigned"]),
        refused=tuple(fields["refused"]),
    )  # fmt: skip


class Node:
    """A started node, whose events come from the script."""

    def __init__(self, name: str) -> None:
        self.name, self.life = name, 0
        self.position: int | None = None
        self.error: HoldfastError | None = None
        self.ends = threading.Event()
        self.alive = self.is_up = False

    def instance(self) -> Instance | None:
        if self.position is None:
            return None
        return Instance(self.name, "", 1, self.position)

    def heard(self, *statuses: object) -> None:
        pass

    def stop(self) -> None:
        assert self.ends.wait(LIMIT_S)

    def begin(self, *, rebuild: bool) -> None:
        pass

    def end(self, why: str, *, power: bool = False) -> None:
        self.life += 1


class Threads:
    def __init__(self, section: Section) -> None:
        self.now, self.core = section.setup["at"], Watched(section)
        self._stopping: dict[str, Node] = {}
        self._reply: Registration | HoldfastError | None = None
        self._wake = threading.Event()
        self._loop = HostLoop(
            section.setup["host"], 1, self.core, self._chief, self._start, self._wake,
            clock=lambda: self.now,
        )  # fmt: skip

    def _chief(self, request: Register) -> Registration:
        assert self._reply is not None
        if isinstance(self._reply, HoldfastError):
            raise self._reply
        return self._reply

    def _start(self, action: StartNode) -> Node:
        node = self._stopping[action.node] = Node(action.node)
        return node

    def play(self, section: Section) -> None:
        for line in section.lines:
            self.now = line.at
            match line.raw:
                case {"progressed": name, "position": position}:
                    self._look(name, position=position)
                case {"failed": name, "error": err}:
                    self._look(name, error=error_of(err))
                case {"stopped": name}:
                    self._wake.clear()
                    self._stopping[name].ends.set()
                    assert self._wake.wait(LIMIT_S)
                    self._loop.look()
                case fields:
                    self._reply = reply_of(fields)
                    self._loop.heartbeat()

    def _look(self, name: str, **fields: Any) -> None:
        node = self._loop.nodes[name]
        for field, value in fields.items():
            setattr(node, field, value)
        self._loop.look()
        for field in fields:
            setattr(node, field, None)

    def close(self) -> None:
        for node in self._stopping.values():
            node.ends.set()


class ScriptedWire:
    """The network, and the only random value: the time that a node takes to stop."""

    def __init__(self) -> None:
        self.chance, self.took_us = self, list[int]()
        self.pending: Callable[[Any], None] | None = None
        self._booted = False

    def random(self) -> float:
        return (self.took_us.pop(0) + 0.5) / STOPPING_US

    def ask_controller(self, process: object, ask: Any, reply: Any, failed: Any) -> None:
        if self._booted:
            assert reply == failed, "replies and errors have the same handler"
            self.pending = reply
        else:
            self._booted = True
            reply(1)


class Supervisor:
    def took(self, node: object) -> None: ...
    def noticed(self, host: object) -> None: ...
    def ended(self, host: object, end: object) -> None: ...


class VirtualTime:
    def __init__(self, section: Section) -> None:
        self._world, self._wire = World("two drivers"), ScriptedWire()
        self._world.now = section.setup["at"]
        wire: Any = self._wire
        make: Any = lambda host, name: Node(name)  # noqa: E731
        supervisor: Any = Supervisor()
        self._host = HostProcess(
            self._world, wire, section.setup["host"], make, lambda node: True, supervisor
        )
        self._host.alive = True
        self._host.boot()
        self.core = self._host._core = Watched(section)
        self._wire.took_us = list(stopping_us(section))

    def play(self, section: Section) -> None:
        lines = section.lines
        for number, line in enumerate(lines):
            self._world.now = line.at
            match line.raw:
                case {"progressed": name, "position": _} if self._wire.pending is None:
                    beat = [ln for ln in lines[number:] if ln.at == line.at]
                    for entry in beat:
                        if "progressed" in entry.raw:
                            self._node(entry.raw["progressed"]).position = entry.raw["position"]
                    self._beat()
                case {"progressed": _}:
                    pass  # reported with the heartbeat
                case {"failed": name, "error": err}:
                    self._host.failed(self._node(name), error_of(err))
                    self._fire()
                case {"stopped": _}:
                    self._fire()
                case entry:
                    if self._wire.pending is None:
                        self._beat()
                    replied, self._wire.pending = self._wire.pending, None
                    assert replied is not None
                    for node in self._host.nodes.values():
                        node.position = None  # type: ignore[misc]
                    replied(reply_of(entry))

    def _node(self, name: str) -> Any:
        return self._host.nodes[name]

    def _beat(self) -> None:
        self._host.wake()
        while self._wire.pending is None:
            self._next()

    def _fire(self) -> None:
        """Advances time until the machine receives an event."""
        before = len(self.core.left)
        while len(self.core.left) == before:
            self._next()

    def _next(self) -> None:
        """Runs the next timer of the process, unless that life of the process has ended."""
        due, _, process, life, fn = heapq.heappop(self._world._heap)
        assert due <= self._world.now, f"nothing is due at {self._world.now}"
        if process is not None and process.life == life:
            fn()

    def close(self) -> None:
        pass


def stopping_us(section: Section) -> Iterator[int]:
    """The time that each node took to stop, in the order of the stop requests."""
    for number, line in enumerate(section.lines):
        for action in line.actions:
            if action.startswith("StopNode("):
                later = (ln for ln in section.lines[number:] if "stopped" in ln.raw)
                name = action.split("'")[1]
                yield next(ln.at for ln in later if ln.raw["stopped"] == name) - line.at


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("driver", [Threads, VirtualTime])
def test_both_drivers_of_a_host_match_the_recording(
    driver: type[Threads] | type[VirtualTime], number: int
) -> None:
    section = RECORDED[number]
    replay = driver(section)
    try:
        replay.play(section)
        assert replay.core.left == [], "the recording has further events"
    finally:
        replay.close()


def test_the_recording_matches_the_current_code(tmp_path: Any) -> None:
    """If this fails: python -m tests.verify.sim.recording"""
    write(tmp_path / "now.jsonl", record_hosts())
    assert read(tmp_path / "now.jsonl") == RECORDED


def test_the_recording_contains_every_kind_of_event() -> None:
    text = " ".join(f"{line.event} {line.actions}" for s in RECORDED for line in s.lines)
    for kind in ("Unanswered", "NodeFailed", "NodeStopped", "StartNode", "StopNode", "End"):
        assert f"{kind}(" in text
