"""Availability of results while inputs are missing, and the delay that each fragment may add
(Borealis section 3.5).

A tree connects a result with the sources that contribute to it. A tree is stable if all these
sources are available. It is tentative if the missing sources enter only through operators that can
continue without them (Union), and blocking otherwise (Join). By property 1, a client receives its
rows, stable or tentative, within kX, where X is the `max_delay` of each SUnion and k the number of
SUnions on the longest route from a source to the output.

`tree_of` and `reach` answer for one path of a fragment, per bucket. `kind` answers for a whole
network; tests use it as an oracle of what a client must receive. `patience` computes X.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.model import operators as ops
from holdfast.model.fragments import Path, fragments
from holdfast.model.network import Network
from holdfast.model.wellformed import inputs_of, promised, topological


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Can continue with any of its parts. Without parts, nothing can be computed."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Can continue only with all of its parts, at least two."""

    parts: tuple[Tree, ...]


#: A leaf is the name of an input stream.
Tree = str | AnyOf | AllOf


def tree_of(path: Path, output: str, network: Network) -> Tree:
    """The tree of one output of a path, over the inputs of the path. The tree is normalized: the
    parts of a node are distinct, and no part has the same class as its node."""
    assert output in path.outputs, f"{output} is not an output of path {path.name}"
    grown: dict[str, Tree] = {name: name for name in path.inputs}
    for op in (*path.operators, network.named(output)):
        parts = [grown[up.name] for up in inputs_of(op) if up.name in grown]
        # An operator fed only by a feedback edge has no parts; downstream operators skip it.
        if parts:
            grown[op.name] = _node(AnyOf if isinstance(op, ops.Union) else AllOf, parts)
    return grown.get(output, AnyOf(()))


def reach(tree: Tree, upto: Mapping[str, int | None]) -> int | None:
    """The last bucket for which a result can be computed; None if there is none. `upto`: the last
    available bucket of each input (None or no entry: not available)."""
    match tree:
        case str():
            return upto.get(tree)
        case AnyOf(parts):
            return max(_present(reach(part, upto) for part in parts), default=None)
        case AllOf(parts):
            buckets = _present(reach(part, upto) for part in parts)
            return min(buckets) if len(buckets) == len(parts) else None


class Kind(StrEnum):
    """The best available tree of a result: what a client must receive."""

    #: All contributing sources are available.
    STABLE = "STABLE"
    #: Sources are missing, but the operators can continue without them.
    TENTATIVE = "TENTATIVE"
    #: No result can be computed until the failure is repaired.
    BLOCKING = "BLOCKING"


def kind(
    network: Network,
    output: str,
    available: Collection[str],
    nodes_up: Collection[str] | None = None,
) -> Kind:
    """The kind of `output` if only the sources `available` can be reached and only the fragments
    `nodes_up` (None: all) have a running replica.

    A fragment is either up or down, so all routes through a fragment use the same replica and no
    tree is invalid in the sense of the paper. A fragment with `on_failure="block"` produces nothing
    while an input is missing, even if its operators could continue.
    """
    kinds: dict[str, Kind] = {}
    for op in topological(network):
        if isinstance(op, ops.Source):
            kinds[op.name] = Kind.STABLE if op.name in available else Kind.BLOCKING
            continue
        parts = [kinds[up.name] for up in inputs_of(op) if up.name in kinds]
        if parts:
            up = nodes_up is None or op.fragment in nodes_up
            kinds[op.name] = _given(network, op, parts) if up else Kind.BLOCKING
    return kinds.get(network.named(output).name, Kind.BLOCKING)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the SUnion of a fragment may hold rows while other inputs are missing."""

    #: Longest delay (X) that the fragment may add to rows that were delayed upstream already.
    own_us: int
    #: Longest time the fragment may hold a row that arrives from a source without delay: the sum of
    #: the delays that the fragment and all fragments upstream may add. At least `own_us`.
    total_us: int


def patience(network: Network) -> dict[str, Patience | None]:
    """X of every fragment, upstream first; None for a fragment that blocks or has no X.

    The paper does not specify how an end-to-end delay is divided into the X of each node (section
    2.3), only the resulting delay: with k SUnions on the longest route, at most kX (property 1).
    Here, each of the k fragments on the longest route to an output gets the same share of the
    output's contract, `within / k`. A fragment with several outputs downstream gets the smallest
    share. The delays on a route to an output then never add up to more than `within`: the route has
    at most k fragments with at most `within / k` each. Fragments that block count in k too, so that
    a later change to `delay` does not change the X of other fragments. `Protection.max_delay`
    overrides the share of a fragment; the shares of other fragments are not adjusted.

    `total_us` follows from the same sum. A fragment may read a source directly and also read
    streams that other fragments have delayed. Rows of the source have no delay yet, so the fragment
    may hold them for the sum of all delays allowed on the slowest route. Fragments that block, or
    have no X, add nothing to this sum.
    """
    names = [fragment.name for fragment in fragments(network)]
    k = longest(network, dict.fromkeys(names, 1))
    promises = promised(network)
    own: dict[str, int | None] = {}
    for name in names:
        protection = network.protection(name)
        shares = [within_us // k[output] for output, within_us in promises[name].items()]
        own[name] = protection.max_delay_us or min(shares, default=None)
        if protection.on_failure == "block":
            own[name] = None
    total = {name: x_us or 0 for name, x_us in own.items()}
    totals = longest(network, total)
    for op in network.operators:
        if not isinstance(op, ops.Source):
            total[op.fragment] = max(total[op.fragment], totals[op.name])
    return {name: None if us is None else Patience(us, total[name]) for name, us in own.items()}


def tolerance_buckets(network: Network, fragment: str) -> int:
    """Lag in buckets up to which a consumer in this fragment prefers stable to tentative rows.
    Derived from the time for which the fragment may hold rows anyway."""
    return tolerances(network).get(fragment, 0)


def tolerances(network: Network) -> dict[str, int]:
    """`tolerance_buckets` of every fragment."""
    return {
        name: 0 if limits is None else max(0, limits.own_us // network.width_us - 1)
        for name, limits in patience(network).items()
    }


def client_tolerance_buckets(network: Network, output: str) -> int:
    """`tolerance_buckets` of a client: that of the fragment that produces the output."""
    return tolerance_buckets(network, network.named(output).fragment)


def longest(network: Network, weight: Mapping[str, int]) -> dict[str, int]:
    """For each operator, the weight of the heaviest route to it from a source or the end of a
    feedback edge. A route gains the weight of a fragment each time it enters one (an SUnion)."""
    weights: dict[str, int] = {}
    for op in topological(network):
        routes = [
            weights[up.name] + (weight[op.fragment] if _enters(up, op) else 0)
            for up in inputs_of(op)
        ]
        weights[op.name] = max(routes, default=0)
    return weights


def _enters(up: ops.Operator, op: ops.Operator) -> bool:
    return up.fragment != op.fragment or not inputs_of(up)


def _given(network: Network, op: ops.Operator, parts: list[Kind]) -> Kind:
    """The kind of an operator in a running fragment, derived from the kinds of its inputs."""
    if all(part is Kind.STABLE for part in parts):
        return Kind.STABLE
    blocking = [part is Kind.BLOCKING for part in parts]
    blocked = all(blocking) if isinstance(op, ops.Union) else any(blocking)
    if blocked or network.protection(op.fragment).on_failure == "block":
        return Kind.BLOCKING
    return Kind.TENTATIVE


def _node(of: type[AnyOf] | type[AllOf], parts: Iterable[Tree]) -> Tree:
    flat: dict[Tree, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if isinstance(part, of) else (part,))
    return next(iter(flat)) if len(flat) == 1 else of(tuple(flat))


def _present(buckets: Iterable[int | None]) -> list[int]:
    return [bucket for bucket in buckets if bucket is not None]
