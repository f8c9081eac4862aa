"""The oracle of random networks, by hand: each result below was worked out on paper."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from holdfast.verify.fuzz.case import Agg, Case, Node, agg_kind
from holdfast.verify.fuzz.row_aggregates import Near, aggregate
from holdfast.verify.fuzz.row_oracle import outputs

SECOND = 1_000_000


def source(**rows: list[Any]) -> Node:
    kinds = {"ts": "timestamp", "k": "string", "n": "int", "m": "int"}
    return Node("s0", "source", columns={name: kinds[name] for name in rows}, rows=rows)


def results(*nodes: Node, width_us: int = SECOND) -> list[dict[str, Any]]:
    case = Case(0, width_us, list(nodes), [nodes[-1].name])
    rows = outputs(case)[nodes[-1].name]
    return sorted(rows, key=lambda row: [str(value) for value in row.values()])


def test_a_row_belongs_to_every_window_that_contains_it() -> None:
    rows = source(ts=[0, 999_999, 1_500_000], k=["a", "a", "a"])
    window = Node("w1", "window", ["s0"], keys=["k"], aggregates={"n": Agg("count")},
                  size=2 * SECOND, slide=SECOND)  # fmt: skip
    assert results(rows, window) == [
        {"k": "a", "n": 1, "window_start": 1_000_000, "ts": 2_999_999},
        {"k": "a", "n": 2, "window_start": -1_000_000, "ts": 999_999},
        {"k": "a", "n": 3, "window_start": 0, "ts": 1_999_999},
    ]


def test_windows_before_1970() -> None:
    rows = source(ts=[-1], k=[None])
    window = Node("w1", "window", ["s0"], keys=["k"], aggregates={"n": Agg("count", "k")},
                  size=SECOND, slide=SECOND)  # fmt: skip
    assert results(rows, window) == [{"k": None, "n": 0, "window_start": -SECOND, "ts": -1}]


def test_a_count_window_takes_rows_in_canonical_order() -> None:
    rows = source(ts=[5, 5, 5, 1], k=["a"] * 4, n=[3, None, 2, 9])
    window = Node("c1", "count_window", ["s0"], keys=["k"],
                  aggregates={"least": Agg("min", "n"), "sum": Agg("sum", "n")},
                  size=2, slide=1)  # fmt: skip
    assert results(rows, window) == [
        {"k": "a", "least": 2, "sum": 2, "ts": 5},  # null precedes 2
        {"k": "a", "least": 2, "sum": 5, "ts": 5},
        {"k": "a", "least": 9, "sum": 9, "ts": 5},
    ]


def test_a_join_ignores_null_keys_and_takes_the_later_time() -> None:
    left = source(ts=[10, 20], k=["a", None])
    right = Node("s1", "source", columns={"at": "timestamp", "k": "string", "x": "int"},
                 rows={"at": [5, 16, 20], "k": ["a", "a", None], "x": [1, 2, 3]})  # fmt: skip
    join = Node("j2", "join", ["s0", "s1"], keys=["k"], size=5)
    assert results(left, right, join) == [{"ts": 10, "k": "a", "at": 5, "x": 1}]


def test_a_timer_fires_in_a_bucket_without_rows_of_its_key() -> None:
    """Rows in buckets 0, 1 and 9; the timer is two buckets after the last row."""
    rows = source(ts=[100, 1_200, 9_000], k=["a"] * 3)
    quiet = Node("q1", "stateful", ["s0"], keys=["k"], function="quiet", size=2_000)
    assert results(rows, quiet, width_us=1_000) == [
        {"k": "a", "n": 1, "ts": 11_000},
        {"k": "a", "n": 2, "ts": 3_200},
    ]
    running = Node("q1", "stateful", ["s0"], keys=["k"], function="running", size=2_000)
    assert [row["n"] for row in results(rows, running, width_us=1_000)] == [1, 2, 3]


def test_filters_have_three_truth_values() -> None:
    rows = source(ts=[1, 2, 3], n=[1, None, 5])
    condition = ["not", ["and", ["<", "n", 3], ["is_null", "n"]]]
    kept = Node("f1", "filter", ["s0"], condition=condition)
    assert [row["ts"] for row in results(rows, kept)] == [1, 3]  # for null: not (null and true)


@pytest.mark.parametrize(
    ("kind", "values", "of", "expected"),
    [
        ("sum", [1e16, 1.0, -1e16], "double", 1.0),
        ("sum", [math.inf, 1.0], "double", math.inf),
        ("sum", [2**63 - 1, 1], "bigint", None),
        ("sum", [None], "int", None),
        ("sum", [Decimal("0.01"), Decimal("999.99")], "decimal(5,2)", Decimal("1000.00")),
        ("avg", [Decimal("0.01"), Decimal("0.02")], "decimal(5,2)", Decimal("0.015000")),
        ("avg", [1, 2], "int", 1.5),
        ("min", [math.nan, 2.0, None], "double", 2.0),
        ("max", ["a", "ключ"], "string", "ключ"),
        ("stddev", [1.0], "double", None),
        ("stddev_pop", [3], "int", Near(0.0, 5e-324)),
        ("variance", [1, 2, 3, 4], "int", Near(5 / 3, 5 / 3 * 4.5e-16)),
        ("count", [None, 1], "int", 1),
    ],
)
def test_aggregates(kind: str, values: list[Any], of: str, expected: Any) -> None:
    agg = Agg(kind, "x")
    found = aggregate(agg, [(0, value) for value in values], agg_kind(agg, {"x": of}))
    assert found == expected


def test_first_and_last_among_rows_of_the_same_time() -> None:
    held = [(1, 5), (1, None), (2, 7), (2, 9)]
    assert aggregate(Agg("first", "x"), held, "int") is None
    assert aggregate(Agg("last", "x"), held, "int") == 9


def test_most_frequent_values() -> None:
    held = [(0, value) for value in ["b", "a", "b", None, "a", "c"]]
    top = aggregate(Agg("top_k", "x", {"k": 2}), held, "")
    assert top == [{"value": "a", "count": 2}, {"value": "b", "count": 2}]
