"""One encoding, one order and one digest for equal rows (ARCHITECTURE.md)."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InputError
from holdfast.storage.rows import (
    TIMESTAMP,
    canonical,
    digest,
    parts_of,
    routed_alike,
    sort_canonical,
    times_us,
)

SCHEMA = pa.schema(
    {
        "ts": TIMESTAMP,
        "i": pa.int32(),
        "f": pa.float64(),
        "s": pa.string(),
        "b": pa.binary(),
        "ok": pa.bool_(),
        "d": pa.decimal128(12, 2),
        "l": pa.list_(pa.string()),
        "m": pa.map_(pa.string(), pa.float32()),
        "n": pa.struct({"x": pa.int64(), "y": pa.list_(pa.int8())}),
    }
)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
row = st.fixed_dictionaries(
    {
        "ts": st.integers(-(10**15), 10**15),
        "i": maybe(st.integers(-3, 3)),
        "f": maybe(st.sampled_from([0.0, -0.0, math.nan, -math.nan, math.inf, 1.5, 1e-300])),
        "s": maybe(text),
        "b": maybe(st.binary(max_size=4)),
        "ok": maybe(st.booleans()),
        "d": maybe(st.decimals(-(10**9), 10**9, places=2)),
        "l": maybe(st.lists(maybe(text), max_size=3)),
        "m": maybe(st.lists(st.tuples(text, maybe(st.floats(width=32))), max_size=2)),
        "n": maybe(
            st.fixed_dictionaries(
                {
                    "x": maybe(st.integers(-(2**63), 2**63 - 1)),
                    "y": maybe(st.lists(maybe(st.integers(-128, 127)), max_size=3)),
                }
            )
        ),
    }
)
tables = st.lists(row, max_size=12)


def table_of(values: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(values, schema=SCHEMA)


def chunked(table: pa.Table, cuts: list[int]) -> pa.Table:
    """The same rows as slices of larger arrays, in many chunks."""
    edges = [0, *sorted(min(cut, table.num_rows) for cut in cuts), table.num_rows]
    parts = [table.slice(a, b - a) for a, b in itertools.pairwise(edges)]
    return pa.concat_tables(parts)


def same(left: pa.Table, right: pa.Table) -> bool:
    """Bit-for-bit equality; for `Table.equals`, NaN differs from itself."""

    def written(table: pa.Table) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes()

    return left.schema == right.schema and written(left) == written(right)


@settings(deadline=None)
@given(tables, st.randoms(use_true_random=False), st.lists(st.integers(0, 12), max_size=4))
def test_digest_and_canonical_order_do_not_depend_on_row_order_and_chunks(
    values: list[dict[str, Any]], random: Any, cuts: list[int]
) -> None:
    shuffled = random.sample(values, len(values))
    left, right = table_of(values), chunked(table_of(shuffled), cuts)
    assert digest(left) == digest(right)
    assert same(sort_canonical(left, "ts"), sort_canonical(right, "ts"))
    assert digest(sort_canonical(left, "ts")) == digest(left)


@settings(deadline=None)
@given(tables.filter(bool), st.integers(0, 11))
def test_digest_depends_on_how_often_a_row_occurs(values: list[dict[str, Any]], which: int) -> None:
    repeated = [*values, values[which % len(values)]]
    assert digest(table_of(values)) != digest(table_of(repeated))
    assert digest(table_of(repeated)) != digest(table_of([*repeated, values[which % len(values)]]))


@given(row, row)
@settings(max_examples=60, deadline=None)
def test_digest_differs_when_a_single_value_differs(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    for name in left:
        one, other = table_of([left]), table_of([{**left, name: right[name]}])
        first, second = (repr(canonical(t).column(name).to_pylist()) for t in (one, other))
        assert (digest(one) == digest(other)) == (first == second), (name, first, second)


def test_zeros_and_nans_have_one_encoding() -> None:
    bits = [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x8000000000000000]
    odd = pa.table({"f": pa.array(np.array(bits, dtype=np.uint64).view(np.float64))})
    plain = pa.table({"f": [math.nan, math.nan, math.nan, 0.0]})
    encoded = canonical(odd).column("f").to_numpy().view(np.uint64).tolist()
    assert encoded == [0x7FF8000000000000] * 3 + [0]
    assert digest(odd) == digest(plain)
    nested = [pa.table({"l": pa.array([table.column("f").to_pylist()])}) for table in (odd, plain)]
    assert digest(nested[0]) == digest(nested[1])
    assert canonical(pa.table({"f": [1.0, None]})).column("f").null_count == 1


def test_types_that_hold_the_same_values_have_one_canonical_type() -> None:
    moment = dt.datetime(2026, 5, 9, 12, tzinfo=dt.UTC)
    plain = pa.table(
        {
            "t": pa.array([moment, None], TIMESTAMP),
            "s": pa.array(["ä", None]),
            "l": pa.array([["x"], None], pa.list_(pa.string())),
            "d": pa.array([dt.date(1960, 1, 1), None], pa.date32()),
        }
    )
    other = pa.table(
        {
            "t": pa.array([moment, None], pa.timestamp("s", "America/New_York")),
            "s": pa.array(["ä", None]).dictionary_encode(),
            "l": pa.array([["x"], None], pa.large_list(pa.field("element", pa.large_string()))),
            "d": pa.array([dt.date(1960, 1, 1), None], pa.date64()),
        }
    )
    naive = other.set_column(0, "t", pa.array([moment.replace(tzinfo=None), None]))
    assert same(canonical(other), plain) and same(canonical(naive), plain)
    assert digest(other) == digest(naive) == digest(plain)


def test_nanoseconds_are_rounded_down_to_microseconds() -> None:
    table = pa.table({"ts": pa.array([-1, 1_999], pa.timestamp("ns"))})
    assert times_us(table, "ts").tolist() == [-1, 1]


def test_digest_depends_on_names_types_columns_and_nulls() -> None:
    tables = [
        pa.table({"a": pa.array([1], pa.int64())}),
        pa.table({"b": pa.array([1], pa.int64())}),
        pa.table({"a": pa.array([1], pa.int32())}),
        pa.table({"a": pa.array([None], pa.int64())}),
        pa.table({"a": pa.array([0], pa.int64())}),
        pa.table({"a": pa.array([None, None], pa.int64())}),
        pa.table({"a": pa.array([], pa.int64())}),
        pa.table({"b": pa.array([], pa.int64())}),
        pa.table({"a": ["a"], "b": [""]}),
        pa.table({"a": [""], "b": ["a"]}),
        pa.table({"a": [""], "b": pa.array([None], pa.string())}),
        pa.table({"a": pa.array([None], pa.string()), "b": [""]}),
        pa.table({"a": ["a", "b"], "b": ["c", "d"]}),
        pa.table({"a": ["a", "b"], "b": ["d", "c"]}),
        pa.table({"a": ["\0"]}),
        pa.table({"a": ["\0\0"]}),
        pa.table({"a": [b"\0"]}),
        pa.table({"a": pa.array([[], [1]], pa.list_(pa.int64()))}),
        pa.table({"a": pa.array([None, [1]], pa.list_(pa.int64()))}),
        pa.table({"a": pa.array([[[1], []]], pa.list_(pa.list_(pa.int64())))}),
        pa.table({"a": pa.array([[[], [1]]], pa.list_(pa.list_(pa.int64())))}),
        pa.table({"a": pa.array([[[1]]], pa.list_(pa.list_(pa.int64())))}),
        pa.table({"a": pa.array([decimal.Decimal(1)], pa.decimal128(38, 0))}),
        pa.table({"a": pa.array([decimal.Decimal(2**64 + 1)], pa.decimal128(38, 0))}),
    ]
    assert len({digest(table) for table in tables}) == len(tables)


def test_digest_has_no_collision_in_two_hundred_thousand_near_equal_rows() -> None:
    numbers = pa.table({"i": np.arange(100_000)})
    words = pa.table({"s": [f"{number:05d}" for number in range(100_000)]})
    for table in (numbers, words):
        one = [digest(table.slice(place, 1)) for place in range(0, 100_000, 97)]
        assert len(set(one)) == len(one)
    moved = np.arange(100_000)
    moved[:2] += [1, -1]  # the sum of the values is unchanged
    moved[2:4] = [4, 1]
    assert digest(pa.table({"i": moved})) != digest(numbers)


def test_digest_of_many_rows_does_not_depend_on_block_boundaries() -> None:
    count = 70_000
    numbers = pa.array(np.arange(count))
    words = numbers.cast(pa.string())
    lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), words)
    table = pa.table(
        {
            "n": numbers.cast(pa.decimal128(20, 0)),
            "b": pa.array(np.arange(count) % 3 == 0),
            "w": words,
            "l": lists,
            "s": pa.StructArray.from_arrays([words, lists], names=["w", "l"]),
            "m": pa.MapArray.from_arrays(lists.offsets, words, numbers),
        }
    )
    turned = pa.concat_tables([table.slice(12_345), table.slice(0, 12_345)])
    assert digest(turned) == digest(table) != digest(table.slice(1))


def test_digest_is_part_of_the_storage_format() -> None:
    """Manifests contain digests, so the digest may change only with a new FORMAT."""
    table = pa.table({"i": [1, None, -3], "s": ["a", "", None], "l": [[1.5], None, []]})
    assert digest(table) == "fe8d079386890716"


def test_canonical_order_is_time_then_columns_nulls_first() -> None:
    table = pa.table(
        {
            "a": ["x", None, "b", "a"],
            "ts": pa.array([2, 1, 1, 1], pa.timestamp("us")),
        }
    )
    assert sort_canonical(table, "ts").column("a").to_pylist() == [None, "a", "b", "x"]
    assert sort_canonical(table, "ts").column_names == ["a", "ts"]


def test_invalid_time_columns_are_refused() -> None:
    with pytest.raises(InputError, match="null in 1 of 2 rows"):
        times_us(pa.table({"ts": pa.array([1, None], TIMESTAMP)}), "ts")
    with pytest.raises(InputError, match="exactly one column 'ts'"):
        times_us(pa.table({"t": [1]}), "ts")
    with pytest.raises(InputError, match="expected type timestamp, found int64"):
        times_us(pa.table({"ts": [1]}), "ts")
    with pytest.raises(InputError, match="column 't'"):
        canonical(pa.table({"t": pa.array([2**62], pa.timestamp("s"))}))


# -- partitions -----------------------------------------------------------------------------------


def test_each_row_is_in_one_partition_and_equal_keys_share_a_partition() -> None:
    rng = np.random.default_rng(1)
    table = pa.table(
        {"src": np.char.add("s", rng.integers(0, 50, 500).astype(str)),
         "n": rng.integers(0, 9, 500), "x": rng.random(500)}
    )  # fmt: skip
    parts = parts_of(table, ["src", "n"], 4)
    assert digest(pa.concat_tables(parts)) == digest(table)
    assert all(60 < part.num_rows < 200 for part in parts)
    keys = [
        {tuple(row.values()) for row in part.select(["src", "n"]).to_pylist()} for part in parts
    ]
    assert all(not a & b for a, b in itertools.combinations(keys, 2))
    # Independent of the order of rows and of the other columns.
    mixed = pa.concat_tables([table.slice(300), table.slice(0, 300)]).drop_columns(["x"])
    mixed_parts = parts_of(mixed, ["src", "n"], 4)
    assert [digest(part.drop_columns(["x"])) for part in parts] == [digest(p) for p in mixed_parts]


def test_the_partition_of_a_key_never_changes() -> None:
    """State is located by partition: another hash would be another format."""
    table = pa.table({"k": ["a", "b", None, ""], "n": pa.array([1, 2, 3, None], pa.int64())})
    assert [part.num_rows for part in parts_of(table, ["k"], 3)] == [2, 1, 1]
    assert [part.num_rows for part in parts_of(table, ["k", "n"], 3)] == [0, 1, 3]


def test_equal_keys_share_a_partition_whatever_their_type() -> None:
    """G1: Spark compares int with bigint, float with double, and decimals of any scale by value."""
    number = decimal.Decimal("-3.25")
    same: list[list[tuple[pa.DataType, Any]]] = [
        [(kind, -4) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())],
        [(pa.float32(), -0.0), (pa.float64(), 0.0)],
        [(pa.float32(), math.nan), (pa.float64(), -math.nan)],
        [(pa.float32(), 0.5), (pa.float64(), 0.5)],
        [(pa.decimal128(3, 2), number), (pa.decimal128(38, 20), number)],
        [(pa.decimal128(38, 0), decimal.Decimal(7)), (pa.decimal128(38, 37), decimal.Decimal(7))],
        [(pa.struct([("a", kind)]), {"a": 5}) for kind in (pa.int32(), pa.int64())],
        [(pa.list_(kind), [5, None]) for kind in (pa.int32(), pa.int64())],
        [(kind, None) for kind in (pa.int32(), pa.float64(), pa.string())],
    ]
    for variants in same:
        tables = [pa.table({"k": pa.array([value], kind)}) for kind, value in variants]
        sizes = [[part.num_rows for part in parts_of(table, ["k"], 61)] for table in tables]
        assert all(size == sizes[0] for size in sizes), variants


def test_types_that_are_routed_alike() -> None:
    wide = pa.decimal128(38, 0)
    assert routed_alike(pa.int32(), pa.int64()) and routed_alike(wide, wide)
    assert routed_alike(pa.decimal128(9, 2), pa.decimal128(30, 5))
    # Spark compares these as decimal(38,0): 0.60 is rounded and equals 1.
    assert not routed_alike(wide, pa.decimal128(10, 2))
    assert not routed_alike(pa.struct([("a", wide)]), pa.struct([("a", pa.decimal128(10, 2))]))
    assert not routed_alike(pa.list_(wide), pa.list_(pa.decimal128(10, 2)))
    assert not routed_alike(pa.int64(), pa.float64())


def test_the_order_of_the_key_columns_does_not_matter() -> None:
    table = pa.table({"x": [1, 1, 2, 2, 3] * 4, "y": list(range(20))})
    for of in (2, 3, 4, 8):
        parts = [[digest(part) for part in parts_of(table, keys, of)] for keys in ("xy", "yx")]
        assert parts[0] == parts[1]


def test_rows_with_equal_key_columns_reach_every_partition() -> None:
    table = pa.table({"x": list(range(4_000)), "y": list(range(4_000))})
    for of in (2, 4, 8):
        sizes = [part.num_rows for part in parts_of(table, ["x", "y"], of)]
        assert min(sizes) > 0.8 * 4_000 / of
