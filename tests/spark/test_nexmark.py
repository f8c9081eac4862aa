"""Nexmark: every query gives the results of DuckDB for the same rows, in every grouping of buckets.

The oracles are derived from the definition of the queries, with times as whole microseconds (`us`).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from holdfast.engine.session import Sessions
from holdfast.examples.nexmark import queries
from holdfast.examples.nexmark.generator import SCHEMAS, live, make
from holdfast.model.loading import load
from holdfast.verify.fuzz.engine_run import digests, run_network

S = 1_000_000
#: Starts in the middle of a bucket, of a slide and of a window.
START_US = 1_700_000_003_210_987
GROUPINGS = ((1_000_000,), (7, 1, 19))

#: Queries that return all rows of a tie; the generated rows contain ties.
TIES = (5, 7)
#: Options, number of buckets needed after the last row, and oracle, by query.
CASES: dict[int, tuple[dict[str, str], int | None, str]] = {
    1: ({}, None, "select us as ts, auction, bidder, price * 0.908 as price, channel from bid"),
    2: ({}, None, "select us as ts, auction, price from bid where auction in (1107, 1230)"),
    3: (
        {"within": "15s"},
        None,
        f"""
        select greatest(p.us, a.us) as ts, seller, name, city, state, a.id as auction
        from person as p join auction as a on a.seller = p.id
        where state in ('OR', 'ID', 'CA') and category = 10 and abs(p.us - a.us) <= 15 * {S}
        """,
    ),
    4: (
        {},
        80,
        f"""
        with closed as (
          select a.id, category, expires_us - 1 as us, max(price) as price
          from auction as a join bid as b on auction = a.id
          where b.us >= a.us and b.us < expires_us
          group by all)
        select category, sum(price) / count(*) as price, count(*) as auctions,
               us // (10 * {S}) * 10 * {S} as window_start,
               us // (10 * {S}) * 10 * {S} + 10 * {S} - 1 as ts
        from closed group by category, us // (10 * {S})
        """,
    ),
    5: (
        {},
        None,
        f"""
        with counts as (
          select auction, count(*) as bids, w * 2 * {S} as end_us
          from bid, unnest(range(us // (2 * {S}) + 1, us // (2 * {S}) + 6)) as t(w)
          group by all)
        select auction, bids, end_us - 10 * {S} as window_start, end_us - 1 as ts
        from counts
        where bids = (select max(bids) from counts as o where o.end_us = counts.end_us)
        """,
    ),
    7: (
        {},
        None,
        f"""
        select us as bid_ts, auction, bidder, price, channel,
               us // (10 * {S}) * 10 * {S} + 10 * {S} - 1 as ts
        from bid as b
        where not exists (from bid as o where o.us // (10 * {S}) = b.us // (10 * {S})
                          and o.price > b.price)
        """,
    ),
    8: (
        {},
        None,
        f"""
        select p.id, any_value(name) as name, count(*) as auctions,
               p.us // (10 * {S}) * 10 * {S} as window_start,
               p.us // (10 * {S}) * 10 * {S} + 10 * {S} - 1 as ts
        from person as p join auction as a
        on a.seller = p.id and a.us // (10 * {S}) = p.us // (10 * {S})
        group by p.id, p.us
        """,
    ),
    11: (
        {"gap": "4s"},
        6,
        f"""
        with gaps as (
          select bidder, us, us - lag(us) over (partition by bidder order by us) as gap from bid),
        numbered as (
          select bidder, us, count(*) filter (gap >= 4 * {S})
            over (partition by bidder order by us) as session
          from gaps)
        select bidder, count(*) as bids, min(us) as started, max(us) as latest,
               max(us) + 4 * {S} - 1 as ts
        from numbered group by bidder, session
        """,
    ),
}


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    """Forty seconds of events, with ties (prices are capped, and no auction is hot at first) and
    bids at the edges of an auction's lifetime and of a session."""
    streams = make(3_000, rate=75, start_us=START_US, seed=16)
    bid, auction = streams["bid"], streams["auction"]
    bid = bid.set_column(3, "price", pc.min_element_wise(bid["price"], 5_000_000))
    hot = np.isin(bid["auction"], (1_000, 1_100)) & (micros(bid, "ts") < START_US + 15 * S)
    # Whole seconds, so that some auctions expire at the end of a window.
    opened, expires = micros(auction, "ts"), (micros(auction, "expires") // S + 1) * S
    auction = auction.set_column(6, "expires", pa.array(expires).cast(auction["expires"].type))
    a, b = np.argsort(expires)[:2]
    edges = [
        (opened[a], a, 7_777, 5_100_000),
        (opened[b] - 1, b, 7_777, 5_900_000),
        (expires[b] - 1, b, 7_777, 5_200_000),
        (expires[b], b, 7_777, 5_300_000),
        (expires[b] + 4 * S, b, 7_777, 5_400_000),
        (expires[b] + 8 * S - 1, b, 7_777, 5_500_000),
    ]
    ts, positions, bidder, price = map(np.array, zip(*edges, strict=True))
    columns = [ts, auction["id"].take(positions), bidder, price, ["Google"] * len(edges)]
    columns = [pa.array(c).cast(f.type) for c, f in zip(columns, bid.schema, strict=True)]
    edge_bids = pa.table(columns, schema=bid.schema)
    bid = pa.concat_tables([bid.filter(pa.array(~hot)), edge_bids])
    return {**streams, "auction": auction, "bid": bid}


@pytest.mark.parametrize("query", CASES)
def test_every_query_equals_the_oracle_in_every_grouping(
    query: int, tables: dict[str, pa.Table], sessions: Sessions
) -> None:
    options, extra_buckets, oracle = CASES[query]
    net = queries.network(query, bucket="1s", rate=None, **options)
    one, other = (
        run_network(net, tables, sessions, groups=groups, extra_buckets=extra_buckets)
        for groups in GROUPINGS
    )
    assert digests(one) == digests(other)
    (result,) = one.values()
    assert result.num_rows > 0
    assert_same_rows(result, answer(oracle, tables))
    if query in TIES:
        assert pc.count_distinct(result["ts"]).as_py() < result.num_rows


def test_live_feeds_give_the_rows_of_the_tables_for_any_division_of_time() -> None:
    streams = make(1_000, rate=333, start_us=START_US, seed=5)
    cuts = [START_US - S, START_US, START_US + 1, START_US + 3_003, START_US + S, START_US + 9 * S]
    for source, table in streams.items():
        feed = live(source, rate=333, start_us=START_US, seed=5)
        pieces = [feed(n, lo, hi) for n, (lo, hi) in enumerate(itertools.pairwise(cuts))]
        for piece, lo, hi in zip(pieces, cuts, cuts[1:], strict=False):
            assert ((micros(piece, "ts") >= lo) & (micros(piece, "ts") < hi)).all()
        assert pa.concat_tables(pieces).slice(0, table.num_rows).equals(table)


def test_generated_streams_have_fixed_proportions_and_valid_references() -> None:
    streams = make(50_000, seed=3)
    assert [streams[source].num_rows for source in SCHEMAS] == [1_000, 3_000, 46_000]
    assert streams["bid"].equals(make(50_000, seed=3)["bid"])
    assert not streams["bid"].equals(make(50_000, seed=4)["bid"])
    strangers = """
        select bid.us from bid left join auction as a on a.id = auction
        left join person as p on p.id = bidder
        where a.id is null or a.us > bid.us or p.id is null or p.us > bid.us
        union all
        select a.us from auction as a left join person as p on p.id = seller
        where p.id is null or p.us > a.us or expires_us <= a.us
    """
    assert answer(strangers, streams).num_rows == 0
    busiest = "select max(n) / sum(n) as share from (select count(*) as n from bid group by bidder)"
    assert answer(busiest, streams)["share"][0].as_py() > 0.05


def test_the_networks_are_loaded_and_checked_without_a_jvm() -> None:
    for query in queries.QUERIES:
        load(f"holdfast.examples.nexmark.queries:q{query}").check()
    code = "import sys, holdfast.examples.nexmark.queries; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def answer(sql: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    with duckdb.connect() as db:
        for name, table in tables.items():
            db.register(f"{name}_rows", table)
            expires = ", epoch_us(expires) as expires_us" if "expires" in table.column_names else ""
            db.execute(
                f"create view {name} as select *, epoch_us(ts) as us{expires} from {name}_rows"
            )
        return db.sql(sql).to_arrow_table()


def assert_same_rows(actual: pa.Table, expected: pa.Table) -> None:
    """Compare as multisets; doubles up to rounding, all other columns exactly."""
    assert set(actual.column_names) == set(expected.column_names)
    for name in actual.column_names:
        if pa.types.is_timestamp(actual.schema.field(name).type):
            column = actual[name].cast(pa.int64())
            actual = actual.set_column(actual.column_names.index(name), name, column)
    schema = actual.schema
    doubles = [field.name for field in schema if pa.types.is_floating(field.type)]
    names = [name for name in schema.names if name not in doubles] + doubles
    keys = [(name, "ascending") for name in names]
    actual = actual.select(names).sort_by(keys)
    expected = expected.select(names).cast(actual.schema).sort_by(keys)
    assert actual.drop_columns(doubles).to_pylist() == expected.drop_columns(doubles).to_pylist()
    for name in doubles:
        np.testing.assert_allclose(actual[name].to_numpy(), expected[name].to_numpy(), rtol=1e-12)


def micros(table: pa.Table, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    values: np.ndarray[Any, np.dtype[np.int64]] = table[column].cast(pa.int64()).to_numpy()
    return values
