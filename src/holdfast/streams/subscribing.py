"""Drives a subscription with threads: one per connection reads, a few ask replicas, whoever
iterates takes. What to do is `core.subscription`'s to say."""

from __future__ import annotations

import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

from holdfast.clock import monotonic_us
from holdfast.core import subscription as core
from holdfast.core.replica_selector import Status
from holdfast.core.subscription import Position, Subscription
from holdfast.errors import HoldfastError, StaleEpoch, StorageFull, TransportError, Trimmed
from holdfast.streams.calls import GetStreamStatus
from holdfast.streams.delivery import Delivery, Peer
from holdfast.types import Stability

#: How to reach each replica of a producer.
Makers = Mapping[str, Callable[[], Peer]]
#: Deliveries of one connection that wait to be taken.
WAITING = 8
#: So often it is looked whether to stop.
LOOK_US = 100_000


def selected(delivery: Delivery, take: core.Take) -> Delivery:
    """The part of a delivery that a consumer takes."""
    after, first = take.tentative_after, take.stable_from
    kept = [
        (first is None or segment.id.bucket >= first)
        and (
            segment.stability is Stability.STABLE
            or (after is not None and segment.id.bucket > after)
        )
        for segment in delivery.segments
    ]
    if after is None and delivery.tentative_upto is not None:
        delivery = replace(delivery, tentative_upto=None, missing=())
    if all(kept):
        return delivery
    return replace(
        delivery,
        segments=tuple(compress(delivery.segments, kept)),
        paths=tuple(compress(delivery.paths, kept)),
        tables=tuple(compress(delivery.tables, kept)),
    )


@dataclass(frozen=True, slots=True)
class _Came:
    connection: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class _Broke:
    """A connection is over, or the consumer itself was refused (`connection` 0)."""

    connection: int
    error: HoldfastError


@dataclass(eq=False, slots=True)
class _Line:
    """One connection to a replica."""

    number: int
    over: threading.Event = field(default_factory=threading.Event)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WAITING))


_Event = core.Event | _Came | _Broke | None


class Subscriber:
    """One subscription of `consumer`, from its first connection to its end."""

    def __init__(
        self,
        stream: str,
        consumer: str,
        subscription: Subscription,
        makers: Makers,
        stop: threading.Event,
        *,
        lost: Callable[[HoldfastError], None] = lambda err: None,
        switched: Callable[[str, int], None] = lambda replica, us: None,
    ) -> None:
        self.stream, self.consumer, self.subscription = stream, consumer, subscription
        self._makers, self._stop = makers, stop
        self._lost, self._switched = lost, switched
        self._events: queue.Queue[_Event] = queue.Queue()
        self._lines: dict[int, _Line] = {}
        self._peers: dict[str, Peer] = {}
        self._polling = ThreadPoolExecutor(len(makers), f"{stream}-poll")
        self._wakes: list[int] = []
        self._finished = False
        self._full = False
        #: Positions come also after the stream has ended.
        self._linger = False
        #: When anything came last, be it a heartbeat.
        self.heard_us = monotonic_us()
        self._last_error: HoldfastError | None = None

    def advanced(self, position: Position) -> None:
        """The consumer is further: producers are told. May be called by any thread."""
        self._events.put(core.Advanced(monotonic_us(), position))

    def run(self, take: Callable[[Delivery], None]) -> None:
        """Until the stream has ended or `stop` is set. What a full disk keeps from being taken is
        delivered again. Producers are told positions for as long as the consumer lives."""
        self._linger = True
        for delivery in self.deliveries():
            try:
                take(delivery)
            except StorageFull as err:
                self._lost(err)
                self._full = True

    def deliveries(self) -> Iterator[Delivery]:
        """Whoever iterates has taken a delivery when it asks for the next one."""
        try:
            yield from self._step(core.Begin(monotonic_us()))
            while not (self._stop.is_set() or self.subscription.ended):
                yield from self._step(self._next())
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
        """Every replica hears how far the stream was read; one that is gone will ask by itself."""
        while not self._stop.is_set() and (self._linger or not self._finished):
            for _ in self._step(self._next()):
                pass
        self._polling.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> _Event:
        now = monotonic_us()
        if self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            return core.Tick(now)
        wait_us = min(self._wakes[0] - now, LOOK_US) if self._wakes else LOOK_US
        try:
            return self._events.get(timeout=wait_us / 1e6)
        except queue.Empty:
            return None

    # -- events in, actions performed -----------------------------------------------------------

    def _step(self, event: _Event) -> Iterator[Delivery]:
        match event:
            case None:
                return
            case _Came():
                line = self._lines.get(event.connection)
                if line is None:
                    return
                line.room.release()
                delivery = event.delivery
                came = core.Delivered(
                    monotonic_us(), event.connection, delivery.epoch, delivery.since,
                    delivery.upto, delivery.state,
                )  # fmt: skip
                yield from self._perform(self.subscription.handle(came), delivery)
            case _Broke():
                if event.connection == 0 or self._is_fatal(event.error):
                    raise event.error
                if event.connection in self._lines:
                    self._last_error = event.error
                    trimmed = isinstance(event.error, Trimmed)
                    broke = core.Disconnected(monotonic_us(), event.connection, trimmed)
                    yield from self._perform(self.subscription.handle(broke))
            case _:
                yield from self._perform(self.subscription.handle(event))

    def _is_fatal(self, err: HoldfastError) -> bool:
        """Where there are other replicas, whatever is wrong with one of them is its own affair."""
        if self.subscription.many:
            return isinstance(err, StaleEpoch)
        return not isinstance(err, TransportError | Trimmed)

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
                    told = TransportError(f"{action.replica}: {action.why}")
                    err, self._last_error = self._last_error or told, None
                    self._lost(err)
                case core.Switched():
                    self._switched(action.replica, action.us)
                case core.Wake():
                    heapq.heappush(self._wakes, action.at)
                case core.Finished():
                    self._finished = True
                case core.Unobtainable():
                    assert self._last_error is not None
                    raise self._last_error

    def _take(self, action: core.Take, delivery: Delivery) -> Iterator[Delivery]:
        part = selected(delivery, action)
        self._full = False
        yield part
        now = monotonic_us()
        outcome: core.Event = core.Taken(now, part.upto, part.tentative_upto, part.ended)
        if self._full:
            outcome = core.NotTaken(now, action.connection, "full")
        yield from self._perform(self.subscription.handle(outcome))

    def _close(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            line.over.set()

    # -- in threads of their own ----------------------------------------------------------------

    def _poll(self, poll: core.Poll) -> None:
        replica = poll.replica
        try:
            peer = self._peers.get(replica)
            if peer is None:
                peer = self._peers[replica] = self._makers[replica]()
            position = None if poll.position is None else (self.consumer, *poll.position)
            told = peer.call(GetStreamStatus(self.stream, position))
            status = None
            if told.state is not None and told.upto is not None:
                status = Status(told.state, told.upto, told.tentative_upto)
            self._events.put(core.Reported(monotonic_us(), replica, status))
        except StaleEpoch as err:
            self._events.put(_Broke(0, err))
        except HoldfastError:
            self._peers.pop(replica, None)
            self._events.put(core.Unreachable(monotonic_us(), replica))

    def _read(self, line: _Line, action: core.Connect) -> None:
        try:
            peer = self._peers.get(action.replica) or self._makers[action.replica]()
            self._peers[action.replica] = peer
            life: Delivery | None = None
            follow = peer.follow(self.stream, action.from_bucket, line.over, action.tentative_after)
            for delivery in follow:
                self.heard_us = monotonic_us()
                if delivery is life or delivery == life:  # a heartbeat that says nothing new
                    continue
                life = delivery if delivery.is_sign_of_life else None
                while not line.room.acquire(timeout=0.1):
                    if line.over.is_set():
                        return
                self._events.put(_Came(line.number, delivery))
                if delivery.ended or line.over.is_set():
                    return
            raise TransportError(f"{action.replica} has closed the stream")
        except HoldfastError as err:
            self._peers.pop(action.replica, None)
            self._events.put(_Broke(line.number, err))
