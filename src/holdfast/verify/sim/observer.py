"""Observes replicas from outside: which producer each consumer reads from, which replicas rely on
others, and how many buckets each node holds. The observer only records; the checkers decide whether
a condition lasted too long."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.lag import AHEAD_BUCKETS
from holdfast.core.replica_selector import LAG_BUCKETS, STEP_US
from holdfast.model.fragments import Path, local_replica_of, pairs_of, peers_of, producers_of
from holdfast.types import OutputState
from holdfast.verify.history import AtBound, Event, Held, Pending, Reading, Relied
from holdfast.verify.sim import inspection
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.condition import Condition, detect_us
from holdfast.verify.sim.links import HEARTBEAT_US, Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_process import DEAD_US, REGISTER_US, Member
from holdfast.verify.sim.simulated_run import Cast
from holdfast.verify.sim.simulated_subscriber import Follower

#: Held buckets and pending entries are recorded at every n-th look.
KEPT_LOOKS = 8
#: Maximum number of pending timers of a process: a heartbeat, a retry and a step per connection,
#: and the deliveries in flight on a slow link, which are more if buckets are shorter.
TIMERS_MAX, TIMERS_BUCKET_US = 120, 500_000
#: A producer that is at least this many buckets behind makes no useful progress.
BEHIND_BUCKETS = LAG_BUCKETS + 1
NO_PROGRESS = "it makes no progress"
TENTATIVE = "it is tentative while another replica is stable"


class Observer:
    def __init__(self, cast: Cast, condition: Condition, held_buckets: int) -> None:
        self._cast, self._condition = cast, condition
        self._held_buckets = held_buckets
        producers = producers_of(cast.network)
        self._producers = {stream: names for stream, names in producers.items() if len(names) > 1}
        self._pairs = pairs_of(cast.network)
        self._has_peers = {
            node.name: bool(peers_of(cast.network, node.name)) for node in cast.nodes
        }
        self._detect_us = detect_us(cast.network)
        #: Per replica of a pair that is behind its peer: since when; and its longest such delay.
        self._behind_since: dict[str, int] = {}
        self._delay_us: dict[str, int] = {}
        self._controller_life = cast.wire.controller.life
        self._looks = 0
        self._readings: dict[tuple[str, str], tuple[str, str]] = {}
        self._relied: dict[
            tuple[str, str, str], tuple[tuple[str, ...], tuple[str, ...], int | None]
        ] = {}

    def look(self, now: int) -> Iterator[Event]:
        if self._producers:
            yield from self._read(now)
            yield from self._declared(now)
            yield from self._relies(now)
        if self._cast.options.buffer_buckets is not None:
            for source in self._cast.sources:
                if inspection.is_at_bound(source):
                    yield AtBound(now, source.name)
        self._looks += 1
        if self._looks % KEPT_LOOKS == 0:
            yield from self._kept(now)

    # -- producers and consumers ------------------------------------------------------------------

    def _read(self, now: int) -> Iterator[Reading]:
        subscriptions = {("controller", name) for name in self._pairs}
        for consumer, stream, follower in self._followers():
            subscriptions.add((consumer.name, stream))
            replica = inspection.read_from(follower) or ""
            local_replica = consumer.name in self._pairs and replica == local_replica_of(
                consumer.name, self._producers[stream]
            )
            instance = inspection.instance_read(follower) or self._cast.by_name.get(replica)
            bad, within_us = self._bad(
                consumer, stream, instance, local_replica=bool(local_replica)
            )
            yield from self._reads(now, consumer.name, stream, replica, bad, within_us)
        for consumer_name, stream in [key for key in self._readings if key not in subscriptions]:
            yield from self._reads(now, consumer_name, stream, "", "", 0)

    def _reads(
        self, now: int, consumer: str, stream: str, replica: str, bad: str, within_us: int
    ) -> Iterator[Reading]:
        if self._readings.get((consumer, stream)) != (replica, bad):
            self._readings[consumer, stream] = replica, bad
            yield Reading(now, consumer, stream, replica, bad, within_us)

    def _followers(self) -> Iterator[tuple[Member, str, Follower]]:
        """The subscriptions of all consumers that are up and could read from another replica."""
        for node in self._cast.nodes:
            if node.is_up and not node.paused and not self._condition.impaired(node):
                for stream, follower in node.followers.items():
                    if stream in self._producers and not follower.ended:
                        yield node, stream, follower
        for client in self._cast.clients:
            if self._takes(client):
                yield client, client.output, client.follower

    def _takes(self, client: ClientProcess) -> bool:
        up = client.is_up and not client.paused and not self._condition.impaired(client)
        return up and client.output in self._producers and not client.ended

    def _bad(
        self, consumer: Member, stream: str, instance: Server | None, *, local_replica: bool
    ) -> tuple[str, int]:
        """Why a replica is unusable for its consumer while another replica is usable, and the time
        within which the consumer must leave the replica."""
        others = [
            (node, status)
            for name in self._producers[stream]
            if (instance is None or name != instance.name)
            and self._serves(node := self._node(name), consumer)
            if (status := inspection.stream_status(node, stream)) is not None
        ]
        if not others:
            return "", 0
        if instance is None:  # the consumer asks the controller for the addresses of the others
            asks = self._condition.reaches(consumer, self._cast.wire.controller)
            return ("nothing is read", self._detect_us) if asks else ("", 0)
        if not instance.alive:
            return "it is dead", self._detect_us
        if instance.paused:
            return "it is paused", self._detect_us
        if not self._condition.linked(consumer, instance):
            return "it is cut off", self._detect_us
        mine = inspection.stream_status(instance, stream)
        if mine is None:
            return "", 0
        ahead = [upto for _, (state, upto) in others if state is OutputState.STABLE]
        if max(ahead, default=mine[1]) - mine[1] < BEHIND_BUCKETS:
            # Stable rows are preferred to tentative rows that reach no further (Borealis, Table
            # II).
            as_far = any(upto >= mine[1] for upto in ahead)
            tentative = as_far and mine[0] is OutputState.UP_FAILURE
            return (TENTATIVE, self._detect_us) if tentative else ("", 0)
        return NO_PROGRESS, self._detect_us + (STEP_US if local_replica else 0)

    def _serves(self, node: NodeProcess, consumer: Member) -> bool:
        return node.is_up and self._condition.reaches(consumer, node)

    def _node(self, name: str) -> NodeProcess:
        node = self._cast.by_name[name]
        assert isinstance(node, NodeProcess)
        return node

    # -- replicas declared dead -------------------------------------------------------------------

    def _declared(self, now: int) -> Iterator[Reading]:
        """The controller leaves a replica of a pair by declaring the replica dead."""
        process = self._cast.wire.controller
        controller = process.controller
        statuses = {} if controller is None else controller.statuses()
        if process.life != self._controller_life:
            # A new controller counts the time without heartbeats from its start (docs/pairs.md).
            self._controller_life, statuses = process.life, {}
        self._compare(now)
        for name, peer in self._pairs.items():
            standing, other = statuses.get(name), self._node(peer)
            bad, within_us = "", 0
            if standing is not None and standing.lives and self._heard(other, process):
                bad, within_us = self._gone(self._node(name), other, process)
            yield from self._reads(now, "controller", name, name, bad, within_us)

    def _heard(self, node: NodeProcess, controller: Server) -> bool:
        """Heartbeats of the node arrive at the controller; the replies need not arrive."""
        up = node.is_up and self._condition.there(node) and not self._condition.impaired(node)
        return up and self._condition.there(controller) and self._says(node, controller)

    def _says(self, node: NodeProcess, controller: Server) -> bool:
        """Heartbeats of the host arrive; the host sends them for the node."""
        return not self._cast.wire.link(node.host.name, controller.name).cut

    def _gone(self, node: NodeProcess, peer: NodeProcess, controller: Server) -> tuple[str, int]:
        silent_us = DEAD_US + 2 * REGISTER_US
        if not node.alive:
            return "it is dead", silent_us
        if node.paused:
            return "it is paused", silent_us
        if not self._says(node, controller):
            return "it is cut off", silent_us
        if self._condition.stuck(node) and node.name in self._behind_since:
            # A replica gets twice the longest delay of either replica so far (docs/pairs.md).
            needed_us = max(self._delay_us.get(name, 0) for name in (node.name, peer.name))
            patience_us = max(self._cast.options.stall_us, 2 * needed_us)
            return NO_PROGRESS, patience_us + 2 * REGISTER_US
        return "", 0

    def _compare(self, now: int) -> None:
        """Tracks which replica of a pair is behind its peer, and how long it took to catch up."""
        for name, peer in self._pairs.items():
            node, other = self._node(name), self._node(peer)
            if node.is_up and other.is_up and self._behind(node, other):
                self._behind_since.setdefault(name, now)
            elif (since := self._behind_since.pop(name, None)) is not None:
                self._delay_us[name] = max(now - since, self._delay_us.get(name, 0))

    def _behind(self, node: NodeProcess, peer: NodeProcess) -> bool:
        mine = node.positions()
        for path, theirs in peer.positions().items():
            reached = mine[path]
            if theirs is not None and (reached is None or theirs - reached >= AHEAD_BUCKETS):
                return True
        return False

    # -- reliance between replicas ----------------------------------------------------------------

    def _relies(self, now: int) -> Iterator[Relied]:
        for node in self._cast.nodes:
            for path in node.fragment.paths if self._has_peers[node.name] else ():
                yield from self._relies_for(now, node, path, "answers", self._answered(node, path))
                on = inspection.waits_for(node, path) if node.is_up else ()
                yield from self._relies_for(now, node, path, "correction", on)

    def _answered(self, node: NodeProcess, path: Path) -> tuple[str, ...]:
        """The replicas that a node relies on to answer while the node itself does not answer."""
        return inspection.answered_by(node, path) if node.is_up else ()

    def _relies_for(
        self, now: int, node: NodeProcess, path: Path, what: str, on: tuple[str, ...]
    ) -> Iterator[Relied]:
        sound = tuple(name for name in on if self._is_sound(node, self._node(name), path, what))
        reached = None
        if what == "correction" and on and self._node(on[0]).is_up:
            reached = self._node(on[0]).positions()[path.name]
        key, relied = (node.name, path.name, what), (on, sound, reached)
        if self._relied.get(key, ((), (), None)) != relied:
            self._relied[key] = relied
            yield Relied(now, node.name, path.name, what, *relied)

    def _is_sound(self, node: NodeProcess, other: NodeProcess, path: Path, what: str) -> bool:
        """A replica relied on for answers must be able to answer. A replica relied on for its
        correction may be stuck: the time limit for that wait is checked by `promises`."""
        if not (other.is_up and self._condition.there(other)):
            return False
        if what == "answers" and self._condition.stuck(other):
            return False
        return self._condition.linked(node, other) and not (
            what == "answers" and inspection.answered_by(other, path)
        )

    # -- held buckets -----------------------------------------------------------------------------

    def _kept(self, now: int) -> Iterator[Held | Pending]:
        for node in self._cast.nodes:
            if not node.is_up:
                continue
            for what, stream, buckets in inspection.tentative_held(node):
                yield Held(now, f"{node.name} {what}", stream, buckets)
            for what, entries, waiting in inspection.to_go_through(node):
                most = (self._held_buckets + waiting) * len(node.fragment.inputs)
                yield Pending(now, node.name, what, entries, most)
            for path, buckets in node.tentative_buckets.items():
                # A tentative line restarts only after as many buckets were corrected as the line
                # repeats (docs/design/0008), so that no bucket is computed more than twice.
                most = 2 * inspection.came_upto(node, path) + self._held_buckets
                yield Pending(now, node.name, f"the tentative line of {path}", buckets, most)
        most = TIMERS_MAX * max(1, TIMERS_BUCKET_US // self._cast.network.width_us)
        for name, timers in self._cast.world.timers().items():
            heartbeats = self._cast.wire.in_flight_us(name) // HEARTBEAT_US
            yield Pending(now, name, "timers", timers, most + heartbeats)
