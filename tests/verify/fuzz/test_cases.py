"""Random cases: the same seed gives the same case, and a failing one becomes small."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from holdfast.verify.fuzz import row_oracle
from holdfast.verify.fuzz.case import Case, Stream
from holdfast.verify.fuzz.draw import draw
from holdfast.verify.fuzz.kinds import arrow_of
from holdfast.verify.fuzz.program import Layout, network_of, program
from holdfast.verify.fuzz.shrink import is_valid, shrink
from holdfast.verify.fuzz.tester import Failure, Summary, Variant, compare, variants

SEEDS = range(1, 61)


def test_a_seed_gives_the_same_case_and_survives_json() -> None:
    for seed in SEEDS:
        case = draw(seed)
        assert draw(seed).to_json() == case.to_json()
        again = Case.from_json(case.to_json())
        assert again.to_json() == case.to_json()
        assert program(again, Layout()) == program(case, Layout())


def test_every_case_is_a_valid_network() -> None:
    for seed in SEEDS:
        case = draw(seed)
        assert is_valid(case), seed
        network_of(case, Layout()).check()
        assert len(variants(case)) == 3


def test_most_operators_and_layouts_occur() -> None:
    cases = [draw(seed) for seed in SEEDS]
    kinds = {node.kind for case in cases for node in case.nodes}
    assert kinds == {
        "source", "filter", "map", "apply", "union", "window", "window_apply", "count_window",
        "join", "stateful",
    }  # fmt: skip
    fragments = [of for case in cases for of in variants(case)[2].layout.fragments.values()]
    assert sum(bool(of.by) for of in fragments) >= 20


def test_a_failing_case_becomes_small() -> None:
    """A check that fails whenever the case has a join."""

    def has_join(case: Case, variant: Variant) -> list[str]:
        joins = [node for node in case.nodes if node.kind == "join"]
        return ["missing: a row"] if joins and row_oracle.outputs(case)[joins[0].name] else []

    seed = next(seed for seed in SEEDS if has_join(draw(seed), Variant()))
    case = draw(seed)
    small = shrink(Failure(case, variants(case)[2], ["missing: a row"]), has_join).case
    assert has_join(small, Variant())
    assert len(small.outputs) == 1
    assert len(small.nodes) <= 5
    assert all(len(node.rows[next(iter(node.columns))]) == 1 for node in small.sources)


def test_differences_are_reported() -> None:
    stream = Stream({"ts": "timestamp", "x": "double"}, "ts")
    table = pa.table({"ts": arrow_of([1, 2], "timestamp"), "x": arrow_of([0.5, None], "double")})
    right = [{"ts": 1, "x": 0.5}, {"ts": 2, "x": None}]
    assert compare(table, right, stream, "out") == []
    assert [text.split(":")[0] for text in compare(table, right[:1], stream, "out")] == [
        "unexpected"
    ]
    wrong = [{"ts": 1, "x": 0.25}, right[1]]
    assert [text.split(":")[0] for text in compare(table, wrong, stream, "out")] == [
        "unexpected", "missing",
    ]  # fmt: skip
    other = replace(stream, columns={"ts": "timestamp", "x": "float"})
    assert compare(table, right, other, "out")[0].startswith("types")
    assert Summary().failures == []
