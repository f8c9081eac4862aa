"""Watching pairs from outside: who of them is being made anew and for how long, and what is kept
while one of them is dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.core.membership import dead_of
from holdfast.core.progress import PAIR_CHECKPOINT_BUCKETS
from holdfast.model.fragments import fragment_of, fragments, producers_of
from holdfast.types import OutputState
from holdfast.verify.history import Outlived, Restored
from holdfast.verify.sim.cast import Cast
from holdfast.verify.sim.members import REGISTER_US, Member
from holdfast.verify.sim.nodes import NodeProcess

#: When everybody has heard of a death, and has deleted what only the dead would have needed.
HEARD_US = 4 * REGISTER_US


class Vigil:
    def __init__(self, cast: Cast, held_buckets: int) -> None:
        self._cast = cast
        # Who is alone keeps inputs until its next checkpoint.
        self._bound = held_buckets + PAIR_CHECKPOINT_BUCKETS
        parts = {part.name: part for part in fragments(cast.network)}
        makers = producers_of(cast.network)
        #: Who makes what each of a pair reads.
        self._read = {
            node.name: [(s, maker) for s in parts[fragment_of(node.name)].inputs
                        for maker in makers[s]]
            for node in cast.nodes if node.pair
        }  # fmt: skip
        self._broken: Counter[str] = Counter()
        #: When anybody was broken last who is not being made anew then, by name.
        self._last: dict[str, int] = {}
        #: Dead for so long that nothing is kept for their disks any more.
        self._released_since: dict[str, int] = {}

    def broke(self, on: str) -> None:
        self._broken[on] += 1

    def healed(self, on: str) -> None:
        self._broken[on] -= 1

    def look(self, now: int) -> Iterator[Restored | Outlived]:
        if not self._read:
            return
        broken = {name for name, number in self._broken.items() if number > 0}
        for name in broken:
            self._last[name] = now
        for node in self._pairs():
            if node.lost_at is not None and self._works(node):
                yield Restored(now, node.name, node.lost_at, self._calm(node))
                node.lost_at = None
        controller = self._cast.wire.controller.controller
        standings = controller.standings() if controller is not None else {}
        dead = dead_of(standings)
        released = [name for name, epoch in dead.items() if standings[name].released >= epoch]
        self._released_since = {n: self._released_since.get(n, now) for n in released}
        late = [name for name, since in self._released_since.items() if now - since > HEARD_US]
        # Whoever else is broken may have a reason to be waited for, and everybody a reason to wait.
        if late and broken <= dead.keys() and not self._recovering(now, broken):
            yield from self._kept(now, late)

    def end(self, now: int) -> Iterator[Restored]:
        for node in self._pairs():
            if node.lost_at is not None and node.alive:
                yield Restored(now, node.name, node.lost_at, self._calm(node))

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
        for stream, maker in sorted({read for name in dead for read in self._read[name]}):
            process = self._cast.by_name[maker]
            if isinstance(process, Member) and process.is_up and not process.paused:
                held = process.held(stream)
                if held is not None and held > self._bound:
                    yield Outlived(now, f"{maker} log", stream, held)
