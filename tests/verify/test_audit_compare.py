"""The comparison finds every planted fault and reports no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.model.contract import Contract
from holdfast.verify.audit import Comparison, OutputReport, Report, compare
from holdfast.verify.audit.report import inter_order_breaks, judge

WIDTH_US = 1_000_000
TIME = pa.timestamp("us", tz="UTC")
#: Delay between the end of a bucket and the receipt of its rows.
LATE_US = 20_000


def rows(count: int = 200, seed: int = 1) -> pa.Table:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=count) * 10.0 ** rng.integers(-8, 12, count)
    return pa.table(
        {
            "ts": pa.array(rng.integers(0, 20 * WIDTH_US, count), TIME),
            "key": pa.array(
                [f"k{at % 5}" if at % 17 else None for at in range(count)], pa.string()
            ),
            "n": pa.array(rng.integers(0, 3, count)),
            "x": values,
            "y": np.round(values),
        }
    ).sort_by("ts")


def received(ideal: pa.Table, order: str = "shuffled") -> pa.Table:
    """The same rows, in another order within their bucket, with their arrival times."""
    buckets = ideal["ts"].cast(pa.int64()).to_numpy() // WIDTH_US
    at = (buckets + 1) * WIDTH_US + LATE_US
    table = ideal.append_column("__received_at", pa.array(at, TIME))
    if order == "shuffled":
        table = table.take(np.random.default_rng(2).permutation(ideal.num_rows))
    return table


def change(table: pa.Table, row: int, column: str, value: Any) -> pa.Table:
    values = table[column].to_pylist()
    values[row] = value
    field = table.schema.field(column)
    at = table.schema.get_field_index(column)
    return table.set_column(at, field, pa.array(values, field.type, from_pandas=False))


def check(ideal: pa.Table, actual: pa.Table, **options: Any) -> Comparison:
    return compare(ideal, actual, time="ts", width_us=WIDTH_US, **options)


def faults(comparison: Comparison) -> tuple[int, int, int]:
    return comparison.missing, comparison.wrong, comparison.duplicated


def test_equal_rows_in_any_order_compare_as_lossless_and_ordered() -> None:
    comparison = check(rows(), received(rows()))
    assert comparison.lossless
    assert (comparison.correct, comparison.loss_factor, comparison.error_factor) == (200, 1.0, 0.0)
    assert comparison.after_bucket is not None
    assert comparison.after_bucket.p50_us == comparison.after_bucket.max_us == LATE_US
    assert comparison.after_row is not None
    assert (
        LATE_US < comparison.after_row.p50_us <= comparison.after_row.max_us <= LATE_US + WIDTH_US
    )
    assert comparison.order_breaks == ()


def test_a_missing_row_is_reported_with_its_bucket() -> None:
    ideal = rows()
    actual = received(ideal, "same")
    comparison = check(ideal, pa.concat_tables([actual.slice(0, 7), actual.slice(8)]))
    assert faults(comparison) == (1, 0, 0)
    lost = ideal.slice(7, 1).to_pylist()[0]
    bucket = int(ideal["ts"].cast(pa.int64())[7].as_py()) // WIDTH_US
    assert comparison.examples == {"missing": [{"bucket": bucket, **lost}]}
    assert comparison.loss_factor == 199 / 200


@pytest.mark.parametrize(
    ("column", "value"), [("x", 3.5), ("key", "other"), ("n", 99), ("x", None), ("key", None)]
)
def test_a_wrong_value_is_a_missing_and_a_wrong_row(column: str, value: Any) -> None:
    comparison = check(rows(), change(received(rows()), 5, column, value))
    assert faults(comparison) == (1, 1, 0)
    assert comparison.examples["wrong"][0][column] == value
    assert comparison.error_factor == 1 / 200


def test_a_repeated_row_counts_as_duplicated_not_wrong() -> None:
    actual = received(rows())
    comparison = check(rows(), pa.concat_tables([actual, actual.slice(3, 1)]))
    assert faults(comparison) == (0, 0, 1)
    assert comparison.correct == 200


def test_a_repeated_bucket_counts_as_duplicated_and_keeps_the_order() -> None:
    ideal = rows()
    actual = received(ideal, "same")
    times = ideal["ts"].cast(pa.int64()).to_numpy() // WIDTH_US
    again = actual.filter(pa.array(times == 4))
    later = pa.array(np.full(again.num_rows, 99 * WIDTH_US), TIME)
    again = again.set_column(again.num_columns - 1, "__received_at", later)
    comparison = check(ideal, pa.concat_tables([again, actual]))
    assert faults(comparison) == (0, 0, again.num_rows)
    assert {row["bucket"] for row in comparison.examples["duplicated"]} == {4}
    assert len(comparison.examples["duplicated"]) == 5
    assert comparison.order_breaks == ()  # of equal rows, the first to arrive is the correct one


def test_equal_rows_are_compared_by_their_count() -> None:
    ideal = pa.concat_tables([rows(10), rows(10), rows(10)])
    assert check(ideal, received(ideal)).lossless
    assert faults(check(ideal, received(ideal).slice(2))) == (2, 0, 0)
    assert faults(check(rows(10), received(ideal))) == (0, 0, 20)


def test_a_row_delivered_in_the_wrong_bucket_is_wrong() -> None:
    actual = received(rows(), "same")
    buckets = actual["ts"].cast(pa.int64()).to_numpy() // WIDTH_US
    assert check(rows(), actual.append_column("__bucket", pa.array(buckets))).lossless
    buckets = buckets + (np.arange(200) == 11)
    assert faults(check(rows(), actual.append_column("__bucket", pa.array(buckets)))) == (1, 1, 0)


def test_doubles_within_1e_9_are_equal() -> None:
    def shaken(by: float) -> Comparison:
        actual = received(rows())
        signs = np.random.default_rng(3).choice([-1.0, 1.0], actual.num_rows)
        x = actual["x"].to_numpy() * (1 + by * signs)
        return check(rows(), actual.set_column(3, "x", pa.array(x)))

    assert shaken(0.9e-9).lossless
    assert faults(shaken(2e-9)) == (200, 200, 0)


def test_rows_with_close_values_are_matched_correctly() -> None:
    """Sorting by the first double would pair these rows wrongly. The ends of a chain of close
    values must not compare as equal."""
    near = 1 + 1e-12
    table = pa.table({"ts": pa.array([5, 5], TIME), "x": [1.0, near], "y": [7.0, 3.0]})
    other = pa.table({"ts": pa.array([5, 5], TIME), "x": [near, 1.0], "y": [7.0, 3.0]})
    assert check(table, other).lossless
    chain = pa.array([1 + at * 0.8e-9 for at in range(8)])
    times = pa.array([5] * 8, TIME)
    low = pa.table({"ts": times, "x": pa.array([1.0] * 8)})
    assert faults(check(pa.table({"ts": times, "x": chain}), low))[0] > 0
    assert check(pa.table({"ts": times, "x": chain}), pa.table({"ts": times, "x": chain})).lossless


def test_nan_null_zero_and_infinity_equal_only_themselves() -> None:
    special = [float("nan"), None, 0.0, float("inf"), -float("inf"), 1e308, 5e-324]
    times = pa.array([5] * len(special), TIME)
    for kind in (pa.float64(), pa.float32()):
        values = [v if kind == pa.float64() or v not in (1e308, 5e-324) else 1.5 for v in special]
        ideal = pa.table({"ts": times, "x": pa.array(values, kind, from_pandas=False)})
        turned = [-0.0 if v == 0.0 and v is not None else v for v in reversed(values)]
        actual = pa.table({"ts": times, "x": pa.array(turned, kind, from_pandas=False)})
        assert check(ideal, actual).lossless
        for at in range(len(values)):
            for other in (2.5, *values):
                one = pa.array([values[at]], kind, from_pandas=False)
                two = pa.array([other], kind, from_pandas=False)
                same = one.equals(two) or (values[at] != values[at] and other != other)
                comparison = check(
                    pa.table({"ts": times[:1], "x": one}), pa.table({"ts": times[:1], "x": two})
                )
                assert comparison.lossless == same, (values[at], other)


def test_float32_columns_have_a_larger_tolerance() -> None:
    times = pa.array([5], TIME)
    one, near, far = (
        pa.table({"ts": times, "x": pa.array([v], pa.float32())}) for v in (0.1, 0.10000001, 0.1001)
    )
    assert check(one, near).lossless
    assert not check(one, far).lossless


def test_nested_columns_are_compared_by_value() -> None:
    kind = pa.struct([("v", pa.float64()), ("l", pa.list_(pa.string()))])
    values = [{"v": 1.0, "l": ["a", None]}, {"v": None, "l": None}, None, {"v": 2.0, "l": []}]
    ideal = pa.table({"ts": pa.array([5] * 4, TIME), "s": pa.array(values, kind)})
    assert check(ideal, ideal.take([3, 1, 0, 2])).lossless
    values[0] = {"v": 1.0 + 1e-12, "l": ["a", None]}
    actual = pa.table({"ts": pa.array([5] * 4, TIME), "s": pa.array(values, kind)})
    assert check(ideal, actual).lossless
    for changed in ({"v": 1.0, "l": ["a", "b"]}, {"v": 1.0, "l": None}, None):
        actual = pa.table({"ts": ideal["ts"], "s": pa.array([changed, *values[1:]], kind)})
        assert faults(check(ideal, actual))[0] == 1


def test_empty_tables_can_be_compared() -> None:
    assert check(rows(0), received(rows(0))).lossless
    assert faults(check(rows(3), received(rows(0)))) == (3, 0, 0)
    comparison = check(rows(0), received(rows(3)))
    assert faults(comparison) == (0, 3, 0)
    assert comparison.error_factor == float("inf")


def test_a_bucket_that_arrives_before_an_earlier_bucket_breaks_iaso() -> None:
    actual = received(rows(), "same")
    at = actual["__received_at"].cast(pa.int64()).to_numpy().copy()
    buckets = actual["ts"].cast(pa.int64()).to_numpy() // WIDTH_US
    at[buckets == 9] = 8 * WIDTH_US
    comparison = check(rows(), actual.set_column(5, "__received_at", pa.array(at, TIME)))
    assert comparison.order_breaks == (9,)
    assert judge(comparison, Contract(), wall_clock=True) != []
    assert judge(comparison, Contract(order="none"), wall_clock=True) == []


def test_ieso_is_evaluated_over_all_outputs() -> None:
    """IESO: bucket 1 of the second output arrives before bucket 0 of the first output."""

    def output(name: str, times: list[int], arrived: list[int]) -> OutputReport:
        ideal = pa.table({"ts": pa.array(times, TIME)})
        actual = ideal.append_column("__received_at", pa.array(arrived, TIME))
        return OutputReport(name, Contract(order="inter"), found=check(ideal, actual))

    one = output("one", [5, WIDTH_US], [50, 60])
    assert inter_order_breaks([one, output("two", [6, WIDTH_US], [55, 60])]) == ()
    assert inter_order_breaks([one, output("two", [6, WIDTH_US], [40, 45])]) == (1,)


def test_levels_are_the_strongest_that_the_rows_reach() -> None:
    """ECOC section 2.5. IESO concerns all outputs, so only the report of all outputs lists it."""

    def output(name: str, times: list[int], arrived: list[int] | None) -> OutputReport:
        ideal = pa.table({"ts": pa.array(times, TIME)})
        actual = (
            ideal
            if arrived is None
            else ideal.append_column("__received_at", pa.array(arrived, TIME))
        )
        return OutputReport(name, Contract(), found=check(ideal, actual))

    one = output("one", [5, WIDTH_US], [5, WIDTH_US])
    assert one.levels == ("LOLE", "DEFR", "IASO")
    assert Report("net", (one,)).levels == ("LOLE", "DEFR", "IASO", "IESO")
    late = output("two", [5, WIDTH_US], [7_005, WIDTH_US])
    assert late.levels == ("LOLE", "LIDE(7ms)", "IASO")
    both = Report("net", (one, late))
    assert both.levels == ("LOLE", "LIDE(7ms)", "IASO")  # simultaneous rows arrived apart
    assert both.json()["levels"] == ["LOLE", "LIDE(7ms)", "IASO"]
    assert "all outputs together: LOLE LIDE(7ms) IASO" in both.text()
    assert "LOLE: every row arrived, and no other; DEFR: no delay; LIDE: longest" in both.text()
    early = output("three", [5, WIDTH_US], [4, WIDTH_US])
    assert early.levels == ("LOLE", "IASO")
    assert output("four", [5, WIDTH_US], None).levels == ("LOLE",)  # no arrival was recorded


def test_the_contract_decides_which_faults_fail_the_audit() -> None:
    actual = received(rows(), "same")
    comparison = check(
        rows(), pa.concat_tables([actual.slice(2), actual.slice(0, 1), actual.slice(9, 1)])
    )
    assert faults(comparison) == (1, 0, 1)
    assert len(judge(comparison, Contract(), wall_clock=True)) == 2
    assert judge(comparison, Contract(loss=0.01, error=0.01), wall_clock=True) == []
    assert len(judge(comparison, Contract(loss=0.001, error=0.001), wall_clock=True)) == 2
    late = Contract(loss=0.1, error=0.1, within="1s")
    assert len(judge(comparison, late, wall_clock=True)) == 1
    assert judge(comparison, late, wall_clock=False) == []


def test_a_report_is_available_as_text_and_as_plain_json() -> None:
    good = OutputReport("good", Contract(), found=check(rows(), received(rows())), upto=20)
    bad = replace(
        good, name="bad", found=check(rows(), received(rows()).slice(1)), broken=("1 is missing",)
    )
    lost = OutputReport("lost", Contract(), unknown="no durable client received this output")
    assert (good.verdict, bad.verdict, lost.verdict) == ("ok", "failed", "unknown")
    assert Report("net", (good,)).ok
    assert Report("net", (good, lost)).verdict == "unknown"
    report = Report("net", (good, bad, lost))
    assert report.verdict == "failed"
    assert not report.ok
    assert good.levels[0] == "LOLE"
    assert bad.levels[0] == "LILO(LF=0.995, EF=0)"
    text = report.text()
    assert text.startswith("audit of net: failed\n")
    assert "missing: bucket=" in text
    body = report.json()
    assert [output["verdict"] for output in body["outputs"]] == ["ok", "failed", "unknown"]
    assert body["outputs"][1]["rows"]["missing"] == 1
    assert isinstance(body["outputs"][1]["rows"]["examples"]["missing"][0]["ts"], str)
