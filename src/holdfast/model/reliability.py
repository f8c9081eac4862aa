"""How long a cluster whose work runs twice lives until something is lost: its mean time to failure.

Flux sections 3.1 and 4.2 compare two schemes. With *cluster pairs* the whole dataflow runs on two
replica sets of half the nodes each, and one dead node makes its whole set useless. With *partition
pairs* every partition has its own pair of nodes, and only nodes that share a partition must not be
down together.

Both are the same process: units (nodes, or replica sets) fail at a constant rate while they are up
and come back after a repair; it is over when a unit fails while a partner of it is down. Of this
process there are three answers here. `limit_mttf_s` is good where repairs are short, as the paper
assumes; `exact_mttf_s` solves the Markov chain; `simulate` rolls dice and can do other repairs.
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
#: Cycles of a simulation, where nobody says how many: the 95 % interval is then below +-2 %.
RUNS = 40_000

#: A Markov chain is followed only up to as many nodes down at once as this many states allow.
_STATES_MAX = 800
#: Nodes times cycles that are simulated side by side.
_CELLS_MAX = 1_000_000

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    nodes: int
    node_mttf_s: float
    #: From the failure of a node until everything it held has two replicas again.
    repair_s: float
    #: The same for a replica set of cluster pairs; Flux: between `repair_s` and `nodes` times it.
    repair_cluster_s: float
    #: `mirrored`: nodes 2k and 2k+1 hold the same. `chained`: node i shares a partition with i+1,
    #: the last with the first, so that a dead node's work is divided.
    placement: Placement = "chained"

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.nodes % 2 or self.nodes > NODES_MAX:
            raise InputError(
                f"nodes = {self.nodes}: pairs want an even number of nodes, 2 to {NODES_MAX}"
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
                "repair_cluster is shorter than repair, but a replica set is not back before its "
                "node; Flux section 4.2 puts it between repair and nodes * repair"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """What fails and is repaired as one: the nodes, or the two replica sets of cluster pairs."""

    mttf_s: float
    repair_s: float
    #: Which may fail while all their partners are up.
    opens: npt.NDArray[np.bool_]
    #: Two rows. A unit that fails while one of its two partners is down ends it all; its own number
    #: stands for no partner.
    peers: npt.NDArray[np.int64]
    #: Turning the ring of units changes nothing; else swapping pairs of them does not.
    ring: bool

    @property
    def count(self) -> int:
        return len(self.opens)


def units_of(layout: Layout, scheme: Scheme, *, both_fail: bool = True) -> Units:
    """`both_fail`: any unit may fail first, as in real life. Else only the primary of a pair does,
    and its secondary is counted while the primary is down, as the formulas of the paper have it."""
    if scheme == "cluster pairs":
        mttf_s, repair_s = 2 * layout.node_mttf_s / layout.nodes, layout.repair_cluster_s
        count, ring = 2, False
    else:
        mttf_s, repair_s = layout.node_mttf_s, layout.repair_s
        count, ring = layout.nodes, layout.placement == "chained"
    own = np.arange(count)
    # In a ring everybody is the primary of one pair and the secondary of another.
    primary = np.full(count, True) if ring else own % 2 == 0
    of_primary = (own - 1) % count if ring else own & ~1
    of_secondary = (own + 1) % count if ring else own | 1
    peers = np.stack([of_primary, of_secondary if both_fail else own])
    return Units(mttf_s, repair_s, primary | both_fail, peers, ring)


def paper_mttf_s(layout: Layout, scheme: Scheme) -> float:
    """Flux section 4.2. With two nodes both are the formula of one pair (section 3.1)."""
    if scheme == "cluster pairs":
        return 4 * layout.node_mttf_s**2 / (layout.nodes**2 * layout.repair_cluster_s)
    return 2 * layout.node_mttf_s**2 / (layout.nodes * layout.repair_s)


def limit_mttf_s(units: Units) -> float:
    """What the exact value tends to as repairs get short: each way for one unit to fail, and a
    given partner of it during the repair, happens with the rate repair / mttf^2."""
    ways = {
        (int(first), then) for row in units.peers for then, first in enumerate(row) if first != then
    }
    return units.mttf_s**2 / (units.repair_s * len(ways))


# -- the Markov chain: repairs are exponential -----------------------------------------------------


def exact_mttf_s(units: Units) -> float | None:
    """From all up to the end, whatever the ratio of repair to MTTF. Where the chain has too many
    states it is cut at so many units down at once, and None if that would matter."""
    levels: list[dict[tuple[int, ...], int]] = [{(): 0}]
    rows: list[tuple[int, int, float]] = []
    deadly: list[float] = []
    whole = True
    while levels[-1]:
        following: dict[tuple[int, ...], int] = {}
        after = sum(map(len, levels))
        for state, number in levels[-1].items():
            deadly.append(0.0)
            for unit in state:
                back = _alike(units, {*state} - {unit})
                rows.append((number, levels[-2][back], 1 / units.repair_s))
            for unit in {*range(units.count)} - {*state}:
                if {*units.peers[:, unit].tolist()} & {*state}:
                    deadly[number] += 1 / units.mttf_s
                elif units.opens[unit]:
                    more = following.setdefault(
                        _alike(units, {*state, unit}), after + len(following)
                    )
                    rows.append((number, more, 1 / units.mttf_s))
        if after + len(following) > _STATES_MAX:
            whole = False
            break
        levels.append(following)
    count = len(deadly)
    rates, fatal = np.zeros((count, count)), np.array(deadly)
    for start, end, rate in rows:
        if end < count:
            rates[start, end] += rate
    mttf_s = _mean_s(rates, fatal)
    if whole:
        return mttf_s
    fewer = count - len(levels[-1])
    coarser_s = _mean_s(rates[:fewer, :fewer], fatal[:fewer])
    return mttf_s if abs(coarser_s - mttf_s) < 0.01 * mttf_s else None


def _alike(units: Units, down: set[int]) -> tuple[int, ...]:
    """One name for all states that only differ in the numbering of the units."""
    if not units.ring:
        return tuple(range(0, 2 * len(down), 2))
    turned = (tuple(sorted((unit - first) % units.count for unit in down)) for first in down)
    return min(turned, default=())


def _mean_s(rates: Floats, fatal: Floats) -> float:
    """Mean time from state 0 to the end, by taking out one state after the other. Nothing is ever
    subtracted (Grassmann, Taksar, Heyman 1985): a plain solver has no digit left when the repair is
    a millionth of the MTTF or less."""
    rates, fatal, held_s = rates.copy(), fatal.copy(), np.ones(len(fatal))
    for state in range(len(fatal) - 1, 0, -1):
        share = rates[:state, state] / (rates[state, :state].sum() + fatal[state])
        rates[:state, :state] += np.outer(share, rates[state, :state])
        fatal[:state] += share * fatal[state]
        held_s[:state] += share * held_s[state]
    return float(held_s[0] / fatal[0])


# -- the simulation --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    mttf_s: float
    #: Half the width of the 95 % confidence interval.
    ci95_s: float


def simulate(
    units: Units, *, runs: int = RUNS, seed: int = 0, constant_repair: bool = False
) -> Simulated:
    """Cycles from all up over the first failure to all up again. They are independent, so MTTF =
    mean length / probability to end deadly (Wald's equation).

    A deadly failure is too rare to wait for. Failures and repairs that are not deadly are drawn;
    along such a path the deadly ones would come at a known rate, so its integral H gives the
    probability 1 - exp(-H) that one came, and exp(-H) that the cycle is still going on. Paths that
    come beyond H = 1 could go on for ever: from there on the deadly failure is drawn as well."""
    if runs < 100 or seed < 0:
        raise InputError(f"{runs} runs, seed {seed}: at least 100 runs, and a seed from 0 on")
    rng = np.random.default_rng(seed)
    part = max(100, _CELLS_MAX // units.count)
    sizes = [min(part, runs - begun) for begun in range(0, runs, part)]
    parts = [_cycles(units, size, rng, constant_repair) for size in sizes]
    deadly, after_s = (np.concatenate(column) for column in zip(*parts, strict=True))
    length_s = units.mttf_s / units.opens.sum() + after_s
    mttf_s = float(length_s.mean() / deadly.mean())
    error = np.std(length_s - mttf_s * deadly) / (math.sqrt(runs) * deadly.mean())
    return Simulated(mttf_s, float(1.96 * error))


def _cycles(
    units: Units, runs: int, rng: np.random.Generator, constant_repair: bool
) -> tuple[Floats, Floats]:
    """Of each cycle the probability of a deadly end, and the mean time after the first failure."""

    def repairs_s(count: int) -> Floats:
        return units.repair_s * (np.ones(count) if constant_repair else rng.exponential(size=count))

    def ended(hazard: Floats) -> Floats:
        return -np.expm1(-np.minimum(hazard, 1.0))

    hazard, after_s = np.zeros(runs), np.zeros(runs)
    #: H at which the deadly failure comes, of those that get beyond 1.
    deadly_at = 1.0 + rng.exponential(size=runs)
    going = np.arange(runs)
    #: Until the unit is back; infinite: it is up.
    left_s = np.full((runs, units.count), np.inf)
    left_s[going, rng.choice(np.flatnonzero(units.opens), runs)] = repairs_s(runs)
    while going.size:
        rows = np.arange(len(going))
        down = np.isfinite(left_s)
        threatened = ~down & (down[:, units.peers[0]] | down[:, units.peers[1]])
        harmless = ~down & ~threatened & units.opens
        choices = harmless.sum(axis=1)
        fails_s = np.full(len(going), np.inf)
        drawn_s = units.mttf_s * rng.exponential(size=len(going))
        np.divide(drawn_s, choices, out=fails_s, where=choices > 0)
        back = left_s.argmin(axis=1)
        back_s = left_s[rows, back]
        step_s = np.minimum(fails_s, back_s)

        # While anybody is down, somebody's failure would be deadly: the rate is never 0.
        rate = threatened.sum(axis=1) / units.mttf_s
        before, limit = hazard[going], deadly_at[going]
        now = np.minimum(before + rate * step_s, limit)
        drawn = np.maximum(now, 1.0) - np.maximum(before, 1.0)
        after_s[going] += (ended(now) - ended(before) + drawn / math.e) / rate
        hazard[going] = now

        left_s -= step_s[:, None]
        up = fails_s >= back_s
        left_s[rows[up], back[up]] = np.inf
        which = (rng.random(len(going)) * choices).astype(np.int64)[~up]
        fallen = (harmless[~up].cumsum(axis=1) > which[:, None]).argmax(axis=1)
        left_s[rows[~up], fallen] = repairs_s(len(fallen))
        stays = np.isfinite(left_s).any(axis=1) & (now < limit)
        going, left_s = going[stays], left_s[stays]
    return ended(hazard) + (hazard >= deadly_at) / math.e, after_s
