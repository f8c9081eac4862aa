"""ECOC section 2.5: the reliability levels, their relations (figure 4), and the independence of
loss, delay and order."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from holdfast.errors import InputError
from holdfast.model.levels import Element, Levels, Matched, came_too_early, evaluate, match

#: The ideal elements of each stream, and the elements that arrived.
Streams = dict[str, tuple[list[Element], list[Element]]]
FACTORS = [1.0, 0.9, 0.5, 1 / 3, 1e-9]
DELTAS_US = [0, 1, 2, 5, 100]


# -- the paper, to the letter -------------------------------------------------------------------


Pair = tuple[Element, Element]


def correct_and_false(ideal: list[Element], real: list[Element]) -> tuple[list[Pair], int]:
    """DS_c as pairs of ideal and real element, sorted by number; and |DS_f|."""
    unmatched, pairs, false = list(ideal), [], 0
    for de_r in sorted(real, key=lambda de: de[2]):
        equal = [de_i for de_i in unmatched if de_i[:2] == de_r[:2]]
        if equal:
            unmatched.remove(equal[0])
            pairs.append((equal[0], de_r))
        else:
            false += 1
    return sorted(pairs, key=lambda pair: pair[0][0]), false


class Paper:
    """Section 2.5 transcribed: plain loops over elements and over pairs of elements."""

    def __init__(self, streams: Streams) -> None:
        self.ideal = {name: ideal for name, (ideal, _) in streams.items()}
        matched = {name: correct_and_false(*both) for name, both in streams.items()}
        self.correct = {name: pairs for name, (pairs, _) in matched.items()}
        self.false = {name: false for name, (_, false) in matched.items()}
        self.pairs = [pair for pairs in self.correct.values() for pair in pairs]

    def lole(self) -> bool:
        return all(
            len(self.correct[name]) == len(ideal) and self.false[name] == 0
            for name, ideal in self.ideal.items()
        )

    def lilo(self, numerator: int, denominator: int, ef: int) -> bool:
        """LILO with LF as a fraction, to avoid rounding."""
        return all(
            len(ideal) >= len(self.correct[name])
            and len(self.correct[name]) * denominator >= len(ideal) * numerator
            and self.false[name] <= len(ideal) * ef
            for name, ideal in self.ideal.items()
        )

    def lide(self, delta_us: int) -> bool:
        return all(de_i[2] <= de_c[2] <= de_i[2] + delta_us for de_i, de_c in self.pairs)

    def iaso(self) -> bool:
        return all(
            one[1][2] <= other[1][2]
            for pairs in self.correct.values()
            for one, other in pairwise(pairs)
        )

    def ieso(self) -> bool:
        return all(
            (i1[2] <= i2[2] and c1[2] <= c2[2]) or (i1[2] > i2[2] and c1[2] > c2[2])
            for (i1, c1), (i2, c2) in product(self.pairs, repeat=2)
        )

    def inversions(self) -> int:
        return sum(
            any(i2[2] < i1[2] and c2[2] > c1[2] for i2, c2 in self.pairs) for i1, c1 in self.pairs
        )


def levels(streams: Streams) -> Levels:
    return evaluate({name: match(ideal, real) for name, (ideal, real) in streams.items()})


@st.composite
def streams(draw: st.DrawFn) -> Streams:
    """Up to three streams, ideal or with faults. Numbers are small, so that ties are common."""
    ideal_only = draw(st.booleans())
    lateness = st.just(0) if ideal_only else st.integers(-1, 3)
    fates = st.sampled_from(["comes"] * 6 + ([] if ideal_only else ["lost", "bent", "twice"]))
    generated: Streams = {}
    for name in "abc"[: draw(st.integers(0, 3))]:
        times = sorted(draw(st.lists(st.integers(0, 6), max_size=6)))
        ideal: list[Element] = [(seq, draw(st.integers(0, 1)), at) for seq, at in enumerate(times)]
        real: list[Element] = []
        for seq, payload, at in ideal:
            fate = draw(fates)
            for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                real.append((seq, 7 if fate == "bent" else payload, at + draw(lateness)))
        generated[name] = (ideal, draw(st.permutations(real)))
    return generated


SWAPPED: Streams = {"a": ([(0, 0, 1), (1, 0, 2)], [(0, 0, 5), (1, 0, 4)])}
TIED: Streams = {"a": ([(0, 0, 1)], [(0, 0, 3)]), "b": ([(0, 0, 1)], [(0, 0, 4)])}


@given(streams())
@example(SWAPPED)
@example(TIED)
def test_levels_match_the_formulas_of_section_2_5(sampled: Streams) -> None:
    paper, reached = Paper(sampled), levels(sampled)
    assert reached.lole == paper.lole()
    for numerator, denominator in ((1, 1), (9, 10), (1, 2), (2, 3), (1, 100)):
        for ef in (0, 1, 2):
            expected = paper.lilo(numerator, denominator, ef)
            assert reached.lilo(numerator / denominator, ef) == expected
    for delta_us in DELTAS_US:
        assert reached.lide(delta_us) == paper.lide(delta_us)
    assert reached.defr == paper.lide(0)
    assert reached.iaso == paper.iaso()
    assert reached.ieso == paper.ieso()
    assert reached.inversions == paper.inversions()
    if reached.delay_us_max:
        assert reached.lide(reached.delay_us_max) and not reached.lide(reached.delay_us_max - 1)


@given(streams())
def test_levels_satisfy_the_relations_of_figure_4(sampled: Streams) -> None:
    """LOLE implies LILO, DEFR implies LIDE, IESO implies IASO; DEFR implies IESO and IASO."""
    reached = levels(sampled)
    if reached.lole:
        assert all(reached.lilo(lf, ef) for lf in FACTORS for ef in (0.0, 0.5, 3.0))
    if reached.defr:
        assert all(reached.lide(delta_us) for delta_us in DELTAS_US)
        assert reached.ieso and reached.iaso and not reached.inversions
    if reached.ieso:
        assert reached.iaso and not reached.inversions


@given(streams())
def test_factors_are_the_tightest_that_hold(sampled: Streams) -> None:
    reached = levels(sampled)
    assume(reached.loss_factor > 0.0 and reached.error_factor < np.inf)
    assert reached.lilo(reached.loss_factor, reached.error_factor)
    if reached.loss_factor < 1.0:
        assert not reached.lilo(np.nextafter(reached.loss_factor, 2.0), reached.error_factor)
    if reached.error_factor > 0.0:
        assert not reached.lilo(reached.loss_factor, np.nextafter(reached.error_factor, 0.0))
    assert reached.loss_factor + reached.loss_share == pytest.approx(1.0)


# -- independence -------------------------------------------------------------------------------

#: Two streams of two elements whose ideal instants alternate.
IDEAL: dict[str, list[Element]] = {
    "a": [(0, "x", 0), (1, "y", 20)],
    "b": [(0, "x", 10), (1, "y", 30)],
}
#: Arrivals of the elements a0, b0, a1, b1 for each order: if none is late, ...
IN_TIME = {"inter": (0, 10, 20, 30), "intra": (10, 10, 20, 30), "none": (25, 10, 20, 30)}
#: ... and if all are late.
LATE = {"inter": (90, 91, 92, 93), "intra": (92, 90, 93, 91), "none": (93, 92, 91, 90)}


def witness(lost: bool, instants: tuple[int, ...]) -> Levels:
    a0, b0, a1, b1 = instants
    real: dict[str, list[Element]] = {
        "a": [(0, "x", a0), (1, "y", a1)],
        "b": [(0, "x", b0), (1, "y", b1)],
    }
    if lost:
        for name in IDEAL:  # a third element that never arrives
            real[name].append((2, "instead", 50))
    ideal = {
        name: [*elements, *([(2, "z", 40)] if lost else [])] for name, elements in IDEAL.items()
    }
    return levels({name: (ideal[name], real[name]) for name in IDEAL})


@pytest.mark.parametrize("order", ["inter", "intra", "none"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_loss_delay_and_order_are_independent(lost: bool, late: bool, order: str) -> None:
    """LOLE or not, LIDE(25) or not, and IESO, only IASO or neither: all combinations exist."""
    reached = witness(lost, (LATE if late else IN_TIME)[order])
    assert reached.lole is not lost
    assert reached.lide(25) is not late
    assert (reached.ieso, reached.iaso) == (order == "inter", order != "none")


@pytest.mark.parametrize("lost", [False, True])
def test_defr_is_independent_of_loss_but_implies_order(lost: bool) -> None:
    """The only exception to orthogonality: DEFR implies IESO and IASO, but not vice versa."""
    free = witness(lost, IN_TIME["inter"])
    assert (free.lole, free.defr, free.ieso, free.iaso) == (not lost, True, True, True)
    ordered = witness(lost, LATE["inter"])
    assert (ordered.lole, ordered.defr, ordered.ieso, ordered.iaso) == (not lost, False, True, True)


# -- interpretations ----------------------------------------------------------------------------


def test_only_the_first_of_two_equal_arrivals_is_correct() -> None:
    matched = match([(0, "x", 1)], [(0, "x", 9), (0, "x", 4)])
    assert (matched.ideal_rows, matched.false_rows, matched.at_us.tolist()) == (1, 1, [4])
    reached = evaluate({"s": matched})
    assert reached.lilo(1.0, 1.0) and not reached.lilo(1.0, 0.9)
    assert reached.delay_us_max == 3


def test_number_and_payload_must_both_match() -> None:
    matched = match([(0, "x", 1), (1, "y", 2)], [(0, "y", 1), (1, "x", 2), (2, "y", 3)])
    assert (len(matched.seq), matched.false_rows) == (0, 3)


def test_an_arrival_before_its_ideal_instant_has_no_bounded_delay() -> None:
    early = levels({"s": ([(0, "x", 5), (1, "y", 6)], [(0, "x", 4), (1, "y", 7)])})
    assert early.delay_us_max is None
    assert not early.lide(10**9) and not early.defr


def test_a_lost_element_does_not_excuse_disorder() -> None:
    ideal: list[Element] = [(0, "x", 0), (1, "y", 1), (2, "z", 2)]
    assert not levels({"s": (ideal, [(0, "x", 9), (2, "z", 8)])}).iaso


def test_simultaneous_elements_that_arrive_separately_violate_ieso_but_no_contract() -> None:
    apart = levels(TIED)
    assert not apart.ieso and apart.inversions == 0
    together = levels({"s": ([(0, 0, 1), (1, 0, 2)], [(0, 0, 5), (1, 0, 5)])})
    assert together.iaso and not together.ieso and together.inversions == 0


def test_elements_with_equal_numbers_have_no_order() -> None:
    def reached(at_us: list[int]) -> Levels:
        columns = (np.array(values, np.int64) for values in ([0, 0, 1], [5, 5, 5], at_us))
        return evaluate({"s": Matched(3, 0, *columns)})

    assert reached([7, 6, 7]).iaso
    assert not reached([7, 9, 8]).iaso


def test_a_level_holds_only_if_it_holds_for_every_stream() -> None:
    complete = match([(0, "x", 0)], [(0, "x", 3)])
    half = match([(0, "x", 0), (1, "y", 1)], [(0, "x", 0), (0, "x", 1)])
    both = evaluate({"complete": complete, "half": half})
    assert (both.loss_factor, both.loss_share, both.error_factor) == (0.5, 0.5, 0.5)
    assert both.delay_us_max == 3


def test_empty_ideal_streams_reach_every_level_unless_rows_arrive() -> None:
    for reached in (evaluate({}), levels({"s": ([], [])})):
        assert reached.lole and reached.defr and reached.iaso and reached.ieso
    surplus = levels({"s": ([], [(0, "x", 1)])})
    assert not surplus.lole and not surplus.lilo(0.5, 1e9)
    assert surplus.loss_factor == 1.0


def test_shares_match_decimal_literals() -> None:
    """3 of 10 is 0.3, and the missing 7 are 0.7: subtraction would round one of them."""
    ten: list[Element] = [(seq, "x", seq) for seq in range(10)]
    reached = levels({"s": (ten, ten[:3])})
    assert reached.lilo(0.3, 0.0) and reached.loss_share <= 0.7


def test_invalid_streams_and_levels_are_refused() -> None:
    with pytest.raises(InputError, match="ideal stream is not in order"):
        match([(0, "x", 5), (1, "y", 4)], [])
    one, two = np.array([1], np.int64), np.array([2, 1], np.int64)
    with pytest.raises(InputError, match="sorted by their numbers"):
        Matched(2, 0, two, two[::-1], two)
    with pytest.raises(InputError, match="columns of equal length"):
        Matched(2, 0, one, one, two)
    with pytest.raises(InputError, match="found 1 correct elements, but only 0 ideal"):
        Matched(0, 0, one, one, one)
    for lf, ef in ((0.0, 0.0), (1.1, 0.0), (0.5, -0.1), (0.5, np.inf), (np.nan, 0.0)):
        with pytest.raises(InputError, match="LILO"):
            evaluate({}).lilo(lf, ef)
    with pytest.raises(InputError, match="LIDE"):
        evaluate({}).lide(-1)


def test_a_million_elements_are_evaluated_as_columns() -> None:
    count = 1_000_000
    at_us = np.arange(count, dtype=np.int64)
    late_us = at_us + 5
    late_us[500] = late_us[400] - 1
    reached = evaluate({"s": Matched(count, 0, at_us, at_us, late_us)})
    assert (reached.inversions, reached.ieso, reached.iaso) == (1, False, False)
    assert came_too_early(at_us, late_us)[500]
