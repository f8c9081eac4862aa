"""Records the events and actions of state machines in a simulated run with faults.

    python -m tests.verify.sim.recording

writes tests/recordings/. A recording has one section per state machine: a line with the setup of
the machine, then one line per event of the transport: its time, the event of the transport, the
event that the driver passed to the machine, and the actions that the machine returned.
`test_two_drivers` replays a recording with the drivers of production and simulator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from holdfast import errors
from holdfast.config import Options
from holdfast.core.hosts import Host, NodeFailed, NodeProgressed, NodeStopped
from holdfast.core.subscription import Position, Subscription
from holdfast.streams.calls import Registration, StreamStatus
from holdfast.streams.delivery import Delivery
from holdfast.streams.subscription_events import (
    Began,
    Broke,
    Came,
    Consumed,
    Moved,
    Polled,
    Rang,
    RawEvent,
)
from holdfast.types import OutputState, StreamInfo
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim import host_process
from holdfast.verify.sim.host_process import HostProcess
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_subscriber import Follower
from holdfast.verify.sim.simulation import Simulation
from tests.verify.sim.lab import S, group_steps, union_of_two

FOLDER = Path(__file__).parents[2] / "recordings"

#: Consumers and streams: one reads from two replicas that both fail and correct, one from a source.
READERS = {("client-merged", "merged"), ("main", "s1")}
FAULTS = (
    Fault(1 * S, "cut", "s2<->main,main@2", 3 * S),
    Fault(1_500_000, "kill", "s1", S // 2),
    Fault(2_200_000, "damage", "s1->main", S),
    Fault(2_500_000, "pause", "main@2", 1_500_000),
    Fault(3_500_000, "full", "main", S),
    Fault(5 * S, "kill", "main", S),
    Fault(5_500_000, "full", "client-merged", S // 2),
    Fault(6_600_000, "cut", "client-merged<->main@2", 1_200_000),
)


@dataclass(slots=True)
class Line:
    """One event of the transport."""

    at: int
    raw: Any
    #: The event of the machine and its actions; None if the driver passed no event to the machine.
    event: str | None = None
    actions: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Section:
    """One state machine, from its creation to the end of its life or of the run."""

    machine: str
    setup: dict[str, Any]
    lines: list[Line] = field(default_factory=list)


class Expected:
    """The rest of a recording, with which the events and actions of a machine are compared one by
    one."""

    def __init__(self, section: Section) -> None:
        self.left = [(ln.event, ln.actions) for ln in section.lines if ln.event is not None]
        self.left.reverse()

    def compare(self, event: object, actions: Sequence[object]) -> None:
        actual, expected = (repr(event), list(map(repr, actions))), self.left.pop()
        assert actual == expected, f"expected {expected}, found {actual}"


# -- events as JSON -------------------------------------------------------------------------------


def error_to_json(err: Exception) -> list[str]:
    return [type(err).__name__, str(err)]


def error_of(fields: list[str]) -> errors.HoldfastError:
    error = getattr(errors, fields[0])(fields[1])
    assert isinstance(error, errors.HoldfastError)
    return error


def raw_event_to_json(raw: RawEvent) -> dict[str, Any]:
    match raw:
        case Began():
            return {"began": True}
        case Polled(replica, StreamStatus() as reply):
            return {"polled": replica, "reply": list(astuple(reply))}
        case Polled(replica, errors.HoldfastError() as err):
            return {"polled": replica, "error": error_to_json(err)}
        case Came(connection, delivery):
            fields = {
                "since": delivery.since, "upto": delivery.upto, "epoch": delivery.epoch,
                "state": delivery.state, "ended": delivery.ended,
                "tentative_upto": delivery.tentative_upto, "spent_us": delivery.spent_us,
                "first": delivery.info is not None,
            }  # fmt: skip
            return {"came": connection, "delivery": {k: v for k, v in fields.items() if v}}
        case Broke(connection, err):
            return {"broke": connection, "error": error_to_json(err)}
        case Consumed():
            return {"consumed": not raw.full}
        case Moved(position):
            return {"moved": list(position)}
        case Rang():
            return {"rang": True}
    raise AssertionError(raw)


def delivery_of(stream: str, recorded: dict[str, Any]) -> Delivery:
    """Without rows, because no decision depends on them."""
    fields = {"since": 0, "upto": 0, **recorded}
    state, first = OutputState(fields.pop("state")), fields.pop("first", False)
    info = StreamInfo(stream, "", "", 0, 0, -1, fields["epoch"]) if first else None
    return Delivery(stream, state=state, info=info, **fields)


def raw_event_of(stream: str, fields: dict[str, Any]) -> RawEvent | bool:
    """The inverse of `raw_event_to_json`; for `Consumed`, whether the rows were consumed."""
    match fields:
        case {"polled": replica, "reply": [state, *rest]}:
            state = None if state is None else OutputState(state)
            return Polled(replica, StreamStatus(state, *rest))
        case {"polled": replica, "error": err}:
            return Polled(replica, error_of(err))
        case {"came": connection, "delivery": delivery}:
            return Came(connection, delivery_of(stream, delivery))
        case {"broke": connection, "error": err}:
            return Broke(connection, error_of(err))
        case {"consumed": bool() as well}:
            return well
        case {"moved": position}:
            return Moved(Position(*position))
        case {"began": _}:
            return Began()
        case {"rang": _}:
            return Rang()
    raise AssertionError(fields)


# -- recording ------------------------------------------------------------------------------------


@contextmanager
def watching(*calls: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """Replaces functions of classes or modules by wrappers, which call the original."""
    with ExitStack() as patched:
        for owner, name, wrapper in calls:
            patched.enter_context(patch.object(owner, name, wrapper))
        yield


@contextmanager
def subscriptions(sections: list[Section]) -> Iterator[None]:
    """Adds a section for every subscription of `READERS`."""
    recorded: dict[int, tuple[Subscription, Section]] = {}
    step, handle = Follower.step, Subscription.handle

    def watched_step(self: Follower, raw: RawEvent) -> None:
        subscription = self.subscription
        if (self.consumer.name, self.stream) in READERS:
            if isinstance(raw, Began):
                recorded[id(subscription)] = (
                    subscription,
                    Section(
                        "subscription", setup_of(self.consumer.name, self.stream, subscription)
                    ),
                )
                sections.append(recorded[id(subscription)][1])
            if not isinstance(raw, Came | Broke) or raw.connection in self.connections:
                line = Line(self.consumer.monotonic(), raw_event_to_json(raw))
                recorded[id(subscription)][1].lines.append(line)
        step(self, raw)

    def watched_handle(self: Subscription, event: Any) -> Any:
        actions = handle(self, event)
        if id(self) in recorded:
            line = recorded[id(self)][1].lines[-1]
            line.event, line.actions = repr(event), list(map(repr, actions))
        return actions

    with watching(
        (Follower, "step", watched_step), (Subscription, "handle", watched_handle)
    ):  # fmt: skip
        yield


def setup_of(consumer: str, stream: str, core: Subscription) -> dict[str, Any]:
    return {
        "consumer": consumer, "stream": stream, "replicas": list(core.replicas), "at": core.at,
        "tentative": core.tentative, "tentative_upto": core.tentative_upto,
        "epochs": dict(core.epochs), "local_replica": core.local_replica,
        "tolerance_buckets": core.tolerance_buckets, "heartbeat_us": core.heartbeat_us,
        "ask_us": core.ask_us,
    }  # fmt: skip


def subscription_of(kind: type[Subscription], setup: dict[str, Any]) -> Subscription:
    arguments = {k: v for k, v in setup.items() if k not in ("consumer", "stream")}
    return kind(**arguments | {"epochs": dict(arguments["epochs"])})


def record() -> list[Section]:
    sections: list[Section] = []
    with patch.dict(NETWORKS, {"lab": lambda: union_of_two(2, "200ms", "600ms")}):
        sim = Simulation(Scenario("recorded", "lab", 9, FAULTS, 1), Options())
        group_steps(60_000)(sim)
        with subscriptions(sections):
            outcome = sim.run()
    assert not outcome.failed, outcome.failed
    return sections


# -- files ----------------------------------------------------------------------------------------


def write(path: Path, sections: list[Section]) -> None:
    with path.open("w") as file:
        for section in sections:
            file.write(json.dumps({"machine": section.machine, **section.setup}) + "\n")
            for line in section.lines:
                fields = {"at": line.at, **line.raw, "event": line.event, "do": line.actions}
                file.write(json.dumps(fields) + "\n")


def read(path: Path) -> list[Section]:
    sections: list[Section] = []
    for text in path.read_text().splitlines():
        fields = json.loads(text)
        if machine := fields.pop("machine", None):
            sections.append(Section(machine, fields))
        else:
            at, event, actions = fields.pop("at"), fields.pop("event"), fields.pop("do")
            sections[-1].lines.append(Line(at, fields, event, actions))
    return sections


# -- hosts ----------------------------------------------------------------------------------------

HOSTS = ("host-1",)
HOST_FAULTS = (
    Fault(4 * S, "pause", "host-1", 5 * S),
    Fault(14 * S, "kill", "host-3", 3 * S),
    Fault(20 * S, "cut", "host-1->controller", 3 * S),
    Fault(24 * S, "kill", "controller", 12 * S),
)


@contextmanager
def hosts(sections: list[Section]) -> Iterator[None]:
    """Adds a section for every life of a host of `HOSTS`."""
    recorded: dict[int, tuple[Host, Section]] = {}
    replies: list[Registration | errors.HoldfastError] = []
    failures: dict[str, BaseException] = {}
    boot, handle, failed = HostProcess.boot, HostProcess._handle, HostProcess.failed
    decide, translate = Host.handle, host_process.heartbeat_event

    def watched_boot(self: HostProcess) -> None:
        boot(self)
        if self.name in HOSTS:
            section = Section("host", {"host": self.name, "at": self.world.now})
            recorded[id(self._core)] = self._core, section
            sections.append(section)

    def watched_event(reply: Registration | errors.HoldfastError, at: int) -> Any:
        replies.append(reply)
        return translate(reply, at)

    def watched_failed(self: HostProcess, node: NodeProcess, err: BaseException) -> None:
        failures[node.name] = err
        failed(self, node, err)

    def fields_of(event: Any) -> dict[str, Any]:
        match event:
            case NodeProgressed():
                return {"progressed": event.node, "position": event.position}
            case NodeStopped():
                return {"stopped": event.node}
            case NodeFailed():
                err = failures[event.node]
                assert isinstance(err, errors.HoldfastError), err
                return {"failed": event.node, "error": error_to_json(err)}
        reply = replies[-1]
        if isinstance(reply, errors.HoldfastError):
            return {"error": error_to_json(reply)}
        return {"current": reply.current, "assigned": reply.assigned, "refused": reply.refused}

    def watched_handle(self: HostProcess, event: Any) -> None:
        if id(self._core) in recorded:
            line = Line(self.world.now, fields_of(event), repr(event))
            recorded[id(self._core)][1].lines.append(line)
        handle(self, event)

    def watched_decide(self: Host, event: Any) -> Any:
        actions = decide(self, event)
        if id(self) in recorded:
            recorded[id(self)][1].lines[-1].actions = list(map(repr, actions))
        return actions

    with watching(
        (HostProcess, "boot", watched_boot), (HostProcess, "_handle", watched_handle),
        (HostProcess, "failed", watched_failed), (Host, "handle", watched_decide),
        (host_process, "heartbeat_event", watched_event),
    ):  # fmt: skip
        yield


def record_hosts() -> list[Section]:
    sections: list[Section] = []
    options = Options(checkpoint_buckets=7)
    sim = Simulation(Scenario("recorded", "pairs-hosts-2", 40, HOST_FAULTS, 1), options)
    with hosts(sections):
        outcome = sim.run()
    assert not outcome.failed, outcome.failed
    return sections


if __name__ == "__main__":
    from tests.verify.sim.recording_catch_up import record_catch_ups
    from tests.verify.sim.recording_promises import record_promises

    for name, make in {
        "subscriptions": record, "hosts": record_hosts, "catch_ups": record_catch_ups,
        "promises": record_promises,
    }.items():  # fmt: skip
        write(FOLDER / f"{name}.jsonl", make())
