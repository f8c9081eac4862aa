"""Records the catch-up of copies of a pair in a simulated run with faults (`recording`)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.config import Options
from holdfast.core import catch_up_events as core
from holdfast.core.catch_up import CatchUp, Phase
from holdfast.errors import HoldfastError, LogError, TransportError
from holdfast.node.transfer_events import (
    Began,
    FetchEnded,
    Happening,
    HoldReplied,
    InstallEnded,
    Rang,
    StateReplied,
)
from holdfast.streams import codec
from holdfast.streams.calls import Holding, OfferedState
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim import simulated_catch_up
from holdfast.verify.sim.simulated_catch_up import Rebuild
from holdfast.verify.sim.simulated_disk import MemoryDisk
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import S
from tests.verify.sim.recording import Line, Section, error_of, error_to_json, watching

NETWORK = "pairs-1"
#: Whose producers are sources, and one whose producers are a pair.
COPIES = ("lower.0", "lower.0@2", "upper.0")
FAULTS = (
    # Pieces come damaged, then the disk is full, then it cannot sync.
    Fault(6 * S, "kill", "lower.0", 4 * S),
    Fault(10_010_000, "damage", "lower.0@2->lower.0", S // 3),
    Fault(10_500_000, "full", "lower.0", 1_500_000),
    Fault(12_500_000, "eio-fsync", "lower.0", 1_500_000),
    # The peer is away; later, a producer is.
    Fault(16 * S, "kill", "upper.0", 3 * S),
    Fault(18 * S, "cut", "upper.0@2<->upper.0", 4 * S),
    Fault(25 * S, "kill", "upper.0", 1_500_000),
    # So slow that leases are renewed; then the peer begins again somewhere else.
    Fault(26 * S, "kill", "lower.0@2", 2 * S),
    Fault(27 * S, "delay", "lower.0->lower.0@2", 8 * S, 400),
    Fault(32 * S, "kill", "lower.0", 300_000),
    # It stands still for longer than a lease, and the peer offers nothing any more.
    Fault(42 * S, "kill", "lower.0@2", 2 * S),
    Fault(43 * S, "delay", "lower.0->lower.0@2", 4 * S, 400),
    Fault(46 * S, "pause", "lower.0@2", 12 * S),
    # Both wait for the state of the other.
    Fault(70 * S, "kill", "lower.0", 2 * S),
    Fault(70 * S, "kill", "lower.0@2", 2_300_000),
)
#: One copy is away for longer than its disk is reckoned with, then the other disk is lost.
LOST = (Fault(6 * S, "kill", "lower.0", 10 * S), Fault(15_500_000, "wipe", "lower.0@2", S))
#: What may be wrong with a disk, as `MemoryDisk` has it.
DISK = ("full", "unreadable", "unsyncable")


def reply_to_json(reply: Holding | OfferedState | HoldfastError) -> dict[str, Any]:
    if isinstance(reply, HoldfastError):
        return {"error": error_to_json(reply)}
    return {"reply": codec.encode(reply)}


def happening_to_json(happened: Happening, came: list[bytes]) -> dict[str, Any]:
    """With the bytes that came of a piece, whatever became of them; and `installed` without what
    came of it: both follow from the disk."""
    match happened:
        case Began():
            return {"began": True}
        case HoldReplied(ask, reply):
            return {"held": [ask.stream, ask.producer], **reply_to_json(reply)}
        case StateReplied(ask, reply):
            return {"offered": ask.peer, **reply_to_json(reply)}
        case FetchEnded(ask, err):
            told = {"fetched": ask.piece.name, "of": ask.peer}
            if err is not None and not came and not isinstance(err, LogError):
                return {**told, "error": error_to_json(err)}
            return {**told, "data": b64encode(came[0] if came else b"").decode()}
        case InstallEnded():
            return {"installed": True}
        case Rang():
            return {"rang": True}
    raise AssertionError(happened)


def reply_of(told: dict[str, Any]) -> Any:
    """What was written by `happening_to_json`: a reply, the bytes of a piece, or an error."""
    match told:
        case {"error": err}:
            return error_of(err)
        case {"data": data}:
            return b64decode(data)
        case {"held": _, "reply": body}:
            return codec.decode(Holding, body, TransportError, "recording")
        case {"offered": _, "reply": body}:
            return codec.decode(OfferedState, body, TransportError, "recording")
    raise AssertionError(told)


def trouble_of(disk: MemoryDisk) -> list[str]:
    return [name for name in DISK if getattr(disk, name)]


def set_trouble(disk: MemoryDisk, told: list[str]) -> None:
    for name in DISK:
        setattr(disk, name, name in told)


@contextmanager
def catch_ups(sections: list[Section]) -> Iterator[None]:
    """Adds a section for every catch-up of `COPIES`."""
    known: dict[int, tuple[CatchUp, Section]] = {}
    came: list[bytes] = []
    step, handle, put = Rebuild.step, CatchUp.handle, simulated_catch_up.put_file

    def watched_put(path: str, data: bytes, **how: Any) -> None:
        came.append(data)
        put(path, data, **how)

    def watched_step(self: Rebuild, happened: Happening) -> None:
        node = self._node
        if node.name in COPIES and self.core.phase is not Phase.OVER:
            if isinstance(happened, Began):
                section = Section("catch-up", setup_of(self.core, node.log.epoch))
                known[id(self.core)] = self.core, section
                sections.append(section)
            told = happening_to_json(happened, came)
            if trouble := trouble_of(node.disk):
                told["disk"] = trouble
            known[id(self.core)][1].lines.append(Line(node.world.now, told))
        came.clear()
        step(self, happened)

    def watched_handle(self: CatchUp, event: core.Event) -> list[core.Action]:
        actions = handle(self, event)
        if id(self) in known and known[id(self)][1].lines[-1].event is None:
            line = known[id(self)][1].lines[-1]
            line.event, line.actions = repr(event), list(map(repr, actions))
        return actions

    with watching(
        (Rebuild, "step", watched_step), (CatchUp, "handle", watched_handle),
        (simulated_catch_up, "put_file", watched_put),
    ):  # fmt: skip
        yield


def setup_of(made: CatchUp, epoch: int) -> dict[str, Any]:
    own = {name: [path.inputs, path.version] for name, path in made._own.items()}
    return {
        "name": made.name, "epoch": epoch, "peers": made._peers, "producers": made._producers,
        "own": own,
    }  # fmt: skip


def catch_up_of(kind: type[CatchUp], setup: dict[str, Any]) -> CatchUp:
    own = {
        name: core.OwnPath(tuple(inputs), None if version is None else tuple(version))
        for name, (inputs, version) in setup["own"].items()
    }
    return kind(setup["name"], setup["peers"], setup["producers"], own)


def record_catch_ups() -> list[Section]:
    sections: list[Section] = []
    options = Options(checkpoint_buckets=7, recovery="checkpoint", rejoin="5s")
    for seconds, faults in (78, FAULTS), (18, LOST):
        sim = Simulation(Scenario("recorded", NETWORK, seconds, faults, 1), options)
        with catch_ups(sections):
            outcome = sim.run()
        assert faults is LOST or not outcome.failed, outcome.failed
    return sections
