"""Records the catch-up of replicas of a pair in a simulated run with faults (`recording`)."""

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
    HoldReplied,
    InstallEnded,
    Rang,
    RawEvent,
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
#: Two replicas whose producers are sources, and one whose producers are a pair.
COPIES = ("lower.0", "lower.0@2", "upper.0")
FAULTS = (
    # Pieces arrive damaged, then the disk is full, then syncs fail.
    Fault(6 * S, "kill", "lower.0", 4 * S),
    Fault(10_010_000, "damage", "lower.0@2->lower.0", S // 3),
    Fault(10_500_000, "full", "lower.0", 1_500_000),
    Fault(12_500_000, "eio-fsync", "lower.0", 1_500_000),
    # The peer is unreachable; later, a producer is down.
    Fault(16 * S, "kill", "upper.0", 3 * S),
    Fault(18 * S, "cut", "upper.0@2<->upper.0", 4 * S),
    Fault(25 * S, "kill", "upper.0", 1_500_000),
    # So slow that leases are renewed; then the peer restarts at another address.
    Fault(26 * S, "kill", "lower.0@2", 2 * S),
    Fault(27 * S, "delay", "lower.0->lower.0@2", 8 * S, 400),
    Fault(32 * S, "kill", "lower.0", 300_000),
    # The replica is paused for longer than a lease, and the offer of the peer expires.
    Fault(42 * S, "kill", "lower.0@2", 2 * S),
    Fault(43 * S, "delay", "lower.0->lower.0@2", 4 * S, 400),
    Fault(46 * S, "pause", "lower.0@2", 12 * S),
    # Both replicas wait for the state of their peer.
    Fault(70 * S, "kill", "lower.0", 2 * S),
    Fault(70 * S, "kill", "lower.0@2", 2_300_000),
)
#: One replica is down for longer than `rejoin`, then the disk of its peer is lost.
LOST = (Fault(6 * S, "kill", "lower.0", 10 * S), Fault(15_500_000, "wipe", "lower.0@2", S))
#: The disk faults of `MemoryDisk`.
DISK = ("full", "unreadable", "unsyncable")


def reply_to_json(reply: Holding | OfferedState | HoldfastError) -> dict[str, Any]:
    if isinstance(reply, HoldfastError):
        return {"error": error_to_json(reply)}
    return {"reply": codec.encode(reply)}


def raw_event_to_json(raw: RawEvent, received: list[bytes]) -> dict[str, Any]:
    """Includes the received bytes of a piece. The results of a fetch and of an installation are
    omitted, because they follow from the disk."""
    match raw:
        case Began():
            return {"began": True}
        case HoldReplied(ask, reply):
            return {"held": [ask.stream, ask.producer], **reply_to_json(reply)}
        case StateReplied(ask, reply):
            return {"offered": ask.peer, **reply_to_json(reply)}
        case FetchEnded(ask, err):
            fields = {"fetched": ask.piece.name, "of": ask.peer}
            if err is not None and not received and not isinstance(err, LogError):
                return {**fields, "error": error_to_json(err)}
            return {**fields, "data": b64encode(received[0] if received else b"").decode()}
        case InstallEnded():
            return {"installed": True}
        case Rang():
            return {"rang": True}
    raise AssertionError(raw)


def reply_of(fields: dict[str, Any]) -> Any:
    """The inverse of `raw_event_to_json`: a reply, the bytes of a piece, or an error."""
    match fields:
        case {"error": err}:
            return error_of(err)
        case {"data": data}:
            return b64decode(data)
        case {"held": _, "reply": body}:
            return codec.decode(Holding, body, TransportError, "recording")
        case {"offered": _, "reply": body}:
            return codec.decode(OfferedState, body, TransportError, "recording")
    raise AssertionError(fields)


def trouble_of(disk: MemoryDisk) -> list[str]:
    return [name for name in DISK if getattr(disk, name)]


def set_trouble(disk: MemoryDisk, faults: list[str]) -> None:
    for name in DISK:
        setattr(disk, name, name in faults)


@contextmanager
def catch_ups(sections: list[Section]) -> Iterator[None]:
    """Adds a section for every catch-up of `COPIES`."""
    recorded: dict[int, tuple[CatchUp, Section]] = {}
    received: list[bytes] = []
    step, handle, put = Rebuild.step, CatchUp.handle, simulated_catch_up.put_file

    def watched_put(path: str, data: bytes, **options: Any) -> None:
        received.append(data)
        put(path, data, **options)

    def watched_step(self: Rebuild, raw: RawEvent) -> None:
        node = self._node
        if node.name in COPIES and self.core.phase is not Phase.OVER:
            if isinstance(raw, Began):
                section = Section("catch-up", setup_of(self.core, node.log.epoch))
                recorded[id(self.core)] = self.core, section
                sections.append(section)
            fields = raw_event_to_json(raw, received)
            if trouble := trouble_of(node.disk):
                fields["disk"] = trouble
            recorded[id(self.core)][1].lines.append(Line(node.world.now, fields))
        received.clear()
        step(self, raw)

    def watched_handle(self: CatchUp, event: core.Event) -> list[core.Action]:
        actions = handle(self, event)
        if id(self) in recorded and recorded[id(self)][1].lines[-1].event is None:
            line = recorded[id(self)][1].lines[-1]
            line.event, line.actions = repr(event), list(map(repr, actions))
        return actions

    with watching(
        (Rebuild, "step", watched_step), (CatchUp, "handle", watched_handle),
        (simulated_catch_up, "put_file", watched_put),
    ):  # fmt: skip
        yield


def setup_of(machine: CatchUp, epoch: int) -> dict[str, Any]:
    own = {name: [path.inputs, path.version] for name, path in machine._own.items()}
    return {
        "name": machine.name, "epoch": epoch, "peers": machine._peers,
        "producers": machine._producers, "own": own,
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
