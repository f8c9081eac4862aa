"""Common base of simulated processes: a log on a disk that can fail, an epoch, and the controller
that assigns epochs. The code around the production classes replaces their threads and the
supervisor."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from holdfast.cluster.controller import Controller
from holdfast.cluster.controller_service import ControllerService
from holdfast.config import Options
from holdfast.core.lag import Positions
from holdfast.core.membership import InstanceStatus
from holdfast.errors import HoldfastError, StaleEpoch, StorageFull, TransportError
from holdfast.model.fragments import consumers_of, producers_of, recovery_of
from holdfast.model.layout import Layout
from holdfast.model.network import Network
from holdfast.model.operators import Operator
from holdfast.model.trees import tolerances
from holdfast.storage import Log
from holdfast.streams.calls import Register, Registration
from holdfast.streams.serving import answered
from holdfast.verify.history import Held, History
from holdfast.verify.sim.links import HEARTBEAT_US, Server, Wire
from holdfast.verify.sim.tables import RowSegments
from holdfast.verify.sim.world import World

#: Recorded in a history as the boundary of a stream that has ended.
FOREVER = 2**62
FULL_US = 1_000_000
REGISTER_US = 500_000
#: A replica of a pair is dead after this time without a heartbeat.
DEAD_US = 2_000_000
TRIM_BUCKETS_MAX = 6


class _Alone(_thread.RLock):  # type: ignore[misc]  # hot path, so the base class is in C
    """A lock and condition for a single thread; `notify_all` only marks the process as changed."""

    __slots__ = ("_process",)

    def __init__(self, process: Server) -> None:
        self._process = process

    def notify_all(self) -> None:
        self._process.news = True


def memory_log(process: Server, owner: str, folder: str | None = None) -> Log:
    log = Log.open(
        folder or f"/{owner}", owner, fsync="always", archive=False,
        disk=process.disk, segments=RowSegments(), clock=lambda: process.world.now,
    )  # fmt: skip
    log.changed = log._appending = _Alone(process)  # type: ignore[assignment]
    return log


class Wiring:
    """Producers and consumers of each stream, and the lag up to which stable rows are preferred:
    derived once from the network, for all processes and all their lives."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.producers = producers_of(network)
        self.consumers = {
            stream: frozenset(names) for stream, names in consumers_of(network).items()
        }
        self.tolerances = tolerances(network)


class ControllerProcess(Server):
    """Assigns epochs and knows the addresses of all processes; `producers` maps each stream to its
    producers."""

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
        if self._peers:  # only replicas of pairs are ever declared dead
            self._judge()

    def _judge(self) -> None:
        assert self.controller is not None
        with suppress(StorageFull):
            dead, moved = self.controller.judge(self.world.now)
            for name in dead:
                why = self.controller.why_dead(name)
                self.world.say("controller", "declares dead", name, f"({why})")
            for name, host in moved.items():
                self.world.say("controller", "assigns", name, "to", host)
        self.after(HEARTBEAT_US, self._judge)

    def forget(self) -> None:
        super().forget()
        self.controller = self._controller_service = None

    def next_epoch(self, name: str, at_least: int) -> int:
        return answered(lambda: self._up().next_epoch(name, at_least))

    def register(
        self, name: str, address: str, epoch: int, positions: Positions
    ) -> dict[str, InstanceStatus] | None:
        """The status of all replicas of pairs; None if the caller was replaced."""
        at, controller = self.world.now, self._up()
        current = answered(lambda: controller.register(name, address, epoch, at, positions))
        return controller.statuses() if current else None

    def heartbeat(self, asked: Register) -> Registration:
        """Handles the heartbeat of a host."""
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
        controller = self._up()
        return {name: controller.address(name) for name in self._producers[stream]}


class Member(Server):
    """A process that gets its epoch from the controller and registers its address there."""

    log: Log
    history: History
    #: Other processes may subscribe to its streams.
    serves = True
    #: The process has its epoch and an open log, and works.
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
        """Registers the address. A process that serves streams registers repeatedly, because a
        restarted controller knows no addresses, and because a replaced process learns of its
        replacement this way."""

        def registered(statuses: dict[str, InstanceStatus] | None) -> None:
            if statuses is None:
                raise StaleEpoch(
                    f"{self.name}: its instance of epoch {self.log.epoch} was replaced; it stops"
                )
            self.heard(statuses)
            if self.serves:
                self.after(REGISTER_US, self._register)

        def failed(err: HoldfastError) -> None:
            if not isinstance(err, TransportError):
                raise err
            self.after(REGISTER_US, self._register)

        address, epoch, positions = self.address, self.log.epoch, self.positions()
        self.wire.ask_controller(
            self, lambda c: c.register(self.name, address, epoch, positions), registered, failed
        )

    def positions(self) -> Positions:
        """The position of each path; empty unless the process is a node."""
        return {}

    def heard(self, statuses: dict[str, InstanceStatus]) -> None:
        """Applies the status from the controller, so that dead replicas are not waited for."""
        with suppress(StorageFull, TransportError):
            self.service.lost(statuses, self.world.now)

    def note_held(self, streams: Sequence[str], kept_for_ever: Collection[str]) -> None:
        """Records how many buckets of each stream the log holds, where a bound is promised: not of
        a stream that has ended, because finished consumers report no more positions."""
        for stream in streams:
            held = self.held(stream)
            if held is not None and stream not in kept_for_ever and not self.log.info(stream).ended:
                self.history.add(Held(self.world.now, f"{self.name} log", stream, held))

    def held(self, stream: str) -> int | None:
        """How many buckets of a stream the log holds; None before the stream was opened."""
        if not self.log.has(stream):
            return None
        first = self.log.info(stream).trimmed_upto + 1
        return len({segment.id.bucket for segment in self.log.segments(stream, first, FOREVER)})

    def retry_full(self, act: Callable[[], None], then: Callable[[], None]) -> None:
        """Retries `act` while the disk is full; all other errors are raised."""
        try:
            act()
        except StorageFull:
            self.after(FULL_US, lambda: self.retry_full(act, then))
            return
        then()


def kept_for_ever(network: Network, options: Options) -> set[str]:
    """Streams that are retained entirely, as promised: with `replay`, an empty node needs all input
    since the start to rebuild state that is not convergent; and with `cec`, but without a limit of
    rows or buckets, no checkpoint is due before a million rows."""
    streams: set[str] = set()
    waiting = [op for op in network.operators if _replays_everything(network, op, options)]
    while waiting:
        for up in waiting.pop().inputs:
            if up is not None and up.name not in streams:
                streams.add(up.name)
                waiting.append(up)
    return streams


def _replays_everything(network: Network, op: Operator, options: Options) -> bool:
    recovery = recovery_of(network, op.fragment, options)
    limit = options.checkpoint_buckets or network.protection(op.fragment).recovery_rows
    return recovery == "cec" and not limit if recovery != "replay" else not op.convergent
