"""A simulated client: the production `Client`, and an application that consumes its deliveries."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.edge.client import Client
from holdfast.model import operators as ops
from holdfast.streams.delivery import Delivery
from holdfast.types import Stability
from holdfast.verify.history import Concluded, Given, Hinted, History, Progressed
from holdfast.verify.sim.links import SILENCE_US, Wire
from holdfast.verify.sim.simulated_process import FOREVER, Member, Wiring
from holdfast.verify.sim.simulated_subscriber import Follower
from holdfast.verify.sim.tables import Row
from holdfast.verify.sim.world import World


class ClientProcess(Member):
    """A client and its application, whose memory is as durable as the client's position."""

    serves = False

    def __init__(
        self, world: World, wire: Wire, wiring: Wiring, op: ops.Output, history: History
    ) -> None:
        super().__init__(world, f"client-{op.name}", wire)
        self.network, self.output, self.history = wiring.network, op.name, history
        self._producers = wiring.producers[op.name]
        self._tolerance_buckets = wiring.tolerances[op.fragment]
        self.position: int | None = None
        self.ended = False
        #: Called with the position of the application; used by the contract monitor.
        self.on_position: Callable[[int], None] = lambda upto: None
        #: Received by the application, but not yet durable.
        self._had: list[Given | Concluded] = []
        #: Number of starts, recorded as the version of tentative buckets: a restarted client
        #: delivers tentative buckets again.
        self._starts = 0
        self._hinted: int | None = None

    def up(self) -> None:
        self._starts += 1
        self.client = Client(
            self.output, {}, self.network.width_us,
            log=self.log, name=self.name, clock=self.clock, tentative=True,
            tolerance_buckets=self._tolerance_buckets,
        )  # fmt: skip
        self.follower = Follower(
            self, self.wire, self.output, self.client.subscription(self._producers), self._take
        )
        self.client.advanced = self.follower.advanced
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
        try:
            self._show(delivery, now)
        except BaseException:
            # The application has seen tentative buckets, even if the process dies now.
            self.history.events += [event for event in self._had if _is_seen(event)]
            self._had = [event for event in self._had if not _is_seen(event)]
            raise
        self._note(now)

    def _show(self, delivery: Delivery, now: int) -> None:
        for table, info in self.client.take(delivery):
            if info.rec_done:
                self._had.append(Concluded(now, self.name, self.output, info.bucket))
                self.world.say(self.name, "REC_DONE", info.bucket)
            else:
                rows: tuple[Row, ...] = table.rows if table.num_rows else ()
                stability = info.stability.value
                delivered = Given(
                    now, self.name, self.output, info.bucket, rows, stability, self._starts,
                    missing=info.missing, inputs_share=info.inputs_share,
                    replaces=info.replaces,
                )  # fmt: skip
                self._had.append(delivered)
                self.world.say(self.name, "delivered", info.bucket, table.num_rows, stability)

    def _note(self, now: int) -> None:
        """Records stable buckets once the position is durable: a crash before that also discards
        the application's own memory, a crash after that does not. Tentative buckets are recorded
        at once."""
        for event in self._had:
            position = self.client.position
            if _is_seen(event) or (position is not None and event.bucket <= position):
                self.history.add(event)
        self._had = []
        known_upto = self.client.known_upto
        if known_upto is not None and known_upto != self._hinted:
            self._hinted = known_upto
            self.history.add(Hinted(now, self.name, self.output, known_upto))
        if self.client.position != self.position:
            assert self.client.position is not None
            self.position = self.client.position
            self.history.add(Progressed(now, self.name, self.output, self.position))
            self.on_position(self.position)
        if self.client.ended and not self.ended:
            self.ended = True
            self.history.add(Progressed(now, self.name, self.output, FOREVER))
            self.on_position(FOREVER)


def _is_seen(event: Given | Concluded) -> bool:
    return isinstance(event, Given) and event.stability == Stability.TENTATIVE
