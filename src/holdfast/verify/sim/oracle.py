"""The results that clients must receive under the current faults: Property 1 of Borealis section
3.5.

The trees are evaluated replica by replica. A replica receives a stream if any producer of the
stream is reachable, and receives the stream at best in the quality of that producer. A process or
link that is up but unreliable (a full disk, a slow link, a wrong clock) is not part of any tree.
The rest of the tree without such components still owes its results.
"""

from __future__ import annotations

from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.model.fragments import (
    Fragment,
    Path,
    consumers_of,
    fragment_of,
    fragments,
    pairs_of,
    producers_of,
    replicas_of,
)
from holdfast.model.trees import AllOf, AnyOf, Kind, Tree, longest, patience, tree_of
from holdfast.verify.history import Deserted, Expected, Owed
from holdfast.verify.sim import inspection
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.condition import STEP_US, Condition, detect_us
from holdfast.verify.sim.links import Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_run import Cast
from holdfast.verify.sim.sources import SourceProcess

#: Time until a failure is detected and all consumers have found another replica, or none.
NOTICED_US = 3_000_000
#: The trees give no answer.
UNKNOWN = "UNKNOWN"


class Oracle:
    def __init__(self, cast: Cast, recovery_us: int) -> None:
        self._cast = cast
        #: Time until the guarantee of a tree holds. A stable tree needs the time in which all
        #: replicas catch up and correct their tentative results.
        self._settle_us: dict[str, int] = {Kind.TENTATIVE: NOTICED_US, Kind.STABLE: recovery_us}
        self._network = cast.network
        self._producers = producers_of(cast.network)
        self._consumers = {
            name: set(consumers) for name, consumers in consumers_of(cast.network).items()
        }
        self._paired = set(pairs_of(cast.network))
        self._said: dict[str, tuple[str, tuple[int, int, bool]]] = {}
        self.condition = Condition(cast, recovery_us)
        parts = fragments(cast.network)
        replicas = [(part, replicas_of(cast.network, part.name)) for part in parts]
        self._replicated = [(part, names) for part, names in replicas if len(names) > 1]
        self._patience = patience(cast.network)
        self._first_us = self.condition.waits_us
        steps_us = longest(cast.network, dict.fromkeys(self._patience, STEP_US))
        width_us = cast.network.width_us
        self._within_us: dict[tuple[str, str], int] = {}
        #: Maximum age of the newest valid result: a wait at every SUnion on the path, the bucket
        #: being computed and the bucket being filled meanwhile, and a step at every fragment.
        self._age_us: dict[str, int] = {}
        for op in cast.network.outputs:
            for kind in (Kind.STABLE, Kind.TENTATIVE):
                waits_us = longest(cast.network, self._waits_us(kind))
                # Fragments wait from the start of a bucket; `within_us` counts from its end.
                since_end_us = max(0, waits_us[op.name] - width_us)
                self._within_us[kind, op.name] = STEP_US + steps_us[op.name] + since_end_us
            steps = STEP_US + steps_us[op.name]
            self._age_us[op.name] = self._first_us[op.name] + 2 * width_us + steps
        #: How often a slow link may delay a row: at every fragment without a `max_delay` that
        #: covers the delay, and between the last node and the client.
        blocks = {name: int(x is None) for name, x in self._patience.items()}
        self._uncovered = {name: 1 + n for name, n in longest(cast.network, blocks).items()}
        self._depth = {name: us // STEP_US for name, us in steps_us.items()}
        self._suspends = any(
            self._network.protection(part.name).on_failure != "block"
            and self._network.protection(part.name).while_correcting == "suspend"
            for part in parts
        )
        self._detect_us = detect_us(cast.network)
        #: A replica that makes no progress is left when another replica is ahead by this much.
        self._behind_us = (LAG_BUCKETS + 1) * width_us
        #: When a replica of a pair was last seen at its buffer bound.
        self._held_up_at = -(2**62)
        #: Times of the last failure, repair, death or start; of the last fault that is detected
        #: only by missing heartbeats or lag; and of the last evaluation of the trees.
        self._changed_at = self._taken_at = self._looked_at = -1
        self._lives, self._all_up = 0, False
        #: Extra time granted while an unreliable component is up: for replicas that are behind, and
        #: for slow links; and whether a source is late.
        self._more_us = (0, 0, False)
        #: Per client: the best tree, and the best tree of replicas that have caught up.
        self._kinds: dict[str, tuple[str, str]] = {}
        #: Per client: since when there has been a tree without interruption, and its kind.
        self._served: dict[str, tuple[int, str]] = {}
        self._owes: dict[str, int | None] = {}
        #: Per stream; replicas of a fragment share the tree.
        self._trees: dict[str, Tree] = {}

    def _waits_us(self, kind: Kind) -> dict[str, int]:
        """The wait of each fragment during a failure. For tentative results, every fragment waits
        its `max_delay` (X in Borealis) if any fragment of the network has `on_failure="delay"`."""
        limits = self._patience
        delays = any(self._network.protection(name).on_failure == "delay" for name in limits)
        waits = delays and kind is Kind.TENTATIVE
        return {name: x.own_us if waits and x else 0 for name, x in limits.items()}

    def changed(self, now: int, *, noticed: bool) -> None:
        """A component fails or heals. `noticed`: others detect the fault only by missing heartbeats
        or lag."""
        self._changed_at = now
        if noticed:
            self._taken_at = now

    def look(self, now: int) -> list[Expected | Owed]:
        """The expectations that have changed since the last look."""
        # At its buffer bound a source stops because of one consumer, and all other consumers wait
        # (docs/availability.md, Retention).
        bounded = self._cast.options.buffer_buckets is not None
        clear = not (bounded and self._stopped_by_a_consumer())
        self._look_at_trees(now)
        if bounded and self._is_held_up():
            self._held_up_at = now
        more_us = self._more_us
        expectations: list[Expected | Owed] = []
        for client in self._cast.clients:
            kind, ready = self._kinds[client.name] if clear else (UNKNOWN, UNKNOWN)
            if self._said.get(client.name) != (kind, more_us):
                self._said[client.name] = kind, more_us
                expectations.append(self._expected(client, kind, now))
            age_us = self._owed(client, ready, now)
            if age_us != self._owes.get(client.name):
                self._owes[client.name] = age_us
                expectations.append(Owed(now, client.name, client.output, age_us))
        return expectations

    def _look_at_trees(self, now: int) -> None:
        """Evaluates the trees if necessary. The trees change only when a component fails, heals,
        dies or starts, until all components are up, and when streams end, so most looks can skip
        the evaluation."""
        lives = sum(process.life for process in self._cast.by_name.values())
        if lives != self._lives:
            self._lives, self._changed_at = lives, now
        ending = any(source.ending for source in self._cast.sources)
        if self._looked_at > self._changed_at and self._all_up and not ending:
            return
        self._looked_at = now
        self._kinds = {
            client.name: (
                self._kind(client, now, ready=False),
                self._kind(client, now, ready=True),
            )
            for client in self._cast.clients
        }
        self._more_us = self._granted_us()
        self._all_up = self.condition.all_up(now)

    def _expected(self, client: ClientProcess, kind: str, now: int) -> Expected:
        output = client.output
        within_us, settle_us = self._within_us.get((kind, output), 0), self._settle_us.get(kind, 0)
        if kind in self._settle_us:
            lag_us, slow_us, late = self._more_us
            # An input that is always late is waited for in every bucket.
            waits_us = self._first_us[output]
            if not (late and kind == Kind.TENTATIVE):
                waits_us = min(waits_us, slow_us * self._depth[output])
            within_us += lag_us + slow_us * self._uncovered[output] + waits_us
        if kind == Kind.TENTATIVE:  # the first buckets wait `max_delay` at every fragment
            settle_us = max(settle_us, self._first_us[output] + STEP_US)
        return Expected(now, client.name, output, kind, within_us, settle_us)

    def _owed(self, client: ClientProcess, kind: str, now: int) -> int | None:
        """The maximum age of the newest valid result. While there is a tree without interruption,
        the same bound applies, even if components of the tree fail, heal, correct their results, or
        the tree changes its kind. Only the time of failure detection is added."""
        output = client.output
        if kind not in self._settle_us:
            self._served.pop(client.name, None)
            return None
        since, before = self._served.get(client.name, (now, kind))
        if self._suspends and (before, kind) == (Kind.TENTATIVE, Kind.STABLE):
            since = now  # new rows wait until the correction is complete
        self._served[client.name] = since, kind
        settle_us = max(self._settle_us[kind], self._first_us[output] + STEP_US)
        if now - since < settle_us:
            return None
        lag_us, slow_us, _ = self._more_us
        if now - self._held_up_at <= self._behind_us:
            lag_us += self._behind_us
        age_us = self._age_us[output] + lag_us + slow_us * self._uncovered[output]
        if now - self._taken_at < self._detect_us + age_us:
            age_us += self._detect_us
        return age_us

    def over(self, now: int) -> list[Expected | Owed]:
        """The sources are asked to finish: no bucket follows the last one."""
        expectations: list[Expected | Owed] = []
        for client in self._cast.clients:
            expectations.append(Expected(now, client.name, client.output, UNKNOWN, 0, 0))
            expectations.append(Owed(now, client.name, client.output, None))
        return expectations

    def deserted(self, now: int) -> list[Deserted]:
        """Fragments whose live replicas all correct at once, each relying on another live replica
        to answer. Replicas must correct one after the other, unless no replica could answer
        meanwhile. `promises` judges the reliance on a replica that has just died."""
        deserted = []
        for part, names in self._replicated:
            nodes = [self._cast.by_name[name] for name in names]
            up = [node for node in nodes if isinstance(node, NodeProcess) and node.is_up]
            for path in part.paths:
                on = [inspection.answered_by(node, path) for node in up]
                lives = {node.name for node in up}
                if len(on) > 1 and all(names and lives.issuperset(names) for names in on):
                    deserted.append(Deserted(now, part.name, path.name))
        return deserted

    @property
    def replicated(self) -> list[tuple[Fragment, tuple[str, ...]]]:
        return self._replicated

    # -- internal ---------------------------------------------------------------------------------

    def _granted_us(self) -> tuple[int, int, bool]:
        """Extra time: a replica that is up but unreliable is left only when it is some buckets
        behind, and slow links delay all rows."""
        lags = {node.fragment.name for node in self._cast.nodes if self.condition.impaired(node)}
        late = any(self.condition.impaired(source) for source in self._cast.sources)
        late = late or self._cast.wire.throttled
        return len(lags) * self._behind_us, self._cast.wire.delays_us, late

    def _stopped_by_a_consumer(self) -> bool:
        """A source or node is at its buffer bound because of a consumer that cannot be replaced. A
        replica of a pair can be replaced, and must be declared dead before the bound is reached."""
        bound = self._cast.options.buffer_buckets
        assert bound is not None
        now = self._cast.world.now // self._network.width_us
        for process in (*self._cast.sources, *self._cast.nodes):
            if not process.is_up:
                continue
            for stream in process.service.logs:
                if not process.log.has(stream) or process.log.info(stream).ended:
                    continue
                received = inspection.received_by(process, stream)
                waited_for = [
                    received.get(consumer, 0) for consumer in self._consumers[stream] - self._paired
                ]
                if waited_for and now - min(waited_for) >= bound - LAG_BUCKETS:
                    return True
        return False

    def _is_held_up(self) -> bool:
        """A replica of a pair is at its buffer bound: the replica waits until a consumer has
        acknowledged or was declared dead. Consumers leave such a replica like any replica that
        makes no progress (docs/pairs.md)."""
        bound = self._cast.options.buffer_buckets
        assert bound is not None
        for process in self._cast.nodes:
            if process.name not in self._paired or not process.is_up:
                continue
            for stream in process.service.logs:
                if not process.log.has(stream):
                    continue
                info = process.log.info(stream)
                if not info.ended and info.complete_upto >= process.log.received(stream) + bound:
                    return True
        return False

    def _kind(self, client: ClientProcess, now: int, *, ready: bool) -> str:
        """With `ready`, only replicas count that have caught up since their start."""
        if not self.condition.there(client) or self.condition.impaired(client):
            return UNKNOWN
        return str(self._best(client, client.output, {}, now if ready else None))

    def _best(
        self, consumer: Server, stream: str, memo: dict[str, Kind], ready_at: int | None
    ) -> Kind:
        kinds = [
            self._made(producer, stream, memo, ready_at)
            for name in self._producers[stream]
            if self.condition.reaches(consumer, producer := self._cast.by_name[name])
        ]
        return next((kind for kind in Kind if kind in kinds), Kind.BLOCKING)

    def _made(
        self, producer: Server, stream: str, memo: dict[str, Kind], ready_at: int | None
    ) -> Kind:
        if self.condition.impaired(producer):
            return Kind.BLOCKING
        if isinstance(producer, SourceProcess):
            serving = producer.is_up and not producer.silent
            # A source that is being retired closes no bucket until its retirement is complete.
            return Kind.STABLE if serving and producer.ending == producer.ended else Kind.BLOCKING
        assert isinstance(producer, NodeProcess)
        key = f"{producer.name}/{stream}"
        if key not in memo:
            memo[key] = self._computed(producer, stream, memo, ready_at)
        return memo[key]

    def _computed(
        self, node: NodeProcess, stream: str, memo: dict[str, Kind], ready_at: int | None
    ) -> Kind:
        if not node.is_up:
            return Kind.BLOCKING
        path = next(path for path in node.fragment.paths if stream in path.outputs)
        if not inspection.begun(node, path) and not inspection.has_checkpoint(node, path):
            # The node cannot know where an input begins that it has never seen
            # (docs/availability.md, Restarts).
            return Kind.BLOCKING
        if ready_at is not None and not self.condition.caught_up(node, path, ready_at):
            return Kind.BLOCKING
        inputs = {name: self._best(node, name, memo, ready_at) for name in path.inputs}
        if all(kind is Kind.STABLE for kind in inputs.values()):
            return Kind.STABLE
        if self._network.protection(fragment_of(node.name)).on_failure == "block":
            return Kind.BLOCKING
        available = [name for name, kind in inputs.items() if kind is not Kind.BLOCKING]
        if all(self._has_ended(name) for name in available):
            return Kind.BLOCKING  # no more input arrives (docs/availability.md, Sources)
        return _of(self._tree(path, stream), inputs)

    def _has_ended(self, stream: str) -> bool:
        producers = [self._cast.by_name[name] for name in self._producers[stream]]
        return any(inspection.has_ended(producer, stream) for producer in producers)

    def _tree(self, path: Path, stream: str) -> Tree:
        if stream not in self._trees:
            self._trees[stream] = tree_of(path, stream, self._network)
        return self._trees[stream]


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
