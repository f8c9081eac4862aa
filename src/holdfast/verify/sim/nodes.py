"""A simulated node: the production `Performer`, carried by virtual time instead of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from holdfast.config import Options
from holdfast.core import moves as core
from holdfast.core.catch_up import CatchUp
from holdfast.core.membership import Standing
from holdfast.core.promises import Answer
from holdfast.core.subscription import Position, Subscription
from holdfast.engine.state import Version
from holdfast.errors import (
    HoldfastError,
    StorageFull,
    TransportError,
)
from holdfast.model.fragments import (
    Fragment,
    home_of,
    is_pair,
    partners_of,
    producers_of,
    readers_of,
)
from holdfast.model.network import Network
from holdfast.model.trees import tolerance_buckets
from holdfast.node.effects import Asked, Event, Finished, Work
from holdfast.node.executor import Performer
from holdfast.node.state_transfer import DECLARED_DEAD
from holdfast.node.state_transfer import install as moved
from holdfast.storage.files import put_file
from holdfast.streams.calls import Moving
from holdfast.types import Segment, SegmentId
from holdfast.verify.history import Held, History, Made
from holdfast.verify.sim.engine_twin import EngineTwin, MemoryInputs
from holdfast.verify.sim.follower import Follower
from holdfast.verify.sim.links import HEARTBEAT_US, SILENCE_US, Wire
from holdfast.verify.sim.members import FULL_US, REGISTER_US, Member, kept_for_ever, memory_log
from holdfast.verify.sim.tables import Rows
from holdfast.verify.sim.world import World

#: At most so long a state is on its way.
MOVING_US = 1_500_000


class Given(NamedTuple):
    """A path on its way to a partner: all of it in one message."""

    moving: Moving
    state: dict[str, bytes]
    rows: dict[SegmentId, Rows]

    def read(self, segment: Segment) -> Rows:
        return self.rows[segment.id]


class NodeProcess(Member):
    """Implements `performer.Carrier`."""

    def __init__(
        self,
        world: World,
        wire: Wire,
        network: Network,
        fragment: Fragment,
        name: str,
        options: Options,
        history: History,
    ) -> None:
        super().__init__(world, name, wire)
        self.network, self.fragment, self.options = network, fragment, options
        self.history = history
        self.chance = world.rng(f"steps/{self.name}")
        #: Steps take so many times as long.
        self.slowness = 1.0
        #: Each bucket more in a step costs so much.
        self._bucket_us = self.chance.choice([5_000, 30_000, 70_000])
        self.followers: dict[str, Follower] = {}
        self._kept_for_ever = kept_for_ever(network, options)
        self._watching = 0
        self.pair = is_pair(network, fragment.name)
        #: A successor runs in its place.
        self.replaced = False
        #: It has no state, and waits for its partner's.
        self.moving = False
        self._catching = CatchUp(0)
        #: Since when it is being made anew, through however many beginnings.
        self.lost_at: int | None = None

    def forget(self) -> None:
        super().forget()
        self.moving = False

    def die(self, why: str, *, power: bool = False) -> None:
        super().die(why, power=power)
        self.lost_at = None

    def give_up(self, err: BaseException) -> None:
        """One of a pair that was declared dead, and so finds itself replaced or without inputs, is
        made anew: its supervisor starts it again."""
        if self.pair and not self.replaced and isinstance(err, DECLARED_DEAD):
            self.world.say(self.name, "starts anew:", f"{type(err).__name__}: {err}")
            since = self.lost_at
            self.die("it was declared dead")
            self.lost_at = since
            self.world.at(self.world.now + REGISTER_US, self.start)
        else:
            super().give_up(err)

    # -- one of a pair is made anew ---------------------------------------------------------------

    def _ready(self) -> None:
        if self.pair and self.log.epoch > 1:
            self.moving, self._catching = True, CatchUp(self.clock())
            self.lost_at = self.lost_at or self.world.now
            self._hold()
        else:
            super()._ready()

    def _hold(self) -> None:
        """Ask all producers to keep what may be needed, then the partner for its state."""
        made_by = producers_of(self.network)
        asked = [(stream, maker) for stream in self.fragment.inputs for maker in made_by[stream]]
        waiting = set(asked)
        whole: set[str] = set()

        def hold(stream: str, maker: str) -> None:
            def over(answer: bool = False) -> None:
                waiting.discard((stream, maker))
                if answer:
                    whole.add(stream)
                if not waiting:
                    self._ask_state(whole == set(self.fragment.inputs))

            epoch = self.log.epoch
            self._ask_node(maker, lambda s: s.service.hold(stream, self.name, epoch), over, over)

        for stream, maker in asked:
            hold(stream, maker)

    def _ask_state(self, whole: bool) -> None:
        (partner,) = partners_of(self.network, self.name)

        def told(given: list[Given] | None) -> None:
            if given is not None:
                took_us = int(MOVING_US * self.chance.random() ** 2)
                self.after(took_us, lambda: self._install(given))
            else:
                refused(waits=True)

        def refused(*, waits: bool = False) -> None:
            own = all(self.log.states(path.name) for path in self.fragment.paths)
            match self._catching.refused(self.clock(), own=own or whole, waits=waits):
                case "own":
                    self.world.say(self.name, "comes back from its own disk")
                    self.moving = False
                    super(NodeProcess, self)._ready()
                case "lost":
                    raise HoldfastError(f"{self.name}: both of the pair are gone")
                case "again":
                    self.after(REGISTER_US, self._hold)

        self._ask_node(partner, lambda node: node.give(), told, refused)

    def give(self) -> list[Given] | None:
        """To a partner that is made anew; None when this one waits for state itself."""
        if self.moving:
            return None
        if not self.is_up:
            raise TransportError(f"{self.name} is not up yet")
        found = self.performer.give()
        if found is None:
            raise TransportError(f"{self.name} has not begun yet")
        state = {
            name: self.disk.read(f"/{self.name}/state/{name}")
            for path in found
            for name in path.files
        }
        rows = {s.id: self.log.read(s) for path in found for r in path.results for s in r.segments}
        self.performer.given()
        return [Given(path, state, rows) for path in found]

    def _install(self, given: list[Given]) -> None:
        epoch, crash_after = self.log.epoch, self.disk.crash_after
        self.disk.wipe()
        self.disk.crash_after = crash_after

        try:
            self.log = memory_log(self, self.name)
            self.log.raise_epoch(epoch)
            for path in given:
                for name in path.moving.files:
                    into = f"/{self.name}/state/{name}"
                    put_file(into, path.state[name], fsync=False, disk=self.disk)
                moved(self.log, path.moving, path.read)
        except StorageFull:
            self.after(FULL_US, lambda: self._install(given))
            return
        self.world.say(self.name, "has the state of its partner at", given[0].moving.bucket)
        self.moving = False
        super()._ready()

    def _ask_node(
        self,
        name: str,
        ask: Callable[[Any], Any],
        told: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        def located(address: str | None) -> None:
            server = self.wire.resolve(address)
            if server is None:
                failed()
            else:
                self.wire.request(self, server, ask, told, lambda err: failed())

        self.wire.ask_controller(self, lambda c: c.where(name), located, lambda err: failed())

    def up(self) -> None:
        engine = EngineTwin(self.network, self.disk, f"/{self.name}/state")
        self.performer = Performer(
            self.name, self.fragment, engine, self.log, self.service, self, self.options,
            inputs=MemoryInputs(self.disk), clock=self.monotonic,
            partners=partners_of(self.network, self.name),
        )  # fmt: skip
        for stream in self.fragment.outputs:
            self.service.readers[stream] = set(readers_of(self.network)[stream])
        made_by = producers_of(self.network)
        self.followers = {
            stream: Follower(
                self, self.wire, stream, self._subscription(stream, made_by[stream]),
                self.performer.receive,
            )
            for stream in self.fragment.inputs
        }  # fmt: skip
        self.performer.take(core.Began(self.monotonic()))
        for follower in self.followers.values():
            follower.connect()
        self.after(SILENCE_US // 2, self._watch)

    def _subscription(self, stream: str, makers: tuple[str, ...]) -> Subscription:
        home = home_of(self.name, makers) if self.pair else None
        return Subscription(
            makers, self.performer.wanted(stream), self.performer.tentative, home=home,
            tolerance_buckets=tolerance_buckets(self.network, self.fragment.name),
            heartbeat_us=HEARTBEAT_US, ask_us=SILENCE_US if home else 0,
        )  # fmt: skip

    def heard(self, standings: dict[str, Standing]) -> None:
        super().heard(standings)
        if self.pair and self.is_up:
            (partner,) = partners_of(self.network, self.name)
            self.performer.take(core.Alone(self.monotonic(), standings[partner].gone))

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
        self.note_held(self.fragment.outputs, self._kept_for_ever)

    # -- carrying -------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        took_us = int((20_000 + 60_000 * self.chance.random()) * self.slowness)
        took_us += self._bucket_us * min(work.hi - work.lo, 20)
        self.after(took_us, lambda: self._work(work, version, took_us))

    def _work(self, work: Work, version: Version, took_us: int) -> None:
        after, error = None, None
        try:
            after = self.performer.step(work, version)
        except Exception as err:
            error = err
        stable = isinstance(work, core.Run)
        what = ("ran" if stable else "ran TENTATIVE") if error is None else "failed"
        self.world.say(self.name, what, work.path, f"{work.lo}..{work.hi}")
        if error is None and stable:
            for stream in self.performer.paths[work.path].outputs:
                first = max(work.lo, self._first(stream))
                for segment in self.log.segments(stream, first, work.hi):
                    self.history.add(
                        Made(self.world.now, self.name, self.log.epoch, stream, segment.id.bucket,
                             segment.stability.value, segment.checksum)
                    )  # fmt: skip
        # The loop hears of it a little later than the log.
        finished = Finished(work, after, took_us / 1e6, error)
        self.after(int(20_000 * self.chance.random() ** 3), lambda: self.performer.take(finished))

    def ask(self, action: core.Ask, peers: tuple[str, ...]) -> None:
        def told(peer: str, answer: Answer) -> None:
            self.world.say(self.name, "asked", peer, "to go on answering", action.path, answer)
            answered = core.Answered(self.monotonic(), action.path, peer, action.correction, answer)
            if not action.done:
                self.performer.take(answered)

        for peer in peers:
            self._ask_partner(
                peer,
                lambda node: node.asked(action, self.name),
                partial(told, peer),
                partial(told, peer, "away"),
            )

    def asked(self, action: core.Ask, peer: str) -> Answer:
        """By a peer."""
        answers: list[Answer] = []
        self.performer.take(
            Asked(action.path, peer, action.correction, action.position, action.done,
                  answers.append)
        )  # fmt: skip
        if not answers:  # a full disk holds up everything
            raise TransportError(f"{self.name} does not answer")
        return answers[0]

    def _ask_partner(
        self,
        partner: str,
        ask: Callable[[NodeProcess], Any],
        told: Callable[[Any], None],
        failed: Callable[[], None],
    ) -> None:
        def asked(node: NodeProcess) -> Any:
            if not node.is_up:
                raise TransportError(f"{node.name} is not up yet")
            return ask(node)

        self._ask_node(partner, asked, told, failed)

    def _first(self, stream: str) -> int:
        return self.log.info(stream).trimmed_upto + 1

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        self.world.say(self.name, "acknowledges", stream, received, "needs from", needed + 1)
        self.followers[stream].advanced(Position(received, needed, epoch))

    def post(self, event: Event, after_s: float = 0.0) -> None:
        self.after(int(after_s * 1e6), lambda: self.performer.take(event))
