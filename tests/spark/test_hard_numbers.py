"""Sums and deviations of numbers that are hard to add: exact, whatever the order of rows."""

from __future__ import annotations

import math
import random
from decimal import Context, Decimal

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.engine.session import Sessions
from holdfast.storage.rows import TIMESTAMP
from holdfast.verify.fuzz.engine_run import run_network
from tests.spark import oracles

WIDE = Context(prec=100)


def test_sums_that_overflow_are_null(sessions: Sessions) -> None:
    """A sum of longs beyond 64 bits is NULL in any order of rows; sums whose intermediate results
    overflow are exact. The same holds for decimals of 38 digits."""
    big, most = 2**63 - 1, Decimal(9) * Decimal(10) ** 37
    cases: dict[str, tuple[list[int], list[Decimal]]] = {
        "over": ([big, 1], [most, most]),
        "back": ([big, big, -big, -big, 7], [Decimal(5), Decimal(-7)]),
        "least": ([-(2**63)], [-most]),
        "under": ([-(2**63), -1], [-most, -most, Decimal(1)]),
        "null": ([], []),
        # G8: the sum just fits 38 digits, or just does not.
        "largest": ([1], [most, Decimal("9" * 37)]),
        "too large": ([1], [most, Decimal(10) ** 37]),
        "there and back": ([1], [most, most, -most, -most, Decimal(3)]),
    }
    rows = [
        {"k": k, "i": i, "d": d, "ts": at}
        for k, (longs, decimals) in cases.items()
        for at, (i, d) in enumerate(
            zip(longs + [None] * 5, decimals + [None] * 5, strict=False)  # type: ignore[operator]
        )
    ]
    schema = pa.schema([("k", pa.string()), ("i", pa.int64()), ("d", pa.decimal128(38, 0)),
                        ("ts", pa.timestamp("us", tz="UTC"))])  # fmt: skip
    net = hf.Network("wide", bucket="1us")
    source = net.source("a", "ts timestamp, k string, i long, d decimal(38,0)", time="ts")
    agg = {"i": hf.sum("i"), "ai": hf.avg("i"), "d": hf.sum("d"), "ad": hf.avg("d")}
    net.output("sums", source.window("16us").group_by("k").agg(**agg))
    outputs = run_network(
        net, {"a": pa.Table.from_pylist(rows, schema)}, sessions, groups=(2,), pane_buckets=1
    )
    sums = {row["k"]: row for row in outputs["sums"].to_pylist()}
    assert {k: row["i"] for k, row in sums.items() if row["i"] != 1} == {
        "over": None, "back": 7, "least": -(2**63), "under": None, "null": None
    }  # fmt: skip
    assert {k: row["d"] for k, row in sums.items()} == {
        "over": None, "back": -2, "least": -most, "under": None, "null": None,
        "largest": Decimal("9" * 38), "too large": None, "there and back": 3,
    }  # fmt: skip
    assert sums["over"]["ai"] == 2.0**62
    assert sums["null"]["ai"] is None


def test_quantiles_and_sums_of_extreme_doubles_are_exact(sessions: Sessions) -> None:
    values = {
        "largest": [1.7976931348623157e308] * 3,
        "cancel": [1e308, 1e308, -1e308, -1e308, 1.0],
        "tiny": [5e-324, 5e-324, -5e-324],
        "nan": [math.nan, 1.0, math.inf],
        "both": [math.inf, -math.inf],
        "up": [math.inf, -1e308],
    }
    rows = [
        {"k": k, "x": x, "ts": at} for k, doubles in values.items() for at, x in enumerate(doubles)
    ]
    schema = pa.schema([("k", pa.string()), ("x", pa.float64()),
                        ("ts", pa.timestamp("us", tz="UTC"))])  # fmt: skip
    net = hf.Network("ends", bucket="1us")
    source = net.source("a", "ts timestamp, k string, x double", time="ts")
    agg = {"s": hf.sum("x"), "q": hf.quantile("x", 0.5), "n": hf.approx_distinct("x")}
    net.output("ends", source.window("8us").group_by("k").agg(**agg))
    results = run_network(net, {"a": pa.Table.from_pylist(rows, schema)}, sessions)["ends"]
    sums = {row["k"]: row for row in results.to_pylist()}
    assert (sums["largest"]["s"], sums["cancel"]["s"], sums["tiny"]["s"]) == (math.inf, 1.0, 5e-324)
    assert math.isnan(sums["nan"]["s"])
    assert math.isnan(sums["both"]["s"])
    assert sums["up"]["s"] == math.inf
    assert sums["largest"]["q"] == pytest.approx(1.7976931348623157e308, rel=0.01)
    assert {k: row["n"] for k, row in sums.items()} == {
        "largest": 1, "cancel": 3, "tiny": 2, "nan": 3, "both": 2, "up": 2
    }  # fmt: skip


def hard_doubles() -> dict[str, list[float]]:
    """Groups of doubles that are hard to add: cancellation, ties, borders of blocks, subnormals."""
    rng = random.Random(7)
    groups: dict[str, list[float]] = {
        "cancel": [2.0**44, -(2.0**43), -(2.0**43), 2.0**-21],
        "ties": [2.0**53, 1.0, 2.0**-60],
        "tie": [1.0, 2.0**-53],
        "above a tie": [1.0, 2.0**-53, 2.0**-200],
        "money": [1e14, -99999999999999.0, 1e-7, -1.0],
        "large mean": [1e9 + rng.gauss(0, 1) for _ in range(400)],
        "larger mean": [2.0**62 + 1024 * rng.randint(-5, 5) for _ in range(50)],
        "squares overflow": [1e200, 2e200, -3e200],
        "subnormal": [5e-324, 1e-323, 5e-324],
        "overflow": [1.7976931348623157e308] * 3,
        "zeros": [0.0, -0.0],
        "equal": [0.1] * 7,
    }
    for number in range(150):
        low = rng.choice((-1060, -300, -40, -5, 0, 0))
        high = low + rng.choice((0, 3, 30, 60, 400))
        groups[f"random {number}"] = [
            math.ldexp(rng.uniform(1, 2) * rng.choice((1, -1)), rng.randint(low, high))
            for _ in range(rng.randint(1, 30))
        ]
    for power in range(-1073, 1024, 7):
        groups[f"below {power}"] = [math.nextafter(math.ldexp(1, power), 0)]
        groups[f"at {power}"] = [math.ldexp(1, power), -math.ldexp(1, max(power - 53, -1074))]
    return groups


@pytest.mark.parametrize("wide", [False, True])
def test_sums_and_deviations_of_any_doubles_are_exact(sessions: Sessions, wide: bool) -> None:
    """G7, G9. The shorter plan for numbers of a similar size gives the same bits."""
    groups = hard_doubles()
    if not wide:
        names = ("large mean", "larger mean", "equal", "zeros")
        groups = {name: groups[name] for name in names}
    rows = [(name, value) for name, values in groups.items() for value in values]
    table = pa.table({
        "ts": pa.array(range(len(rows)), TIMESTAMP),
        "k": [name for name, _ in rows], "x": [value for _, value in rows],
    })  # fmt: skip
    net = hf.Network("hard", bucket="1ms")
    source = net.source("a", "ts timestamp, k string, x double", time="ts")
    agg = {"s": hf.sum("x"), "d": hf.stddev("x")}
    net.output("o", source.window("1s").group_by("k").agg(**agg))
    results = run_network(net, {"a": table}, sessions, groups=(1,), pane_buckets=1)["o"]
    assert results.num_rows == len(groups)
    for row in results.to_pylist():
        values = groups[row["k"]]
        assert oracles.close(row["s"], *oracles.exact_sum(values)), (row, values)
        assert oracles.close(row["d"], *oracles.spread(values)), (row, values)


def test_deviations_of_large_integers_are_exact(sessions: Sessions) -> None:
    """G9: integers around 2**62 differ by less than doubles can tell apart."""
    groups = {k: [sign * 2**62 + i * i for i in range(40)] for k, sign in (("a", 1), ("b", -1))}
    groups["c"] = [-(2**63), 2**63 - 1, 0, 5]
    rows = [(name, value) for name, values in groups.items() for value in values]
    table = pa.table({
        "ts": pa.array(range(len(rows)), TIMESTAMP),
        "k": [name for name, _ in rows], "i": pa.array([value for _, value in rows], pa.int64()),
    })  # fmt: skip
    net = hf.Network("large", bucket="1ms")
    source = net.source("a", "ts timestamp, k string, i long", time="ts")
    net.output("o", source.window("1s").group_by("k").agg(d=hf.stddev("i")))
    results = run_network(net, {"a": table}, sessions)["o"]
    for row in results.to_pylist():
        assert oracles.close(row["d"], *oracles.spread(groups[row["k"]])), row


SCALES = [(38, 0), (38, 2), (38, 7), (38, 18), (38, 20), (38, 27), (38, 38), (29, 10), (10, 2),
          (20, 10), (5, 0), (28, 28)]  # fmt: skip


@pytest.mark.parametrize("types", [SCALES[:6], SCALES[6:]])
def test_sums_and_averages_of_decimals_are_exact(
    sessions: Sessions, types: list[tuple[int, int]]
) -> None:
    """Also where Spark's own arithmetic would drop fractional digits."""
    rng = random.Random(5)
    groups = 6
    numbers = {
        (p, s): [[rng.randrange(-(10**p) + 1, 10**p) // 10 ** rng.choice((0, 0, p - 1))
                  for _ in range(rng.choice((1, 2, 7, 32)))] for _ in range(groups)]
        for p, s in types
    }  # fmt: skip
    for (p, _), of in numbers.items():
        of[0], of[1], of[2] = [1] + [0] * 31, [-(10**p) + 1], [-1]
    length = max(len(values) for of in numbers.values() for values in of)
    columns: dict[str, pa.Array] = {
        "ts": pa.array(range(groups * length), TIMESTAMP),
        "k": [group for group in range(groups) for _ in range(length)],
    }
    for (p, s), of in numbers.items():
        padded = [v for values in of for v in values + [None] * (length - len(values))]  # type: ignore[list-item]
        exact = [None if v is None else WIDE.create_decimal(v).scaleb(-s, WIDE)
                 for v in padded]  # fmt: skip
        columns[f"d{p}_{s}"] = pa.array(exact, pa.decimal128(p, s))
    ddl = ", ".join(f"d{p}_{s} decimal({p},{s})" for p, s in types)
    net = hf.Network("decimals", bucket="1ms")
    source = net.source("a", f"ts timestamp, k long, {ddl}", time="ts")
    agg = {f"s{p}_{s}": hf.sum(f"d{p}_{s}") for p, s in types}
    agg |= {f"a{p}_{s}": hf.avg(f"d{p}_{s}") for p, s in types}
    net.output("o", source.window("1s").group_by("k").agg(**agg))
    results = run_network(net, {"a": pa.table(columns)}, sessions)["o"]
    assert results.num_rows == groups
    for row in results.to_pylist():
        for p, s in types:
            values = numbers[p, s][row["k"]]
            total = sum(values)
            fits = abs(total) < 10**38
            wanted = WIDE.create_decimal(total).scaleb(-s, WIDE) if fits else None
            assert row[f"s{p}_{s}"] == wanted, (p, s, values)
            fine, digits = min(s + 4, 38), min(p + 4, 38)
            scaled = 2 * abs(total) * 10 ** (fine - s) + len(values)  # half up
            average = scaled // (2 * len(values)) * (1 if total >= 0 else -1)
            fits = fits and abs(average) < 10**digits
            wanted = WIDE.create_decimal(average).scaleb(-fine, WIDE) if fits else None
            assert row[f"a{p}_{s}"] == wanted, (p, s, values)
