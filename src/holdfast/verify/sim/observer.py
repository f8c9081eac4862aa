"""Watching replicas from outside: who reads whom, who counts on whom, and how much everybody keeps.
What is written down is what happened; whether it took too long, the checkers say."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.replica_selector import LAG_BUCKETS, STEP_US
from holdfast.model.fragments import Path, home_of, pairs_of, partners_of, producers_of
from holdfast.types import OutputState
from holdfast.verify.history import Event, Held, Pending, Reading, Relied
from holdfast.verify.sim import internals
from holdfast.verify.sim.cast import Cast
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.condition import Condition, detect_us
from holdfast.verify.sim.follower import Follower
from holdfast.verify.sim.links import Server
from holdfast.verify.sim.members import DEAD_US, REGISTER_US, Member
from holdfast.verify.sim.nodes import NodeProcess

#: How much is kept is noted at every so many looks.
KEPT_LOOKS = 8
#: What a process may have to do at one time: a heartbeat, a retry and a step for each connection.
TIMERS_MAX = 120
#: A producer that is behind by so many buckets, at least, makes no progress worth waiting for.
BEHIND_BUCKETS = LAG_BUCKETS + 1


class Observer:
    def __init__(self, cast: Cast, condition: Condition, held_buckets: int) -> None:
        self._cast, self._condition = cast, condition
        self._held_buckets = held_buckets
        makers = producers_of(cast.network)
        self._makers = {stream: names for stream, names in makers.items() if len(names) > 1}
        self._pairs = pairs_of(cast.network)
        self._detect_us = detect_us(cast.network.width_us)
        self._looks = 0
        self._readings: dict[tuple[str, str], tuple[str, str]] = {}
        self._relied: dict[tuple[str, str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def look(self, now: int) -> Iterator[Event]:
        if self._makers:
            yield from self._read(now)
            yield from self._declared(now)
            yield from self._relies(now)
        self._looks += 1
        if self._looks % KEPT_LOOKS == 0:
            yield from self._kept(now)

    # -- who reads whom ---------------------------------------------------------------------------

    def _read(self, now: int) -> Iterator[Reading]:
        asked = {("controller", name) for name in self._pairs}
        for reader, stream, follower in self._followers():
            asked.add((reader.name, stream))
            replica = internals.read_from(follower) or ""
            home = reader.name in self._pairs and replica == home_of(
                reader.name, self._makers[stream]
            )
            bad, within_us = self._bad(reader, stream, replica, home=bool(home))
            yield from self._reads(now, reader.name, stream, replica, bad, within_us)
        for reader_name, stream in [key for key in self._readings if key not in asked]:
            yield from self._reads(now, reader_name, stream, "", "", 0)

    def _reads(
        self, now: int, reader: str, stream: str, replica: str, bad: str, within_us: int
    ) -> Iterator[Reading]:
        if self._readings.get((reader, stream)) != (replica, bad):
            self._readings[reader, stream] = replica, bad
            yield Reading(now, reader, stream, replica, bad, within_us)

    def _followers(self) -> Iterator[tuple[Member, str, Follower]]:
        """Of everybody who is up and could read another replica."""
        for node in self._cast.nodes:
            if node.is_up and not node.paused and not self._condition.impaired(node):
                for stream, follower in node.followers.items():
                    if stream in self._makers and not follower.ended:
                        yield node, stream, follower
        for client in self._cast.clients:
            if self._takes(client):
                yield client, client.output, client.follower

    def _takes(self, client: ClientProcess) -> bool:
        up = client.is_up and not client.paused and not self._condition.impaired(client)
        return up and client.output in self._makers and not client.ended

    def _bad(self, reader: Member, stream: str, replica: str, *, home: bool) -> tuple[str, int]:
        """Why a replica is of no use to its reader while another one would be, and how soon it has
        to be left."""
        others = [
            (node, known)
            for name in self._makers[stream]
            if name != replica and self._serves(node := self._node(name), reader)
            if (known := internals.stands(node, stream)) is not None
        ]
        if not others:
            return "", 0
        if not replica:
            return "nothing is read", self._detect_us
        node = self._node(replica)
        if not node.alive:
            return "it is dead", self._detect_us
        if node.paused:
            return "it stands still", self._detect_us
        if not self._condition.linked(reader, node):
            return "it is cut off", self._detect_us
        mine = internals.stands(node, stream)
        if mine is None:
            return "", 0
        ahead = [upto for _, (state, upto) in others if state is OutputState.STABLE]
        if max(ahead, default=mine[1]) - mine[1] < BEHIND_BUCKETS:
            return "", 0
        return "it makes no progress", self._detect_us + (STEP_US if home else 0)

    def _serves(self, node: NodeProcess, reader: Member) -> bool:
        return node.is_up and self._condition.reaches(reader, node, strict=True)

    def _node(self, name: str) -> NodeProcess:
        node = self._cast.by_name[name]
        assert isinstance(node, NodeProcess)
        return node

    # -- who is declared dead ---------------------------------------------------------------------

    def _declared(self, now: int) -> Iterator[Reading]:
        """The controller leaves one of a pair by declaring it dead."""
        process = self._cast.wire.controller
        known = process.controller
        standings = {} if known is None else known.standings()
        for name, partner in self._pairs.items():
            standing, other = standings.get(name), self._node(partner)
            bad, within_us = "", 0
            if standing is not None and standing.lives and self._heard(other, process):
                bad, within_us = self._gone(self._node(name), other, process)
            yield from self._reads(now, "controller", name, name, bad, within_us)

    def _heard(self, node: NodeProcess, controller: Server) -> bool:
        """What it says arrives; whether it hears an answer is another matter."""
        up = node.is_up and self._condition.there(node) and not self._condition.impaired(node)
        return up and self._condition.there(controller) and self._says(node, controller)

    def _says(self, node: NodeProcess, controller: Server) -> bool:
        return not self._cast.wire.link(node.name, controller.name).cut

    def _gone(self, node: NodeProcess, partner: NodeProcess, controller: Server) -> tuple[str, int]:
        silent_us = DEAD_US + 2 * REGISTER_US
        if not node.alive:
            return "it is dead", silent_us
        if node.paused:
            return "it stands still", silent_us
        if not self._says(node, controller):
            return "it is cut off", silent_us
        if node.is_up and self._condition.stuck(node) and self._behind(node, partner):
            # As long as a step may take (docs/pairs.md).
            return "it makes no progress", STEP_US
        return "", 0

    def _behind(self, node: NodeProcess, partner: NodeProcess) -> bool:
        for stream in node.fragment.outputs:
            mine, theirs = internals.stands(node, stream), internals.stands(partner, stream)
            if mine is not None and theirs is not None and theirs[1] - mine[1] >= BEHIND_BUCKETS:
                return True
        return False

    # -- who counts on whom -----------------------------------------------------------------------

    def _relies(self, now: int) -> Iterator[Relied]:
        for node in self._cast.nodes:
            partners = partners_of(self._cast.network, node.name)
            for path in node.fragment.paths if partners else ():
                yield from self._relies_for(now, node, path, "answers", self._answered(node, path))
                on = internals.waits_for(node, path) if node.is_up else ()
                yield from self._relies_for(now, node, path, "correction", on)

    def _answered(self, node: NodeProcess, path: Path) -> tuple[str, ...]:
        """Those that a replica counts on to answer while it does not."""
        if not (node.is_up and internals.suspended(node, path)):
            return ()
        partners = [self._node(name) for name in partners_of(self._cast.network, node.name)]
        promised = [p for p in partners if p.is_up and node.name in internals.waits_for(p, path)]
        return tuple(partner.name for partner in promised or partners)

    def _relies_for(
        self, now: int, node: NodeProcess, path: Path, what: str, on: tuple[str, ...]
    ) -> Iterator[Relied]:
        sound = tuple(name for name in on if self._is_sound(node, self._node(name), path, what))
        key = (node.name, path.name, what)
        if self._relied.get(key, ((), ())) != (on, sound):
            self._relied[key] = on, sound
            yield Relied(now, node.name, path.name, what, on, sound)

    def _is_sound(self, node: NodeProcess, other: NodeProcess, path: Path, what: str) -> bool:
        up = other.is_up and self._condition.there(other) and self._condition.linked(node, other)
        if not up or self._condition.stuck(other):
            return False
        return what != "answers" or not internals.suspended(other, path)

    # -- how much is kept -------------------------------------------------------------------------

    def _kept(self, now: int) -> Iterator[Held | Pending]:
        for node in self._cast.nodes:
            if not node.is_up:
                continue
            for what, stream, buckets in internals.guesses_held(node):
                yield Held(now, f"{node.name} {what}", stream, buckets)
            for what, entries in internals.to_go_through(node):
                most = self._held_buckets * len(node.fragment.inputs)
                yield Pending(now, node.name, what, entries, most)
        for name, timers in self._cast.world.timers().items():
            yield Pending(now, name, "timers", timers, TIMERS_MAX)
