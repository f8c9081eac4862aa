"""Observes pairs from outside: which replicas are being rebuilt and for how long, and how much is
retained while a replica is dead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from holdfast.core.membership import InstanceStatus, dead_of
from holdfast.core.progress import PAIR_CHECKPOINT_BUCKETS
from holdfast.model.fragments import fragment_of, fragments, pairs_of, producers_of
from holdfast.types import OutputState
from holdfast.verify.history import Outlived, Restored, Stopped
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_process import REGISTER_US, Member
from holdfast.verify.sim.simulated_run import Cast

#: Time after which all processes know of a death and have deleted what only the dead replica needs.
HEARD_US = 4 * REGISTER_US
#: A fault that is longer ago than this is no reason to declare a replica dead.
LATELY_US = 20_000_000


class Vigil:
    def __init__(self, cast: Cast, held_buckets: int) -> None:
        self._cast = cast
        # An unpaired replica retains inputs until its next checkpoint.
        self._bound = held_buckets + PAIR_CHECKPOINT_BUCKETS
        parts = {part.name: part for part in fragments(cast.network)}
        producers = producers_of(cast.network)
        #: Per replica of a pair: its inputs, each with every producer.
        self._read = {
            node.name: [(s, producer) for s in parts[fragment_of(node.name)].inputs
                        for producer in producers[s]]
            for node in cast.nodes if node.pair
        }  # fmt: skip
        self._peers = pairs_of(cast.network)
        #: Components whose faults may be a reason to declare a replica of a pair dead.
        self._reasons = {*self._read, *cast.hosts}
        self._broken: Counter[str] = Counter()
        #: When each component was last broken, by name.
        self._last: dict[str, int] = {}
        #: Since when a replica has been dead, reset while another component is broken or recovers;
        #: and since when nothing need be retained for the disk of a dead replica.
        self._dead_since: dict[str, int] = {}
        self._released_since: dict[str, int] = {}
        #: Highest epoch of each replica of a pair that was declared dead.
        self._dead: dict[str, int] = {}

    def broke(self, on: str) -> None:
        self._broken[on] += 1
        self._last[on] = self._cast.world.now  # the fault may be over before the next look

    def healed(self, on: str) -> None:
        self._broken[on] -= 1

    def look(self, now: int) -> Iterator[Restored | Outlived | Stopped]:
        if not self._read:
            return
        broken = {name for name, number in self._broken.items() if number > 0}
        for name in broken:
            self._last[name] = now
        for node in self._pairs():
            if node.lost_at is not None and node.slowness > 1.0:
                node.lost_at = now  # the rebuild counts from the end of the slowness
            if node.lost_at is not None and self._works(node):
                yield Restored(now, node.name, node.lost_at, self._calm(node))
                node.lost_at = None
        controller = self._cast.wire.controller.controller
        statuses = controller.statuses() if controller is not None else {}
        dead = dead_of(statuses)
        calm = not broken and not self._recovering(now, broken)
        yield from self._wronged(now, statuses, calm)
        # While no other component is broken, the controller must count down `rejoin`, too
        # (docs/pairs.md).
        counts = broken <= dead.keys() and not self._recovering(now, broken)
        self._dead_since = {n: self._dead_since.get(n, now) for n in dead} if counts else {}
        released = [
            name
            for name, epoch in dead.items()
            if statuses[name].released >= epoch
            or now - self._dead_since.get(name, now) > self._cast.options.rejoin_us + HEARD_US
        ]
        self._released_since = {n: self._released_since.get(n, now) for n in released}
        late = [name for name, since in self._released_since.items() if now - since > HEARD_US]
        # Data may be retained for another broken component, and any component may wait for it.
        if late and broken <= dead.keys() and not self._recovering(now, broken):
            yield from self._kept(now, late)

    def end(self, now: int) -> Iterator[Restored]:
        for node in self._pairs():
            if node.lost_at is not None and node.alive:
                yield Restored(now, node.name, node.lost_at, self._calm(node))

    def _wronged(
        self, now: int, statuses: Mapping[str, InstanceStatus], calm: bool
    ) -> Iterator[Stopped]:
        """Detects wrong declarations of death. A replica may be declared dead only after a recent
        fault of its own or of another replica or host. Lost heartbeats without a fault, an idle
        replica, or a fault of its peer are no reason. A dead instance stays dead, and stops."""
        why = ""
        for name, standing in statuses.items():
            before, self._dead[name] = self._dead.get(name, standing.dead), standing.dead
            node = self._cast.by_name[name]
            runs_on = (
                isinstance(node, NodeProcess) and node.is_up and node.log.epoch <= standing.dead
            )
            if standing.dead < before:
                why = "it was declared dead and is alive again"
            elif standing.dead > before and not self._has_reason(name, self._peers[name], now):
                why = "it was declared dead without a recent fault"
            elif calm and runs_on:
                why = "it was declared dead but keeps running"
            else:
                continue
            yield Stopped(now, name, "ours", why)

    def _has_reason(self, name: str, peer: str, now: int) -> bool:
        others = self._reasons - {peer}
        return any(
            now - at < LATELY_US and not others.isdisjoint(re.split("<->|->|,", on))
            for on, at in self._last.items()
        )

    def _pairs(self) -> list[NodeProcess]:
        return [node for node in self._cast.nodes if node.pair]

    def _works(self, node: NodeProcess) -> bool:
        states = [node.service.states.get(stream) for stream in node.fragment.outputs]
        return node.is_up and all(state is OutputState.STABLE for state in states)

    def _calm(self, node: NodeProcess) -> bool:
        assert node.lost_at is not None
        return all(at < node.lost_at for name, at in self._last.items() if name != node.name)

    def _recovering(self, now: int, broken: set[str]) -> bool:
        recent = [at for name, at in self._last.items() if name not in broken]
        return any(now - at < 2 * HEARD_US for at in recent)

    def _kept(self, now: int, dead: list[str]) -> Iterator[Outlived]:
        retained = {read for name in dead for read in self._read[name]}
        # Buckets that one replica was fetching from the other are not retained, either.
        retained |= {
            (stream, self._peers[node.name])
            for node in self._pairs()
            for stream in node.fragment.outputs
            if node.name in dead
        }
        for stream, producer in sorted(retained):
            process = self._cast.by_name[producer]
            if isinstance(process, Member) and process.is_up and not process.paused:
                held = process.held(stream)
                if held is not None and held > self._bound:
                    yield Outlived(now, f"{producer} log", stream, held)
