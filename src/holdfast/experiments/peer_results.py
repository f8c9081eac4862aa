"""Check and summarise the runs of `vs-peers`.

The expected results are computed from the input files with Arrow. A run with a wrong result is
reported as wrong and not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

WINDOW_BUCKETS = 10
COLUMNS = ["window", "src", "n", "bytes"]
ORDER = [("window", "ascending"), ("src", "ascending")]

#: Number of buckets done, and when in seconds.
Marks = Sequence[tuple[int, float]]


def expected(files: Sequence[str]) -> pa.Table:
    """Count and sum of each source and window of the buckets; the last window may be open."""
    windows = []
    for at in range(0, len(files) - WINDOW_BUCKETS + 1, WINDOW_BUCKETS):
        rows = pa.concat_tables(
            pq.read_table(file, columns=["src", "bytes"])
            for file in files[at : at + WINDOW_BUCKETS]
        )
        found = rows.group_by("src").aggregate([([], "count_all"), ("bytes", "sum")])
        window = pa.array([at // WINDOW_BUCKETS] * found.num_rows, pa.int64())
        columns = [window, found["src"], found["count_all"], found["bytes_sum"]]
        windows.append(pa.table(columns, names=COLUMNS))
    return pa.concat_tables(windows).sort_by(ORDER)


def read_result_file(file: Path) -> pa.Table:
    """A result file of any system: Parquet of one window, or CSV."""
    if file.suffix == ".parquet":
        table = pq.read_table(file)
        window = pa.array([int(file.stem.split("-")[1])] * table.num_rows, pa.int64())
        return table.append_column("window", window).select(COLUMNS)
    types = {"window": pa.int64(), "src": pa.string(), "n": pa.int64(), "bytes": pa.int64()}
    return pacsv.read_csv(
        file,
        read_options=pacsv.ReadOptions(column_names=COLUMNS),
        convert_options=pacsv.ConvertOptions(column_types=types),
    )


def result_files(out: Path) -> list[Path]:
    """The visible files with rows; names of files that are still written begin with a dot."""
    files = [file for file in sorted(out.iterdir()) if not file.name.startswith((".", "_"))]
    return [file for file in files if file.stat().st_size]


def problem(out: Path, wanted: pa.Table) -> str | None:
    """What is wrong with the results, or None. Windows after the expected ones are ignored."""
    files = result_files(out)
    if not files:
        return "no results"
    schema = pa.schema(
        [("window", pa.int64()), ("src", pa.string()), ("n", pa.int64()), ("bytes", pa.int64())]
    )
    found = pa.concat_tables(read_result_file(file).cast(schema) for file in files).sort_by(ORDER)
    last = pc.max(wanted["window"]).as_py()
    found = found.filter(pc.less_equal(found["window"], last)).combine_chunks()
    if found.equals(wanted.cast(schema).combine_chunks()):
        return None
    return (
        f"wrong results: {found.num_rows:,} rows, count {pc.sum(found['n'])}, bytes "
        f"{pc.sum(found['bytes'])}; expected {wanted.num_rows:,}, {pc.sum(wanted['n'])}, "
        f"{pc.sum(wanted['bytes'])}"
    )


def rows_per_s(marks: Marks, rows: int, warm: int) -> float:
    """Rate from the first mark at or after the warm-up to the last one."""
    (first, began), *_ = [mark for mark in marks if mark[0] >= warm]
    last, ended = marks[-1]
    if last <= first:
        raise ValueError(f"expected marks after bucket {warm}, found {first} to {last}")
    return rows * (last - first) / (ended - began)


def visible_at(out: Path, files: Mapping[str, float]) -> Marks:
    """When each window was complete, from the times at which its files became visible."""
    seen: dict[int, float] = {}
    for file in result_files(out):
        for window in pc.unique(read_result_file(file)["window"]).to_pylist():
            seen[window] = max(seen.get(window, 0.0), files[file.name])
    return [((window + 1) * WINDOW_BUCKETS, at) for window, at in sorted(seen.items())]


def delays_ms(marks: Marks, available_at: Sequence[float], warm: int) -> list[float]:
    """From the moment at which the last bucket of a window was there to its result."""
    return [
        1_000 * (at - available_at[count - 1])
        for count, at in marks
        if count % WINDOW_BUCKETS == 0 and warm < count <= len(available_at)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: with few values, p99 is the largest."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(rates: Mapping[str, Sequence[float]], delays: Mapping[str, Sequence[float]]) -> Any:
    return {
        "rows_per_s": {name: round(statistics.median(found)) for name, found in rates.items()},
        "spread": {name: [round(min(found)), round(max(found))] for name, found in rates.items()},
        "delay_ms": {
            name: {
                "median": round(statistics.median(found), 1),
                "p99": round(percentile(found, 0.99), 1),
                "windows": len(found),
            }
            for name, found in delays.items()
        },
    }
