"""The actual condition of all simulated components: which processes are up, which processes can
reach each other, and which processes are up but unreliable. The oracle builds its trees from this
condition."""

from __future__ import annotations

from holdfast.core.replica_selector import LAG_BUCKETS
from holdfast.model.fragments import Path, fragment_of, fragments
from holdfast.model.network import Network
from holdfast.model.trees import longest, patience, tolerances
from holdfast.types import OutputState
from holdfast.verify.sim import inspection
from holdfast.verify.sim.links import HEARTBEAT_US, SILENCE_US, Link, Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_run import Cast
from holdfast.verify.sim.sources import SourceProcess

#: Time through a fragment in addition to its waits: steps, links, and one or two latency spikes.
STEP_US = 150_000


def detect_us(network: Network) -> int:
    """Time until all consumers have left a process that died, hangs or was disconnected. Consumers
    detect missing heartbeats, with two checks per `silence`, or a lag of `LAG_BUCKETS`, or a lag of
    more than their tolerance (docs/availability.md, Replicas)."""
    silent_us = SILENCE_US + SILENCE_US // 2 + 5 * HEARTBEAT_US
    behind = [LAG_BUCKETS, *(buckets + 1 for buckets in tolerances(network).values())]
    return max(silent_us, (max(behind) + 1) * network.width_us)


def _bearable_us(network: Network) -> dict[str, int]:
    """Per fragment: a fragment that does not block bears its own part of `max_delay` (X in
    Borealis) without the share reserved for computing, without the bucket width, and without
    `STEP_US`. Fragments downstream bear the sum of the parts on the longest route. A fragment that
    blocks passes the delay on."""
    waits, parts = patience(network), {part.name: part for part in fragments(network)}

    def limit_us(name: str, *, downstream: bool) -> int:
        wait = waits[name]
        if wait is None:
            return SILENCE_US
        reserved_us = int((1 - network.protection(name).wait_share) * wait.own_us)
        held_us = wait.total_us if downstream else wait.own_us
        return held_us - reserved_us - network.width_us - STEP_US

    def bears_us(name: str, *, downstream: bool = False) -> int:
        outputs = set(parts[name].outputs)
        others = [other for other, part in parts.items() if outputs & set(part.inputs)]
        limits_us = [bears_us(other, downstream=True) for other in others]
        return max(0, min([limit_us(name, downstream=downstream), *limits_us]))

    return {name: bears_us(name) for name in parts}


class Condition:
    def __init__(self, cast: Cast, recovery_us: int) -> None:
        self._cast = cast
        #: Time that a started replica may take to catch up; afterwards the replica counts as ready.
        self._catch_up_us = recovery_us
        self._caught_up: dict[tuple[str, str], int] = {}
        self._started: dict[str, tuple[int, int]] = {}
        network = cast.network
        own_us = {name: wait.own_us if wait else 0 for name, wait in patience(network).items()}
        #: Per stream: how long all fragments on the longest path to it may wait for an input.
        self.waits_us = longest(network, own_us)
        #: Delay of an input of a fragment relative to other inputs that makes no bucket tentative,
        #: in this fragment and in all fragments downstream.
        self._bears_us = _bearable_us(network)

    def there(self, process: Server) -> bool:
        return process.alive and not process.paused

    def linked(self, a: Server, b: Server) -> bool:
        """No link between the two processes is cut."""
        link = self._cast.wire.link
        return not (link(a.name, b.name).cut or link(b.name, a.name).cut)

    def reaches(self, consumer: Server, producer: Server) -> bool:
        """Rows get from the producer to the consumer. A degraded link may or may not deliver rows
        in time, and therefore does not count."""
        if not (
            self.there(producer)
            and self.linked(consumer, producer)
            and self._finds(consumer, producer)
        ):
            return False
        wire = self._cast.wire
        forward, back = (
            wire.link(producer.name, consumer.name),
            wire.link(consumer.name, producer.name),
        )
        return not (self._bad(forward, consumer) or self._bad(back, consumer))

    def _finds(self, consumer: Server, producer: Server) -> bool:
        """The consumer knows the address of the producer, or can ask the controller
        (docs/pairs.md, The controller)."""
        controller = self._cast.wire.controller
        if producer is controller or (self.there(controller) and self.linked(consumer, controller)):
            return True
        return inspection.knows_address(consumer, producer)

    def _bad(self, link: Link, consumer: Server) -> bool:
        if link.damage or link.row_us:
            return True
        bears_us = self._bears_us.get(fragment_of(consumer.name), SILENCE_US)
        # Messages of one connection arrive in order, also those that are sent after the fault.
        in_flight_us = link.slow_until - self._cast.world.now
        return max(link.delay_us, in_flight_us) > bears_us

    def stuck(self, process: Server) -> str:
        """Why a process that is up makes no progress; empty if the process works."""
        disk = process.disk
        if disk.full or disk.unreadable or disk.unsyncable:
            return "its disk fails"
        return "it makes no progress" if process.hung else ""

    def impaired(self, process: Server) -> str:
        """Why a process that is up is unreliable; empty if the process is reliable."""
        if why := self.stuck(process):
            return why
        if isinstance(process, NodeProcess):
            if process.disk.rotten:  # a stable step stops the node, a tentative one is retried
                return "its state is damaged"
            return "it is slow" if process.slowness > 1.0 else ""
        if not isinstance(process, SourceProcess):
            return ""
        unsteady = self._cast.world.now < process.unsteady_until and inspection.is_apart(process)
        return "its clock is wrong" if process.offset_us or unsteady else ""

    def caught_up(self, node: NodeProcess, path: Path, now: int) -> bool:
        """Since its start the replica has caught up, or has had enough time to catch up."""
        key = (node.name, path.name)
        life, since = self._started.get(node.name, (-1, 0))
        if life != node.life:
            life, since = self._started[node.name] = node.life, now
        if self._caught_up.get(key) == life:
            return True
        if now - since < self._catch_up_us:
            statuses = [inspection.stream_status(node, stream) for stream in path.outputs]
            if any(status is None or status[0] is OutputState.STABILIZATION for status in statuses):
                return False
            # A restarted node waits for a missing input once more (docs/availability.md, Restarts).
            wait_us = self.waits_us[path.outputs[0]] + STEP_US
            ended_upto = since // self._cast.network.width_us - 1
            if now - since < wait_us and any(
                status and status[1] < ended_upto for status in statuses
            ):
                return False
        self._caught_up[key] = life
        return True

    def all_up(self, now: int) -> bool:
        """The condition does not change until a component fails, heals, dies or starts."""
        for node in self._cast.nodes:
            if not node.is_up:
                return False
            for path in node.fragment.paths:
                if not (inspection.begun(node, path) and self.caught_up(node, path, now)):
                    return False
        if self._cast.wire.settling:
            return False
        return all(source.is_up and source.unsteady_until < now for source in self._cast.sources)
