"""TCP proxies that stand between readers and producers, and break links as networks break them.

A reader connects to its proxy, the proxy to the producer; bytes go both ways through gates that can
be shut, slowed or narrowed. A shut gate is silent: connections stay open, what was sent waits, as
TCP does while a network is partitioned. Even the end of a connection does not get through.

All proxies of a run live in one thread; methods may be called from any other and have taken effect
when they return.
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
#: Chunks on their way through a slow gate; more wait where they come from.
_UNDER_WAY = 256
#: A narrow gate lets through so many pieces a second.
_PIECES_PER_S = 20
#: Aborted connections are told so: RST instead of FIN.
_NO_LINGER = struct.pack("ii", 1, 0)


class Gate:
    """What one direction of a link lets through. Only touched in the thread of the proxies."""

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
        """All bytes of `source`, then its end."""
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
    """One proxy: `reader` connects to `address`, behind which is `producer`, now at `target`."""

    def __init__(self, proxies: Proxies, producer: str, reader: str, target: str) -> None:
        self.producer, self.reader = producer, reader
        self.address = ""
        self._proxies = proxies
        self._target = target
        #: By who sends the bytes.
        self._gates = {producer: Gate(), reader: Gate()}
        #: How often each end was cut off and not mended: faults may overlap.
        self._cuts = Counter[str]()
        self._connections: set[asyncio.Task[None]] = set()
        self._sockets: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return self._proxies.do(lambda: len(self._connections))

    def lead_to(self, target: str) -> None:
        """New connections go there. Those that are open stay with whom they were made to."""
        self._target = target

    def cut(self, *senders: str) -> None:
        """Nothing these ends send gets through; without any, nothing at all."""
        self._cut_off(senders, 1)

    def mend(self, *senders: str) -> None:
        """What these ends send gets through again, once every cut is mended; without any, all."""
        self._cut_off(senders, -1)

    def delay(self, ms: float, *senders: str) -> None:
        """What these ends send takes so much longer; 0 for no longer."""
        self._each(senders, lambda gate: gate.set(delay_s=ms / 1_000))

    def throttle(self, kb_per_s: float, *senders: str) -> None:
        """So much of what these ends send gets through; 0 for everything."""
        self._each(senders, lambda gate: gate.set(bytes_per_s=kb_per_s * 1_000))

    def heal(self, *senders: str) -> None:
        """As if nothing had ever been done to what these ends send; without any, to anything."""
        for sender in senders or tuple(self._gates):
            self._cuts[sender] = 0
        self._each(senders, lambda gate: gate.set(shut=False, delay_s=0.0, bytes_per_s=0.0))

    def reset(self) -> None:
        """Break every connection; new ones can be made at once."""
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
        self, from_reader: asyncio.StreamReader, to_reader: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._sockets.add(to_reader)
        to_producer: asyncio.StreamWriter | None = None
        forth, back = self._gates[self.reader], self._gates[self.producer]
        try:
            # Making a connection takes bytes both ways.
            await forth.opened()
            await back.opened()
            host, _, port = self._target.rpartition(":")
            from_producer, to_producer = await asyncio.open_connection(host, int(port))
            self._sockets.add(to_producer)
            await _both(forth.carry(from_reader, to_producer), back.carry(from_producer, to_reader))
        except OSError:
            # One end went away: the other is told when something gets through to it again.
            with suppress(asyncio.CancelledError):
                await forth.opened()
                await back.opened()
        except asyncio.CancelledError:
            pass
        finally:
            for writer in (to_reader, to_producer):
                if writer is not None:
                    self._sockets.discard(writer)
                    writer.transport.abort()
            self._connections.discard(task)

    def _abort(self) -> None:
        for writer in list(self._sockets):
            held: socket.socket | None = writer.get_extra_info("socket")
            if held is not None:
                with suppress(OSError):
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()
        for task in list(self._connections):
            task.cancel()


class Proxies:
    """The links of a run, each made when it is first asked for, and the thread they live in."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._links: dict[tuple[str, str], Link] = {}
        self._making = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="proxies", daemon=True)
        self._thread.start()

    def link(self, producer: str, reader: str, target: str) -> Link:
        """The link between the two, leading to `target` from now on."""
        with self._making:
            link = self._links.get((producer, reader))
            if link is None:
                link = Link(self, producer, reader, target)
                asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result()
                self._links[producer, reader] = link
            link.lead_to(target)
            return link

    def all(self) -> list[Link]:
        with self._making:
            return list(self._links.values())

    def do(self, change: Callable[[], T]) -> T:
        """Run `change` where the links live."""

        async def run() -> T:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def end() -> None:
            for link in self.all():
                link.close()
            # Among them connections that were accepted a moment ago.
            while left := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _both(*ways: Coroutine[Any, Any, None]) -> None:
    """Until both are done; when one fails, the other is ended too."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
