"""What simulated processes have in common: a log on a disk that can fail, an epoch, and the
controller that hands it out. Around the production classes is what threads and supervisor do."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from holdfast.cluster.controller import Controller
from holdfast.cluster.controller_service import ControllerService
from holdfast.config import Options
from holdfast.core.lag import Positions
from holdfast.core.membership import Standing
from holdfast.errors import HoldfastError, StaleEpoch, StorageFull, TransportError
from holdfast.model.fragments import producers_of, readers_of, recovery_of
from holdfast.model.layout import Layout
from holdfast.model.network import Network
from holdfast.model.trees import tolerances
from holdfast.storage import Log
from holdfast.streams.calls import Register, Registration
from holdfast.streams.serving import answered
from holdfast.verify.history import Held, History
from holdfast.verify.sim.links import HEARTBEAT_US, Server, Wire
from holdfast.verify.sim.tables import RowSegments
from holdfast.verify.sim.world import World

#: The boundary of a stream that has ended, in a history.
FOREVER = 2**62
FULL_US = 1_000_000
REGISTER_US = 500_000
#: One of a pair that was not heard of for so long is dead.
DEAD_US = 2_000_000
TRIM_BUCKETS_MAX = 6


class _Alone(_thread.RLock):  # type: ignore[misc]  # entered for everything, so not in Python
    """A lock and condition where there is one thread: it only says that something changed."""

    __slots__ = ("_process",)

    def __init__(self, process: Server) -> None:
        self._process = process

    def notify_all(self) -> None:
        self._process.news = True


def memory_log(process: Server, owner: str, folder: str | None = None) -> Log:
    log = Log.open(
        folder or f"/{owner}", owner, fsync="always", archive=False,
        disk=process.disk, segments=RowSegments(),
    )  # fmt: skip
    log.changed = log._appending = _Alone(process)  # type: ignore[assignment]
    return log


class Wiring:
    """Who makes and who reads each stream, and how far behind stable rows are preferred: derived
    once from the network, for all processes and all their lives."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.producers = producers_of(network)
        self.readers = {stream: frozenset(names) for stream, names in readers_of(network).items()}
        self.tolerances = tolerances(network)


class ControllerProcess(Server):
    """Hands out epochs and knows where everybody is; `producers` is the layout."""

    def __init__(
        self,
        world: World,
        wire: Wire,
        producers: dict[str, tuple[str, ...]],
        peers: dict[str, str],
        options: Options,
        layout: Layout,
    ) -> None:
        super().__init__(world, "controller", wire)
        self._producers, self._peers = producers, peers
        self._options, self._layout = options, layout
        self.controller: Controller | None = None
        self._controller_service: ControllerService | None = None

    def boot(self) -> None:
        try:
            log = memory_log(self, "controller")
        except StorageFull:
            self.after(FULL_US, self.boot)
            return
        self.controller = Controller(
            log, self._peers, self.world.now, self._layout, silence_us=DEAD_US,
            rejoin_us=self._options.rejoin_us, stall_us=self._options.stall_us,
        )  # fmt: skip
        self._controller_service = ControllerService(
            self.controller, self.service, (), lambda: self.world.now
        )
        if self._peers:  # nobody else is ever declared dead
            self._judge()

    def _judge(self) -> None:
        assert self.controller is not None
        with suppress(StorageFull):
            dead, moved = self.controller.judge(self.world.now)
            for name in dead:
                why = self.controller.why_dead(name)
                self.world.say("controller", "declares dead", name, f"({why})")
            for name, host in moved.items():
                self.world.say("controller", "gives", name, "to", host)
        self.after(HEARTBEAT_US, self._judge)

    def forget(self) -> None:
        super().forget()
        self.controller = self._controller_service = None

    def next_epoch(self, name: str, at_least: int) -> int:
        return answered(lambda: self._up().next_epoch(name, at_least))

    def register(
        self, name: str, address: str, epoch: int, positions: Positions
    ) -> dict[str, Standing] | None:
        """How those stand that are one of a pair; None for whoever was replaced."""
        at, known = self.world.now, self._up()
        current = answered(lambda: known.register(name, address, epoch, at, positions))
        return known.standings() if current else None

    def heartbeat(self, asked: Register) -> Registration:
        """Of a host."""
        self._up()
        assert self._controller_service is not None
        controller_service = self._controller_service
        return answered(lambda: controller_service.register(asked))

    def host_ended(self, host: str) -> None:
        if self._controller_service is not None:
            self._controller_service.ended(host)

    def _up(self) -> Controller:
        if self.controller is None:
            raise TransportError("the controller is not up yet")
        return self.controller

    def where(self, name: str, *, catching_up: bool = False) -> str | None:
        return self._up().address(name, catching_up=catching_up)

    def locate(self, stream: str) -> dict[str, str | None]:
        known = self._up()
        return {name: known.address(name) for name in self._producers[stream]}


class Member(Server):
    """A process that gets its epoch from the controller and tells it where it listens."""

    log: Log
    history: History
    #: Somebody may follow it.
    serves = True
    #: It has its epoch, its log is open, and it works.
    is_up = False

    def forget(self) -> None:
        super().forget()
        self.is_up = False

    def boot(self) -> None:
        self.wire.listen(self)
        self.service.trim_buckets = int(1 + TRIM_BUCKETS_MAX * self.wire.chance.random())
        self.retry_full(self._open, self._ask_epoch)

    def _open(self) -> None:
        self.log = self.open_log()

    def open_log(self) -> Log:
        return memory_log(self, self.name)

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
        if self.serves:
            self.after(HEARTBEAT_US, self.beat)

    def _register(self) -> None:
        """Whoever is followed says again and again where it is, and so finds out that it was
        replaced; a controller that comes back knows no addresses."""

        def told(standings: dict[str, Standing] | None) -> None:
            if standings is None:
                raise StaleEpoch(f"{self.name} of epoch {self.log.epoch} was replaced; it stops")
            self.heard(standings)
            if self.serves:
                self.after(REGISTER_US, self._register)

        def failed(err: HoldfastError) -> None:
            if not isinstance(err, TransportError):
                raise err
            self.after(REGISTER_US, self._register)

        address, epoch, positions = self.address, self.log.epoch, self.positions()
        self.wire.ask_controller(
            self, lambda c: c.register(self.name, address, epoch, positions), told, failed
        )

    def positions(self) -> Positions:
        """How far each path is, of a node."""
        return {}

    def heard(self, standings: dict[str, Standing]) -> None:
        """From the controller: who is dead is not waited for."""
        with suppress(StorageFull, TransportError):
            self.service.lost(standings, self.world.now)

    def note_held(self, streams: Sequence[str], kept_for_ever: Collection[str]) -> None:
        """How much of each stream the log holds, where a bound is promised."""
        for stream in streams:
            held = self.held(stream)
            if held is not None and stream not in kept_for_ever:
                self.history.add(Held(self.world.now, f"{self.name} log", stream, held))

    def held(self, stream: str) -> int | None:
        """How many buckets of a stream its log has; None before it was opened."""
        if not self.log.has(stream):
            return None
        first = self.log.info(stream).trimmed_upto + 1
        return len({segment.id.bucket for segment in self.log.segments(stream, first, FOREVER)})

    def retry_full(self, act: Callable[[], None], then: Callable[[], None]) -> None:
        """A full disk makes it wait, nothing else."""
        try:
            act()
        except StorageFull:
            self.after(FULL_US, lambda: self.retry_full(act, then))
            return
        then()


def kept_for_ever(network: Network, options: Options) -> set[str]:
    """Streams of which everything is kept, as promised: with `replay`, what an empty node needs to
    rebuild state that is not convergent is all of its input since the start."""
    found: set[str] = set()
    waiting = [
        op
        for op in network.operators
        if not op.convergent and recovery_of(network, op.fragment, options) == "replay"
    ]
    while waiting:
        for up in waiting.pop().inputs:
            if up is not None and up.name not in found:
                found.add(up.name)
                waiting.append(up)
    return found
