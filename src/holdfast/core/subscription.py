"""A consumer's subscription to a stream, served by one producer or several replicas of it. Pure.

A subscription records the position of the consumer and the newest epoch received from each replica.
A new connection continues from there. A bucket is taken once, and deliveries of an instance with an
older epoch are refused (ARCHITECTURE.md). `replica_selector` chooses the replica to read. This
module decides what follows from the choice: which replicas to connect to, which to poll and when,
when to retry, to which replicas to report the position of the consumer, and when the stream is
unobtainable.

The driver opens connections, polls replicas and passes rows to the consumer; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple, assert_never

from holdfast.core.replica_selector import LAG_BUCKETS, NOTHING, ReplicaSelector, Status
from holdfast.core.wake_ups import Alarm
from holdfast.errors import HoldfastError, StaleEpoch, TransportError, Trimmed
from holdfast.frozen import dataclass
from holdfast.types import OutputState

#: Pause before a reconnect to the only producer; doubled until something is delivered.
RETRY_US, RETRY_US_MAX = 50_000, 400_000
#: Pause of the subscription after the consumer reported that it has no space.
FULL_US = 1_000_000
#: Attempts to report to a replica that the stream was read to its end.
LAST_WORDS = 50


class Position(NamedTuple):
    """Position of a consumer: received, released, and the epoch of the consumer."""

    received: int
    needed: int
    epoch: int


# -- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    at: int


@dataclass(frozen=True, slots=True)
class Reported:
    """A replica answered `Poll`. `status` None: the replica has not opened the stream yet."""

    at: int
    replica: str
    status: Status | None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A replica did not answer `Poll`."""

    at: int
    replica: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivery arrived over a connection; the fields that accompany its rows."""

    at: int
    connection: int
    epoch: int
    since: int
    upto: int
    state: OutputState


@dataclass(frozen=True, slots=True)
class Taken:
    """The consumer has taken the delivery of `Take`."""

    at: int
    upto: int
    tentative_upto: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Full:
    """The consumer could not take the delivery, because it has no space."""

    at: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection ended or failed. `trimmed`: because the requested bucket was deleted."""

    at: int
    connection: int
    trimmed: bool = False


@dataclass(frozen=True, slots=True)
class Advanced:
    """The position of the consumer has advanced."""

    at: int
    position: Position


@dataclass(frozen=True, slots=True)
class Tick:
    at: int


Event = Begin | Reported | Unreachable | Delivered | Taken | Full | Disconnected | Advanced | Tick

# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask a replica for its status, and report the position of the consumer unless None. `Reported`
    or `Unreachable` follows."""

    replica: str
    position: Position | None


@dataclass(frozen=True, slots=True)
class Connect:
    connection: int
    replica: str
    from_bucket: int | None
    #: None: no tentative buckets are requested.
    tentative_after: int | None


@dataclass(frozen=True, slots=True)
class Disconnect:
    connection: int


@dataclass(frozen=True, slots=True)
class Take:
    """Pass the delivery to the consumer: stable buckets from `stable_from` on (None: all), and
    tentative ones after `tentative_after` (None: none). `Taken` or `Full` follows."""

    connection: int
    stable_from: int | None
    tentative_after: int | None


@dataclass(frozen=True, slots=True)
class Lost:
    """For the log: a replica is no longer read."""

    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class Switched:
    """For the log: another replica is read, `us` microseconds after the switch was decided."""

    replica: str
    us: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a `Tick` at `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class Unobtainable:
    """Every replica has deleted the next bucket."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The stream was read to its end, and every reachable replica has been notified."""


Action = Poll | Connect | Disconnect | Take | Lost | Switched | Wake | Unobtainable | Finished


@dataclass(slots=True)
class _Polling:
    #: Earliest time of the next poll.
    due: int = 0
    #: A poll is under way, and reports the position `reporting`.
    under_way: bool = False
    reporting: Position | None = None
    #: Last position that the replica confirmed.
    confirmed: Position | None = None
    #: Remaining attempts to report the last position.
    tries: int = LAST_WORDS


@dataclass(frozen=True, slots=True)
class _Connection:
    id: int
    replica: str
    correcting: bool


@dataclass(slots=True)
class Subscription:
    replicas: Sequence[str]
    #: The next stable bucket to read; None: the oldest available.
    at: int | None = None
    #: Tentative buckets are read too; and the last one that was taken, the t_max of Borealis
    #: section 3.5. The same bucket from another replica would repeat all or some of its rows.
    tentative: bool = False
    tentative_upto: int = NOTHING
    #: The newest epoch received from each replica. Never decreases, and outlives a subscription.
    epochs: dict[str, int] = field(default_factory=dict)
    #: The local replica, in pairs: the one in the same dataflow.
    local_replica: str | None = None
    tolerance_buckets: int = LAG_BUCKETS
    #: Replicas are polled at the longer of these intervals. With a local replica, the replica that
    #: is read reports its status with its deliveries, and the others are polled rarely (`ask_us`).
    heartbeat_us: int = 100_000
    ask_us: int = 0
    ended: bool = False
    many: bool = field(init=False)
    selector: ReplicaSelector = field(init=False)
    _polling: dict[str, _Polling] = field(init=False)
    _connections: dict[bool, _Connection] = field(default_factory=dict)
    _number: int = 0
    _position: Position | None = None
    _trimmed: set[str] = field(default_factory=set)
    _retry_us: int = RETRY_US
    #: With one producer: time of the next connection attempt.
    _retry_at: int | None = None
    #: With several replicas: no replica is read before this time.
    _paused_until: int = 0
    #: Time at which a change of the main connection was decided; None: no change is under way.
    _wanted_at: int | None = None
    _alarm: Alarm = field(default_factory=Alarm)

    def __post_init__(self) -> None:
        self.selector = ReplicaSelector(self.replicas, self.local_replica, self.tolerance_buckets)
        self._polling = {replica: _Polling() for replica in self.replicas}
        self.many = len(self.replicas) > 1

    def ends_with(self, err: HoldfastError) -> bool:
        """Whether an error of a connection stops the consumer. With several replicas, an error of
        one of them does not; `StaleEpoch` does, because the consumer itself was replaced."""
        if self.many:
            return isinstance(err, StaleEpoch)
        return not isinstance(err, TransportError | Trimmed)

    @property
    def main(self) -> str | None:
        """The replica that is read."""
        connection = self._connections.get(False)
        return None if connection is None else connection.replica

    def handle(self, event: Event) -> list[Action]:
        """The only method that changes the state."""
        return [*self._handle(event), *self._polls(event.at), *self._wake(event.at)]

    def _handle(self, event: Event) -> list[Action]:
        at = event.at
        match event:
            case Begin():
                return [] if self.many else self._connect(at, self.replicas[0], correcting=False)
            case Reported():
                return self._reported(event)
            case Unreachable():
                self._polling[event.replica].confirmed = None
                self._answered(at, event.replica)
                return self._gone(at, event.replica, "does not answer") if self.many else []
            case Delivered():
                return self._delivered(event)
            case Taken():
                return self._taken(event)
            case Full():
                return self._full(event.at)
            case Disconnected():
                return self._disconnected(event)
            case Advanced():
                self._position = event.position
                for polling in self._polling.values():
                    polling.tries = LAST_WORDS
                return []
            case Tick():
                self._alarm.rang()
                if self._retry_at is not None and self._retry_at <= at:
                    self._retry_at = None
                    return self._connect(at, self.replicas[0], correcting=False)
                return []
            case _:
                assert_never(event)

    # -- polling replicas and reporting the position --------------------------------------------

    def _polls(self, at: int) -> list[Action]:
        actions: list[Action] = []
        for replica, polling in self._polling.items():
            if polling.under_way or at < max(polling.due, self._paused_until):
                continue
            news = self._position is not None and self._position != polling.confirmed
            if self.ended:
                if not news or not polling.tries:
                    continue
                polling.tries -= 1
            elif not news and (not self.many or self._tells(replica)):
                polling.due = at + self._every_us if self.many else 0
                continue
            polling.under_way, polling.reporting = True, self._position if news else None
            actions.append(Poll(replica, polling.reporting))
        if self.ended and not actions and not self._owed:
            actions.append(Finished())
        return actions

    @property
    def _owed(self) -> bool:
        """Some replica has not been notified yet that the stream was read to its end."""
        return any(
            polling.under_way or (polling.tries and polling.confirmed != self._position)
            for polling in self._polling.values()
            if self._position is not None
        )

    @property
    def _every_us(self) -> int:
        return self.heartbeat_us if self.ended else max(self.heartbeat_us, self.ask_us)

    def _tells(self, replica: str) -> bool:
        """Whether the replica reports its status with its deliveries."""
        connection = self._connections.get(False)
        return (
            self.local_replica is not None
            and connection is not None
            and connection.replica == replica
        )

    def _answered(self, at: int, replica: str) -> _Polling:
        polling = self._polling[replica]
        polling.under_way = False
        polling.due = at + self._every_us if self.many or self.ended or not polling.confirmed else 0
        return polling

    def _reported(self, event: Reported) -> list[Action]:
        polling = self._polling[event.replica]
        if event.status is not None and polling.reporting is not None:
            polling.confirmed = polling.reporting
        self._answered(event.at, event.replica)
        if not self.many or self.ended:
            return []
        if event.status is None:
            return self._gone(event.at, event.replica, "has not opened the stream yet")
        if event.at < self._paused_until:
            return []
        self.selector.heard(event.at, event.replica, event.status)
        return self._choose(event.at)

    # -- connections ----------------------------------------------------------------------------

    def _choose(self, at: int) -> list[Action]:
        if self.ended:
            return []
        choice, actions = self.selector.choose(at, self.at), list[Action]()
        for correcting, replica in ((True, choice.correcting), (False, choice.main)):
            connection = self._connections.get(correcting)
            if connection is None or connection.replica != replica:
                actions += self._close(correcting)
                if replica is not None:
                    actions += self._connect(at, replica, correcting=correcting)
        return actions

    def _connect(self, at: int, replica: str, *, correcting: bool) -> list[Action]:
        self._number += 1
        self._connections[correcting] = _Connection(self._number, replica, correcting)
        # The replica may be a new instance that does not know the position of the consumer.
        self._polling[replica].confirmed = None
        if not correcting and self._wanted_at is None:
            self._wanted_at = at
        after = self.tentative_upto if self.tentative and not correcting else None
        return [Connect(self._number, replica, self.at, after)]

    def _close(self, correcting: bool) -> list[Action]:
        connection = self._connections.pop(correcting, None)
        return [] if connection is None else [Disconnect(connection.id)]

    def _find(self, connection: int) -> _Connection | None:
        for candidate in self._connections.values():
            if candidate.id == connection:
                return candidate
        return None

    def _gone(self, at: int, replica: str, why: str) -> list[Action]:
        actions: list[Action] = []
        for correcting, connection in list(self._connections.items()):
            if connection.replica == replica:
                actions += self._close(correcting)
                if not correcting:
                    self._wanted_at = at
        if actions or self.selector.knows(replica):
            actions.append(Lost(replica, why))
        self.selector.gone(replica)
        return [*actions, *self._choose(at)]

    def _lost(self, at: int, connection: _Connection, why: str) -> list[Action]:
        if self.many:
            return self._gone(at, connection.replica, why)
        actions = [*self._close(connection.correcting), Lost(connection.replica, why)]
        self._wanted_at = at
        self._retry_at = at + self._retry_us
        self._retry_us = min(2 * self._retry_us, RETRY_US_MAX)
        return actions

    def _disconnected(self, event: Disconnected) -> list[Action]:
        connection = self._find(event.connection)
        if connection is None or self.ended:
            return []
        if event.trimmed:
            self._trimmed.add(connection.replica)
            if len(self._trimmed) == len(self.replicas):
                return [*self._close(False), *self._close(True), Unobtainable()]
        return self._lost(event.at, connection, "the connection was closed or failed")

    # -- deliveries -----------------------------------------------------------------------------

    def _delivered(self, event: Delivered) -> list[Action]:
        connection = self._find(event.connection)
        if connection is None or self.ended:
            return []
        actions: list[Action] = []
        self._trimmed.discard(connection.replica)
        if (refusal := self._refuses(event, connection.replica)) is not None:
            return self._lost(event.at, connection, refusal)
        self.epochs[connection.replica], self._retry_us = event.epoch, RETRY_US
        if self.many and self.selector.said(event.at, connection.replica, event.state, event.upto):
            actions += self._choose(event.at)
        main = self._connections.get(False)
        after = None
        if main is not None and main.replica == connection.replica:
            after = self.tentative_upto if self.tentative else None
            if self._wanted_at is not None:
                us = max(1, event.at - self._wanted_at)
                self._wanted_at = None
                actions.append(Switched(connection.replica, us))
        return [*actions, Take(event.connection, self.at, after)]

    def _refuses(self, event: Delivered, replica: str) -> str | None:
        """Why a delivery is refused; None: the delivery is accepted."""
        newest = self.epochs.get(replica, 0)
        if event.epoch < newest:
            return (
                f"delivery of epoch {event.epoch} refused: a newer instance, epoch {newest}, has "
                "already delivered"
            )
        if self.at is not None and event.since > self.at:
            return (
                f"delivery refused: expected bucket {self.at}, received a delivery that starts at "
                f"bucket {event.since}"
            )
        return None

    def _taken(self, event: Taken) -> list[Action]:
        self.at = event.upto + 1 if self.at is None else max(self.at, event.upto + 1)
        if event.tentative_upto is not None:
            self.tentative_upto = max(self.tentative_upto, event.tentative_upto)
        if not event.ended:
            return []
        self.ended = True
        for polling in self._polling.values():
            polling.due = 0
        return [*self._close(False), *self._close(True)]

    def _full(self, at: int) -> list[Action]:
        actions = [*self._close(False), *self._close(True)]
        self.selector.forget()
        if self.many:
            self._paused_until = at + FULL_US
        else:
            self._retry_at = at + FULL_US
        return actions

    def _wake(self, at: int) -> list[Action]:
        due = self._retry_at if self._retry_at is not None and self._retry_at > at else None
        many = self.many
        for polling in self._polling.values():
            if polling.under_way or (self.ended and not polling.tries):
                continue
            time = max(polling.due, self._paused_until)
            if time > at and (due is None or time < due) and (
                many or self._position != polling.confirmed
            ):  # fmt: skip
                due = time
        return [Wake(due)] if due is not None and self._alarm.needs(at, due) else []
