"""Deliberate bugs, planted one at a time: what the simulator is worth.

Each is a mistake somebody could make in the code as it is, with the checkers that may report it and
the run that shows it: a scene that many share (`scenes`), faults of its own, or a random seed. The
list is kept and grows with every protocol. A mistake that nothing catches is a hole in the
simulator, unless `harmless` says what makes it good.
"""

from __future__ import annotations

from tests.verify.sim.mutations import (
    growth,
    hosts,
    logs,
    nodes,
    pairs,
    rebuilding,
    rebuilds,
    replacing,
    replicas,
    sources,
    starts,
    subscriptions,
    tentative,
    wrong_bits,
)
from tests.verify.sim.mutations.planting import MUTATIONS, Mutation

#: Importing them fills the list.
LISTS = (
    logs, nodes, subscriptions, tentative, replacing, replicas, starts, pairs, rebuilding, rebuilds,
    wrong_bits, sources, growth, hosts,
)  # fmt: skip

__all__ = ["LISTS", "MUTATIONS", "Mutation"]
