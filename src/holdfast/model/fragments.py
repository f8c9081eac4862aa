"""Divides a network into fragments and each fragment into paths; lists nodes and their streams.

A path is the set of outputs of a fragment that depend on exactly the same inputs. Each path has its
own schedule and state versions, so a missing input never delays an output that does not depend on
that input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.config import HOST_HEARTBEAT_US, Options, RecoveryPolicy
from holdfast.errors import InputError
from holdfast.model import operators as ops
from holdfast.model.network import Network
from holdfast.model.wellformed import topological


@dataclass(frozen=True, slots=True)
class Path:
    #: Name of the first output; unique in the fragment.
    name: str
    #: Streams that the path reads, sorted by name, and streams that the path writes.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: The operators between inputs and outputs, upstream first.
    operators: tuple[ops.Operator, ...]

    @property
    def convergent(self) -> bool:
        return all(op.convergent for op in self.operators)

    def extent_us(self) -> int:
        """Longest time between a result and the input rows that contribute to it."""
        reach: dict[str, int] = {}
        for op in self.operators:
            before = [reach.get(up.name, 0) for up in op.inputs if up is not None]
            reach[op.name] = op.extent_us + max(before, default=0)
        return max(reach.values(), default=0)


@dataclass(frozen=True, slots=True)
class Fragment:
    name: str
    paths: tuple[Path, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def stream_name(op: ops.Operator) -> str:
    """Name of the stream in the log, for an operator whose rows are logged."""
    return op.name


def fragments(network: Network) -> list[Fragment]:
    """The fragments of a network, upstream fragments first."""
    order = topological(network)
    names: list[str] = []
    for op in order:
        if not isinstance(op, ops.Source) and op.fragment not in names:
            names.append(op.fragment)
    return [_fragment(order, name) for name in names]


def replicas_of(network: Network, fragment: str) -> tuple[str, ...]:
    """The nodes of a fragment: the first has the name of the fragment, the second is `main@2`."""
    number = network.protection(fragment).replicas
    return (fragment, *(f"{fragment}@{n}" for n in range(2, number + 1)))


def fragment_of(node: str) -> str:
    return node.partition("@")[0]


def peers_of(network: Network, node: str) -> tuple[str, ...]:
    """The other replicas of a node's fragment."""
    return tuple(name for name in replicas_of(network, fragment_of(node)) if name != node)


def is_pair(network: Network, fragment: str) -> bool:
    return network.protection(fragment).replication == "pairs"


def recovery_of(network: Network, fragment: str, options: Options) -> RecoveryPolicy:
    """What upstream logs retain for the replicas of a fragment that is not a pair."""
    return network.protection(fragment).recovery or options.recovery


def check_options(network: Network, options: Options) -> None:
    """Raise InputError if a fragment recovers from checkpoints but checkpoints are disabled, or if
    `silence` is too short for the heartbeats of hosts, which decide over replicas of pairs."""
    if pairs_of(network) and options.silence_s < 3 * HOST_HEARTBEAT_US / 1e6:
        raise InputError(
            f"silence: {options.silence!r} must be at least {3 * HOST_HEARTBEAT_US // 1_000}ms "
            "with pairs: hosts send two heartbeats per second, and one lost heartbeat does not "
            "mean death"
        )
    names = {fragment.name for fragment in fragments(network)}
    checkpointed = [name for name in names if recovery_of(network, name, options) == "checkpoint"]
    if checkpointed and options.checkpoint_buckets == 0:
        raise InputError(
            f"recovery='checkpoint' of fragment {min(checkpointed)!r} needs checkpoint_buckets "
            ">= 1, found 0, which disables checkpoints; set it, or use recovery='replay'"
        )


def pairs_of(network: Network) -> dict[str, str]:
    """Every node of a pair, and its peer."""
    names = [
        name
        for fragment in fragments(network)
        if is_pair(network, fragment.name)
        for name in replicas_of(network, fragment.name)
    ]
    return {name: peers_of(network, name)[0] for name in names}


def local_replica_of(consumer: str, producers: Sequence[str]) -> str | None:
    """The producer with the same replica number as the consumer: its local replica. None if the
    stream has only one producer, or no producer with that number."""
    number = consumer.partition("@")[2]
    same_number = [producer for producer in producers if producer.partition("@")[2] == number]
    return same_number[0] if len(same_number) == 1 and len(producers) > 1 else None


def producers_for(network: Network, stream: str, consumer: str) -> tuple[str, ...]:
    """The producers from which a consumer may read a stream. With `replication="clusters"`, a
    replica reads only from producers of its own dataflow (Flux section 4.2)."""
    producers = producers_of(network)[stream]
    local = local_replica_of(consumer, producers)
    clustered = fragment_of(consumer) in network.protections and (
        network.protection(fragment_of(consumer)).replication == "clusters"
    )
    return (local,) if clustered and local is not None else producers


def producers_of(network: Network) -> dict[str, tuple[str, ...]]:
    """The producers of every logged stream: a source, or the replicas of a fragment."""
    producers: dict[str, tuple[str, ...]] = {op.name: (op.name,) for op in network.sources}
    for fragment in fragments(network):
        producers |= dict.fromkeys(fragment.outputs, replicas_of(network, fragment.name))
    return producers


def consumers_of(network: Network) -> dict[str, list[str]]:
    """The consumers of every logged stream: nodes, and one client per output."""
    consumers: dict[str, list[str]] = {}
    for fragment in fragments(network):
        for stream in fragment.inputs:
            consumers.setdefault(stream, []).extend(replicas_of(network, fragment.name))
    for op in network.operators:
        if isinstance(op, ops.Output):
            consumers.setdefault(op.name, []).append(f"client-{op.name}")
    return consumers


def _fragment(order: list[ops.Operator], name: str) -> Fragment:
    mine = [op for op in order if op.fragment == name and not isinstance(op, ops.Source)]
    read_elsewhere = {
        up.name
        for op in order
        if op.fragment != name
        for up in op.inputs
        if up is not None and up.fragment == name and not isinstance(up, ops.Source)
    }
    ends = [op for op in mine if isinstance(op, ops.Output) or op.name in read_elsewhere]
    grouped: dict[tuple[str, ...], list[ops.Operator]] = {}
    for end in ends:
        grouped.setdefault(_inputs(end, name), []).append(end)
    paths = []
    for inputs, outputs in grouped.items():
        needed = {op.name for end in outputs for op in _upstream(end, name)}
        operators = tuple(op for op in mine if op.name in needed and not isinstance(op, ops.Output))
        paths.append(
            Path(
                name=outputs[0].name,
                inputs=inputs,
                outputs=tuple(end.name for end in outputs),
                operators=operators,
            )
        )
    return Fragment(
        name=name,
        paths=tuple(paths),
        inputs=tuple(dict.fromkeys(stream for path in paths for stream in path.inputs)),
        outputs=tuple(end.name for end in ends),
    )


def _upstream(end: ops.Operator, fragment: str) -> list[ops.Operator]:
    """The operators of the fragment that `end` depends on, including `end`."""
    upstream: dict[str, ops.Operator] = {}
    waiting = [end]
    while waiting:
        op = waiting.pop()
        if op.name in upstream or op.fragment != fragment or isinstance(op, ops.Source):
            continue
        upstream[op.name] = op
        waiting += [up for up in op.inputs if up is not None]
    return list(upstream.values())


def _inputs(end: ops.Operator, fragment: str) -> tuple[str, ...]:
    streams: list[str] = []
    for op in _upstream(end, fragment):
        for up in op.inputs:
            if up is not None and (isinstance(up, ops.Source) or up.fragment != fragment):
                streams.append(stream_name(up))
    return tuple(sorted(set(streams)))
