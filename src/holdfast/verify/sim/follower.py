"""A reader's end of the simulated network: it connects, takes, connects again. The decisions are
`Following`'s, and `Upstream`'s where a stream has more than one maker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.following import Following
from holdfast.core.upstream import Action, Drop, Gone, Heard, Upstream
from holdfast.errors import HoldfastError, StorageFull, TransportError, Trimmed
from holdfast.node.executor import FULL_S
from holdfast.streams.delivery import Cursor, Delivery, verified
from holdfast.streams.subscribing import fresh, only_stable
from holdfast.types import OutputState
from holdfast.verify.sim.links import HEARTBEAT_US, SILENCE_US, Server, Wire
from holdfast.verify.sim.tables import rows_digest
from holdfast.verify.sim.world import Process


class Connection:
    """One connection over which a reader follows a stream."""

    def __init__(
        self,
        follower: Follower,
        server: Server,
        stream: str,
        replica: str,
        correcting: bool,
        ticket: int,
    ) -> None:
        self.follower, self.server, self.stream = follower, server, stream
        self.replica, self.correcting, self.ticket = replica, correcting, ticket
        self.heard_at = follower.reader.world.now
        self.server_life, self.reader_life = server.life, follower.life
        self.cursor = Cursor(0)
        self.sent_at = 0
        self.arrives_at = 0
        #: Nothing gets through any more; the reader may not have noticed yet.
        self.broken = False
        #: The reader has given it up: what is still on its way is not heard.
        self.dropped = False

    def has_news(self) -> bool:
        return self.cursor.news(self.server.service.logs[self.stream].info(self.stream))

    def send(self, delivery: Delivery) -> None:
        wire, server, reader = self.server.wire, self.server, self.follower.reader
        self.sent_at = server.world.now
        link = wire.link(server.name, reader.name)
        if delivery.ended:
            server.connections = [c for c in server.connections if c is not self]
        if link.cut or self.broken or reader.life != self.reader_life:
            self.broken = True
            return
        tables = tuple(server.service.logs[self.stream].read(s) for s in delivery.segments)
        if link.damage and tables and wire.chance.random() < 0.3:
            tables = (tables[0].damaged(), *tables[1:])
        due = server.world.now + wire.delay(link)
        if tables:
            delivery = replace(delivery, paths=(), tables=tables)
            due += link.row_us * sum(table.num_rows for table in tables)
        self.arrives_at = due = max(due, self.arrives_at + 1)
        server.world.at(due, lambda: self.follower.arrive(self, delivery), reader)

    def reset(self) -> None:
        """The other end closed it, or its process died: the reader hears of it, if it can."""
        server, reader = self.server, self.follower.reader
        link = server.wire.link(server.name, reader.name)
        if not (self.broken or link.cut or reader.life != self.reader_life):
            due = max(server.world.now + server.wire.delay(link), self.arrives_at + 1)
            server.world.at(due, lambda: self.follower.lost(self, "connection reset"), reader)
        self.broken = True


class Follower:
    """A reader's end: it connects, takes, and connects again. The decisions are `Following`'s, and
    `Upstream`'s where the stream has more than one maker."""

    def __init__(
        self,
        reader: Process,
        wire: Wire,
        stream: str,
        following: Following,
        take: Callable[[Delivery], None],
        replicas: tuple[str, ...],
        home: str | None = None,
    ) -> None:
        self.reader, self.wire, self.stream = reader, wire, stream
        self.following, self._take = following, take
        self.upstream = Upstream(replicas, following, home)
        self.life = reader.life
        #: The connection that is followed, and the one that only corrects.
        self.connections: dict[bool, Connection] = {}
        #: Of each role, the newest attempt to connect: what belongs to an older one is not heard.
        self._tickets = {False: 0, True: 0}
        self._addresses: dict[str, str | None] = {}
        #: Replicas that have deleted what the reader wants.
        self._trimmed: dict[str, Trimmed] = {}
        #: What is to be said to every replica: received, no longer needed, epoch of the reader.
        self.position: tuple[int, int, int] | None = None
        self._not_said: Callable[[HoldfastError], None] = lambda err: None
        #: What each replica was told last: where a stream has ended, all of them hear it.
        self._said: dict[str, tuple[int, int, int] | None] = {}
        self.ended = False
        self._paused_until = 0

    @property
    def connection(self) -> Connection | None:
        return self.connections.get(False)

    @property
    def _many(self) -> bool:
        return len(self.upstream.replicas) > 1

    def connect(self) -> None:
        if self._many:
            for replica in self.upstream.replicas:
                self._ask(replica)
        else:
            self._open(self.upstream.replicas[0], correcting=False)

    def acknowledge(
        self, position: tuple[int, int, int], failed: Callable[[HoldfastError], None]
    ) -> None:
        """Say it to whoever is followed; the others hear it with the next question."""
        self.position, self._not_said = position, failed
        if self._many or self.connection is None:
            return
        self._request(
            self.connection.server,
            lambda server: self._say(server, position),
            lambda _: None,
            failed,
            life=self.connection.server_life,
        )

    def _say(self, server: Any, position: tuple[int, int, int] | None) -> Any:
        if position is not None:
            server.service.acknowledge(self.stream, self.reader.name, *position)
        return server.service.stands(self.stream)

    def _request(
        self,
        server: Any,
        ask: Callable[[Any], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
        life: int | None = None,
    ) -> None:
        self.wire.request(self.reader, server, ask, reply, failed, life=life, repeatable=True)

    # -- many replicas: how do they stand? ------------------------------------------------------

    def _ask(self, replica: str) -> None:
        if self.ended and self._said.get(replica) == self.position:
            return
        if self.reader.world.now < self._paused_until:
            self.reader.after(HEARTBEAT_US, lambda: self._ask(replica))
            return
        address = self._addresses.get(replica)
        if address is None:
            self._locate(replica, lambda: self._ask_there(replica), lambda: self._away(replica))
        else:
            self._ask_there(replica)

    def _ask_there(self, replica: str) -> None:
        server = self.wire.resolve(self._addresses.get(replica))
        if server is None:
            self._away(replica)
            return
        position = self.position

        def told(stands: tuple[OutputState, int, int | None] | None) -> None:
            if stands is None:
                self._away(replica)
                return
            self._said[replica] = position
            self._perform(self.upstream.handle(Heard(self.reader.world.now, replica, *stands)))
            self.reader.after(HEARTBEAT_US, lambda: self._ask(replica))

        def failed(err: HoldfastError) -> None:
            if not isinstance(err, TransportError):
                raise err
            self._away(replica)

        self._request(server, lambda at: self._say(at, position), told, failed)

    def _away(self, replica: str) -> None:
        self._addresses.pop(replica, None)
        self._gone(replica)
        self.reader.after(HEARTBEAT_US, lambda: self._ask(replica))

    def _gone(self, replica: str) -> None:
        for correcting, connection in list(self.connections.items()):
            if connection.replica == replica:
                self._close(correcting)
        self._perform(self.upstream.handle(Gone(self.reader.world.now, replica)))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in () if self.ended else actions:
            if isinstance(action, Drop):
                self._close(action.correcting)
            else:
                self._open(action.replica, correcting=action.correcting)

    # -- connecting -----------------------------------------------------------------------------

    def _locate(self, replica: str, then: Callable[[], None], failed: Callable[[], None]) -> None:
        def located(addresses: dict[str, str | None]) -> None:
            self._addresses[replica] = addresses.get(replica)
            then()

        def refused(err: HoldfastError) -> None:
            if not isinstance(err, TransportError):
                raise err
            failed()

        self.wire.ask_controller(self.reader, lambda c: c.locate(self.stream), located, refused)

    def _open(self, replica: str, *, correcting: bool) -> None:
        """Ask where the replica is, then ask there for the stream."""
        self._close(correcting)
        ticket = self._tickets[correcting]

        def there() -> None:
            server = self.wire.resolve(self._addresses.get(replica))
            if server is None:
                self._lost(replica)
                return
            self.wire.request(
                self.reader,
                server,
                lambda at: self._begin(at, replica, correcting, ticket),
                self._begun,
                lambda err: self._failed(replica, err),
            )

        if self._many and self._addresses.get(replica) is not None:
            there()
        else:
            self._locate(replica, there, lambda: self._lost(replica))

    def _begin(self, server: Server, replica: str, correcting: bool, ticket: int) -> Connection:
        """At the server: the first delivery goes out with the answer."""
        connection = Connection(self, server, self.stream, replica, correcting, ticket)
        begun = server.service.begin(self.stream, self.following.at, self.following.tentative_after)
        if begun is None:
            raise TransportError("the stream is not opened yet")
        first, connection.cursor = begun
        server.connections.append(connection)
        connection.send(first)
        return connection

    def _begun(self, connection: Connection) -> None:
        correcting = connection.correcting
        if connection.ticket == self._tickets[correcting] and correcting not in self.connections:
            self.connections[correcting] = connection
            connection.heard_at = self.reader.world.now
            self._trimmed.pop(connection.replica, None)
            self.reader.world.say(
                self.reader.name, "corrects" if correcting else "follows", self.stream,
                connection.server.address, "from", self.following.at,
            )  # fmt: skip

    def _failed(self, replica: str, err: HoldfastError) -> None:
        if isinstance(err, Trimmed) and self._many:
            self._trimmed[replica] = err
            if len(self._trimmed) == len(self.upstream.replicas):
                raise err
        elif not isinstance(err, TransportError):
            raise err
        self._lost(replica)

    def arrive(self, connection: Connection, delivery: Delivery) -> None:
        if connection.reader_life != self.reader.life or connection.dropped or self.ended:
            return
        self._begun(connection)
        if connection is not self.connections.get(connection.correcting):
            connection.broken = connection.dropped = True
            return
        connection.heard_at = self.reader.world.now
        if delivery.info is not None and self.position is not None:
            # Whoever speaks may be new, and not know how far we are.
            self.acknowledge(self.position, self._not_said)
        try:
            for number, table in enumerate(delivery.tables):
                verified(table, delivery.segments[number], rows_digest)
            if self._many:
                now = self.reader.world.now
                said = self.upstream.said(now, connection.replica, delivery.state, delivery.upto)
                self._perform(said)
                if not self.upstream.takes_tentative(connection.replica):
                    delivery = only_stable(delivery)
            self._take(fresh(self.following, delivery, connection.replica))
        except TransportError as err:
            self._drop(connection, str(err))
        except StorageFull as err:
            self._drop(connection, str(err), int(FULL_S * 1e6))
        else:
            self.ended = delivery.ended

    def lost(self, connection: Connection, why: str) -> None:
        if connection is self.connections.get(connection.correcting) and not self.ended:
            self._drop(connection, why)

    def watch(self) -> None:
        """Silence is taken for death."""
        for connection in list(self.connections.values()):
            if not self.ended and self.reader.world.now - connection.heard_at > SILENCE_US:
                self._drop(connection, "silence")

    def _drop(self, connection: Connection, why: str, retry_us: int | None = None) -> None:
        self.reader.world.say(self.reader.name, "lost", self.stream, f"({why})")
        if self.connections.get(connection.correcting) is connection:
            self._close(connection.correcting)
        if retry_us is not None and self._many:
            self._pause(retry_us)
        else:
            self._lost(connection.replica, retry_us)

    def _pause(self, for_us: int) -> None:
        """The reader has no space: nobody is read for a while."""
        self._paused_until = self.reader.world.now + for_us
        self._close(False)
        self._close(True)
        self.upstream = Upstream(self.upstream.replicas, self.following, self.upstream.home)

    def _close(self, correcting: bool) -> None:
        self._tickets[correcting] += 1
        connection = self.connections.pop(correcting, None)
        if connection is not None:
            connection.broken = connection.dropped = True

    def _lost(self, replica: str, after_us: int | None = None) -> None:
        if self._many:
            self._gone(replica)
            return
        pause_us = self.following.lost() * 1_000 if after_us is None else after_us
        self.reader.after(pause_us, self.connect)
