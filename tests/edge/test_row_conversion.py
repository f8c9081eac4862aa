"""Ambiguous times are refused, with advice on what to pass instead."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from holdfast.edge.row_conversion import fit
from holdfast.errors import InputError
from holdfast.model.schema import arrow_schema

SCHEMA = arrow_schema("ts timestamp, v double")
NOON = datetime(2026, 3, 1, 12)
NOON_US = int(NOON.replace(tzinfo=UTC).timestamp()) * 1_000_000


def times(data: object) -> list[int]:
    return [value.value for value in fit(data, SCHEMA, "tap")["ts"]]


@pytest.mark.parametrize(
    "when",
    [
        NOON.replace(tzinfo=UTC),
        NOON.replace(hour=14, tzinfo=timezone(timedelta(hours=2))),
        pd.Timestamp("2026-03-01 13:00", tz="Europe/Berlin"),
        NOON_US,
    ],
)
def test_unambiguous_times_are_converted(when: object) -> None:
    assert times([{"ts": when, "v": 1.0}]) == [NOON_US]
    assert times({"ts": [when], "v": [1.0]}) == [NOON_US]


@pytest.mark.parametrize(
    "column",
    [
        np.array([NOON_US]),
        np.array(["2026-03-01T12"], "datetime64[us]"),  # UTC by definition
        np.array(["2026-03-01T12"], "datetime64[ns]"),
        pa.array([NOON_US // 1_000], pa.timestamp("ms", tz="Europe/Berlin")),
    ],
)
def test_columns_of_times_are_converted(column: object) -> None:
    data = {"ts": column, "v": np.array([1.0])}
    assert times(pa.table(data) if isinstance(column, pa.Array) else data) == [NOON_US]


def test_a_missing_time_is_converted_to_null() -> None:
    rows = [{"ts": None, "v": 1.0}, {"ts": pd.NaT, "v": 1.0}]
    assert times(rows) == [None, None]


@pytest.mark.parametrize(
    "data",
    [
        [{"ts": datetime.now(), "v": 1.0}],
        {"ts": [NOON.replace(tzinfo=UTC), NOON], "v": [1.0, 2.0]},
        [{"ts": pd.Timestamp(NOON), "v": 1.0}],
    ],
)
def test_datetimes_without_a_time_zone_are_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"'ts'.*without a zone; use datetime.now\(timezone"):
        times(data)


@pytest.mark.parametrize(
    "data",
    [
        pd.DataFrame({"ts": [pd.Timestamp(NOON)], "v": [1.0]}),
        pa.table({"ts": pa.array([NOON_US], pa.timestamp("us")), "v": [1.0]}),
    ],
)
def test_tables_with_times_without_a_time_zone_are_refused(data: object) -> None:
    with pytest.raises(InputError, match="'ts': expected times with a time zone, found times with"):
        times(data)


@pytest.mark.parametrize(
    "data",
    [
        [{"ts": time.time(), "v": 1.0}],
        {"ts": [np.float64(time.time())], "v": [1.0]},
        {"ts": np.array([time.time()]), "v": np.array([1.0])},
        pd.DataFrame({"ts": [time.time()], "v": [1.0]}),
    ],
)
def test_floating_point_times_are_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"'ts': .* floating-point numbers; .*int\(time.time"):
        times(data)


WANTED = arrow_schema("ts timestamp, key string, value double")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"ts": NOON.replace(tzinfo=UTC), "key": "a", "value": 1.0},
            r"column 'ts': expected a list of values, found datetime .* a list with one dict: \[",
        ),
        ({"key": "/docs", "ts": [0], "value": [1.0]}, "column 'key': expected a list of values"),
        (
            [{"ts": "2026-03-01T12:00:00Z", "key": "a", "value": 1.0}],
            r"column 'ts': expected a datetime with a time zone .* found str '2026-03-01T12:00:00Z'"
            r"; use datetime\.fromisoformat",
        ),
        (
            [(0, "a", 1.0), (0, "b", "much")],
            r"column 'value': expected double, found str 'much' in row 1; convert the",
        ),
        ([(0, 17, 1.0)], "column 'key': expected string, found int 17 in row 0"),
        (
            [(0, "a")],
            r"tuples of 3 values \(ts, key, value\), found tuple \(0, 'a'\) of 2 values; list",
        ),
    ],
    ids=["one dict", "one text", "ISO text", "text", "number", "short"],
)
def test_conversion_errors_name_the_column_the_expected_and_found_values_and_the_remedy(
    data: object, message: str
) -> None:
    with pytest.raises(InputError, match=f"source 'tap': cannot convert the rows.*{message}"):
        fit(data, WANTED, "tap")


@pytest.mark.parametrize(
    ("number", "unit"),
    [
        (NOON_US // 1_000_000, "looks like seconds; multiply"),
        (NOON_US // 1_000, "looks like milliseconds; multiply"),
    ],
)
def test_integers_that_look_like_seconds_or_milliseconds_are_refused(
    number: int, unit: str
) -> None:
    for data in (
        [{"ts": number, "v": 1.0}],
        [(number, 1.0)],
        {"ts": np.array([number]), "v": np.array([1.0])},
        pa.table({"ts": pa.array([None, number], pa.int64()), "v": [1.0, 2.0]}),
    ):
        with pytest.raises(InputError, match=f"expected microseconds since 1970, found .* {unit}"):
            fit(data, SCHEMA, "tap", real_time=True)
        assert fit(data, SCHEMA, "tap")["ts"].drop_null()[0].value == number, (
            "a manual clock may show any time"
        )


@pytest.mark.parametrize("value", [2.7, -0.9, float("nan"), np.float64(1.5)])
@pytest.mark.parametrize("rows", ["dicts", "tuples", "columns", "pandas"])
def test_a_number_with_a_fraction_is_refused_in_an_integer_column(rows: str, value: float) -> None:
    data: object = {
        "dicts": [{"ts": NOON_US, "v": value}],
        "tuples": [(NOON_US, value)],
        "columns": {"ts": [NOON_US], "v": [value]},
        "pandas": pd.DataFrame({"ts": [pd.Timestamp(NOON, tz="UTC")], "v": [value]}),
    }[rows]
    schema = arrow_schema("ts timestamp, v long")
    if rows == "pandas" and value != value:
        return  # pandas writes a missing integer as NaN
    with pytest.raises(InputError, match=r"'v'|truncated"):
        fit(data, schema, "tap")
    assert fit([{"ts": NOON_US, "v": 2.0}], schema, "tap")["v"].to_pylist() == [2]
