"""As `test_two_drivers`, for hosts: what the controller replies, and what becomes of nodes, goes
through the threads of production and the simulator's driver. Scripted are the controller and the
threads that run nodes."""

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
    """Compares what it is told and answers with the recording, event by event."""

    def __init__(self, section: Section) -> None:
        super().__init__(section.setup["at"], lambda node: True)
        self.left = [(line.event, line.actions) for line in reversed(section.lines)]

    def handle(self, event: Event) -> list[Action]:
        actions = super().handle(event)
        assert (repr(event), list(map(repr, actions))) == self.left.pop()
        return actions


def reply_of(told: dict[str, Any]) -> Registration | HoldfastError:
    if "error" in told:
        return error_of(told["error"])
    return Registration(
        current=told["current"], readers={}, standings={}, assigned=tuple(told["assigned"]),
        refused=tuple(told["refused"]),
    )  # fmt: skip


class Node:
    """One that was started: the script says what becomes of it."""

    def __init__(self, name: str) -> None:
        self.name, self.life = name, 0
        self.position: int | None = None
        self.error: HoldfastError | None = None
        self.ends = threading.Event()
        self.alive = self.is_up = False

    def told(self) -> Instance | None:
        if self.position is None:
            return None
        return Instance(self.name, "", 1, self.position)

    def heard(self, *which: object) -> None:
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

    def _chief(self, asked: Register) -> Registration:
        assert self._reply is not None
        if isinstance(self._reply, HoldfastError):
            raise self._reply
        return self._reply

    def _start(self, action: StartNode) -> Node:
        made = self._stopping[action.node] = Node(action.node)
        return made

    def play(self, section: Section) -> None:
        for line in section.lines:
            self.now = line.at
            match line.happened:
                case {"progressed": name, "position": position}:
                    self._look(name, position=position)
                case {"failed": name, "error": err}:
                    self._look(name, error=error_of(err))
                case {"stopped": name}:
                    self._wake.clear()
                    self._stopping[name].ends.set()
                    assert self._wake.wait(LIMIT_S)
                    self._loop.look()
                case told:
                    self._reply = reply_of(told)
                    self._loop.heartbeat()

    def _look(self, name: str, **how: Any) -> None:
        node = self._loop.nodes[name]
        for field, value in how.items():
            setattr(node, field, value)
        self._loop.look()
        for field in how:
            setattr(node, field, None)

    def close(self) -> None:
        for node in self._stopping.values():
            node.ends.set()


class ScriptedWire:
    """Also the only chance in it: how long a node takes to stop."""

    def __init__(self) -> None:
        self.chance, self.took_us = self, list[int]()
        self.pending: Callable[[Any], None] | None = None
        self._booted = False

    def random(self) -> float:
        return (self.took_us.pop(0) + 0.5) / STOPPING_US

    def ask_controller(self, process: object, ask: Any, reply: Any, failed: Any) -> None:
        if self._booted:
            assert reply == failed, "one way for whatever comes back"
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
            match line.happened:
                case {"progressed": name, "position": _} if self._wire.pending is None:
                    beat = [ln for ln in lines[number:] if ln.at == line.at]
                    for told in beat:
                        if "progressed" in told.happened:
                            self._node(told.happened["progressed"]).position = told.happened[
                                "position"
                            ]
                    self._beat()
                case {"progressed": _}:
                    pass  # told with the heartbeat
                case {"failed": name, "error": err}:
                    self._host.failed(self._node(name), error_of(err))
                    self._fire()
                case {"stopped": _}:
                    self._fire()
                case told:
                    if self._wire.pending is None:
                        self._beat()
                    over, self._wire.pending = self._wire.pending, None
                    assert over is not None
                    for node in self._host.nodes.values():
                        node.position = None  # type: ignore[misc]
                    over(reply_of(told))

    def _node(self, name: str) -> Any:
        return self._host.nodes[name]

    def _beat(self) -> None:
        self._host.wake()
        while self._wire.pending is None:
            self._next()

    def _fire(self) -> None:
        """Until the machine hears of something."""
        before = len(self.core.left)
        while len(self.core.left) == before:
            self._next()

    def _next(self) -> None:
        """What the process does next, if it is not over by now."""
        due, _, process, life, fn = heapq.heappop(self._world._heap)
        assert due <= self._world.now, f"nothing is due at {self._world.now}"
        if process is not None and process.life == life:
            fn()

    def close(self) -> None:
        pass


def stopping_us(section: Section) -> Iterator[int]:
    """How long each node took to stop, in the order in which they were told to."""
    for number, line in enumerate(section.lines):
        for action in line.actions:
            if action.startswith("StopNode("):
                later = (ln for ln in section.lines[number:] if "stopped" in ln.happened)
                name = action.split("'")[1]
                yield next(ln.at for ln in later if ln.happened["stopped"] == name) - line.at


@pytest.mark.parametrize("number", range(len(RECORDED)))
@pytest.mark.parametrize("driver", [Threads, VirtualTime])
def test_both_drivers_of_a_host_do_what_was_recorded(
    driver: type[Threads] | type[VirtualTime], number: int
) -> None:
    section = RECORDED[number]
    drives = driver(section)
    try:
        drives.play(section)
        assert drives.core.left == [], "the recording goes on"
    finally:
        drives.close()


def test_the_recording_is_of_this_code(tmp_path: Any) -> None:
    """Else: python -m tests.verify.sim.recording"""
    write(tmp_path / "now.jsonl", record_hosts())
    assert read(tmp_path / "now.jsonl") == RECORDED


def test_the_recording_shows_what_it_is_about() -> None:
    told = " ".join(f"{line.event} {line.actions}" for s in RECORDED for line in s.lines)
    for what in ("Unanswered", "NodeFailed", "NodeStopped", "StartNode", "StopNode", "End"):
        assert f"{what}(" in told
