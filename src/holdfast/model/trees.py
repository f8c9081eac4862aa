"""Which results can go on when inputs are missing, and how long they may be kept waiting for them
(Borealis section 3.5).

A tree is what connects sources with a result. It is stable with all the sources that contribute,
tentative when those missing come in through operators that go on without them (Union), blocking
otherwise (Join). By property 1 a reader gets its rows, stable or tentative, within kX: X at every
SUnion, k of them on the longest way.

`tree_of` and `reach` answer for one path of a fragment, bucket by bucket; `kind` for a whole
network, as an oracle of what a reader must see; `patience` says what X is.
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
    """Goes on with any of its parts; without parts there is nothing to go on with."""

    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Goes on only with all of its parts, of which there are at least two."""

    parts: tuple[Tree, ...]


#: A leaf is the name of an input stream.
Tree = str | AnyOf | AllOf


def tree_of(path: Path, output: str, network: Network) -> Tree:
    """What one of the path's outputs needs of the path's inputs, in the order they are drawn. No
    part stands twice in a node, and no node in one of its own kind."""
    assert output in path.outputs, f"{output} is not an output of path {path.name}"
    grown: dict[str, Tree] = {name: name for name in path.inputs}
    for op in (*path.operators, network.named(output)):
        parts = [grown[up.name] for up in inputs_of(op) if up.name in grown]
        # What is fed by a feedback edge alone has no parts and is left out of what reads it.
        if parts:
            grown[op.name] = _node(AnyOf if isinstance(op, ops.Union) else AllOf, parts)
    return grown.get(output, AnyOf(()))


def reach(tree: Tree, upto: Mapping[str, int | None]) -> int | None:
    """The last bucket for which something can be computed, each input being there up to a bucket of
    its own (None or not named: not at all). None: nothing can."""
    match tree:
        case str():
            return upto.get(tree)
        case AnyOf(parts):
            return max(_present(reach(part, upto) for part in parts), default=None)
        case AllOf(parts):
            found = _present(reach(part, upto) for part in parts)
            return min(found) if len(found) == len(parts) else None


class Kind(StrEnum):
    """The best tree that is left for a result; what a reader must be given."""

    #: Every source that contributes is in it.
    STABLE = "STABLE"
    #: Something is missing that the operators can do without.
    TENTATIVE = "TENTATIVE"
    #: Nothing can be computed until the failure heals.
    BLOCKING = "BLOCKING"


def kind(
    network: Network,
    output: str,
    available: Collection[str],
    nodes_up: Collection[str] | None = None,
) -> Kind:
    """The tree of `output` when only the sources `available` can be reached and only the fragments
    `nodes_up` (None: all) have a replica that runs.

    A fragment is up or down as a whole, so every way through it takes the same replica and no tree
    is invalid. One that blocks gives nothing as long as it lacks a part, whatever its operators
    could do without.
    """
    found: dict[str, Kind] = {}
    for op in topological(network):
        if isinstance(op, ops.Source):
            found[op.name] = Kind.STABLE if op.name in available else Kind.BLOCKING
            continue
        parts = [found[up.name] for up in inputs_of(op) if up.name in found]
        if parts:
            up = nodes_up is None or op.fragment in nodes_up
            found[op.name] = _given(network, op, parts) if up else Kind.BLOCKING
    return found.get(network.named(output).name, Kind.BLOCKING)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a fragment's SUnion may hold rows for the sake of those that are missing."""

    #: What it may add by waiting where its input was delayed already.
    own_us: int
    #: How long it may hold a row that came straight from a source without any delay: as long as
    #: everything before it and itself could have. Never less than `own_us`.
    total_us: int


def patience(network: Network) -> dict[str, Patience | None]:
    """X of every fragment, upstream first; None for one that blocks, or that nobody gave an X.

    The paper leaves open how an end-to-end delay becomes the X of a node (section 2.3) but tells
    what comes of it: with k SUnions on the longest way, at most kX (property 1). So each of the k
    fragments on the longest way to an output is given the same share of what the output promises,
    `within / k`, and a fragment that serves several outputs the smallest one. Then no way to an
    output can add up to more than its promise: it has at most k fragments, and none of them more
    than the k-th part. Fragments that block count in k too: turning one of them to `delay` later
    changes the X of no other. `Protection.x` goes before the division, and nothing makes up for it.

    `total_us` follows from the same sum. Where a fragment reads a source directly and, beside it,
    what others have held up already, the rows of the source have spent nothing on their way: they
    may wait here for as long as the others were allowed to take, along the way that may take
    longest. Fragments that block, or have no X, add nothing to it.
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
    ways = longest(network, total)
    for op in network.operators:
        if not isinstance(op, ops.Source):
            total[op.fragment] = max(total[op.fragment], ways[op.name])
    return {name: None if us is None else Patience(us, total[name]) for name, us in own.items()}


def tolerance_buckets(network: Network, fragment: str) -> int:
    """How far behind a consumer in this fragment prefers stable rows to tentative ones: as far as
    they may be held anyway."""
    return tolerances(network).get(fragment, 0)


def tolerances(network: Network) -> dict[str, int]:
    """`tolerance_buckets` of every fragment."""
    return {
        name: 0 if known is None else max(0, known.own_us // network.width_us - 1)
        for name, known in patience(network).items()
    }


def client_tolerance_buckets(network: Network, output: str) -> int:
    """The same for a client: as far as the fragment that makes the output may hold rows."""
    return tolerance_buckets(network, network.named(output).fragment)


def longest(network: Network, weight: Mapping[str, int]) -> dict[str, int]:
    """By operator, the heaviest way to it from where rows come in: sources, ends of feedback edges.
    A way takes on the weight of a fragment each time it enters one, through an SUnion."""
    found: dict[str, int] = {}
    for op in topological(network):
        ways = [
            found[up.name] + (weight[op.fragment] if _enters(up, op) else 0) for up in inputs_of(op)
        ]
        found[op.name] = max(ways, default=0)
    return found


def _enters(up: ops.Operator, op: ops.Operator) -> bool:
    return up.fragment != op.fragment or not inputs_of(up)


def _given(network: Network, op: ops.Operator, parts: list[Kind]) -> Kind:
    """What an operator of a fragment that is up gives, from what it is given."""
    if all(part is Kind.STABLE for part in parts):
        return Kind.STABLE
    missing = [part is Kind.BLOCKING for part in parts]
    blocked = all(missing) if isinstance(op, ops.Union) else any(missing)
    if blocked or network.protection(op.fragment).on_failure == "block":
        return Kind.BLOCKING
    return Kind.TENTATIVE


def _node(of: type[AnyOf] | type[AllOf], parts: Iterable[Tree]) -> Tree:
    flat: dict[Tree, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if isinstance(part, of) else (part,))
    return next(iter(flat)) if len(flat) == 1 else of(tuple(flat))


def _present(found: Iterable[int | None]) -> list[int]:
    return [bucket for bucket in found if bucket is not None]
