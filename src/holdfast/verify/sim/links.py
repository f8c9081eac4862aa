"""The network between simulated processes: requests with replies, and subscribed streams.

The guarantees are those of TCP and no more. Data on one connection arrives in order and once. A
connection may break at any time, and then neither side knows how much of the data arrived. A
request without a reply may have been executed, now or much later, even twice. A link that is cut
drops everything, and the consumer detects the cut only by missing heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, TransportError
from holdfast.streams.serving import Service
from holdfast.verify.sim.simulated_disk import Crashed
from holdfast.verify.sim.world import Process, World

if TYPE_CHECKING:
    from holdfast.verify.sim.simulated_subscriber import Connection

HEARTBEAT_US = 100_000
SILENCE_US = 1_000_000


@dataclass(slots=True)
class Link:
    """One direction between two processes."""

    #: `cut`, `repeat`, `damage`: number of active faults of this kind, which may overlap.
    cut: int = 0
    repeat: int = 0
    damage: int = 0
    delay_us: int = 0
    #: Arrival of the last message that was delayed by a fault; the fault may be over by then.
    slow_until: int = 0
    #: Delay that the fault added to that message.
    slow_us: int = 0
    #: Microseconds per row on a throttled link.
    row_us: int = 0


class Server(Process):
    """A process that serves streams and requests of other processes."""

    def __init__(self, world: World, name: str, wire: Wire) -> None:
        super().__init__(world, name)
        self.wire = wire
        self.service = Service()
        #: Connections of consumers that read a stream of this server, in order of arrival.
        self.connections: list[Connection] = []

    def beat(self) -> None:
        """Sends heartbeats on connections that have been quiet."""
        quiet_since = self.world.now - HEARTBEAT_US
        for connection in self.connections[:]:
            if connection.broken:
                self.connections.remove(connection)
            elif connection.sent_at <= quiet_since:
                connection.beat()
        self.after(HEARTBEAT_US, self.beat)

    def spread(self) -> None:
        for connection in self.connections[:]:
            if connection.broken:
                self.connections.remove(connection)
            else:
                connection.send_news()

    def forget(self) -> None:
        self.service = Service()
        for connection in self.connections:
            connection.reset()
        self.connections = []


class Wire:
    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.rng("wire")
        self.controller: Any = None
        self._links: dict[tuple[str, str], Link] = {}
        #: Every instance that was ever reachable, by address.
        self._servers: dict[str, Server] = {}

    def link(self, a: str, b: str) -> Link:
        link = self._links.get((a, b))
        if link is None:
            link = self._links[a, b] = Link()
        return link

    @property
    def delays_us(self) -> int:
        """The longest delay that faults add to the messages of any link, including messages that
        are still in flight after the fault: later messages of a connection arrive after them."""
        now = self.world.now
        return max(
            (
                max(link.delay_us, link.slow_us if link.slow_until > now else 0)
                for link in self._links.values()
            ),
            default=0,
        )

    @property
    def settling(self) -> bool:
        """Messages that were delayed by a fault are still in flight."""
        return any(link.slow_until > self.world.now for link in self._links.values())

    def in_flight_us(self, name: str) -> int:
        """The time for which delayed messages to a process are still in flight; the sum over all
        its links."""
        now = self.world.now
        links = [link for (_, to), link in self._links.items() if to == name]
        return sum(max(0, link.slow_until - now) for link in links)

    @property
    def throttled(self) -> bool:
        """Some link is throttled: its rows arrive, but repeatedly late."""
        return any(link.row_us for link in self._links.values())

    def delay(self, link: Link) -> int:
        chance = self.chance.random()
        base = 200 + int(1_800 * chance)
        if chance > 0.98:
            base += int(40_000 * self.chance.random())
        if link.delay_us:
            base += link.delay_us
            if self.world.now + base > link.slow_until:
                link.slow_until, link.slow_us = self.world.now + base, link.delay_us
        return base

    def listen(self, server: Server) -> None:
        self._servers[server.address] = server

    def resolve(self, address: str | None) -> Server | None:
        """The server that listens at an address; None if that instance is gone."""
        server = self._servers.get(address) if address is not None else None
        return server if server is not None and server.address == address else None

    def ask_controller(
        self,
        process: Process,
        ask: Callable[[Any], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        self.request(process, self.controller, ask, reply, failed)

    def request(
        self,
        process: Process,
        server: Any,
        ask: Callable[[Any], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
        *,
        life: int | None = None,
        repeatable: bool = False,
    ) -> None:
        """Executes `ask` at the server, if the server is still in that life; then calls `reply` or
        `failed` at the process."""
        world = self.world
        forward, back = self.link(process.name, server.name), self.link(server.name, process.name)
        life, answered = server.life if life is None else life, False
        asked_in = process.life

        def answer_with(fn: Callable[[], None], after_us: int) -> None:
            if process.life == asked_in:
                process.after(after_us, fn)

        def fail(text: str, after_us: int) -> None:
            answer_with(lambda: failed(TransportError(text)), after_us)

        def carry_out() -> None:
            nonlocal answered
            answer: Any = None
            error: HoldfastError | None = None
            try:
                answer = ask(server)
            except HoldfastError as err:
                error = err
            except Crashed:
                if not answered:
                    answered = True
                    fail(f"{server.name} crashed while it handled the request", self.delay(back))
                raise
            if answered:
                return
            answered = True
            if back.cut:
                fail(f"{server.name} did not answer", SILENCE_US)
            elif error is not None:
                refusal = error
                answer_with(lambda: failed(refusal), self.delay(back))
            else:
                answer_with(lambda: reply(answer), self.delay(back))

        def arrive() -> None:
            if server.alive and server.life == life:
                if server.paused:
                    server.backlog.append(carry_out)
                    fail_if_unanswered()
                else:
                    server.enter(carry_out)
            elif not back.cut:
                fail(f"{server.name} is gone", self.delay(back))
            else:
                fail(f"{server.name} does not answer", SILENCE_US)

        def fail_if_unanswered() -> None:
            def check() -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    failed(TransportError(f"{server.name} is paused"))

            answer_with(check, SILENCE_US)

        if forward.cut:
            fail(f"{server.name} cannot be reached", SILENCE_US)
            return
        world.at(world.now + self.delay(forward), arrive)
        if repeatable and forward.repeat and self.chance.random() < 0.5:
            late = int(3_000_000 * self.chance.random())

            def again() -> None:
                if server.alive and server.life == life and not server.paused:
                    server.enter(lambda: _quietly(lambda: ask(server)))

            world.at(world.now + late, again)


def _quietly(ask: Callable[[], Any]) -> None:
    with suppress(HoldfastError):
        ask()
