"""The parts of a running network as simulated processes: the production classes `Source`,
`Performer`, `Client` and `Controller`, each with a log on a disk that can fail, and around them
what threads and the supervisor do in production, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.client import Client
from holdfast.config import Options
from holdfast.controller import Controller
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, StaleEpoch, StorageFull, TransportError
from holdfast.history import Accepted, Closed, Given, Held, History, Logged, Made, Told
from holdfast.log import Log
from holdfast.model import operators as ops
from holdfast.model.fragments import Fragment, Path, fragments
from holdfast.model.network import Network
from holdfast.performer import Event, Finished, Performer, Refused
from holdfast.sim.engine import EngineTwin, MemoryInputs
from holdfast.sim.rows import Row, RowSegments
from holdfast.sim.wire import HEARTBEAT_US, SILENCE_US, Follower, Server, Wire
from holdfast.sim.world import EPOCH_US, World
from holdfast.source import Source
from holdfast.transport.service import Delivery
from holdfast.types import bucket_of

#: The boundary of a stream that has ended, in a history.
FOREVER = 2**62
FULL_US = 1_000_000
REGISTER_US = 500_000
ROWS = 10
TIME = pa.timestamp("us", tz="UTC")
#: Pushes whose chances are drawn at once.
_BLOCK = 32
COLUMNS = ["ts", "key", "value"]


class _Alone:
    """A lock and condition where there is one thread: it only says that something changed."""

    __slots__ = ("_process",)

    def __init__(self, process: Server) -> None:
        self._process = process

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self._process.news = True


def _log(process: Server, owner: str) -> Log:
    log = Log.open(
        f"/{owner}", owner, fsync="always", archive=False,
        disk=process.disk, segments=RowSegments(),
    )  # fmt: skip
    log.changed = log._appending = _Alone(process)  # type: ignore[assignment]
    return log


class ControllerProcess(Server):
    """Hands out epochs and knows where everybody is; `producers` is the layout."""

    def __init__(self, world: World, wire: Wire, producers: dict[str, str]) -> None:
        super().__init__(world, "controller", wire)
        self._producers = producers
        self.controller: Controller | None = None

    def boot(self) -> None:
        try:
            self.controller = Controller(_log(self, "controller"))
        except StorageFull:
            self.after(FULL_US, self.boot)

    def forget(self) -> None:
        super().forget()
        self.controller = None

    def next_epoch(self, name: str, at_least: int) -> int:
        return self._up().next_epoch(name, at_least)

    def register(self, name: str, address: str, epoch: int) -> bool:
        return self._up().register(name, address, epoch)

    def _up(self) -> Controller:
        if self.controller is None:
            raise TransportError("the controller is not up yet")
        return self.controller

    def locate(self, stream: str) -> str | None:
        return self._up().address(self._producers[stream])


class Member(Server):
    """A process that gets its epoch from the controller and tells it where it listens."""

    log: Log
    #: It has its epoch, its log is open, and it works.
    is_up = False

    def forget(self) -> None:
        super().forget()
        self.is_up = False

    def boot(self) -> None:
        self.wire.listen(self)
        self.service.trim_buckets = int(1 + 6 * self.wire.chance.random())
        self.retry_full(self._open, self._ask_epoch)

    def _open(self) -> None:
        self.log = self.open_log()

    def open_log(self) -> Log:
        return _log(self, self.name)

    def up(self) -> None:
        raise NotImplementedError

    def _ask_epoch(self) -> None:
        def granted(epoch: int) -> None:
            self.retry_full(lambda: self.log.raise_epoch(epoch), self._ready)

        def failed(err: HoldfastError) -> None:
            self.after(REGISTER_US, self._ask_epoch)

        self.wire.ask_controller(
            self, lambda c: c.next_epoch(self.name, self.log.epoch), granted, failed
        )

    def _ready(self) -> None:
        self.retry_full(self.up, self._started)

    def _started(self) -> None:
        self.is_up = True
        self._register()
        if not isinstance(self, ClientProcess):
            self.after(HEARTBEAT_US, self.beat)

    def _register(self) -> None:
        """Whoever is followed says again and again where it is, and so finds out that it was
        replaced; a controller that comes back knows no addresses."""

        def told(current: bool) -> None:
            if not current:
                raise StaleEpoch(f"{self.name} of epoch {self.log.epoch} was replaced; it stops")
            if not isinstance(self, ClientProcess):
                self.after(REGISTER_US, self._register)

        def failed(err: HoldfastError) -> None:
            if not isinstance(err, TransportError | StorageFull):
                raise err
            self.after(REGISTER_US, self._register)

        address, epoch = self.address, self.log.epoch
        self.wire.ask_controller(
            self, lambda c: c.register(self.name, address, epoch), told, failed
        )

    def retry_full(self, act: Callable[[], None], then: Callable[[], None]) -> None:
        """A full disk makes it wait, nothing else."""
        try:
            act()
        except StorageFull:
            self.after(FULL_US, lambda: self.retry_full(act, then))
            return
        then()


class _Lot(NamedTuple):
    offsets: Any
    keys: Any
    pause: float
    chance: float


class SourceProcess(Member):
    """A source and the application that pushes: a few rows in every bucket, each push with its
    number as token, so that after a crash it goes on where the log says."""

    def __init__(
        self, world: World, wire: Wire, network: Network, op: ops.Source, history: History
    ) -> None:
        super().__init__(world, op.name, wire)
        self.network, self.op, self.history = network, op, history
        self._seed = list(f"{world.seed}/{self.name}".encode())
        self._block: tuple[int, Any, Any, list[list[float]]] | None = None
        #: The application stands still: nothing is pushed, nothing closed.
        self.silent = False
        self.ending = False
        self._accepted = 0
        self._closed_upto: int | None = None
        #: Rows of all closed buckets: what the network's input really was.
        self.logged: list[Row] = []
        self._logged_upto = bucket_of(EPOCH_US, network.width_us) - 1

    def up(self) -> None:
        self.source = Source(self.op, self.log, self.network.width_us, clock=self.clock)
        self.source.start(EPOCH_US)
        self.service.logs[self.name] = self.log
        self.service.readers[self.name] = readers_of(self.network, self.name)
        self._next = int(self.source.token or 0) + 1
        self._note()
        self._plan_push()
        self._plan_tick()

    def _plan_push(self) -> None:
        """Somewhere in the next bucket; the chance depends on the number, not on what fails."""
        self._lot = self._lots(self._next)
        self.after(int(self.network.width_us * (0.6 + 0.8 * self._lot.pause)), self._push)

    def _lots(self, number: int) -> _Lot:
        """What is drawn for a push, a block of them at a time."""
        block, place = divmod(number, _BLOCK)
        if self._block is None or self._block[0] != block:
            draw = np.random.default_rng([*self._seed, block])
            offsets = draw.integers(-400_000, 200_000, (_BLOCK, ROWS))
            keys = draw.integers(0, 4, (_BLOCK, ROWS))
            self._block = (block, offsets, keys, draw.random((_BLOCK, 2)).tolist())
        _, offsets, keys, chances = self._block
        return _Lot(offsets[place], keys[place], *chances[place])

    def _push(self) -> None:
        if self.ending:
            return
        if self.silent:
            self.after(self.network.width_us, self._push)
            return
        lot, number = self._lot, self._next
        times = (self.clock() + lot.offsets).view("datetime64[us]")
        values = np.arange(number * ROWS, number * ROWS + ROWS)
        rows = pa.Table.from_arrays(
            [pa.array(times, TIME), pa.array(lot.keys), pa.array(values)], COLUMNS
        )
        try:
            self.source.push(rows, token=str(number), flush=lot.chance < 0.1)
        except StorageFull:
            self.after(FULL_US, self._push)
            return
        self._next += 1
        self._note()
        self._plan_push()

    def _plan_tick(self) -> None:
        width = self.network.width_us
        self.after(width - self.clock() % width, self._tick)

    def _tick(self) -> None:
        if not self.silent:
            try:
                if self.ending:
                    self.source.end()
                else:
                    self.source.advance(self.clock())
            except StorageFull:
                self.after(FULL_US, self._tick)
                return
            self._note()
        if not self.ending:
            self._plan_tick()

    def finish(self) -> None:
        """The application is done: everything is closed and the stream ends."""
        self.ending = True
        if self.is_up:
            self.after(0, self._tick)

    def _note(self) -> None:
        """What the application now knows to be safe."""
        token = int(self.source.token or 0)
        if token > self._accepted:
            values = range((self._accepted + 1) * ROWS, (token + 1) * ROWS)
            self._accepted = token
            self.history.add(Accepted(self.world.now, self.name, tuple((v,) for v in values)))
        info = self.log.info(self.name)
        for segment in self.log.segments(self.name, self._logged_upto + 1, info.complete_upto):
            rows = self.log.read(segment).rows
            self.logged += rows
            logged = Logged(
                self.world.now, self.name, segment.id.bucket, tuple((row[2],) for row in rows)
            )
            self.history.add(logged)
        self._logged_upto = info.complete_upto
        upto = FOREVER if info.ended else info.complete_upto
        if upto != self._closed_upto:
            self._closed_upto = upto
            self.history.add(Closed(self.world.now, self.name, upto))
            self.world.say(self.name, "closed", info.complete_upto, "ended" if info.ended else "")

    @property
    def ended(self) -> bool:
        return self._closed_upto == FOREVER


class NodeProcess(Member):
    """A node: the performer, carried by virtual time."""

    def __init__(
        self,
        world: World,
        wire: Wire,
        network: Network,
        fragment: Fragment,
        options: Options,
        history: History,
    ) -> None:
        super().__init__(world, fragment.name, wire)
        self.network, self.fragment, self.options = network, fragment, options
        self.history = history
        self.chance = world.rng(f"steps/{self.name}")
        #: Steps take so many times as long.
        self.slowness = 1.0
        self.followers: dict[str, Follower] = {}
        self._watching = 0
        self._steps_until = 0

    def up(self) -> None:
        engine = EngineTwin(self.network, self.disk, f"/{self.name}/state")
        self.performer = Performer(
            self.name, self.fragment, engine, self.log, self.service, self, self.options,
            inputs=MemoryInputs(), clock=self.clock,
        )  # fmt: skip
        for stream in self.fragment.outputs:
            self.service.readers[stream] = readers_of(self.network, stream)
        self.followers = {
            stream: Follower(self, self.wire, stream, following, self.performer.receive)
            for stream, following in self.performer.following.items()
        }
        for follower in self.followers.values():
            follower.connect()
        self.after(SILENCE_US // 2, self._watch)

    def _watch(self) -> None:
        for follower in self.followers.values():
            follower.watch()
        self._watching += 1
        if self._watching % 4 == 0:
            self._note_held()
        self.after(SILENCE_US // 2, self._watch)

    def _note_held(self) -> None:
        now = self.world.now
        for stream in self.fragment.inputs:
            held = self.performer.inputs.held(stream)
            self.history.add(Held(now, f"{self.name} inputs", stream, held))
        for stream in self.fragment.outputs:
            if stream in self.log.streams():
                held = len(self.log.segments(stream, self.log.info(stream).trimmed_upto + 1, 2**62))
                self.history.add(Held(now, f"{self.name} log", stream, held))

    # -- carrying -------------------------------------------------------------------------------

    def run(self, path: Path, version: Version, lo: int, hi: int) -> None:
        took_us = int((20_000 + 60_000 * self.chance.random()) * self.slowness)
        self.after(took_us, lambda: self._work(path, version, lo, hi, took_us))

    def _work(self, path: Path, version: Version, lo: int, hi: int, took_us: int) -> None:
        after, error = None, None
        try:
            after = self.performer.step(path, version, lo, hi)
        except Exception as err:
            error = err
        self.world.say(self.name, "ran" if error is None else "failed", path.name, f"{lo}..{hi}")
        if error is None:
            for stream in path.outputs:
                for segment in self.log.segments(stream, max(lo, self._first(stream)), hi):
                    self.history.add(
                        Made(self.world.now, self.name, self.log.epoch, stream, segment.id.bucket,
                             segment.stability.value, segment.checksum)
                    )  # fmt: skip
        self.performer.take(Finished(path.name, after, took_us / 1e6, error))

    def _first(self, stream: str) -> int:
        return self.log.info(stream).trimmed_upto + 1

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        connection = self.followers[stream].connection
        if connection is None:
            return  # said again with the next step
        name = self.name
        self.wire.request(
            self,
            connection.server,
            lambda server: server.service.acknowledge(stream, name, received, needed, epoch),
            lambda _: None,
            self._not_acknowledged,
            life=connection.server_life,
            repeatable=True,
        )

    def _not_acknowledged(self, err: HoldfastError) -> None:
        if not isinstance(err, TransportError | StorageFull):
            self.performer.take(Refused(err))

    def post(self, event: Event, after_s: float = 0.0) -> None:
        self.after(int(after_s * 1e6), lambda: self.performer.take(event))


class ClientProcess(Member):
    """A client and its application, whose memory is as durable as the client's position."""

    def __init__(
        self, world: World, wire: Wire, network: Network, output: str, history: History
    ) -> None:
        super().__init__(world, f"client-{output}", wire)
        self.network, self.output, self.history = network, output, history
        self.position: int | None = None
        self.ended = False
        #: Told how far the application is: the monitor's eye.
        self.on_told: Callable[[int], None] = lambda upto: None
        #: Had by the application, not yet durable.
        self._had: list[Given] = []

    def up(self) -> None:
        self.client = Client(
            self.output, lambda: None, self.network.width_us,  # type: ignore[arg-type,return-value]
            log=self.log, name=self.name, clock=self.clock,
        )  # fmt: skip
        self.client.peer = self  # type: ignore[assignment]
        self.follower = Follower(self, self.wire, self.output, self.client.following, self._take)
        self._note(self.world.now)
        if not self.ended:
            self.follower.connect()
            self.after(SILENCE_US // 2, self._watch)

    def _watch(self) -> None:
        self.follower.watch()
        self.after(SILENCE_US // 2, self._watch)

    def _take(self, delivery: Delivery) -> None:
        now = self.world.now
        self.client.settle()
        for table, info in self.client.take(delivery):
            rows: tuple[Row, ...] = table.rows
            self._had.append(
                Given(now, self.name, self.output, info.bucket, rows, info.stability.value)
            )
            self.world.say(self.name, "given", info.bucket, table.num_rows)
        self._note(now)

    def _note(self, now: int) -> None:
        """What the application had counts once the position is durable: a crash before takes it
        back with the application's own memory, a crash after does not."""
        for given in self._had:
            if self.client.position is not None and given.bucket <= self.client.position:
                self.history.add(given)
        self._had = []
        if self.client.position != self.position:
            assert self.client.position is not None
            self.position = self.client.position
            self.history.add(Told(now, self.name, self.output, self.position))
            self.on_told(self.position)
        if self.client.ended and not self.ended:
            self.ended = True
            self.history.add(Told(now, self.name, self.output, FOREVER))
            self.on_told(FOREVER)

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        connection = self.follower.connection
        if connection is None:
            return

        def failed(err: HoldfastError) -> None:
            self.client.not_acknowledged()
            if not isinstance(err, TransportError | StorageFull):
                raise err

        self.wire.request(
            self,
            connection.server,
            lambda server: server.service.acknowledge(stream, reader, received, needed, epoch),
            lambda _: None,
            failed,
            life=connection.server_life,
            repeatable=True,
        )


def readers_of(network: Network, stream: str) -> set[str]:
    """Who must have acknowledged before anything of a stream is trimmed."""
    nodes = {fragment.name for fragment in fragments(network) if stream in fragment.inputs}
    outputs = {op.name for op in network.outputs}
    return nodes | ({f"client-{stream}"} if stream in outputs else set())
