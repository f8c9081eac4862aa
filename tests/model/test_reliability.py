"""Mean time to failure: Flux sections 3.1 and 4.2, Markov chains, Monte Carlo simulation."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import numpy as np
import pytest

from holdfast.errors import InputError
from holdfast.model.reliability import (
    SCHEMES,
    Layout,
    Placement,
    exact_mttf_s,
    limit_mttf_s,
    paper_mttf_s,
    simulate,
    units_of,
)

PLACEMENTS: tuple[Placement, ...] = ("mirrored", "chained")


def layout(nodes: int, repair_s: float, placement: Any = "chained", **options: float) -> Layout:
    """Nodes live for one second on average, so `repair_s` is the ratio too."""
    options.setdefault("repair_cluster_s", nodes / 2 * repair_s)
    return Layout(nodes=nodes, node_mttf_s=1.0, repair_s=repair_s, placement=placement, **options)


def nodes_of(nodes: int, repair_s: float, placement: Placement, both_fail: bool = True) -> Any:
    return units_of(layout(nodes, repair_s, placement), "partition pairs", both_fail=both_fail)


def sets_of(nodes: int, repair_s: float, both_fail: bool = True) -> Any:
    return units_of(layout(nodes, repair_s), "cluster pairs", both_fail=both_fail)


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "cluster", "partition"), [(2, 100, 100), (4, 12.5, 50), (8, 1.5625, 25)]
)
def test_paper_mttf_matches_the_table_of_section_4_2(
    nodes: int, cluster: float, partition: float
) -> None:
    small = layout(nodes, 0.01)
    assert paper_mttf_s(small, "cluster pairs") == pytest.approx(cluster)
    assert paper_mttf_s(small, "partition pairs") == pytest.approx(partition)
    long_lived = Layout(
        nodes=nodes, node_mttf_s=10.0, repair_s=0.01, repair_cluster_s=nodes / 2 * 0.01
    )
    assert paper_mttf_s(long_lived, "partition pairs") == pytest.approx(100 * partition)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_with_short_repairs_the_mttf_is_a_half_or_a_quarter_of_the_paper(nodes: int) -> None:
    def share(units: Any, paper_s: float) -> float:
        exact_s = exact_mttf_s(units)
        assert exact_s == pytest.approx(limit_mttf_s(units), rel=1e-6)
        return limit_mttf_s(units) / paper_s

    repair_s = 1e-8
    cluster_s = paper_mttf_s(layout(nodes, repair_s), "cluster pairs")
    pairs_s = paper_mttf_s(layout(nodes, repair_s), "partition pairs")
    assert share(sets_of(nodes, repair_s), cluster_s) == pytest.approx(1 / 2)
    assert share(sets_of(nodes, repair_s, False), cluster_s) == pytest.approx(1)
    assert share(nodes_of(nodes, repair_s, "mirrored"), pairs_s) == pytest.approx(1 / 2)
    assert share(nodes_of(nodes, repair_s, "mirrored", False), pairs_s) == pytest.approx(1)
    # Two nodes are one pair in any placement: both neighbours are the same node.
    chained = 1 / 2 if nodes == 2 else 1 / 4
    assert share(nodes_of(nodes, repair_s, "chained"), pairs_s) == pytest.approx(chained)
    assert share(nodes_of(nodes, repair_s, "chained", False), pairs_s) == pytest.approx(1 / 2)


@pytest.mark.parametrize("repair_rate", [1e9, 1000.0, 5.0, 0.5])
def test_exact_mttf_matches_small_chains_solved_by_hand(repair_rate: float) -> None:
    """Nodes fail with rate 1 and are repaired with rate `repair_rate`; E1 is the mean time from the
    state with one node down."""
    one_pair = (3 + repair_rate) / 2
    pair_as_paper = 2 + repair_rate
    mirrored_e1 = ((1 + repair_rate / 4) * (repair_rate + 1) + 1) / (repair_rate + 3)
    chained_e1 = ((1 + repair_rate / 4) * (repair_rate + 1) + 1 / 2) / (2 * repair_rate + 3)
    for placement in PLACEMENTS:
        assert exact_mttf_s(nodes_of(2, 1 / repair_rate, placement)) == pytest.approx(one_pair)
    assert exact_mttf_s(nodes_of(2, 1 / repair_rate, "mirrored", False)) == pytest.approx(
        pair_as_paper
    )
    assert exact_mttf_s(nodes_of(4, 1 / repair_rate, "mirrored")) == pytest.approx(
        1 / 4 + mirrored_e1
    )
    assert exact_mttf_s(nodes_of(4, 1 / repair_rate, "chained")) == pytest.approx(
        1 / 4 + chained_e1
    )


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_replica_set_is_one_unit_with_a_higher_failure_rate(nodes: int) -> None:
    failure_rate, repair_rate = nodes / 2, 1 / (nodes / 2 * 0.05)
    assert exact_mttf_s(sets_of(nodes, 0.05)) == pytest.approx(
        (3 * failure_rate + repair_rate) / (2 * failure_rate**2)
    )


@pytest.mark.parametrize("ratio", [0.2, 0.01])
def test_mirrored_pairs_fail_like_independent_pairs(ratio: float) -> None:
    """The first failure of four pairs: integral of survival to the 4th power."""
    repair_rate, pairs = 1 / ratio, 4
    root = math.sqrt((repair_rate + 3) ** 2 - 8)
    slow, fast = (-(repair_rate + 3) + root) / 2, (-(repair_rate + 3) - root) / 2
    mean = sum(
        math.comb(pairs, k) * slow**k * (-fast) ** (pairs - k) / (slow - fast) ** pairs
        / -(k * fast + (pairs - k) * slow)
        for k in range(pairs + 1)
    )  # fmt: skip
    assert exact_mttf_s(nodes_of(8, ratio, "mirrored")) == pytest.approx(mean)


@pytest.mark.parametrize("nodes", [6, 8])
@pytest.mark.parametrize("ratio", [0.2, 0.01])
def test_chained_nodes_fail_fatally_when_neighbours_are_down(nodes: int, ratio: float) -> None:
    """One equation for every set of nodes without neighbours, without use of symmetry."""
    subsets = [set(c) for k in range(nodes) for c in itertools.combinations(range(nodes), k)]
    states = [s for s in subsets if not s & {(node + 1) % nodes for node in s}]
    matrix = np.zeros((len(states), len(states)))
    for number, state in enumerate(states):
        matrix[number, number] = nodes - len(state) + len(state) / ratio
        for other, target in enumerate(states):
            if state < target and len(target - state) == 1:
                matrix[number, other] -= 1
            if target < state and len(state - target) == 1:
                matrix[number, other] -= 1 / ratio
    mean = np.linalg.solve(matrix, np.ones(len(states)))[states.index(set())]
    assert exact_mttf_s(nodes_of(nodes, ratio, "chained")) == pytest.approx(mean)


def test_a_large_chain_is_truncated_if_the_error_is_small_and_refused_otherwise() -> None:
    fine = nodes_of(64, 1e-5, "chained")
    assert exact_mttf_s(fine) == pytest.approx(limit_mttf_s(fine), rel=1e-3)
    assert exact_mttf_s(nodes_of(64, 0.2, "chained")) is None


# -- simulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("both_fail", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 0.2])
def test_the_simulation_matches_the_markov_chain(
    nodes: int, placement: Placement, ratio: float, both_fail: bool
) -> None:
    for units in (nodes_of(nodes, ratio, placement, both_fail), sets_of(nodes, ratio, both_fail)):
        simulated = simulate(units)
        assert simulated.mttf_s == pytest.approx(exact_mttf_s(units), rel=0.05)
        assert 0 < simulated.ci95_s < 0.02 * simulated.mttf_s


@pytest.mark.parametrize("both_fail", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_simulation_matches_the_markov_chain_closely_with_many_nodes_down(
    placement: Placement, both_fail: bool
) -> None:
    """The choice of the failing node matters here: a neighbour of a node that is down, or not."""
    units = nodes_of(12, 1.0, placement, both_fail)
    simulated = simulate(units, runs=100_000)
    assert simulated.mttf_s == pytest.approx(exact_mttf_s(units), abs=1.5 * simulated.ci95_s)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_simulation_matches_the_paper_if_only_primaries_fail_first(nodes: int) -> None:
    """Section 4.2 with its own assumptions: pairs of nodes and short repairs."""
    mirrored = layout(nodes, 1e-3, "mirrored")
    for scheme in SCHEMES:
        paper_s = paper_mttf_s(mirrored, scheme)
        as_paper = simulate(units_of(mirrored, scheme, both_fail=False)).mttf_s
        assert as_paper == pytest.approx(paper_s, rel=0.05)
        assert simulate(units_of(mirrored, scheme)).mttf_s == pytest.approx(paper_s / 2, rel=0.05)


def test_the_limit_is_inaccurate_for_long_repairs() -> None:
    units = nodes_of(2, 0.2, "mirrored")
    simulated_s = simulate(units).mttf_s
    assert limit_mttf_s(units) < 0.9 * simulated_s
    assert exact_mttf_s(units) == pytest.approx(simulated_s, rel=0.05)


@pytest.mark.parametrize("constant_repair", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_simulation_matches_an_event_by_event_simulation(
    placement: Placement, constant_repair: bool
) -> None:
    """Lives of four nodes, event by event; feasible because the lives are short."""
    random, repair_s = Random(1), 0.2
    peers = [{1}, {0}, {3}, {2}] if placement == "mirrored" else [{1, 3}, {0, 2}] * 2

    def life_s() -> float:
        until = [random.expovariate(1) for _ in range(4)]
        down: set[int] = set()
        while True:
            node = min(range(4), key=until.__getitem__)
            if node not in down and peers[node] & down:
                return until[node]
            down ^= {node}
            repair = repair_s if constant_repair else random.expovariate(1 / repair_s)
            until[node] += repair if node in down else random.expovariate(1)

    mean_life_s = sum(life_s() for _ in range(10_000)) / 10_000
    simulated = simulate(nodes_of(4, repair_s, placement), constant_repair=constant_repair)
    assert simulated.mttf_s == pytest.approx(mean_life_s, rel=0.03)


def test_only_the_mean_of_short_repairs_matters() -> None:
    units = nodes_of(8, 1e-4, "chained")
    assert simulate(units, constant_repair=True).mttf_s == pytest.approx(limit_mttf_s(units), 0.01)


def test_the_confidence_interval_contains_the_exact_mttf_in_95_percent_of_runs() -> None:
    units = nodes_of(4, 0.05, "chained")
    exact_s = exact_mttf_s(units)
    assert exact_s is not None
    results = [simulate(units, runs=1_000, seed=seed) for seed in range(200)]
    inside = sum(abs(result.mttf_s - exact_s) <= result.ci95_s for result in results)
    assert 180 <= inside <= 198


def test_the_simulation_is_deterministic_for_a_seed() -> None:
    units = nodes_of(8, 0.05, "chained")
    assert simulate(units, seed=7) == simulate(units, seed=7)
    assert simulate(units, seed=7) != simulate(units, seed=8)


# -- invalid arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 3}, "nodes = 3: pairs need an even number"),
        ({"nodes": 0}, "nodes = 0: pairs need"),
        ({"nodes": 1_000}, "2 to 256"),
        ({"repair_s": 0.0}, "repair_s = 0.0 must be positive"),
        ({"placement": "random"}, "placement = 'random' is not one of mirrored, chained"),
        ({"repair_cluster_s": 0.001}, "repair_cluster is shorter than repair"),
    ],
)
def test_an_invalid_layout_is_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"nodes": 4, "repair_s": 0.01}
    with pytest.raises(InputError, match=message):
        layout(**{**good, **change})


def test_too_few_runs_and_negative_seeds_are_refused() -> None:
    with pytest.raises(InputError, match="at least 100 runs"):
        simulate(nodes_of(2, 0.01, "chained"), runs=10)
    with pytest.raises(InputError, match="a seed >= 0"):
        simulate(nodes_of(2, 0.01, "chained"), seed=-1)
