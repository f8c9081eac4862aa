"""A simulated node: the production `Performer`, driven in virtual time instead of by threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.config import Options
from holdfast.core import progress_events as core
from holdfast.core.divergence import COMPARE_US, Window
from holdfast.core.lag import Positions
from holdfast.core.membership import InstanceStatus
from holdfast.core.quarantine import kind_of
from holdfast.core.subscription import Position, Subscription
from holdfast.engine.state import Version
from holdfast.errors import HoldfastError, NotOffered, TransportError
from holdfast.model.fragments import (
    Fragment,
    is_pair,
    local_replica_of,
    peers_of,
)
from holdfast.node.executor import Performer
from holdfast.node.node_events import (
    Asked,
    DigestsReceived,
    Event,
    Finished,
    Flushed,
    InputDigestsReceived,
    Recomputation,
    Replied,
    StateAnswer,
    StateAsked,
    Work,
)
from holdfast.node.state_lending import offer_of
from holdfast.node.state_transfer import Fingerprints, Staging
from holdfast.storage import Log
from holdfast.streams.calls import Digests, Instance, OfferedState, Postpone, Postponement
from holdfast.verify.history import Held, History, Made
from holdfast.verify.sim.links import HEARTBEAT_US, SILENCE_US
from holdfast.verify.sim.simulated_catch_up import Rebuild
from holdfast.verify.sim.simulated_engine import EngineTwin, MemoryInputs
from holdfast.verify.sim.simulated_process import Member, Wiring, kept_for_ever
from holdfast.verify.sim.simulated_subscriber import Follower
from holdfast.verify.sim.tables import RowSegments

if TYPE_CHECKING:
    from holdfast.verify.sim.host_process import HostProcess

#: Kinds of errors that no fault explains: such errors are recorded as stops.
BUGS = ("crash", "refused")
#: Cost of a step, at least, and how much more it may be, in microseconds.
STEP_US, STEP_MORE_US = 20_000, 60_000
#: More buckets than this do not make a step longer.
COSTLY_BUCKETS = 20


class NodeProcess(Member):
    """Implements `node_events.Carrier`. The host starts and stops the node and reports the node to
    the controller. Every other fault of the node is applied to its host."""

    def __init__(
        self,
        host: HostProcess,
        wiring: Wiring,
        fragment: Fragment,
        name: str,
        options: Options,
        history: History,
    ) -> None:
        super().__init__(host.world, name, host.wire)
        self.host = host
        self.network, self.fragment, self.options = wiring.network, fragment, options
        self._wiring = wiring
        self.history = history
        self.chance = self.world.rng(f"steps/{self.name}")
        #: Factor by which steps are slower than usual.
        self.slowness = 1.0
        #: Cost of each further bucket in a step, in microseconds, derived from the bucket width.
        width_us = min(self.network.width_us, 500_000)
        self._bucket_us = width_us * self.chance.choice([1, 6, 14]) // 100
        #: Sometimes the results of many buckets are too large for one step; never if the work of an
        #: hour waits, which would take too many steps.
        limits = [None] * 7 + ([2, 5, 20] if self.network.name not in ("hours", "short") else [])
        self._buckets_max = self.world.rng(f"large/{self.name}").choice(limits)
        self.followers: dict[str, Follower] = {}
        self._kept_for_ever = kept_for_ever(self.network, options)
        self._watching = 0
        self.pair = is_pair(self.network, fragment.name)
        self._peers = peers_of(self.network, name)
        #: A successor has replaced this node.
        self.replaced = False
        #: Set while a replica of a pair catches up.
        self.rebuild: Rebuild | None = None
        self._staging = Staging(f"/{name}", self.disk, RowSegments())
        #: Number of tentative buckets computed in this life, per path.
        self.tentative_buckets: Counter[str] = Counter()
        #: When the catch-up began, across all of its attempts; None: not catching up.
        self.lost_at: int | None = None

    def forget(self) -> None:
        super().forget()
        self.rebuild = None
        self.tentative_buckets.clear()

    # -- called by the host -----------------------------------------------------------------------

    def begin(self, *, rebuild: bool) -> None:
        if rebuild:
            self.world.say(self.name, "is rebuilt")
            crash_after = self.disk.crash_after
            self.disk.wipe()
            self.disk.crash_after = crash_after
        super().start()

    def end(self, why: str, *, power: bool = False) -> None:
        """Ends this life. A node that is stopped retains the start time of a catch-up in progress,
        because the next attempt counts from the same start."""
        since = self.lost_at
        super().die(why, power=power)
        self.lost_at = since if why == "stopped" else None

    def instance(self) -> Instance | None:
        """The report to the controller about this node; None before there is anything to report."""
        if self.rebuild is not None:
            return Instance(self.name, self.address, self.log.epoch, up=False)
        if not (self.alive and self.is_up):
            return None
        return Instance(
            self.name, self.address, self.log.epoch, self.position, dict(self.positions())
        )

    @property
    def position(self) -> int | None:
        """The last bucket of the slowest path; None until all paths have begun."""
        positions = list(self.positions().values())
        begun = [position for position in positions if position is not None]
        return min(begun) if len(begun) == len(positions) else None

    # -- delegated to the host --------------------------------------------------------------------

    def start(self) -> None:
        self.host.start()

    def die(self, why: str, *, power: bool = False) -> None:
        self.host.die(why, power=power)

    def pause(self) -> None:
        self.host.pause()

    def resume(self) -> None:
        self.host.resume()

    def give_up(self, err: BaseException) -> None:
        self.world.say(self.name, "fails:", f"{type(err).__name__}: {err}")
        if kind_of(err) in BUGS:
            self.world.on_stop(self, err)
        self.host.failed(self, err)

    def _register(self) -> None:
        self.host.wake()

    # -- catch-up of a replica of a pair ----------------------------------------------------------

    def open_log(self) -> Log:
        self._staging.settle()
        return super().open_log()

    def _ready(self) -> None:
        if self.pair and self.log.epoch > 1:
            self.rebuild = Rebuild(self, self._staging)
            self.lost_at = self.lost_at or self.world.now
            self.rebuild.begin()
        else:
            super()._ready()

    def caught_up(self, *, reopen: bool) -> None:
        self.rebuild = None
        if reopen:
            self.retry_full(self._open, super()._ready)
        else:
            super()._ready()

    def offer_state(self, newcomer: str) -> OfferedState:
        """Offers the state to a peer that catches up."""
        if self.rebuild is not None:
            return OfferedState("waits", own=self.rebuild.core.as_peer().own)
        if not self.is_up:
            raise TransportError(f"{self.name} is not up yet")
        answers: list[StateAnswer] = []
        self.performer.take(StateAsked(newcomer, answers.append))
        (answer,) = answers
        return offer_of(answer, Fingerprints(f"/{self.name}/state", self.disk))

    def piece(self, name: str) -> bytes:
        path = self.service.offered.get(name)
        if path is None:
            raise NotOffered(f"{name!r} is not offered here, or not any more")
        if not self.disk.exists(path):
            raise NotOffered(f"{name!r} was deleted before it was fetched")
        return self.disk.read(path)

    def ask_node(
        self,
        name: str,
        ask: Callable[[Any], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        def located(address: str | None) -> None:
            self.ask_at(address, name, ask, reply, failed)

        self.locate(name, located, failed)

    def locate(
        self,
        name: str,
        located: Callable[[str | None], None],
        failed: Callable[[HoldfastError], None],
        *,
        catching_up: bool = False,
    ) -> None:
        self.wire.ask_controller(
            self, lambda c: c.where(name, catching_up=catching_up), located, failed
        )

    def ask_at(
        self,
        address: str | None,
        name: str,
        ask: Callable[[Any], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        server = self.wire.resolve(address)
        if server is None:
            failed(TransportError(f"{name} has no live instance"))
        else:
            self.wire.request(self, server, ask, reply, failed)

    def up(self) -> None:
        engine = EngineTwin(
            self.network, self.disk, f"/{self.name}/state", buckets_max=self._buckets_max
        )
        self.performer = Performer(
            self.name, self.fragment, engine, self.log, self.service, self, self.options,
            inputs=MemoryInputs(self.disk), clock=self.monotonic,
            peers=self._peers,
        )  # fmt: skip
        for stream in self.fragment.outputs:
            self.service.consumers[stream] = set(self._wiring.consumers[stream])
        self.followers = {
            stream: Follower(
                self, self.wire, stream, self._subscription(stream, self._wiring.producers[stream]),
                self.performer.receive,
            )
            for stream in self.fragment.inputs
        }  # fmt: skip
        self.performer.take(core.Began(self.monotonic()))
        for follower in self.followers.values():
            follower.connect()
        self.after(SILENCE_US // 2, self._watch)
        for peer in self._peers:
            self.after(COMPARE_US, partial(self._compare, peer))

    def _compare(self, peer: str) -> None:
        def again(err: HoldfastError | None = None) -> None:
            self.after(COMPARE_US, lambda: self._compare(peer))

        def received(digests: Digests) -> None:
            again()
            self.performer.take(DigestsReceived(peer, digests))

        self._ask_peer(peer, lambda node: node.performer.comparison.digests(), received, again)

    def compare_inputs(self, path: str, stream: str) -> None:
        """The digests of an input count once all producers of the input have answered."""
        producers, windows = self._wiring.producers, dict[str, dict[str, Window]]()

        def ask(name: str, producer: str) -> None:
            def received(digests: Digests) -> None:
                if name in digests.windows:
                    windows.setdefault(name, {})[producer] = digests.windows[name]
                    if len(windows[name]) == len(producers[name]):
                        self.performer.take(InputDigestsReceived(stream, {name: windows[name]}))

            self._ask_peer(
                producer,
                lambda node: node.performer.comparison.digests(),
                received,
                lambda err: None,
            )

        for name in self.performer.paths[path].inputs:
            for producer in producers[name]:
                if producer != name:  # a source has no replicas
                    ask(name, producer)

    def _subscription(self, stream: str, producers: tuple[str, ...]) -> Subscription:
        local_replica = local_replica_of(self.name, producers) if self.pair else None
        return Subscription(
            producers, self.performer.wanted(stream), self.performer.tentative,
            local_replica=local_replica,
            tolerance_buckets=self._wiring.tolerances[self.fragment.name],
            heartbeat_us=HEARTBEAT_US, ask_us=SILENCE_US if local_replica else 0,
        )  # fmt: skip

    def positions(self) -> Positions:
        return {name: path.position for name, path in self.performer.core.paths.items()}

    def heard(self, statuses: dict[str, InstanceStatus]) -> None:
        super().heard(statuses)
        if self.pair and self.is_up:
            (peer,) = self._peers
            self.performer.take(core.Unpaired(self.monotonic(), statuses[peer].gone))

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

    # -- carrier --------------------------------------------------------------------------------

    def run(self, work: Work, version: Version) -> None:
        fixed_us = STEP_US + STEP_MORE_US * self.chance.random()
        took_us = int(fixed_us * self.slowness) + self._buckets_us(work.hi - work.lo + 1)
        self.after(took_us, lambda: self._work(work, version, took_us))

    def _buckets_us(self, count: int) -> int:
        return self._bucket_us * min(count - 1, COSTLY_BUCKETS)

    def split_us(self, backlog: int) -> int:
        """How long the node takes for so many buckets if their results are too large for one step,
        which is halved until they fit; 0: they are not."""
        if self._buckets_max is None or backlog <= self._buckets_max:
            return 0
        in_all_us, count = 0, backlog
        while count > self._buckets_max:
            in_all_us += STEP_US + STEP_MORE_US + self._buckets_us(count)
            count //= 2
        each_us = STEP_US + STEP_MORE_US + self._buckets_us(count)
        return in_all_us + -(-backlog // count) * each_us

    def _work(self, work: Work, version: Version, took_us: int) -> None:
        after, error = None, None
        try:
            after = self.performer.step(work, version)
        except Exception as err:
            error = err
        stable = isinstance(work, core.Run)
        recomputed = isinstance(work, Recomputation)
        event = "computed again" if recomputed else "ran" if stable else "ran TENTATIVE"
        event = event if error is None else "failed"
        self.world.say(self.name, event, work.path, f"{work.lo}..{work.hi}")
        if error is None and isinstance(work, core.RunTentative):
            self.tentative_buckets[work.path] += work.hi - work.lo + 1
        if error is None and stable:
            for stream in self.performer.paths[work.path].outputs:
                first = max(work.lo, self._first(stream))
                for segment in self.log.segments(stream, first, work.hi):
                    self.history.add(
                        Made(self.world.now, self.name, self.log.epoch, stream, segment.id.bucket,
                             segment.stability.value, segment.checksum)
                    )  # fmt: skip
        # The event loop receives the result slightly later than the log.
        finished = Finished(work, after, took_us / 1e6, error)
        self.after(int(20_000 * self.chance.random() ** 3), lambda: self.performer.take(finished))

    def flush(self, version: Version, costs: tuple[float, ...]) -> None:
        took_us = int((1_000 + 60_000 * self.chance.random() ** 4) * self.slowness)

        def over() -> None:
            new_entries, error = 0, None
            try:
                new_entries = self.performer.flush(version, costs)
            except Exception as err:
                error = err
            event = "checkpointed" if error is None else "could not checkpoint"
            self.world.say(self.name, event, version.path, version.bucket)
            flushed = Flushed(version, new_entries, took_us / 1e6, error)
            self.after(
                int(20_000 * self.chance.random() ** 3), lambda: self.performer.take(flushed)
            )

        self.after(took_us, over)

    def ask(self, asked: Postpone, peers: tuple[str, ...]) -> None:
        def over(peer: str, reply: Postponement | HoldfastError) -> None:
            answer = "away" if isinstance(reply, HoldfastError) else reply.answer
            self.world.say(
                self.name, "asked", peer, "to keep answering; path and reply:", asked.path, answer
            )
            self.performer.take(Replied(asked, peer, reply))

        for peer in peers:
            replied = partial(over, peer)
            self._ask_peer(peer, lambda node: node.postpone(asked), replied, replied)

    def postpone(self, asks: Postpone) -> Postponement:
        """Handles the request of a peer."""
        replies: list[Postponement] = []
        self.performer.take(Asked(asks, replies.append))
        if not replies:  # a full disk blocks all processing
            raise TransportError(f"{self.name} does not answer")
        return replies[0]

    def _ask_peer(
        self,
        peer: str,
        ask: Callable[[NodeProcess], Any],
        reply: Callable[[Any], None],
        failed: Callable[[HoldfastError], None],
    ) -> None:
        def ask_if_up(node: NodeProcess) -> Any:
            if not node.is_up:
                raise TransportError(f"{node.name} is not up yet")
            return ask(node)

        self.ask_node(peer, ask_if_up, reply, failed)

    def _first(self, stream: str) -> int:
        return self.log.info(stream).trimmed_upto + 1

    def acknowledge(self, stream: str, received: int, needed: int, epoch: int) -> None:
        self.world.say(
            self.name, "acknowledges", stream, received, "and needs buckets from", needed + 1
        )
        self.followers[stream].advanced(Position(received, needed, epoch))

    def post(self, event: Event, after_s: float = 0.0) -> None:
        self.after(int(after_s * 1e6), lambda: self.performer.take(event))
