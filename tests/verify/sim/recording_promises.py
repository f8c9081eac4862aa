"""Records replicas that ask each other to keep answering while they correct their results, in a
simulated run with faults (`recording`).

Messages are recorded as they arrive: deliveries, requests, replies and acknowledgements. Internal
events of a node, such as the end of a step or a timer, are recorded by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.core.progress import Progress
from holdfast.errors import HoldfastError, TransportError
from holdfast.model.network import Network
from holdfast.node.executor import Performer
from holdfast.node.node_events import (
    Arrived,
    Asked,
    DigestsReceived,
    Event,
    Finished,
    Flushed,
    InputDigestsReceived,
    Replied,
)
from holdfast.streams import codec
from holdfast.streams.calls import Postpone, Postponement
from holdfast.streams.delivery import Delivery
from holdfast.verify.scenario import Fault, Scenario
from holdfast.verify.sim.networks import NETWORKS
from holdfast.verify.sim.simulation import Simulation
from holdfast.verify.sim.tables import Rows
from tests.verify.sim.lab import S, group_steps, union_of_two
from tests.verify.sim.recording import Line, Section, error_of, error_to_json, watching

SEED, BUCKET_US = 1, 60_000
OPTIONS = Options(checkpoint_buckets=12)
#: The third replica only receives requests; it is paused and killed.
REPLICAS = ("main", "main@2")
FAULTS = (
    # All replicas want to correct at once, and one is paused.
    Fault(1 * S, "cut", "s2<->main,main@2,main@3", 2 * S),
    Fault(3_100_000, "pause", "main@3", 1_600_000),
    # Again, and no peer can be asked: one is dead, the other is unreachable.
    Fault(6_500_000, "cut", "s1<->main,main@2,main@3", 2 * S),
    Fault(8_200_000, "kill", "main@3", 1 * S),
    Fault(8_300_000, "cut", "main->main@2", 1_500_000),
)
#: Fields of a delivery that are not recorded.
WITHOUT = ("tables", "paths")


def network() -> Network:
    return union_of_two(3, "200ms", "600ms")


# -- events as JSON -------------------------------------------------------------------------------


def delivery_to_json(delivery: Delivery) -> dict[str, Any]:
    return {"delivered": codec.encode(delivery, without=WITHOUT)}


def delivery_of(fields: dict[str, Any]) -> Delivery:
    """With the recorded number of rows; no decision depends on their content."""
    delivery = codec.decode(
        Delivery, fields["delivered"], TransportError, "recording", without=WITHOUT
    )
    tables = [
        Rows([(segment.t_max_us, 1, number) for number in range(segment.rows)])
        for segment in delivery.segments
    ]
    return replace(delivery, tables=tuple(tables))


def postpone_of(fields: dict[str, Any]) -> Postpone:
    return codec.decode(Postpone, fields, TransportError, "recording")


def reply_of(fields: dict[str, Any]) -> Postponement | HoldfastError:
    if "error" in fields:
        return error_of(fields["error"])
    return codec.decode(Postponement, fields["reply"], TransportError, "recording")


def name_of(event: Event) -> str:
    """The recorded name of an internal event of a node."""
    match event:
        case Arrived():
            return f"Arrived({event.stream!r}, {event.upto})"
        case Finished():
            return f"Finished({event.run!r}, {event.error!r})"
        case Flushed():
            return f"Flushed({event.version.bucket}, {event.error!r})"
    return repr(event)


def without_duration(event: core.Event) -> core.Event:
    """The duration of a step or a checkpoint is the only field that differs between drivers."""
    if isinstance(event, core.StepDone | core.CheckpointDone):
        return replace(event, took_us=0)
    return event


def event_to_json(event: Event) -> dict[str, Any]:
    match event:
        case core.Began():
            return {"began": True}
        case Asked():
            return {"asked": codec.encode(event.asks)}
        case Replied(request, peer, HoldfastError() as err):
            return {"replied": peer, "to": codec.encode(request), "error": error_to_json(err)}
        case Replied(request, peer, reply):
            return {"replied": peer, "to": codec.encode(request), "reply": codec.encode(reply)}
        case core.Acknowledged():
            return {"acknowledged": event.output, "upto": [event.needed, event.received]}
    return {"took": name_of(event)}


# -- recording ------------------------------------------------------------------------------------


@contextmanager
def promises(sections: list[Section]) -> Iterator[None]:
    """Adds a section for the first life of each of `REPLICAS`."""
    recorded: dict[int, tuple[Performer, Section]] = {}
    take, receive, handle = Performer.take, Performer.receive, Progress.handle
    #: The recorded performers that are handling an event now.
    taking: list[Section] = []

    def watched_take(self: Performer, event: Event) -> None:
        if isinstance(event, core.Began) and self.name in REPLICAS and self.log.epoch == 1:
            engine: Any = self.engine
            setup = {"name": self.name, "buckets_max": engine.buckets_max}
            sections.append(Section("replica", setup))
            recorded[id(self)] = self, sections[-1]
        if id(self) not in recorded or isinstance(event, DigestsReceived | InputDigestsReceived):
            take(self, event)
            return
        section = recorded[id(self)][1]
        line = Line(self._clock(), event_to_json(event))
        section.lines.append(line)
        if isinstance(event, Asked):
            event = replace(event, reply=answering(line, event))
        taking.append(section)
        take(self, event)
        taking.pop()

    def answering(line: Line, event: Asked) -> Any:
        def reply(postponement: Postponement) -> None:
            line.raw["reply"] = codec.encode(postponement)
            event.reply(postponement)

        return reply

    def watched_receive(self: Performer, delivery: Delivery) -> None:
        if id(self) in recorded and not delivery.is_sign_of_life:
            line = Line(self._clock(), delivery_to_json(delivery))
            recorded[id(self)][1].lines.append(line)
        receive(self, delivery)

    def watched_handle(self: Progress, event: core.Event) -> list[core.Action]:
        actions = handle(self, event)
        if taking:
            lines = taking[-1].lines
            if (
                lines[-1].event is not None
            ):  # a delivery causes two events: the stream, and its rows
                lines.append(Line(lines[-1].at, {"with": "it"}))
            lines[-1].event = repr(without_duration(event))
            lines[-1].actions = list(map(repr, actions))
        return actions

    with watching(
        (Performer, "take", watched_take), (Performer, "receive", watched_receive),
        (Progress, "handle", watched_handle),
    ):  # fmt: skip
        yield


def record_promises() -> list[Section]:
    sections: list[Section] = []
    with patch.dict(NETWORKS, {"lab": network}):
        sim = Simulation(Scenario("recorded", "lab", 11, FAULTS, SEED), OPTIONS)
        group_steps(BUCKET_US)(sim)
        with promises(sections):
            outcome = sim.run()
    assert not outcome.failed, outcome.failed
    return sections
