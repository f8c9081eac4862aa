"""Translates events of the transport and of the consumer into events of `core.subscription`.

The threaded driver and the simulator share this translation, so that they cannot differ in it."""

from __future__ import annotations

from dataclasses import field, replace
from itertools import compress
from typing import assert_never

from holdfast.core import subscription as core
from holdfast.core.replica_selector import Status
from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, StaleEpoch, Trimmed
from holdfast.frozen import dataclass
from holdfast.streams.calls import StreamStatus
from holdfast.streams.delivery import Delivery
from holdfast.types import Stability


@dataclass(frozen=True, slots=True)
class Began:
    """The consumer has started."""


@dataclass(frozen=True, slots=True)
class Polled:
    """The result of a `Poll`: the reply, or the error."""

    replica: str
    reply: StreamStatus | HoldfastError


@dataclass(frozen=True, slots=True)
class Came:
    connection: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Broke:
    """A connection has failed, or could not be made."""

    connection: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Consumed:
    """The consumer has processed `part`, or refused it because its disk is `full`."""

    take: core.Take
    part: Delivery
    full: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """The consumer has reached a new position."""

    position: Position


@dataclass(frozen=True, slots=True)
class Rang:
    """The timer of a `Wake` has expired."""


RawEvent = Began | Polled | Came | Broke | Consumed | Moved | Rang


@dataclass(slots=True)
class Translation:
    """The translation of one subscription."""

    subscription: Subscription
    #: Error of the connection that failed last.
    error: HoldfastError | None = None
    #: By connection: the last delivery if it was a heartbeat. An equal heartbeat is no event.
    _heartbeats: dict[int, Delivery] = field(default_factory=dict)

    def event(self, raw: RawEvent, at: int) -> core.Event | None:
        """The event for the subscription; None: nothing has changed. Raises errors that terminate
        the consumer."""
        match raw:
            case Began():
                return core.Begin(at)
            case Polled():
                return self._polled(raw, at)
            case Came():
                return self._came(raw, at)
            case Broke():
                if self.subscription.ends_with(raw.error):
                    raise raw.error
                self.error = raw.error
                trimmed = isinstance(raw.error, Trimmed)
                return core.Disconnected(at, raw.connection, trimmed)
            case Consumed():
                if raw.full:
                    return core.Full(at)
                part = raw.part
                return core.Taken(at, part.upto, part.tentative_upto, part.ended)
            case Moved():
                return core.Advanced(at, raw.position)
            case Rang():
                return core.Tick(at)
            case _:
                assert_never(raw)

    def closed(self, connection: int) -> None:
        self._heartbeats.pop(connection, None)

    def _polled(self, polled: Polled, at: int) -> core.Event:
        replica, reply = polled.replica, polled.reply
        if isinstance(reply, StaleEpoch):
            raise reply
        if isinstance(reply, HoldfastError):
            return core.Unreachable(at, replica)
        if reply.state is None or reply.upto is None:
            return core.Reported(at, replica, None)
        status = Status(reply.state, reply.upto, reply.tentative_upto, reply.ended)
        return core.Reported(at, replica, status)

    def _came(self, came: Came, at: int) -> core.Event | None:
        number, delivery = came.connection, came.delivery
        last_heartbeat = self._heartbeats.get(number)
        if delivery.is_sign_of_life:
            if delivery is last_heartbeat or delivery == last_heartbeat:
                return None
            self._heartbeats[number] = delivery
        elif last_heartbeat is not None:
            del self._heartbeats[number]
        return core.Delivered(
            at, number, delivery.epoch, delivery.since, delivery.upto, delivery.state
        )


def selected(delivery: Delivery, take: core.Take) -> Delivery:
    """The part of a delivery that the consumer takes."""
    after, first = take.tentative_after, take.stable_from
    wanted = [
        (first is None or segment.id.bucket >= first)
        and (
            segment.stability is Stability.STABLE
            or (after is not None and segment.id.bucket > after)
        )
        for segment in delivery.segments
    ]
    if after is None and delivery.tentative_upto is not None:
        delivery = replace(delivery, tentative_upto=None, missing=())
    if all(wanted):
        return delivery
    return replace(
        delivery,
        segments=tuple(compress(delivery.segments, wanted)),
        paths=tuple(compress(delivery.paths, wanted)),
        tables=tuple(compress(delivery.tables, wanted)),
    )
