"""TCP proxies between consumers and producers that inject network faults.

A consumer connects to its proxy, and the proxy connects to the producer. Each direction passes a
gate that can be shut, delayed or throttled. A shut gate behaves like a partitioned network:
connections stay open, and sent bytes wait. Not even the end of a connection passes a shut gate.

All proxies of a run share one thread. Their methods may be called from any other thread and have
taken effect when they return.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK_BYTES = 64 * 1024
#: Most chunks buffered in a slow gate. Further bytes stay with the sender.
_UNDER_WAY = 256
#: A throttled gate forwards this many pieces per second.
_PIECES_PER_S = 20
#: SO_LINGER value that makes an abort send RST instead of FIN.
_NO_LINGER = struct.pack("ii", 1, 0)


class Gate:
    """One direction of a link. Used only in the thread of the proxies."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0

    def set(
        self,
        *,
        shut: bool | None = None,
        delay_s: float | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        if shut is not None:
            (self._open.clear if shut else self._open.set)()
        self._delay_s = self._delay_s if delay_s is None else delay_s
        self._bytes_per_s = self._bytes_per_s if bytes_per_s is None else bytes_per_s

    async def opened(self) -> None:
        await self._open.wait()

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Forward all bytes of `source`, then the end of the connection."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)

        async def take() -> None:
            while True:
                data = await source.read(_CHUNK_BYTES)
                await under_way.put((loop.time(), data))
                if not data:
                    return

        async def give() -> None:
            while True:
                at, data = await under_way.get()
                while (wait_s := at + self._delay_s - loop.time()) > 0:
                    await asyncio.sleep(min(wait_s, 1 / _PIECES_PER_S))
                await self._pass(data, target)
                if not data:
                    target.write_eof()
                    return

        await _both(take(), give())

    async def _pass(self, data: bytes, target: asyncio.StreamWriter) -> None:
        while data:
            await self.opened()
            size = len(data)
            if self._bytes_per_s:
                size = min(size, max(1, int(self._bytes_per_s / _PIECES_PER_S)))
                await asyncio.sleep(size / self._bytes_per_s)
                await self.opened()
            target.write(data[:size])
            await target.drain()
            data = data[size:]
        await self.opened()


class Link:
    """One proxy. `consumer` connects to `address`; the proxy connects to `producer` at `target`."""

    def __init__(self, proxies: Proxies, producer: str, consumer: str, target: str) -> None:
        self.producer, self.consumer = producer, consumer
        self.address = ""
        self._proxies = proxies
        self._target = target
        #: Gate by sender of the bytes.
        self._gates = {producer: Gate(), consumer: Gate()}
        #: Number of active cuts per sender: faults may overlap.
        self._cuts = Counter[str]()
        self._connections: set[asyncio.Task[None]] = set()
        self._sockets: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return self._proxies.do(lambda: len(self._connections))

    def lead_to(self, target: str) -> None:
        """Send new connections to `target`. Open connections keep their old target."""
        self._target = target

    def cut(self, *senders: str) -> None:
        """Block everything from these senders, or from both ends if none is given."""
        self._cut_off(senders, 1)

    def mend(self, *senders: str) -> None:
        """Undo one cut of these senders, or of both ends. The last undone cut opens the gate."""
        self._cut_off(senders, -1)

    def delay(self, ms: float, *senders: str) -> None:
        """Delay bytes from these senders by `ms`; 0 removes the delay."""
        self._each(senders, lambda gate: gate.set(delay_s=ms / 1_000))

    def throttle(self, kb_per_s: float, *senders: str) -> None:
        """Limit the rate of these senders to `kb_per_s`; 0 removes the limit."""
        self._each(senders, lambda gate: gate.set(bytes_per_s=kb_per_s * 1_000))

    def heal(self, *senders: str) -> None:
        """Remove all faults of these senders, or of both ends if none is given."""
        for sender in senders or tuple(self._gates):
            self._cuts[sender] = 0
        self._each(senders, lambda gate: gate.set(shut=False, delay_s=0.0, bytes_per_s=0.0))

    def reset(self) -> None:
        """Abort all connections. New connections are accepted at once."""
        self._proxies.do(self._abort)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._abort()

    def _cut_off(self, senders: tuple[str, ...], times: int) -> None:
        for sender in senders or tuple(self._gates):
            self._cuts[sender] = max(0, self._cuts[sender] + times)
            shut = self._cuts[sender] > 0
            self._each((sender,), lambda gate, shut=shut: gate.set(shut=shut))  # type: ignore[misc]

    def _each(self, senders: tuple[str, ...], change: Callable[[Gate], None]) -> None:
        def apply() -> None:
            for sender in senders or tuple(self._gates):
                change(self._gates[sender])

        self._proxies.do(apply)

    async def _connected(
        self, from_consumer: asyncio.StreamReader, to_consumer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._sockets.add(to_consumer)
        to_producer: asyncio.StreamWriter | None = None
        forth, back = self._gates[self.consumer], self._gates[self.producer]
        try:
            # A TCP handshake needs both directions.
            await forth.opened()
            await back.opened()
            host, _, port = self._target.rpartition(":")
            from_producer, to_producer = await asyncio.open_connection(host, int(port))
            self._sockets.add(to_producer)
            await _both(
                forth.carry(from_consumer, to_producer), back.carry(from_producer, to_consumer)
            )
        except OSError:
            # One end is gone: the other end learns that only when both gates are open.
            with suppress(asyncio.CancelledError):
                await forth.opened()
                await back.opened()
        except asyncio.CancelledError:
            pass
        finally:
            for writer in (to_consumer, to_producer):
                if writer is not None:
                    self._sockets.discard(writer)
                    writer.transport.abort()
            self._connections.discard(task)

    def _abort(self) -> None:
        for writer in list(self._sockets):
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()
        for task in list(self._connections):
            task.cancel()


class Proxies:
    """The links of a run, each created on first use, and the thread that runs them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: dict[tuple[str, str], Link] = {}
        self._making = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="proxies", daemon=True)
        self._thread.start()

    def link(self, producer: str, consumer: str, target: str) -> Link:
        """Return the link between `producer` and `consumer`, redirected to `target`."""
        with self._making:
            link = self._links.get((producer, consumer))
            if link is None:
                link = Link(self, producer, consumer, target)
                asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result()
                self._links[producer, consumer] = link
            link.lead_to(target)
            return link

    def all(self) -> list[Link]:
        with self._making:
            return list(self._links.values())

    def do(self, change: Callable[[], T]) -> T:
        """Run `change` in the thread of the proxies and return its result."""

        async def run() -> T:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def end() -> None:
            for link in self.all():
                link.close()
            # This includes connections accepted a moment ago, which no link knows yet.
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _both(*ways: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines to the end. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
