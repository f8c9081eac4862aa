"""Following a stream for ever: one connection after another, each from where the last one got to.

Node and client read alike. What they have taken is said to `core.following`, which decides; which
replica to read, where there is more than one, `core.upstream` decides. Here are only the loops
around connections.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

from holdfast.clock import now_us
from holdfast.core.following import Following
from holdfast.core.upstream import Action, Drop, Gone, Heard, Upstream
from holdfast.errors import HoldfastError, StaleEpoch, TransportError, Trimmed
from holdfast.streams.calls import GetStreamStatus, Position
from holdfast.streams.delivery import Delivery, Peer
from holdfast.types import Stability

#: How to reach each replica of whoever makes a stream.
Makers = Mapping[str, Callable[[], Peer]]
#: Deliveries of one connection that wait to be taken.
WAITING = 8
#: Attempts to tell a replica that a stream was read to its end.
LAST_WORDS = 50


def only_stable(delivery: Delivery) -> Delivery:
    """A delivery as a reader takes it that follows another replica."""
    kept = [segment.stability is Stability.STABLE for segment in delivery.segments]
    return replace(_some(delivery, kept), undone=False, tentative_upto=None, missing=())


def fresh(following: Following, delivery: Delivery, replica: str = "") -> Delivery:
    """What is new in a delivery. An instance that was replaced is cut off."""
    refused = following.refuses(delivery.epoch, delivery.since, replica)
    if refused is not None:
        raise TransportError(f"stream {delivery.stream!r}: {refused}")
    if delivery.undone:
        following.undone()
    new = [
        following.is_new(segment.id.bucket)
        if segment.stability is Stability.STABLE
        else following.is_younger(segment.id.bucket)
        for segment in delivery.segments
    ]
    return delivery if all(new) else _some(delivery, new)


def _some(delivery: Delivery, kept: list[bool]) -> Delivery:
    return replace(
        delivery,
        segments=tuple(compress(delivery.segments, kept)),
        paths=tuple(compress(delivery.paths, kept)),
        tables=tuple(compress(delivery.tables, kept)),
    )


def follow(
    stream: str,
    following: Following,
    makers: Makers,
    stop: threading.Event,
    *,
    connected: Callable[[Peer], None] = lambda peer: None,
    lost: Callable[[Exception], None] = lambda err: None,
    position: Callable[[], Position | None] = lambda: None,
    switched: Callable[[str, int], None] = lambda replica, us: None,
    heartbeat_s: float = 0.1,
    ask_s: float | None = None,
    home: str | None = None,
) -> Iterator[Delivery]:
    """Deliveries until the stream has ended or `stop` is set. The reader calls `following.taken`
    when it has one; whatever it could not take is delivered again.

    Where there are replicas, `position` is said to all of them, and `switched` is called when
    another one is read than before: with its name, and the microseconds since that was decided.
    They are asked how they stand as often as they give a sign of life. With `home`, which is read
    unless it is lost, that is seldom needed: every `ask_s`, and not of the one that is read; nor
    are its signs of life delivered.
    """
    if len(makers) > 1:
        replicas = _Replicas(
            stream, following, makers, lost, position, switched, heartbeat_s, ask_s or heartbeat_s,
            home,
        )  # fmt: skip
        yield from replicas.deliveries(stop)
        return
    (connect,) = makers.values()
    while not stop.is_set():
        try:
            peer = connect()
            connected(peer)
            for delivery in peer.follow(stream, following.at, stop, following.tentative_after):
                yield fresh(following, delivery)
                if delivery.ended or stop.is_set():
                    return
        except TransportError as err:
            lost(err)
            stop.wait(following.lost() / 1_000)


@dataclass(eq=False, slots=True)
class _Line:
    """One connection to a replica."""

    replica: str
    correcting: bool
    over: threading.Event = field(default_factory=threading.Event)
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WAITING))


@dataclass(frozen=True, slots=True)
class _Came:
    line: _Line
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class _Ended:
    """A connection is over, or a reader was refused."""

    line: _Line | None
    error: HoldfastError


@dataclass(eq=False, slots=True)
class _Replicas:
    """Reads a stream that several replicas make. Threads carry: one per replica asks how it stands,
    one per connection reads; whoever iterates decides."""

    stream: str
    following: Following
    makers: Makers
    lost: Callable[[Exception], None]
    position: Callable[[], Position | None]
    switched: Callable[[str, int], None]
    heartbeat_s: float
    ask_s: float
    home: str | None = None
    upstream: Upstream = field(init=False)
    _events: queue.Queue[Heard | Gone | _Came | _Ended] = field(init=False)
    _over: threading.Event = field(init=False)
    _lines: dict[bool, _Line] = field(init=False)
    _peers: dict[str, Peer] = field(init=False)
    _trimmed: dict[str, Trimmed] = field(init=False)
    _ended: bool = False
    #: Since when another replica than the one that was read is wanted.
    _wanted_at: int | None = None

    def __post_init__(self) -> None:
        self.upstream = Upstream(tuple(self.makers), self.following, self.home)
        self._events, self._over = queue.Queue(), threading.Event()
        self._lines, self._peers, self._trimmed = {}, {}, {}

    def deliveries(self, stop: threading.Event) -> Iterator[Delivery]:
        for replica in self.makers:
            self._thread(partial(self._ask, replica), f"ask-{replica}")
        try:
            while not stop.is_set():
                with suppress(queue.Empty):
                    event = self._events.get(timeout=self.heartbeat_s)
                    for delivery in self._handle(event):
                        yield delivery
                        if delivery.ended:
                            self._ended = True
                            return
        finally:
            self._over.set()
            for correcting in list(self._lines):
                self._close(correcting)

    # -- in the thread that iterates ------------------------------------------------------------

    def _handle(self, event: Heard | Gone | _Came | _Ended) -> Iterator[Delivery]:
        match event:
            case _Came():
                yield from self._came(event.line, event.delivery)
            case _Ended(line=None):
                raise event.error
            case _Ended():
                assert event.line is not None
                if self._lines.get(event.line.correcting) is event.line:
                    self._refused(event.line, event.error)
            case _:
                self._perform(self.upstream.handle(event))

    def _came(self, line: _Line, delivery: Delivery) -> Iterator[Delivery]:
        if self._lines.get(line.correcting) is not line:
            return
        line.room.release()
        self._trimmed.pop(line.replica, None)
        self._perform(self.upstream.said(now_us(), line.replica, delivery.state, delivery.upto))
        if not self.upstream.takes_tentative(line.replica):
            delivery = only_stable(delivery)
        elif self._wanted_at is not None:
            self.switched(line.replica, max(1, now_us() - self._wanted_at))
            self._wanted_at = None
        try:
            delivery = fresh(self.following, delivery, line.replica)
        except TransportError as err:
            self._refused(line, err)
        else:
            yield delivery

    def _refused(self, line: _Line, err: HoldfastError) -> None:
        """A connection is lost; that somebody has deleted what we want is a failure only once
        everybody has."""
        if isinstance(err, Trimmed):
            self._trimmed[line.replica] = err
            if len(self._trimmed) == len(self.makers):
                raise err
        elif not isinstance(err, TransportError):
            raise err
        if self._lines.get(line.correcting) is line:
            self._close(line.correcting)
        self.lost(err)
        self._perform(self.upstream.handle(Gone(now_us(), line.replica)))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Drop):
                self._close(action.correcting)
                continue
            if not action.correcting:
                self._wanted_at = self.upstream.lost_at or now_us()
                self.upstream.lost_at = None
            self._close(action.correcting)
            line = self._lines[action.correcting] = _Line(action.replica, action.correcting)
            at, after = self.following.at, self.following.tentative_after
            self._thread(partial(self._read, line, at, after), f"read-{line.replica}")

    def _close(self, correcting: bool) -> None:
        line = self._lines.pop(correcting, None)
        if line is not None:
            line.over.set()

    # -- in threads of their own ----------------------------------------------------------------

    def _thread(self, run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=f"{self.stream}-{name}", daemon=True).start()

    def _ask(self, replica: str) -> None:
        """How does the replica stand? It is told on the occasion how far this reader is."""
        said: Position | None = None
        tries = LAST_WORDS
        # Where the stream has ended, every replica hears so; one that is gone will ask by itself.
        while not self._over.is_set() or (self._ended and said != self.position() and tries):
            tries -= self._over.is_set()
            try:
                peer = self._peers.get(replica)
                if peer is None:
                    peer = self._peers[replica] = self.makers[replica]()
                position = self.position()
                news = position if position != said else None
                tells = self._tells(replica)
                if news is not None or not tells:
                    heard = self._stands(peer, replica, news)
                    said = position
                    if not tells:
                        self._events.put(heard)
            except StaleEpoch as err:
                self._events.put(_Ended(None, err))
                return
            except HoldfastError:
                self._peers.pop(replica, None)
                said = None
                self._events.put(Gone(now_us(), replica))
            if self._ended:
                time.sleep(self.heartbeat_s)
            else:
                self._over.wait(self.ask_s)

    def _tells(self, replica: str) -> bool:
        """How it stands comes with its deliveries."""
        line = self._lines.get(False)
        return self.home is not None and line is not None and line.replica == replica

    def _stands(self, peer: Peer, replica: str, position: Position | None) -> Heard:
        status = peer.call(GetStreamStatus(self.stream, position))
        if status.state is None or status.upto is None:
            raise TransportError(f"{replica} has not opened {self.stream!r} yet")
        return Heard(now_us(), replica, status.state, status.upto, status.tentative_upto)

    def _read(self, line: _Line, at: int | None, after: int | None) -> None:
        try:
            peer = self._peers.get(line.replica) or self.makers[line.replica]()
            life: Delivery | None = None
            for delivery in peer.follow(self.stream, at, line.over, after):
                if self.home is not None:
                    if delivery == life:
                        continue
                    life = delivery if delivery.is_sign_of_life else None
                while not line.room.acquire(timeout=self.heartbeat_s):
                    if line.over.is_set():
                        return
                self._events.put(_Came(line, delivery))
                if delivery.ended or line.over.is_set():
                    return
            raise TransportError(f"{line.replica} has closed the stream")
        except HoldfastError as err:
            self._events.put(_Ended(line, err))
