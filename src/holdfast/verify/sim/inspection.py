"""The only module in which the simulator's judges read the internal state of the protocols, so that
a change of a protocol affects one module here. This module makes no judgements: oracle, observers
and checkers do."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.model.fragments import Path
from holdfast.types import OutputState
from holdfast.verify.sim.clients import ClientProcess
from holdfast.verify.sim.links import Server
from holdfast.verify.sim.nodes import NodeProcess
from holdfast.verify.sim.simulated_process import Member
from holdfast.verify.sim.simulated_subscriber import Follower
from holdfast.verify.sim.sources import SourceProcess


def begun(node: NodeProcess, path: Path) -> bool:
    """The node knows where the inputs of the path begin, and computes."""
    return node.performer.core.paths[path.name].position is not None


def has_ended(process: Server, stream: str) -> bool:
    """The process has completed the stream."""
    log = process.service.logs.get(stream)
    return log is not None and log.has(stream) and log.info(stream).ended


def has_checkpoint(node: NodeProcess, path: Path) -> bool:
    return bool(node.log.states(path.name))


def stream_status(node: Server, stream: str) -> tuple[OutputState, int] | None:
    """The status that a replica reports for a stream, and the last bucket that it has answered,
    stable or tentative."""
    status = node.service.stream_status(stream) if stream in node.service.logs else None
    if status is None:
        return None
    return status.state, max(status.upto, status.reached)


def received_by(process: Member, stream: str) -> dict[str, int]:
    """The last bucket that each consumer of a stream has received, by the producer's log."""
    return {
        consumer: ack.received for consumer, ack in process.log._state.streams[stream].acks.items()
    }


def is_at_bound(process: SourceProcess) -> bool:
    """The source may close no bucket until the slowest consumer has received an older one."""
    stream = process.name
    if not process.is_up or not process.log.has(stream):
        return False
    info = process.log.info(stream)
    return not info.ended and info.complete_upto >= process.source._room_upto()


def knows_address(consumer: Server, producer: Server) -> bool:
    """The consumer knows the address of the producer's current instance."""
    if isinstance(consumer, NodeProcess):
        followers = list(consumer.followers.values()) if consumer.is_up else []
    else:
        assert isinstance(consumer, ClientProcess)
        followers = [consumer.follower] if consumer.is_up else []
    return any(follower._addresses.get(producer.name) == producer.address for follower in followers)


def is_apart(process: SourceProcess) -> bool:
    """The source clock and the wall clock differ now, or the source is down and the difference is
    unknown."""
    if not process.is_up:
        return True
    return process.clock() - process.monotonic() != process.source._watermark.clock._shown


def answered_by(node: NodeProcess, path: Path) -> tuple[str, ...]:
    """The replicas that promised to answer while this one corrects and does not answer; empty if
    the replica answers itself."""
    consistency, now = node.performer.core.paths[path.name].consistency, node.monotonic()
    if consistency.state is not OutputState.STABILIZATION:
        return ()
    leases = consistency.promises._leases
    return tuple(peer for peer, lease in leases.items() if lease.until > now)


def waits_for(node: NodeProcess, path: Path) -> tuple[str, ...]:
    """The replicas for which the node postpones its own correction."""
    consistency = node.performer.core.paths[path.name].consistency
    if consistency.state is not OutputState.UP_FAILURE:
        return ()  # there is nothing to correct
    name = consistency.promises.waits_for(node.monotonic())
    return () if name is None else (name,)


def read_from(follower: Follower) -> str | None:
    """The replica that a consumer reads from; None: no replica."""
    return follower.subscription.main


def instance_read(follower: Follower) -> Server | None:
    """The instance that a consumer reads from, which its successor may already have replaced;
    None: the consumer is not connected."""
    main = follower.subscription._connections.get(False)
    connection = None if main is None else follower.connections.get(main.id)
    return None if connection is None else connection.server


def tentative_held(node: NodeProcess) -> Iterator[tuple[str, str, int]]:
    """The kind, the stream and the number of the tentative buckets that a node holds, counting
    every version: of its inputs, and of its outputs."""
    index = node.performer.inputs
    for stream in node.fragment.inputs:
        replaced = len(index._replaced.get(stream, ()))
        yield "tentative inputs", stream, len(index._tentative.get(stream, ())) + replaced
    for stream in node.fragment.outputs:
        if node.log.has(stream):
            yield "tentative results", stream, len(node.log.tentative(stream)[0])


def came_upto(node: NodeProcess, path: str) -> int:
    """The last bucket of which a path has received any input."""
    return node.performer.core.paths[path].sunion.newest() or 0


def to_go_through(node: NodeProcess) -> Iterator[tuple[str, int, int]]:
    """The collections that are scanned at every event, their number of entries, and the number of
    buckets that wait for a result. Expired deadlines are not counted: they are scanned only once
    more."""
    now = node.monotonic()
    for name, path in node.performer.core.paths.items():
        held = path.sunion._held.values()
        entries = sum(deadline.until > now for deadlines in held for deadline in deadlines)
        newest, reached = path.sunion.newest(), path.reached
        waiting = 0 if newest is None or reached is None else max(0, newest - reached)
        yield f"deadlines of {name}", entries, waiting
