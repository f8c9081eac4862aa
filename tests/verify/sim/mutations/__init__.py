"""Deliberate bugs, planted one at a time: they measure what the simulator detects.

Each bug is a mistake that a developer could make in the current code, with the checkers that may
report it and the run that shows it: a scene that many bugs share (`scenes`), its own faults, or a
random seed. The list grows with every protocol. A mistake that no checker reports is a gap in the
simulator, unless `harmless` names the safeguard that compensates for it.
"""

from __future__ import annotations

from tests.verify.sim.mutations import (
    eventual,
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

#: Importing these modules fills the list of mutations.
LISTS = (
    logs, nodes, subscriptions, tentative, replacing, replicas, starts, pairs, rebuilding, rebuilds,
    wrong_bits, sources, growth, hosts, eventual,
)  # fmt: skip

__all__ = ["LISTS", "MUTATIONS", "Mutation"]
