"""Eight of the Nexmark queries as networks: `q1` to `q11` here, or `network(5, slide="1s")`.

Where Nexmark's state is unbounded, these queries limit the state to a given time, so that every
result is final and the state is bounded. Time windows are aligned to 1970. The time of a result is
the last instant of its window, auction or session, one microsecond before the end. Ids of persons
and auctions are assumed to be unique. This module needs no JVM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import holdfast as hf
from holdfast.config import duration_us
from holdfast.edge.feeds import Generate
from holdfast.errors import InputError
from holdfast.examples.nexmark import keyed_queries as keyed
from holdfast.examples.nexmark.generator import SCHEMAS, live

#: Declares the source with the given name and returns its stream.
Take = Callable[[str], hf.Stream]


def currency_conversion(take: Take) -> hf.Stream:
    """Q1: every bid with its price in euros, price * 0.908 as an exact decimal(24,3).

    Time: that of the bid.
    """
    return take("bid").map("ts", "auction", "bidder", "price * 0.908 as price", "channel")


def selection(take: Take) -> hf.Stream:
    """Q2: auction and price of the bids on auctions whose id is a multiple of 123.

    Time: that of the bid.
    """
    return take("bid").filter("auction % 123 = 0").map("ts", "auction", "price")


def local_items(take: Take, *, within: str = "1min") -> hf.Stream:
    """Q3: sellers in Oregon, Idaho or California with an auction in category 10. A result is a pair
    of a person and an auction of that person, if registration and opening are at most `within`
    apart, in any order. (Nexmark: any time apart.)

    Time: the later of the two.
    """
    persons = take("person").filter("state in ('OR', 'ID', 'CA')")
    auctions = take("auction").filter("category = 10")
    return persons.map("ts", "id as seller", "name", "city", "state").join(
        auctions.map("ts", "seller", "id as auction"), on=["seller"], within=within
    )


def closing_prices(take: Take, *, window: str = "10s") -> hf.Stream:
    """Q4: the average closing price of each category, over the auctions that ended in each
    tumbling window. The closing price is the highest of all bids from the opening of the auction
    (included) to its `expires` (excluded), regardless of the reserve. An auction ends at its last
    instant, a microsecond before `expires`. An auction without a bid has no closing price and is
    not counted. (Nexmark: the average over all auctions ever ended.)

    State: one row for each open auction. Time: the last instant of the window.
    """
    opened = (
        take("auction")
        .filter("expires > ts")
        .map(
            "ts",
            "id as auction",
            "category",
            "cast(null as bigint) as price",
            "expires - interval 1 microsecond as ends",
        )
    )
    bids = take("bid").map(
        "ts", "auction", "cast(null as bigint) as category", "price",
        "cast(null as timestamp) as ends",
    )  # fmt: skip
    closed = opened.union(bids).stateful(
        keyed.closings,
        key="auction",
        state=keyed.AUCTION_STATE,
        out=keyed.AUCTION_OUT,
        timer="ends",
    )
    return (
        closed.window(window).group_by("category").agg(price=hf.avg("price"), auctions=hf.count())
    )


def hot_items(take: Take, *, size: str = "10s", slide: str = "2s") -> hf.Stream:
    """Q5: the auctions with the most bids in each sliding window; all of them in case of a tie.

    Time: the last instant of the window.
    """
    counts = take("bid").window(size, slide=slide).group_by("auction").agg(bids=hf.count())
    # Each tumbling window of length `slide` contains the results of exactly one sliding window.
    return counts.window(slide).apply(lambda df: _highest(df, "bids"))


def highest_bids(take: Take, *, window: str = "10s") -> hf.Stream:
    """Q7: the bids with the highest price in each tumbling window; all of them in case of a tie.

    Time: the last instant of the window; the time of the bid is in `bid_ts`.
    """
    return (
        take("bid")
        .window(window)
        .apply(lambda df: _highest(df.withColumnRenamed("ts", "bid_ts"), "price"))
    )


def new_sellers(take: Take, *, window: str = "10s") -> hf.Stream:
    """Q8: the persons who registered and opened an auction in the same tumbling window, in any
    order, with the number of auctions that they opened in the window.

    Time: the last instant of the window.
    """
    persons = take("person").map("ts", "id", "name", "0L as opened")
    sellers = take("auction").map(
        "ts", "seller as id", "cast(null as string) as name", "1L as opened"
    )
    return (
        persons.union(sellers)
        .window(window)
        .group_by("id")
        .agg(name=hf.max("name"), auctions=hf.sum("opened"))
        .filter("name is not null and auctions > 0")
    )


def bidder_sessions(take: Take, *, gap: str = "10s") -> hf.Stream:
    """Q11: the number of bids of each bidder in each session. Bids less than `gap` apart are in one
    session. A session ends `gap` after its last bid; a bid at that instant begins the next session.

    State: one row for each bidder with an open session. Time: the last instant of the session, a
    microsecond before the end of the gap. `started` and `latest`: times of the first and last bid.
    """
    return (
        take("bid")
        .map("ts", "bidder")
        .stateful(
            partial(keyed.sessions, gap_us=duration_us(gap, of="gap")),
            key="bidder",
            state=keyed.SESSION_STATE,
            out=keyed.SESSION_OUT,
            timer="ends",
        )
    )


def _highest(df: Any, column: str) -> Any:
    """The rows with the greatest value of the column."""
    with_most = df.selectExpr("*", f"max({column}) over () as _most")
    return with_most.filter(f"{column} = _most").drop("_most")


QUERIES: dict[int, Callable[..., hf.Stream]] = {
    1: currency_conversion,
    2: selection,
    3: local_items,
    4: closing_prices,
    5: hot_items,
    7: highest_bids,
    8: new_sellers,
    11: bidder_sessions,
}


def network(
    query: int, *, bucket: str = "500ms", rate: int | None = 1_000, **options: str
) -> hf.Network:
    """The network of one query, with one output that has the name of the query's function. `rate`:
    events per second of the live feeds; None: the application pushes rows. `options`: arguments of
    the query's function."""
    if query not in QUERIES:
        raise InputError(f"nexmark: there is no query {query}, only {', '.join(map(str, QUERIES))}")
    net = hf.Network(f"nexmark-q{query}", bucket=bucket)
    fn = QUERIES[query]

    def take(source: str) -> hf.Stream:
        feed = None if rate is None else Generate(live(source, rate=rate))
        return net.source(source, SCHEMAS[source], time="ts", feed=feed)

    net.output(fn.__name__, fn(take, **options))
    return net


q1, q2, q3, q4, q5, q7, q8, q11 = (network(query) for query in QUERIES)
