"""Drives a subscription in virtual time, over simulated links. All decisions are made in
`core.subscription`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.core import subscription as core
from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, StorageFull, TransportError
from holdfast.streams.calls import StreamStatus
from holdfast.streams.delivery import Cursor, Delivery, verified
from holdfast.streams.serving import OPENING_S
from holdfast.streams.subscription_events import (
    Began,
    Broke,
    Came,
    Consumed,
    Moved,
    Polled,
    Rang,
    RawEvent,
    Translation,
    selected,
)
from holdfast.verify.sim.links import SILENCE_US, Server, Wire
from holdfast.verify.sim.tables import rows_digest
from holdfast.verify.sim.world import Process


class Connection:
    """One connection over which a consumer reads a stream."""

    def __init__(
        self,
        follower: Follower,
        server: Server,
        stream: str,
        number: int,
    ) -> None:
        self.follower, self.server, self.stream, self.number = follower, server, stream, number
        self.heard_at = follower.consumer.world.now
        self.consumer_life = follower.life
        self.link = server.wire.link(server.name, follower.consumer.name)
        #: None until the stream is open.
        self.cursor: Cursor | None = None
        self.sent_at = 0
        self.arrives_at = 0
        #: The connection delivers nothing any more; the consumer may not have detected that yet.
        self.broken = False
        #: The last delivery was sent; the first one has arrived.
        self.ended = self.is_read = False

    def begin(self, from_bucket: int | None, tentative_after: int | None) -> None:
        """Sends the first delivery as soon as the stream is open, as `Service.follow` does."""
        begun = self.server.service.begin(self.stream, from_bucket, tentative_after)
        if begun is None:
            self.server.after(
                int(1e6 * OPENING_S), lambda: self._begin_later(from_bucket, tentative_after)
            )
            return
        first, self.cursor = begun
        self.send(first)
        if not first.ended:
            self.send_news()

    def _begin_later(self, from_bucket: int | None, tentative_after: int | None) -> None:
        if self.broken:
            return
        try:
            self.begin(from_bucket, tentative_after)
        except HoldfastError as err:
            self.reset(err)

    def beat(self) -> None:
        if self.cursor is not None:
            self.send(self.server.service.next(self.stream, self.cursor))

    def send_news(self) -> None:
        """Sends until there is nothing new. Different tentative buckets need separate
        deliveries."""
        service, cursor = self.server.service, self.cursor
        if cursor is None:
            return
        while cursor.news(service.logs[self.stream].info(self.stream)):
            at = cursor.at, cursor.tentative_at
            self.send(service.next(self.stream, cursor))
            if self.broken or (cursor.at, cursor.tentative_at) == at:
                return

    def send(self, delivery: Delivery) -> None:
        server, consumer, link = self.server, self.follower.consumer, self.link
        wire, world = server.wire, server.world
        self.sent_at = world.now
        if delivery.ended:
            self.ended = True
            server.connections = [c for c in server.connections if c is not self]
        if link.cut or self.broken or consumer.life != self.consumer_life:
            self.broken = True
            return
        tables: tuple[Any, ...] = ()
        if delivery.segments:
            log = server.service.logs[self.stream]
            tables = tuple([log.read(segment) for segment in delivery.segments])
            if link.damage and wire.chance.random() < 0.3:
                tables = (tables[0].damaged(), *tables[1:])
        due = world.now + wire.delay(link)
        if tables:
            delivery = delivery.carrying(tables)
            due += link.row_us * sum(table.num_rows for table in tables)
        self.arrives_at = due = max(due, self.arrives_at + 1)
        world.at(due, partial(self.follower.arrive, self, delivery), consumer)

    def reset(self, err: HoldfastError | None = None) -> None:
        """The other end closed the connection or died; the consumer is notified if the link
        works."""
        why = err or TransportError("connection reset")
        server, consumer = self.server, self.follower.consumer
        link = self.link
        if not (self.broken or link.cut or consumer.life != self.consumer_life):
            due = max(server.world.now + server.wire.delay(link), self.arrives_at + 1)
            server.world.at(due, lambda: self.follower.lost(self, why), consumer)
        self.broken = True


class Follower:
    """The consumer's end of a subscription: opens connections, polls replicas, and passes
    deliveries on."""

    def __init__(
        self,
        consumer: Process,
        wire: Wire,
        stream: str,
        subscription: Subscription,
        take: Callable[[Delivery], None],
    ) -> None:
        self.consumer, self.wire, self.stream = consumer, wire, stream
        self.subscription, self._take = subscription, take
        self.life = consumer.life
        #: Requested connections by number; None until they are established.
        self.connections: dict[int, Connection | None] = {}
        self._addresses: dict[str, str | None] = {}
        self._translation = Translation(subscription)

    @property
    def ended(self) -> bool:
        return self.subscription.ended

    def connect(self) -> None:
        self.step(Began())

    def advanced(self, position: Position) -> None:
        """Takes effect after the current event, as with a thread and a queue."""
        self.consumer.after(0, lambda: self.step(Moved(position)))

    @property
    def _now(self) -> int:
        return self.consumer.world.now

    def step(self, raw: RawEvent) -> None:
        """Handles an event and performs the resulting actions."""
        delivery = None
        if isinstance(raw, Came):
            if raw.connection not in self.connections:
                return
            delivery = raw.delivery
        elif isinstance(raw, Broke) and raw.connection not in self.connections:
            return
        event = self._translation.event(raw, self.consumer.world.now)
        if event is not None:
            self._perform(self.subscription.handle(event), delivery)

    def _perform(self, actions: Sequence[core.Action], delivery: Delivery | None) -> None:
        for action in actions:
            match action:
                case core.Poll():
                    self._poll(action)
                case core.Connect():
                    self._open(action)
                case core.Disconnect():
                    self._close(action.connection)
                case core.Take():
                    assert delivery is not None
                    self._hand_on(action, delivery)
                case core.Lost():
                    self.consumer.world.say(
                        self.consumer.name,
                        "stopped reading",
                        self.stream,
                        action.replica,
                        f"({action.why})",
                    )
                case core.Wake():
                    self.consumer.after(max(0, action.at - self._now), lambda: self.step(Rang()))
                case core.Unobtainable():
                    assert self._translation.error is not None
                    raise self._translation.error
                case core.Switched() | core.Finished():
                    pass

    # -- polling --------------------------------------------------------------------------------

    def _poll(self, poll: core.Poll) -> None:
        def failed(err: HoldfastError) -> None:
            self._addresses.pop(poll.replica, None)
            self.step(Polled(poll.replica, err))

        def answered(status: StreamStatus) -> None:
            self.step(Polled(poll.replica, status))

        def request_status(server: Server) -> None:
            self.wire.request(
                self.consumer, server, lambda at: self._say(at, poll.position), answered, failed,
                repeatable=True,
            )  # fmt: skip

        self._reach(poll.replica, request_status, failed)

    def _say(self, server: Server, position: Position | None) -> StreamStatus:
        if position is not None:
            server.service.acknowledge(self.stream, self.consumer.name, *position)
        return StreamStatus(*server.service.stream_status(self.stream) or ())

    def _reach(
        self,
        replica: str,
        then: Callable[[Server], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        """Calls `then` with the replica's server; asks the controller if the address is unknown."""

        def proceed() -> None:
            server = self.wire.resolve(self._addresses.get(replica))
            if server is None:
                failed(TransportError(f"{replica} has no live instance"))
            else:
                then(server)

        def located(addresses: dict[str, str | None]) -> None:
            self._addresses[replica] = addresses.get(replica)
            proceed()

        if self._addresses.get(replica) is not None:
            proceed()
        else:
            ask = self.wire.ask_controller
            ask(self.consumer, lambda c: c.locate(self.stream), located, failed)

    # -- connections ----------------------------------------------------------------------------

    def _open(self, action: core.Connect) -> None:
        number = action.connection
        self.connections[number] = None

        def begin(server: Server) -> None:
            self.wire.request(
                self.consumer, server, lambda at: self._begin(at, action), self._begun, failed
            )

        def failed(err: HoldfastError) -> None:
            self._addresses.pop(action.replica, None)
            self.step(Broke(number, err))

        self._reach(action.replica, begin, failed)

    def _begin(self, server: Server, action: core.Connect) -> Connection:
        """Runs at the server: the first delivery is sent together with the reply, or when the
        stream is open."""
        connection = Connection(self, server, self.stream, action.connection)
        connection.begin(action.from_bucket, action.tentative_after)
        if not connection.ended:
            server.connections.append(connection)
        return connection

    def _begun(self, connection: Connection) -> None:
        if connection.number not in self.connections:
            connection.broken = True
        elif self.connections[connection.number] is None:
            self.connections[connection.number] = connection
            connection.heard_at = self.consumer.world.now

    def _close(self, number: int) -> None:
        connection = self.connections.pop(number, None)
        self._translation.closed(number)
        if connection is not None:
            connection.broken = True

    # -- deliveries -----------------------------------------------------------------------------

    def arrive(self, connection: Connection, delivery: Delivery) -> None:
        if connection.consumer_life != self.consumer.life:
            return
        self._begun(connection)
        if self.connections.get(connection.number) is not connection:
            connection.broken = True
            return
        if not connection.is_read:
            connection.is_read = True
            self.consumer.world.say(
                self.consumer.name, "reads", self.stream, connection.server.address, "from bucket",
                self.subscription.at,
            )  # fmt: skip
        connection.heard_at = self.consumer.world.now
        try:
            for number, table in enumerate(delivery.tables):
                verified(table, delivery.segments[number], rows_digest)
        except TransportError as err:
            self.step(Broke(connection.number, err))
        else:
            self.step(Came(connection.number, delivery))

    def _hand_on(self, action: core.Take, delivery: Delivery) -> None:
        part, full = selected(delivery, action), False
        try:
            self._take(part)
        except StorageFull:
            full = True
        self.step(Consumed(action, part, full))

    def lost(self, connection: Connection, err: HoldfastError) -> None:
        self.step(Broke(connection.number, err))

    def watch(self) -> None:
        """Breaks connections without heartbeats, as the transport does."""
        for connection in list(self.connections.values()):
            if connection is None:
                continue
            if not self.ended and self.consumer.world.now - connection.heard_at > SILENCE_US:
                self.step(Broke(connection.number, TransportError("no heartbeat")))
