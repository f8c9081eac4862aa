"""State functions of the queries. A function gets and returns Arrow tables of one shard.

Both functions store one row per open item (a bidder's session, or an auction). The timer of a row
is the last instant of the item. In the bucket of that instant, the function removes the row from
the state and returns the result, with that instant as its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SESSION_STATE = "bidder bigint, bids bigint, started timestamp, latest timestamp, ends timestamp"
SESSION_OUT = "bidder bigint, bids bigint, started timestamp, latest timestamp, ts timestamp"
AUCTION_STATE = "auction bigint, category bigint, opened timestamp, price bigint, ends timestamp"
AUCTION_OUT = "auction bigint, category bigint, price bigint, ts timestamp"

_NO_BID = np.iinfo(np.int64).min


def sessions(
    state: pa.Table, rows: pa.Table, info: Any, *, gap_us: int
) -> tuple[pa.Table, pa.Table]:
    """Bids of a bidder less than `gap_us` apart form a session, which ends `gap_us` after its last
    bid.

    Open sessions are merged with the new bids: a bid is a session with a single bid.
    """
    at = _micros(rows, "ts")
    bidder = np.r_[_whole(state, "bidder"), _whole(rows, "bidder")]
    bids = np.r_[_whole(state, "bids"), np.ones(len(at), np.int64)]
    started = np.r_[_micros(state, "started"), at]
    latest = np.r_[_micros(state, "latest"), at]
    order = np.lexsort((started, bidder))
    bidder, bids, started, latest = bidder[order], bids[order], started[order], latest[order]
    begins = np.ones(len(bidder), bool)
    begins[1:] = (bidder[1:] != bidder[:-1]) | (started[1:] - latest[:-1] >= gap_us)
    first = np.flatnonzero(begins)
    last = np.r_[first[1:], len(bidder)][: len(first)] - 1
    ends = latest[last] + gap_us - 1
    merged = pa.table(
        {
            "bidder": bidder[first],
            "bids": np.add.reduceat(bids, first) if len(first) else bids,
            "started": _times(started[first]),
            "latest": _times(latest[last]),
            "ends": _times(ends),
        }
    )
    over = ends < info.end_us
    return _stamped(merged.filter(pa.array(over))), merged.filter(pa.array(~over))


def closings(state: pa.Table, rows: pa.Table, info: Any) -> tuple[pa.Table, pa.Table]:
    """The highest bid of each auction from `opened` to `ends`, both included, when it has ended.

    A row with `ends` opens an auction; any other row is a bid. Bids on auctions that are not open
    are ignored. An auction without bids ends without a result.
    """
    opening = rows.filter(rows["ends"].is_valid())
    opening = opening.rename_columns([{"ts": "opened"}.get(c, c) for c in opening.column_names])
    auctions = pa.concat_tables([state, opening.select(state.column_names).cast(state.schema)])
    auctions = auctions.sort_by("auction")
    best = pc.fill_null(auctions["price"], _NO_BID).to_numpy().copy()
    ends = _micros(auctions, "ends")

    bids = rows.filter(rows["ends"].is_null())
    auction, at, price = _whole(bids, "auction"), _micros(bids, "ts"), _whole(bids, "price")
    ids = _whole(auctions, "auction")
    place = np.searchsorted(ids, auction)
    place[place == len(ids)] = 0
    if len(ids):
        hit = (
            (ids[place] == auction)
            & (_micros(auctions, "opened")[place] <= at)
            & (at <= ends[place])
        )
        np.maximum.at(best, place[hit], price[hit])

    bid_on, over = best != _NO_BID, ends < info.end_us
    auctions = auctions.set_column(
        auctions.column_names.index("price"), "price", pa.array(best, mask=~bid_on)
    )
    return _stamped(auctions.filter(pa.array(over & bid_on))), auctions.filter(pa.array(~over))


def _stamped(ended: pa.Table) -> pa.Table:
    return ended.append_column("ts", ended["ends"])


def _whole(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = table[column].to_numpy()
    return values


def _micros(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = table[column].cast(pa.int64()).to_numpy()
    return values


def _times(micros: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(micros).cast(pa.timestamp("us", tz="UTC"))
