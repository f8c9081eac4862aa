"""Deliberate bugs, planted one at a time: what the simulator is worth.

Each is a mistake somebody could make in the code as it is, with the checkers that may report it and
the first seed that does, or a scenario written for it where it takes more of a coincidence than the
lot brings. The list is kept and grows with every protocol. A mutation that nothing catches is a
hole in the simulator, not a proof that the mistake is harmless.
"""

from __future__ import annotations

from tests.verify.sim.mutations import (
    growth,
    hosts,
    logs,
    nodes,
    pairs,
    rebuilding,
    replicas,
    sources,
    tentative,
)
from tests.verify.sim.mutations.planting import MUTATIONS, Mutation

#: Importing them fills the list.
LISTS = (logs, nodes, tentative, replicas, pairs, rebuilding, sources, growth, hosts)

__all__ = ["LISTS", "MUTATIONS", "Mutation"]
