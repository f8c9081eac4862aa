"""Mean time to failure: Flux sections 3.1 and 4.2, the Markov chains by hand, and the dice."""

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


def layout(nodes: int, repair_s: float, placement: Any = "chained", **more: float) -> Layout:
    """Nodes live for one second on average, so `repair_s` is the ratio too."""
    more.setdefault("repair_cluster_s", nodes / 2 * repair_s)
    return Layout(nodes=nodes, node_mttf_s=1.0, repair_s=repair_s, placement=placement, **more)


def nodes_of(nodes: int, repair_s: float, placement: Placement, both_fail: bool = True) -> Any:
    return units_of(layout(nodes, repair_s, placement), "partition pairs", both_fail=both_fail)


def sets_of(nodes: int, repair_s: float, both_fail: bool = True) -> Any:
    return units_of(layout(nodes, repair_s), "cluster pairs", both_fail=both_fail)


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "cluster", "partition"), [(2, 100, 100), (4, 12.5, 50), (8, 1.5625, 25)]
)
def test_the_paper_counts_as_in_section_4_2(nodes: int, cluster: float, partition: float) -> None:
    of = layout(nodes, 0.01)
    assert paper_mttf_s(of, "cluster pairs") == pytest.approx(cluster)
    assert paper_mttf_s(of, "partition pairs") == pytest.approx(partition)
    days = Layout(nodes=nodes, node_mttf_s=10.0, repair_s=0.01, repair_cluster_s=nodes / 2 * 0.01)
    assert paper_mttf_s(days, "partition pairs") == pytest.approx(100 * partition)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_short_repairs_give_a_half_and_a_quarter_of_the_paper(nodes: int) -> None:
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
    # Two nodes are one pair, however they are placed: both neighbours are the same one.
    chained = 1 / 2 if nodes == 2 else 1 / 4
    assert share(nodes_of(nodes, repair_s, "chained"), pairs_s) == pytest.approx(chained)
    assert share(nodes_of(nodes, repair_s, "chained", False), pairs_s) == pytest.approx(1 / 2)


@pytest.mark.parametrize("back", [1e9, 1000.0, 5.0, 0.5])
def test_small_chains_solved_by_hand(back: float) -> None:
    """Nodes fail with rate 1 and come back with rate `back`; E1 is the mean time with one down."""
    one_pair = (3 + back) / 2
    pair_as_paper = 2 + back
    mirrored_e1 = ((1 + back / 4) * (back + 1) + 1) / (back + 3)
    chained_e1 = ((1 + back / 4) * (back + 1) + 1 / 2) / (2 * back + 3)
    for placement in PLACEMENTS:
        assert exact_mttf_s(nodes_of(2, 1 / back, placement)) == pytest.approx(one_pair)
    assert exact_mttf_s(nodes_of(2, 1 / back, "mirrored", False)) == pytest.approx(pair_as_paper)
    assert exact_mttf_s(nodes_of(4, 1 / back, "mirrored")) == pytest.approx(1 / 4 + mirrored_e1)
    assert exact_mttf_s(nodes_of(4, 1 / back, "chained")) == pytest.approx(1 / 4 + chained_e1)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_replica_set_is_one_unit_that_fails_more_often(nodes: int) -> None:
    often, back = nodes / 2, 1 / (nodes / 2 * 0.05)
    assert exact_mttf_s(sets_of(nodes, 0.05)) == pytest.approx((3 * often + back) / (2 * often**2))


@pytest.mark.parametrize("ratio", [0.2, 0.01])
def test_mirrored_pairs_die_like_independent_pairs(ratio: float) -> None:
    """The first of four pairs: its survival is that of one to the fourth, integrated."""
    back, pairs = 1 / ratio, 4
    root = math.sqrt((back + 3) ** 2 - 8)
    slow, fast = (-(back + 3) + root) / 2, (-(back + 3) - root) / 2
    mean = sum(
        math.comb(pairs, k) * slow**k * (-fast) ** (pairs - k) / (slow - fast) ** pairs
        / -(k * fast + (pairs - k) * slow)
        for k in range(pairs + 1)
    )  # fmt: skip
    assert exact_mttf_s(nodes_of(8, ratio, "mirrored")) == pytest.approx(mean)


@pytest.mark.parametrize("nodes", [6, 8])
@pytest.mark.parametrize("ratio", [0.2, 0.01])
def test_chained_nodes_die_when_neighbours_are_down(nodes: int, ratio: float) -> None:
    """All sets of nodes without neighbours, one equation each, without any symmetry."""
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


def test_a_chain_too_large_is_cut_where_that_does_not_matter_and_refused_elsewhere() -> None:
    fine = nodes_of(64, 1e-5, "chained")
    assert exact_mttf_s(fine) == pytest.approx(limit_mttf_s(fine), rel=1e-3)
    assert exact_mttf_s(nodes_of(64, 0.2, "chained")) is None


# -- simulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("both_fail", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 0.2])
def test_the_dice_agree_with_the_chain(
    nodes: int, placement: Placement, ratio: float, both_fail: bool
) -> None:
    for units in (nodes_of(nodes, ratio, placement, both_fail), sets_of(nodes, ratio, both_fail)):
        seen = simulate(units)
        assert seen.mttf_s == pytest.approx(exact_mttf_s(units), rel=0.05)
        assert 0 < seen.ci95_s < 0.02 * seen.mttf_s


@pytest.mark.parametrize("both_fail", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_dice_agree_closely_where_many_are_down_at_once(
    placement: Placement, both_fail: bool
) -> None:
    """Which node falls matters here: next to one that is down, or far away."""
    units = nodes_of(12, 1.0, placement, both_fail)
    seen = simulate(units, runs=100_000)
    assert seen.mttf_s == pytest.approx(exact_mttf_s(units), abs=1.5 * seen.ci95_s)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_the_dice_agree_with_the_paper_where_only_primaries_fail_first(nodes: int) -> None:
    """Section 4.2 with its own assumptions: pairs of nodes, and repairs that are short."""
    of = layout(nodes, 1e-3, "mirrored")
    for scheme in SCHEMES:
        paper_s = paper_mttf_s(of, scheme)
        as_paper = simulate(units_of(of, scheme, both_fail=False)).mttf_s
        assert as_paper == pytest.approx(paper_s, rel=0.05)
        assert simulate(units_of(of, scheme)).mttf_s == pytest.approx(paper_s / 2, rel=0.05)


def test_long_repairs_are_not_for_the_simple_formula() -> None:
    units = nodes_of(2, 0.2, "mirrored")
    seen_s = simulate(units).mttf_s
    assert limit_mttf_s(units) < 0.9 * seen_s
    assert exact_mttf_s(units) == pytest.approx(seen_s, rel=0.05)


@pytest.mark.parametrize("constant_repair", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_dice_agree_with_living_through_it(placement: Placement, constant_repair: bool) -> None:
    """Lives of four nodes, event by event, which is possible where they are short."""
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

    lived_s = sum(life_s() for _ in range(10_000)) / 10_000
    seen = simulate(nodes_of(4, repair_s, placement), constant_repair=constant_repair)
    assert seen.mttf_s == pytest.approx(lived_s, rel=0.03)


def test_short_repairs_count_by_their_mean_alone() -> None:
    units = nodes_of(8, 1e-4, "chained")
    assert simulate(units, constant_repair=True).mttf_s == pytest.approx(limit_mttf_s(units), 0.01)


def test_the_interval_holds_what_it_promises() -> None:
    units = nodes_of(4, 0.05, "chained")
    exact_s = exact_mttf_s(units)
    assert exact_s is not None
    seen = [simulate(units, runs=1_000, seed=seed) for seed in range(200)]
    held = sum(abs(one.mttf_s - exact_s) <= one.ci95_s for one in seen)
    assert 180 <= held <= 198


def test_one_seed_gives_one_result() -> None:
    units = nodes_of(8, 0.05, "chained")
    assert simulate(units, seed=7) == simulate(units, seed=7)
    assert simulate(units, seed=7) != simulate(units, seed=8)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"nodes": 3}, "nodes = 3: pairs want an even number"),
        ({"nodes": 0}, "nodes = 0: pairs want"),
        ({"nodes": 1_000}, "2 to 256"),
        ({"repair_s": 0.0}, "repair_s = 0.0 must be positive"),
        ({"placement": "random"}, "placement = 'random' is not one of mirrored, chained"),
        ({"repair_cluster_s": 0.001}, "repair_cluster is shorter than repair"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(bad: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"nodes": 4, "repair_s": 0.01}
    with pytest.raises(InputError, match=says):
        layout(**{**good, **bad})


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(InputError, match="at least 100 runs"):
        simulate(nodes_of(2, 0.01, "chained"), runs=10)
    with pytest.raises(InputError, match="a seed from 0 on"):
        simulate(nodes_of(2, 0.01, "chained"), seed=-1)
