"""Drives a subscription with threads: one thread per connection reads, a pool polls replicas, and
the thread that iterates consumes the deliveries. `core.subscription` makes all decisions."""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from holdfast.clock import monotonic_us
from holdfast.core import subscription as core
from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, StorageFull, TransportError
from holdfast.streams.calls import GetStreamStatus, StreamStatus
from holdfast.streams.delivery import Delivery, Peer
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

#: By replica of the producer: a function that connects to it.
Connections = Mapping[str, Callable[[], Peer]]
#: Deliveries of one connection that may wait to be consumed.
WAITING = 8
#: Interval at which the loop checks whether to stop.
LOOK_US = 100_000


@dataclass(eq=False, slots=True)
class _Line:
    """One connection to a replica."""

    number: int
    over: threading.Event = field(default_factory=threading.Event)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WAITING))


class Subscriber:
    """One subscription of `consumer`, from its first connection to its end."""

    def __init__(
        self,
        stream: str,
        consumer: str,
        subscription: Subscription,
        producers: Connections,
        stop: threading.Event,
        *,
        clock: Callable[[], int] = monotonic_us,
        lost: Callable[[HoldfastError], None] = lambda err: None,
        switched: Callable[[str, int], None] = lambda replica, us: None,
    ) -> None:
        self.stream, self.consumer, self.subscription = stream, consumer, subscription
        self._translation = Translation(subscription)
        self._producers, self._stop, self._clock = producers, stop, clock
        self._lost, self._switched = lost, switched
        self._events: queue.Queue[RawEvent] = queue.Queue()
        self._lines: dict[int, _Line] = {}
        self._peers: dict[str, Peer] = {}
        self._polling = ThreadPoolExecutor(len(producers), f"{stream}-poll")
        self._wakes: list[int] = []
        self._finished = False
        self._full = False
        #: True: positions are reported after the end of the stream as well, until `stop` is set.
        self._linger = False
        #: Time of the last delivery, heartbeats included.
        self.heard_us = clock()

    def advanced(self, position: Position) -> None:
        """Report a new position of the consumer to the producers. Thread-safe."""
        self._events.put(Moved(position))

    def run(self, take: Callable[[Delivery], None]) -> None:
        """Pass deliveries to `take` until the stream has ended or `stop` is set. A delivery that
        `take` refuses because of a full disk is delivered again. Positions are reported to the
        producers until `stop` is set, also after the stream has ended."""
        self._linger = True
        for delivery in self.deliveries():
            try:
                take(delivery)
            except StorageFull as err:
                self._lost(err)
                self._full = True

    def deliveries(self) -> Iterator[Delivery]:
        """The deliveries in order. A request for the next delivery confirms the previous one."""
        try:
            yield from self.step(Began())
            while not (self._stop.is_set() or self.subscription.ended):
                if (raw := self._next()) is not None:
                    yield from self.step(raw)
        finally:
            for number in list(self._lines):
                self._close(number)
            if self.subscription.ended:
                threading.Thread(
                    target=self._last_words, name=f"{self.stream}-end", daemon=True
                ).start()
            else:
                self._polling.shutdown(wait=False, cancel_futures=True)

    def _last_words(self) -> None:
        """After the end of the stream, report the final position to every replica that can be
        reached."""
        while not self._stop.is_set() and (self._linger or not self._finished):
            if (raw := self._next()) is not None:
                for _ in self.step(raw):
                    pass
        self._polling.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> RawEvent | None:
        now = self._clock()
        if self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            return Rang()
        wait_us = min(self._wakes[0] - now, LOOK_US) if self._wakes else LOOK_US
        try:
            return self._events.get(timeout=wait_us / 1e6)
        except queue.Empty:
            return None

    # -- events in, actions performed -----------------------------------------------------------

    def step(self, raw: RawEvent) -> Iterator[Delivery]:
        """Handle an event and perform the resulting actions. Yields deliveries to consume."""
        if isinstance(raw, Came | Broke) and raw.connection not in self._lines:
            return
        delivery = None
        if isinstance(raw, Came):
            self._lines[raw.connection].room.release()
            delivery = raw.delivery
        yield from self._handle(raw, delivery)

    def _handle(self, raw: RawEvent, delivery: Delivery | None = None) -> Iterator[Delivery]:
        event = self._translation.event(raw, self._clock())
        if event is not None:
            yield from self._perform(self.subscription.handle(event), delivery)

    def _perform(
        self, actions: list[core.Action], delivery: Delivery | None = None
    ) -> Iterator[Delivery]:
        for action in actions:
            match action:
                case core.Poll():
                    self._polling.submit(self._poll, action)
                case core.Connect():
                    line = self._lines[action.connection] = _Line(action.connection)
                    read = partial(self._read, line, action)
                    name = f"{self.stream}-read-{action.replica}"
                    threading.Thread(target=read, name=name, daemon=True).start()
                case core.Disconnect():
                    self._close(action.connection)
                case core.Take():
                    assert delivery is not None
                    yield from self._take(action, delivery)
                case core.Lost():
                    error = TransportError(f"{action.replica}: {action.why}")
                    err, self._translation.error = self._translation.error or error, None
                    self._lost(err)
                case core.Switched():
                    self._switched(action.replica, action.us)
                case core.Wake():
                    heapq.heappush(self._wakes, action.at)
                case core.Finished():
                    self._finished = True
                case core.Unobtainable():
                    assert self._translation.error is not None
                    raise self._translation.error

    def _take(self, action: core.Take, delivery: Delivery) -> Iterator[Delivery]:
        part = selected(delivery, action)
        self._full = False
        yield part
        yield from self._handle(Consumed(action, part, self._full))

    def _close(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            line.over.set()
            self._translation.closed(number)

    # -- run by other threads -------------------------------------------------------------------

    def _poll(self, poll: core.Poll) -> None:
        replica = poll.replica
        try:
            peer = self._peers.get(replica)
            if peer is None:
                peer = self._peers[replica] = self._producers[replica]()
            position = None if poll.position is None else (self.consumer, *poll.position)
            reply: StreamStatus | HoldfastError = peer.call(GetStreamStatus(self.stream, position))
        except HoldfastError as err:
            self._peers.pop(replica, None)
            reply = err
        self._events.put(Polled(replica, reply))

    def _read(self, line: _Line, action: core.Connect) -> None:
        try:
            peer = self._peers.get(action.replica) or self._producers[action.replica]()
            self._peers[action.replica] = peer
            follow = peer.follow(self.stream, action.from_bucket, line.over, action.tentative_after)
            for delivery in follow:
                self.heard_us = self._clock()
                while not line.room.acquire(timeout=0.1):
                    if line.over.is_set():
                        return
                self._events.put(Came(line.number, delivery))
                if delivery.ended or line.over.is_set():
                    return
            raise TransportError(f"replica {action.replica} closed the stream")
        except HoldfastError as err:
            self._peers.pop(action.replica, None)
            self._events.put(Broke(line.number, err))
