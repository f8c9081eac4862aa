"""The comparison with Structured Streaming: steps of a query, count windows over columns, delays,
ratios and their rendering. Without a JVM."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.errors import HoldfastError
from holdfast.experiments import vs_structured_streaming as vs
from holdfast.experiments.versus import live_holdfast as live
from holdfast.experiments.versus import pictures, realtime, summary
from holdfast.experiments.versus.count_ways import fold_columns
from holdfast.experiments.versus.step_profile import ELSE, Timers
from holdfast.experiments.versus.workload import Buckets, Query, make_bucket

# -- queries ---------------------------------------------------------------------------------------


def test_a_prefill_is_one_step_before_steps_of_one_bucket() -> None:
    query = Query("q", "sliding", 10, 2, warm=1, steps=2, prefill=100)
    assert query.ranges() == [(0, 99), (100, 100), (101, 101), (102, 102)]
    assert query.buckets == 103


def test_groups_of_ten_buckets_do_not_end_with_a_window() -> None:
    (query,) = (q for q in vs.size_of(True).queries if q.name == "large_10")
    assert query.ranges()[:2] == [(5, 14), (15, 24)]
    assert all((hi + 1) % 10 for _, hi in query.ranges())


def test_a_prefill_needs_steps_of_one_bucket() -> None:
    with pytest.raises(ValueError, match="steps of one bucket"):
        Query("q", "sliding", 10, 2, warm=1, steps=2, prefill=5, group=10)


def test_the_installed_form_runs_the_headline_queries_with_a_longer_warm_up() -> None:
    queries = vs.size_of(True).queries
    headline = vs._headline(queries)
    assert [query.name for query in headline] == [*vs.HEADLINE]
    by_name = {query.name: query for query in queries}
    assert headline[0].warm == 2 * by_name["tumbling"].warm
    assert [by_name[query.name] for query in headline[1:]] == [*headline[1:]]


def test_every_query_measures_results() -> None:
    """Windows of ten buckets close in the measured steps of every query, quick or not."""
    for quick in (True, False):
        size = vs.size_of(quick)
        assert size.repeats == 5
        assert {"tumbling", "large", "large_10"} == {*vs.HEADLINE}
        for query in (*size.queries, *size.lazy):
            assert query.steps * query.group >= (20 if query.kind in ("tumbling", "sliding") else 1)


def test_buckets_are_files_in_the_order_of_their_times(tmp_path: Path) -> None:
    query = Query("q", "join", 20, 5, warm=1, steps=1, prefill=2)
    buckets = Buckets(tmp_path)
    buckets.write(query)
    left = [buckets.prefill(query)[0], buckets.left(query, 2), buckets.left(query, 3)]
    assert [pq.read_metadata(file).num_rows for file in left] == [40, 20, 20]
    times = [file.stat().st_mtime for file in left]
    assert times == sorted(times) and len(set(times)) == 3
    assert pq.read_schema(buckets.right(query, 3)).names == ["ts", "src", "level"]
    assert pq.read_table(left[1]).equals(make_bucket(2, 20, 5))


# -- count windows ---------------------------------------------------------------------------------


def one_by_one(tables: list[pa.Table], size: int) -> list[tuple[str, int, int]]:
    rows = [row for table in tables for row in table.to_pylist()]
    held: dict[str, list[int]] = {}
    results = []
    for row in rows:
        values = held.setdefault(row["src"], [])
        values.append(row["bytes"])
        if len(values) == size:
            results.append((row["src"], sum(values), int(row["ts"].timestamp() * 1e6 + 0.5)))
            values.clear()
    return sorted(results)


@pytest.mark.parametrize(
    ("rows", "keys", "size"), [(50, 7, 3), (200, 3, 10), (9, 30, 2), (40, 1, 1)]
)
def test_count_windows_over_columns_equal_those_of_a_loop(rows: int, keys: int, size: int) -> None:
    tables = [make_bucket(bucket, rows, keys) for bucket in range(6)]
    state = pa.table(
        {"src": pa.array([], pa.string()), "n": np.zeros(0, int), "bytes": np.zeros(0, int)}
    )
    results = []
    for table in tables:
        out, state = fold_columns(state, table, size)
        last = out["last"].cast(pa.int64()).to_pylist()
        results += list(zip(out["src"].to_pylist(), out["bytes"].to_pylist(), last, strict=True))
    assert sorted(results) == one_by_one(tables, size)
    assert max(state["n"].to_pylist(), default=0) < size


# -- while rows arrive -----------------------------------------------------------------------------


def test_an_update_is_as_late_as_its_newest_row() -> None:
    # Rows 5 and 105 of the window that starts with row 1,000 are the first two rows of key 5.
    lines = [
        (1_000_000 + 5_000 + 12_000, 1_000_000, 5, 1),
        (1_000_000 + 105_000 + 15_000, 1_000_000, 5, 2),
    ]
    assert realtime.update_delays_ms(lines, 0) == [12.0, 15.0]


def test_a_window_is_final_at_the_end_of_the_batch_that_passes_it() -> None:
    batches = [
        {"timestamp": "1970-01-01T00:00:00.000Z", "durationMs": {"triggerExecution": 5_200},
         "eventTime": {"max": "1970-01-01T00:00:04.999Z"}},
        {"timestamp": "1970-01-01T00:00:05.200Z", "durationMs": {"triggerExecution": 5_100},
         "eventTime": {"max": "1970-01-01T00:00:10.100Z"}},
        {"timestamp": "1970-01-01T00:00:10.300Z", "durationMs": {"triggerExecution": 1}},
    ]  # fmt: skip
    delays = realtime.final_delays_ms(batches, [0, 3_000_000, 4_000_000, 10_000_000])
    assert delays == [4_200.0, 1_200.0, 5_300.0]  # the last window is not final yet


def test_rows_that_are_written_again_after_a_kill_are_counted() -> None:
    before = [(100, 0, 1, 1), (200, 0, 1, 2)]
    after = [(2_000_000, 0, 1, 1), (2_000_100, 0, 1, 2), (3_000_300, 0, 1, 3)]
    cost = realtime.kill_cost([*before, *after], killed_us=300)
    assert cost == {"pause_after_kill_s": 3.0, "duplicates_after_kill": 2}
    with pytest.raises(HoldfastError, match="before or after"):
        realtime.kill_cost(before, killed_us=300)


def test_the_pause_of_a_client_is_the_gap_around_the_kill() -> None:
    def at(us: int, bucket: int) -> live.Delivered:
        return live.Delivered(us, bucket, 1, 10, ("a",))

    arrived = [at(0, 1), at(100_000, 2), at(1_400_000, 3), at(1_450_000, 4), at(9_000_000, 5)]
    cost = live.kill_cost(arrived, killed_us=150_000)
    assert cost == {"pause_after_kill_s": 1.3, "duplicates_after_kill": 0}
    assert live.kill_cost([*arrived, at(9_100_000, 5)], 150_000)["duplicates_after_kill"] == 1


def test_the_time_of_an_inner_part_does_not_count_for_the_outer_one() -> None:
    times = iter([0.0, 1.0, 4.0, 10.0])
    timers = Timers(lambda: next(times))
    inner = timers.around("inner", lambda: None)
    timers.around("outer", inner)()
    assert timers.seconds == {"inner": 3.0, "outer": 7.0}
    assert timers.shares(20.0) == {"inner": 0.15, "outer": 0.35, ELSE: 0.5}


# -- the result ------------------------------------------------------------------------------------


def measures(due_ms: float, rows_per_s: float, step_ms: float | None = None) -> dict[str, Any]:
    return {"due_ms": [due_ms], "step_ms": [step_ms or due_ms], "rows_per_s": rows_per_s}


def found() -> summary.Found:
    return {
        "tumbling": {
            "holdfast": [measures(ms, 20_000) for ms in (50, 40, 60, 45, 55)],
            "tuned": [measures(ms, 9_000) for ms in (100, 90, 125, 80, 110)],
            "tuned-rocksdb": [measures(120, 8_000)],
            "installed": [measures(200, 4_000)],
        },
        "sliding": {"holdfast": [measures(65, 1)], "tuned": [measures(130, 1)]},
        "join": {"holdfast": [measures(60, 1)], "tuned": [measures(240, 1)]},
        "stateless": {"holdfast": [measures(90, 1)], "tuned": [measures(100, 1)]},
        "large": {
            "holdfast": [measures(100, 3e6)], "tuned": [measures(200, 1e6)],
            "installed": [measures(300, 5e5)],
        },
        "large_10": {
            "holdfast": [measures(600, 3.4e6)], "tuned": [measures(600, 3.1e6)],
            "installed": [measures(900, 2e6)],
        },
        "count": {"holdfast": [measures(200, 5e5)], "tuned": [measures(150, 6e5, 160)]},
        "count applyInPandasWithState": {"tuned": [measures(28_000, 3_000)]},
        "count transformWithStateInPandas": {"tuned": [measures(20_000, 5_000)]},
        "lazy_tumbling": {"holdfast": [measures(40, 1e5, 1)]},
        "lazy_large": {"holdfast": [measures(400, 4e6, 1)]},
        "profile": {"holdfast": [{"commit": 0.1, "everything else": 0.9}]},
    }  # fmt: skip


def result() -> dict[str, Any]:
    ours = {"update_ms": 110.0, "final_ms": 67.0, "rows_per_s": 5e5, "pause_after_kill_s": 0.3,
            "duplicates_after_kill": 0}  # fmt: skip
    theirs = {"update_ms": 15.0, "final_ms": 2_352.0, "rows_per_s": 6e3, "pause_after_kill_s": 9.0,
              "duplicates_after_kill": 1_304}  # fmt: skip
    alone = {"pause_after_kill_s": 7.0, "duplicates_after_kill": 0}
    ends = summary.beside(
        {"final_ms": 70.0, "final_ms_all": [60.0, 70.0, 90.0]},
        {"final_ms": 300.0, "final_ms_all": [250.0, 300.0, 420.0]},
    )
    return {**summary.summarize(found()), "end_to_end": ends, "no_fork": True,
            "realtime": summary.realtime(ours, theirs, alone)}  # fmt: skip


def test_ratios_compare_medians_with_the_faster_state_store() -> None:
    ratios = summary.summarize(found())
    assert ratios["latency_ratio"] == 0.25 and ratios["latency_ratio_tuned"] == 0.5
    assert ratios["throughput_ratio"] == 6.0 and ratios["throughput_ratio_tuned"] == 3.0
    assert ratios["throughput_ratio_10"] == 1.7 and ratios["throughput_ratio_10_tuned"] == 1.1
    assert ratios["join_ratio_tuned"] == 0.25 and ratios["sliding_ratio_tuned"] == 0.5
    assert ratios["stateless_ratio_tuned"] == 0.9
    assert ratios["lazy_latency_ms"] == 40 and ratios["lazy_rows_per_s"] == 4e6


def test_the_wait_for_the_watermark_is_reported_beside_the_latency() -> None:
    measured = found()
    assert summary.watermark_wait_ms(measured) is None
    measured["tumbling"]["tuned"][0]["emitting"] = [111, 121, 131]
    assert summary.summarize(measured)["watermark_wait_ms"] == 200.0


def test_the_fastest_way_of_count_windows_counts() -> None:
    ratios = summary.summarize(found())
    assert ratios["count_window_ms"] == {
        "foreachBatch": 160, "applyInPandasWithState": 28_000, "transformWithStateInPandas": 20_000,
    }  # fmt: skip
    assert ratios["count_window_ratio"] == 1.25


def test_every_configuration_has_its_repeats_and_their_range() -> None:
    one = summary.summarize(found())["runs"]["tumbling"]["tuned"]["due_ms"]
    assert one == {"median": 100, "min": 80, "max": 125, "repeats": [100, 90, 125, 80, 110]}


def test_the_table_and_the_readme_show_both_sides() -> None:
    shown = summary.table(result())
    caption = str(shown.caption)
    assert "110 ms and 15 ms" in caption and "67 ms and 2,352 ms" in caption
    assert "0 and 1,304" in caption and "count windows 1.25" in caption
    assert "Holdfast 70 ms (60 to 90); tuned 300 ms (250 to 420)" in caption
    spec = importlib.util.spec_from_file_location(
        "figures", Path(__file__).parents[2] / "scripts" / "figures.py"
    )
    assert spec is not None and spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    rows = figures.costs({"vs-structured-streaming": result()})
    assert "50 ms (40 to 60)" in rows and "1,304" in rows
    assert "fastest of three ways: foreachBatch, 160 ms" in rows
    without = {**copy.deepcopy(result()), "realtime": None, "no_fork": False}
    assert "no JDK" in str(summary.table(without).caption)
    assert "real-time mode" not in figures.costs({"vs-structured-streaming": without})


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    (path,) = pictures.plot(result(), str(tmp_path))
    assert Path(path).stat().st_size > 10_000
