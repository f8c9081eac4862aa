"""What clients must be given with what is broken now: Property 1 of Borealis section 3.5.

The trees are looked at replica by replica: a replica gets a stream if any maker of it can be
reached, and gets it at best as that maker has it. Where a fault does more than take something away
(slow links, full disks, wrong clocks) the trees say nothing, and neither does this.
"""

from __future__ import annotations

from functools import cache

from holdfast.model.fragments import Path, fragment_of, fragments, producers_of, replicas_of
from holdfast.model.trees import AllOf, AnyOf, Kind, Tree, longest, patience, tree_of
from holdfast.types import OutputState
from holdfast.verify.history import Deserted, Expected
from holdfast.verify.sim.cast import Cast
from holdfast.verify.sim.links import Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.sources import SourceProcess

#: On the way through a fragment beside what it may wait: steps, links and a spike or two.
STEP_US = 150_000
#: Until a failure is noticed and everybody has found another replica, or none; and until everybody
#: has caught up and corrected what it gave.
SETTLE_US: dict[str, int] = {Kind.TENTATIVE: 3_000_000, Kind.STABLE: 7_000_000}


class Oracle:
    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._network = cast.network
        self._makers = producers_of(cast.network)
        self._said: dict[str, str] = {}
        replicas = [
            (part, replicas_of(cast.network, part.name)) for part in fragments(cast.network)
        ]
        self._replicated = [(part, names) for part, names in replicas if len(names) > 1]
        own_us = {name: x.own_us if x else 0 for name, x in patience(cast.network).items()}
        self._first_us = longest(cast.network, own_us)
        self._within_us: dict[tuple[str, str], int] = {}
        for kind in (Kind.STABLE, Kind.TENTATIVE):
            waits_us = longest(cast.network, self._waits_us(kind))
            steps_us = longest(cast.network, dict.fromkeys(patience(cast.network), STEP_US))
            for op in cast.network.outputs:
                # Who waits does so from the start of a bucket on, and this counts from its end.
                since_end_us = max(0, waits_us[op.name] - cast.network.width_us)
                self._within_us[kind, op.name] = STEP_US + steps_us[op.name] + since_end_us

    def _waits_us(self, kind: Kind) -> dict[str, int]:
        """In a failure a fragment that delays always waits: for its X, and for that of those before
        it where it reads a source beside them."""
        known = patience(self._network)
        delays = any(self._network.protection(name).failure == "delay" for name in known)
        waits = delays and kind is Kind.TENTATIVE
        return {name: x.own_us if waits and x else 0 for name, x in known.items()}

    def expect(self, now: int, *, clear: bool) -> list[Expected]:
        """What has changed; with `clear` nothing is broken that the trees do not speak of."""
        found = []
        for client in self._cast.clients:
            up = clear and client.alive and not client.paused and self._reach(client, None)
            kind = str(self._best(client, client.output, {})) if up else "UNKNOWN"
            if self._said.get(client.name) != kind:
                self._said[client.name] = kind
                within_us = self._within_us.get((kind, client.output), 0)
                settle_us = SETTLE_US.get(kind, 0)
                if kind == Kind.TENTATIVE:  # the first buckets wait for every X on their way
                    settle_us = max(settle_us, self._first_us[client.output] + STEP_US)
                found.append(Expected(now, client.name, client.output, kind, within_us, settle_us))
        return found

    def deserted(self, now: int) -> list[Deserted]:
        """Replicas correct themselves one after the other, unless nobody could answer meanwhile."""
        found = []
        for part, names in self._replicated:
            nodes = [self._cast.by_name[name] for name in names]
            up = [node for node in nodes if isinstance(node, NodeProcess) and node.is_up]
            for path in part.paths:
                lines = [node.performer.core.paths[path.name].consistency for node in up]
                trusting = [
                    c.state is OutputState.STABILIZATION and c.promises.covered(now) for c in lines
                ]
                if len(lines) > 1 and all(trusting):
                    found.append(Deserted(now, part.name, path.name))
        return found

    def _reach(self, a: Server, b: Server | None) -> bool:
        """Both can speak to each other; None stands for the controller."""
        other = self._cast.wire.controller if b is None else b
        wire = self._cast.wire
        there = other.alive and not other.paused
        return there and not (
            wire.link(a.name, other.name).cut or wire.link(other.name, a.name).cut
        )

    def _best(self, reader: Server, stream: str, known: dict[str, Kind]) -> Kind:
        kinds = [
            self._made(maker, stream, known)
            for name in self._makers[stream]
            if self._reach(reader, maker := self._cast.by_name[name])
        ]
        return next((kind for kind in Kind if kind in kinds), Kind.BLOCKING)

    def _made(self, maker: Server, stream: str, known: dict[str, Kind]) -> Kind:
        if isinstance(maker, SourceProcess):
            return Kind.BLOCKING if maker.silent or not maker.is_up else Kind.STABLE
        assert isinstance(maker, NodeProcess)
        key = f"{maker.name}/{stream}"
        if key not in known:
            known[key] = self._computed(maker, stream, known)
        return known[key]

    def _computed(self, node: NodeProcess, stream: str, known: dict[str, Kind]) -> Kind:
        if not node.is_up or not self._reach(node, None):
            return Kind.BLOCKING
        path = next(path for path in node.fragment.paths if stream in path.outputs)
        if node.performer.core.paths[path.name].position is None:
            return Kind.BLOCKING  # it came back while something it needs was gone
        inputs = {name: self._best(node, name, known) for name in path.inputs}
        if all(kind is Kind.STABLE for kind in inputs.values()):
            return Kind.STABLE
        if self._network.protection(fragment_of(node.name)).failure == "block":
            return Kind.BLOCKING
        return _of(self._tree(path, stream), inputs)

    @cache  # noqa: B019 - lives as long as one run
    def _tree(self, path: Path, stream: str) -> Tree:
        return tree_of(path, stream, self._network)


def _of(tree: Tree, inputs: dict[str, Kind]) -> Kind:
    match tree:
        case str():
            return inputs[tree]
        case AnyOf(parts):
            kinds = [_of(part, inputs) for part in parts]
            blocked = all(kind is Kind.BLOCKING for kind in kinds)
        case AllOf(parts):
            kinds = [_of(part, inputs) for part in parts]
            blocked = any(kind is Kind.BLOCKING for kind in kinds)
    if blocked:
        return Kind.BLOCKING
    return Kind.STABLE if all(kind is Kind.STABLE for kind in kinds) else Kind.TENTATIVE
