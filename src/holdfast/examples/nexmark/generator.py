"""Generates the Nexmark streams: persons, auctions and bids, in the proportions 1 : 3 : 46.

A row is a pure function of its event number and the seed: event n happens at `start + n / rate`,
and its columns are hashes of n. Any slice of time can therefore be generated independently. The
three streams can be generated separately and still refer to the same persons and auctions. A live
feed has the same rows as a table generated at once. As in Nexmark, half of the bids go to one hot
auction, three quarters of the bids come from one hot bidder, and three quarters of the auctions
belong to one hot seller. The hot auction changes every hundred auctions; the hot bidder and seller
change every hundred persons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import InputError
from holdfast.model.schema import arrow_schema

SCHEMAS = {
    "person": "ts timestamp, id bigint, name string, email string, city string, state string",
    "auction": "ts timestamp, id bigint, item string, description string, initial_bid bigint, "
    "reserve bigint, expires timestamp, seller bigint, category bigint",
    "bid": "ts timestamp, auction bigint, bidder bigint, price bigint, channel string",
}
#: 2026-01-01 UTC. Live feeds number their events from this time, so that feeds agree without
#: coordination.
START_US = 1_767_225_600_000_000

#: Of every 50 consecutive events, the first is a person, the next three are auctions; the others
#: are bids.
CYCLE, AUCTIONS = 50, 3
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1_000, 10, 5
#: The hot auction or seller is the newest one whose number is a multiple of this.
HOT_EVERY = 100
#: Other bids go to one of this many newest auctions and come from one of this many newest persons.
AUCTIONS_IN_FLIGHT, PERSONS_ACTIVE = 100, 1_000

_FIRST = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter")
_LAST = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
_CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond",
           "Seattle", "Kent", "Cheyenne")  # fmt: skip
_STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
_WARES = ("lamp", "clock", "chair", "violin", "map", "camera", "kettle", "globe")
_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")

Numbers = npt.NDArray[np.int64]


def make(
    events: int, *, rate: int = 1_000, start_us: int = START_US, seed: int = 0
) -> dict[str, pa.Table]:
    """The first `events` events as tables; `rate` is the events per second of all three streams."""
    _check(rate)
    numbers = np.arange(events, dtype=np.int64)
    return {source: _rows(source, numbers, rate, start_us, seed) for source in SCHEMAS}


def live(
    source: str, *, rate: int = 1_000, start_us: int = START_US, seed: int = 0
) -> Callable[[int, int, int], pa.Table]:
    """The rows of one stream in [from_us, to_us), for `hf.Generate`."""
    _check(rate)
    if source not in SCHEMAS:
        raise InputError(f"nexmark: source {source!r} is not one of {', '.join(SCHEMAS)}")

    def rows(number: int, from_us: int, to_us: int) -> pa.Table:
        first, end = (max(0, -(-(at - start_us) * rate // 1_000_000)) for at in (from_us, to_us))
        return _rows(source, np.arange(first, end, dtype=np.int64), rate, start_us, seed)

    return rows


def _check(rate: int) -> None:
    if rate < 1:
        raise InputError(f"nexmark: rate={rate} must be at least one event a second")


def _rows(source: str, numbers: Numbers, rate: int, start_us: int, seed: int) -> pa.Table:
    place = numbers % CYCLE
    match source:
        case "person":
            columns = _persons(numbers[place == 0], seed)
        case "auction":
            columns = _auctions(numbers[(place >= 1) & (place <= AUCTIONS)], rate, start_us, seed)
        case _:
            columns = _bids(numbers[place > AUCTIONS], seed)
    columns["ts"] = start_us + columns["ts"] * 1_000_000 // rate
    schema = arrow_schema(SCHEMAS[source])
    return pa.table(
        [pa.array(columns[field.name]).cast(field.type) for field in schema], schema=schema
    )


def _persons(n: Numbers, seed: int) -> dict[str, Any]:
    ids = FIRST_ID + n // CYCLE
    first, last = _pick(_FIRST, n, 1, seed), _pick(_LAST, n, 2, seed)
    account = pc.binary_join_element_wise(first, last, pa.array(ids).cast(pa.string()), ".")
    return {
        "ts": n,
        "id": ids,
        "name": pc.binary_join_element_wise(first, last, " "),
        "email": pc.binary_join_element_wise(account, "example.com", "@"),
        "city": _pick(_CITIES, n, 3, seed),
        "state": _pick(_STATES, n, 4, seed),
    }


def _auctions(n: Numbers, rate: int, start_us: int, seed: int) -> dict[str, Any]:
    number = n // CYCLE * AUCTIONS + n % CYCLE - 1
    person = n // CYCLE
    ware = _pick(_WARES, n, 1, seed)
    initial_bid = _price(n, 2, seed)
    # The duration of an auction is at least a millisecond, and less than twice the time in which
    # AUCTIONS_IN_FLIGHT auctions are opened.
    longest_us = max(1_001, 2 * AUCTIONS_IN_FLIGHT * CYCLE * 1_000_000 // (AUCTIONS * rate))
    hot = person // HOT_EVERY * HOT_EVERY
    return {
        "ts": n,
        "id": FIRST_ID + number,
        "item": pc.binary_join_element_wise(ware, pa.array(number).cast(pa.string()), "-"),
        "description": pc.binary_join_element_wise("a", ware, "nearly new", " "),
        "initial_bid": initial_bid,
        "reserve": initial_bid + _price(n, 3, seed),
        "expires": start_us
        + n * 1_000_000 // rate
        + _below(longest_us - 1_000, n, 4, seed)
        + 1_000,
        "seller": FIRST_ID
        + np.where(_below(4, n, 5, seed) > 0, hot, _newest(person, PERSONS_ACTIVE, n, 6, seed)),
        "category": FIRST_CATEGORY + _below(CATEGORIES, n, 7, seed),
    }


def _bids(n: Numbers, seed: int) -> dict[str, Any]:
    person = n // CYCLE
    auction = n // CYCLE * AUCTIONS + AUCTIONS - 1
    hot_auction = auction // HOT_EVERY * HOT_EVERY
    # The person after the hot seller: sellers do not bid on their own auctions.
    hot_bidder = np.minimum(person // HOT_EVERY * HOT_EVERY + 1, person)
    return {
        "ts": n,
        "auction": FIRST_ID
        + np.where(
            _below(2, n, 1, seed) > 0, hot_auction, _newest(auction, AUCTIONS_IN_FLIGHT, n, 2, seed)
        ),
        "bidder": FIRST_ID
        + np.where(
            _below(4, n, 3, seed) > 0, hot_bidder, _newest(person, PERSONS_ACTIVE, n, 4, seed)
        ),
        "price": _price(n, 5, seed),
        "channel": _pick(_CHANNELS, n, 6, seed),
    }


def _newest(last: Numbers, count: int, n: Numbers, column: int, seed: int) -> Numbers:
    """A random one of the `count` newest numbers up to `last`, or of all if there are fewer."""
    return last - _below(np.minimum(last + 1, count), n, column, seed)


def _price(n: Numbers, column: int, seed: int) -> Numbers:
    """A price in cents, from 100 to 9,990,000. All powers of ten are equally likely."""
    number = _below(4_500, n, column, seed)
    price: Numbers = (100 + number % 900) * np.power(10, number // 900)
    return price


def _pick(values: tuple[str, ...], n: Numbers, column: int, seed: int) -> pa.Array:
    return pa.array(values).take(pa.array(_below(len(values), n, column, seed)))


def _below(end: int | Numbers, n: Numbers, column: int, seed: int) -> Numbers:
    """A pseudo-random number below `end`: splitmix64 of event number, column and seed."""
    salt = np.array([(seed * 64 + column) % 2**64], np.uint64)
    x = n.astype(np.uint64) + _mixed(salt)
    return (_mixed(x) >> np.uint64(1)).astype(np.int64) % end


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
