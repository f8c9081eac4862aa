"""Rewrites a network with partitions as one of ordinary fragments, to be run (Flux, section 4.1).

A fragment with P partitions becomes P fragments, for example `stats.0` to `stats.3`, each with its
own instances of the operators. Producers route the rows: each upstream operator gets P `Part`s,
which are separate streams, and each partition reads the union of its parts. Partitions therefore
have all properties of fragments: complete buckets, replicas, state per path, corrections.

Sources do not route rows. A fragment `ingress` routes for them, and a fragment `egress` unites the
partitions of an output, like the paper's operators of the same names. Both only forward rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.model import operators as ops
from holdfast.model.network import Network
from holdfast.model.wellformed import RESERVED, topological

INGRESS, EGRESS = RESERVED


def partitions_of(network: Network) -> dict[str, int]:
    """Number of partitions of each partitioned fragment, by name."""
    return {op.fragment: op.partitions for op in network.operators if isinstance(op, ops.Exchange)}


def partition_of(network: Network, fragment: str) -> tuple[str, int] | None:
    """For a fragment of the network as it is run: the partitioned fragment and the number of the
    partition. None if the fragment is not a partition."""
    name, _, number = fragment.rpartition(".")
    return (name, int(number)) if name in partitions_of(network.logical) else None


def one_of_each(network: Network, names: Iterable[str]) -> list[str]:
    """Only the first partition of each fragment: all partitions compile to the same plans."""
    kinds: dict[str, str] = {}
    for name in names:
        part = partition_of(network, name)
        kinds.setdefault(part[0] if part else name, name)
    return list(kinds.values())


def physical(network: Network) -> Network:
    """The network as it is run. A network without partitions is returned unchanged."""
    split = partitions_of(network)
    if not split:
        return network
    return _Expansion(network, split).made


class _Expansion:
    def __init__(self, network: Network, split: dict[str, int]) -> None:
        self.split = split
        self.made = Network(network.name, partitions=network.partitions)
        self.made.width_us = network.width_us
        self.made.logical = network
        #: The instances of each operator, by partition; a single one if the fragment is not
        #: partitioned.
        self._copies: dict[str, list[ops.Operator]] = {}
        for op in topological(network):
            self._copies[op.name] = self._copied(op)
        for fragment, protection in network.protections.items():
            for name in self._names(fragment):
                self.made.protections[name] = protection

    def _names(self, fragment: str) -> list[str]:
        parts = self.split.get(fragment)
        return [fragment] if parts is None else [f"{fragment}.{n}" for n in range(parts)]

    def _add(self, op: ops.Operator) -> ops.Operator:
        self.made.operators.append(op)
        return op

    def _existing(self, name: str) -> ops.Operator | None:
        return next((op for op in self.made.operators if op.name == name), None)

    def _copied(self, op: ops.Operator) -> list[ops.Operator]:
        if isinstance(op, ops.Source):
            return [self._add(op)]
        if isinstance(op, ops.Exchange):
            return [self._routed(op, number) for number in range(op.partitions)]
        if isinstance(op, ops.Output):
            return [self._output(op)]
        if op.fragment not in self.split:
            inputs: list[ops.Operator | None] = [self._united(up, op.fragment) for up in op.inputs]
            return [self._add(replace(op, inputs=inputs))]
        return [
            self._add(
                replace(
                    op,
                    name=f"{op.name}.{number}",
                    fragment=f"{op.fragment}.{number}",
                    inputs=[self._copies[up.name][number] for up in op.inputs if up is not None],
                )
            )
            for number in range(self.split[op.fragment])
        ]

    def _routed(self, op: ops.Exchange, number: int) -> ops.Operator:
        """The input of one partition: its part of every instance of the upstream operator."""
        up = op.inputs[0]
        assert up is not None
        parts: list[ops.Operator | None] = []
        for instance in self._copies[up.name]:
            fragment = INGRESS if isinstance(instance, ops.Source) else instance.fragment
            part = ops.Part(
                name=f"{instance.name}.to-{op.fragment}.{number}",
                inputs=[instance],
                fn=op.fn,
                keys=op.keys,
                number=number,
                of=op.partitions,
                fragment=fragment,
            )
            parts.append(self._existing(part.name) or self._add(part))
        return self._add(
            ops.Union(name=f"{op.name}.{number}", inputs=parts, fragment=f"{op.fragment}.{number}")
        )

    def _united(self, up: ops.Operator | None, fragment: str) -> ops.Operator:
        """The input of a fragment without partitions: the union of all upstream partitions."""
        assert up is not None
        instances: list[ops.Operator | None] = [*self._copies[up.name]]
        if len(instances) == 1 and up.fragment not in self.split:
            return self._copies[up.name][0]
        name = f"{up.name}.to-{fragment}"
        return self._existing(name) or self._add(
            ops.Union(name=name, inputs=instances, fragment=fragment)
        )

    def _output(self, op: ops.Output) -> ops.Operator:
        up = op.inputs[0]
        assert up is not None
        fragment = EGRESS if up.fragment in self.split else op.fragment
        return self._add(replace(op, inputs=[self._united(up, fragment)], fragment=fragment))
