"""Mean time to failure (MTTF) of a cluster with two replicas of everything.

Flux sections 3.1 and 4.2 compare two schemes. With *cluster pairs*, the whole dataflow runs on two
replica sets of half the nodes each, and one dead node makes its whole set unusable. With *partition
pairs*, every partition has its own pair of nodes; data is lost only if two nodes that share a
partition are down at the same time.

Both schemes are the same stochastic process. Units (nodes, or replica sets) fail at a constant rate
while they are up, and are up again after a repair. The process ends when a unit fails while one of
its peers is down. This module computes the MTTF in three ways: `limit_mttf_s` is accurate if
repairs are short, as the paper assumes; `exact_mttf_s` solves the Markov chain; `simulate` is a
Monte Carlo simulation, which also supports constant repair times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from holdfast.errors import InputError

Placement = Literal["mirrored", "chained"]
Scheme = Literal["cluster pairs", "partition pairs"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
NODES_MAX = 256
#: Default number of simulated cycles: the 95 % confidence interval is then below +-2 %.
RUNS = 40_000

#: Most states of a Markov chain. A larger chain is truncated at a number of units down at once.
_STATES_MAX = 800
#: Units times cycles that are simulated at once, in one array.
_CELLS_MAX = 1_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    nodes: int
    node_mttf_s: float
    #: Time from the failure of a node until all its data has two replicas again.
    repair_s: float
    #: The same for a replica set of cluster pairs; Flux: from `repair_s` to `nodes * repair_s`.
    repair_cluster_s: float
    #: `mirrored`: nodes 2k and 2k+1 hold the same partitions. `chained`: node i shares a partition
    #: with node i+1, and the last with the first, so that two nodes share the work of a dead node.
    placement: Placement = "chained"

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.nodes % 2 or self.nodes > NODES_MAX:
            raise InputError(
                f"nodes = {self.nodes}: pairs need an even number of nodes from 2 to {NODES_MAX}"
            )
        if self.placement not in get_args(Placement):
            raise InputError(
                f"placement = {self.placement!r} is not one of {', '.join(get_args(Placement))}"
            )
        for name in ("node_mttf_s", "repair_s", "repair_cluster_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} = {getattr(self, name)} must be positive and finite")
        if self.repair_cluster_s < self.repair_s:
            raise InputError(
                "repair_cluster is shorter than repair, but a replica set is not up before its "
                "node; use a value from repair to nodes * repair (Flux section 4.2)"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """The units that fail and are repaired: the nodes, or the two replica sets of cluster pairs."""

    mttf_s: float
    repair_s: float
    #: The units that may fail while all their peers are up.
    opens: npt.NDArray[np.bool_]
    #: Up to two peers of each unit, in two rows; the unit's own number means no peer. The process
    #: ends when a unit fails while one of its peers is down.
    peers: npt.NDArray[np.int64]
    #: Symmetry of the states. True: the units form a ring, and rotations of a state are equivalent.
    #: False: the units form pairs, and permutations of the pairs are equivalent.
    ring: bool

    @property
    def count(self) -> int:
        return len(self.opens)


def units_of(layout: Layout, scheme: Scheme, *, both_fail: bool = True) -> Units:
    """The units of a scheme. With `both_fail`, either unit of a pair may fail first. Without, only
    the primary may, and failures of the secondary count only while the primary is down: the
    paper's formulas assume this."""
    if scheme == "cluster pairs":
        mttf_s, repair_s = 2 * layout.node_mttf_s / layout.nodes, layout.repair_cluster_s
        count, ring = 2, False
    else:
        mttf_s, repair_s = layout.node_mttf_s, layout.repair_s
        count, ring = layout.nodes, layout.placement == "chained"
    own = np.arange(count)
    # In a ring, every unit is the primary of one pair and the secondary of another.
    primary = np.full(count, True) if ring else own % 2 == 0
    of_primary = (own - 1) % count if ring else own & ~1
    of_secondary = (own + 1) % count if ring else own | 1
    peers = np.stack([of_primary, of_secondary if both_fail else own])
    return Units(mttf_s, repair_s, primary | both_fail, peers, ring)


def paper_mttf_s(layout: Layout, scheme: Scheme) -> float:
    """The formulas of Flux section 4.2. For two nodes both are that of one pair (section 3.1)."""
    if scheme == "cluster pairs":
        return 4 * layout.node_mttf_s**2 / (layout.nodes**2 * layout.repair_cluster_s)
    return 2 * layout.node_mttf_s**2 / (layout.nodes * layout.repair_s)


def limit_mttf_s(units: Units) -> float:
    """The limit of the exact MTTF for short repairs. The event that a unit fails, and a given peer
    of the unit during the repair, has the rate repair / mttf^2; the rates of all events add up."""
    events = {
        (int(first), then) for row in units.peers for then, first in enumerate(row) if first != then
    }
    return units.mttf_s**2 / (units.repair_s * len(events))


# -- Markov chain with exponential repair times ----------------------------------------------------


def exact_mttf_s(units: Units) -> float | None:
    """The MTTF, starting with all units up, for any ratio of repair time to MTTF. A chain with too
    many states is truncated at a number of units down at once. None if the truncation would change
    the result by 1 % or more."""
    levels: list[dict[tuple[int, ...], int]] = [{(): 0}]
    rows: list[tuple[int, int, float]] = []
    fatal_rates: list[float] = []
    complete = True
    while levels[-1]:
        following: dict[tuple[int, ...], int] = {}
        first_number = sum(map(len, levels))
        for state, number in levels[-1].items():
            fatal_rates.append(0.0)
            for unit in state:
                repaired = _alike(units, {*state} - {unit})
                rows.append((number, levels[-2][repaired], 1 / units.repair_s))
            for unit in {*range(units.count)} - {*state}:
                if {*units.peers[:, unit].tolist()} & {*state}:
                    fatal_rates[number] += 1 / units.mttf_s
                elif units.opens[unit]:
                    target = following.setdefault(
                        _alike(units, {*state, unit}), first_number + len(following)
                    )
                    rows.append((number, target, 1 / units.mttf_s))
        if first_number + len(following) > _STATES_MAX:
            complete = False
            break
        levels.append(following)
    count = len(fatal_rates)
    rates, fatal = np.zeros((count, count)), np.array(fatal_rates)
    for start, end, rate in rows:
        if end < count:
            rates[start, end] += rate
    mttf_s = _mean_s(rates, fatal)
    if complete:
        return mttf_s
    fewer = count - len(levels[-1])
    coarser_s = _mean_s(rates[:fewer, :fewer], fatal[:fewer])
    return mttf_s if abs(coarser_s - mttf_s) < 0.01 * mttf_s else None


def _alike(units: Units, down: set[int]) -> tuple[int, ...]:
    """A canonical representative of all states that differ only in the numbering of the units."""
    if not units.ring:
        return tuple(range(0, 2 * len(down), 2))
    rotations = (tuple(sorted((unit - first) % units.count for unit in down)) for first in down)
    return min(rotations, default=())


def _mean_s(rates: Floats, fatal: Floats) -> float:
    """Mean time from state 0 to the end, by elimination of one state after the other. The algorithm
    needs no subtraction (Grassmann, Taksar, Heyman 1985): an ordinary linear solver loses all
    digits if the repair time is a millionth of the MTTF or less."""
    rates, fatal, sojourn_s = rates.copy(), fatal.copy(), np.ones(len(fatal))
    for state in range(len(fatal) - 1, 0, -1):
        share = rates[:state, state] / (rates[state, :state].sum() + fatal[state])
        rates[:state, :state] += np.outer(share, rates[state, :state])
        fatal[:state] += share * fatal[state]
        sojourn_s[:state] += share * sojourn_s[state]
    return float(sojourn_s[0] / fatal[0])


# -- Monte Carlo simulation ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    mttf_s: float
    #: Half the width of the 95 % confidence interval.
    ci95_s: float


def simulate(
    units: Units, *, runs: int = RUNS, seed: int = 0, constant_repair: bool = False
) -> Simulated:
    """Simulate independent cycles. A cycle starts with all units up, contains a first failure, and
    ends when all units are up again. MTTF = mean length of a cycle / probability that a cycle ends
    in a fatal failure (Wald's equation).

    Fatal failures are too rare to be simulated directly. Only the other failures and repairs are
    randomly generated. Along such a path, fatal failures have a known rate with the integral H: a
    fatal failure has occurred with probability 1 - exp(-H), and the cycle still runs with
    probability exp(-H). Paths beyond H = 1 might never end, so from there on the fatal failure is
    randomly generated too."""
    if runs < 100 or seed < 0:
        raise InputError(f"{runs} runs, seed {seed}: expected at least 100 runs and a seed >= 0")
    rng = np.random.default_rng(seed)
    batch = max(100, _CELLS_MAX // units.count)
    sizes = [min(batch, runs - start) for start in range(0, runs, batch)]
    batches = [_cycles(units, size, rng, constant_repair) for size in sizes]
    fatal, after_s = (np.concatenate(column) for column in zip(*batches, strict=True))
    length_s = units.mttf_s / units.opens.sum() + after_s
    mttf_s = float(length_s.mean() / fatal.mean())
    error = np.std(length_s - mttf_s * fatal) / (math.sqrt(runs) * fatal.mean())
    return Simulated(mttf_s, float(1.96 * error))


def _cycles(
    units: Units, runs: int, rng: np.random.Generator, constant_repair: bool
) -> tuple[Floats, Floats]:
    """For each cycle: probability of a fatal end, and mean time after the first failure."""

    def repairs_s(count: int) -> Floats:
        return units.repair_s * (np.ones(count) if constant_repair else rng.exponential(size=count))

    def ended(hazard: Floats) -> Floats:
        return -np.expm1(-np.minimum(hazard, 1.0))

    hazard, after_s = np.zeros(runs), np.zeros(runs)
    #: H at which the fatal failure occurs, for cycles beyond H = 1.
    fatal_at = 1.0 + rng.exponential(size=runs)
    running = np.arange(runs)
    #: Remaining repair time of each unit; infinite: the unit is up.
    remaining_s = np.full((runs, units.count), np.inf)
    remaining_s[running, rng.choice(np.flatnonzero(units.opens), runs)] = repairs_s(runs)
    while running.size:
        rows = np.arange(len(running))
        down = np.isfinite(remaining_s)
        threatened = ~down & (down[:, units.peers[0]] | down[:, units.peers[1]])
        harmless = ~down & ~threatened & units.opens
        choices = harmless.sum(axis=1)
        fails_s = np.full(len(running), np.inf)
        random_s = units.mttf_s * rng.exponential(size=len(running))
        np.divide(random_s, choices, out=fails_s, where=choices > 0)
        repaired = remaining_s.argmin(axis=1)
        repaired_s = remaining_s[rows, repaired]
        step_s = np.minimum(fails_s, repaired_s)

        # While a unit is down, the failure of another unit is fatal: the rate is never 0.
        rate = threatened.sum(axis=1) / units.mttf_s
        before, limit = hazard[running], fatal_at[running]
        now = np.minimum(before + rate * step_s, limit)
        beyond = np.maximum(now, 1.0) - np.maximum(before, 1.0)
        after_s[running] += (ended(now) - ended(before) + beyond / math.e) / rate
        hazard[running] = now

        remaining_s -= step_s[:, None]
        up = fails_s >= repaired_s
        remaining_s[rows[up], repaired[up]] = np.inf
        choice = (rng.random(len(running)) * choices).astype(np.int64)[~up]
        failed = (harmless[~up].cumsum(axis=1) > choice[:, None]).argmax(axis=1)
        remaining_s[rows[~up], failed] = repairs_s(len(failed))
        continues = np.isfinite(remaining_s).any(axis=1) & (now < limit)
        running, remaining_s = running[continues], remaining_s[continues]
    return ended(hazard) + (hazard >= fatal_at) / math.e, after_s
