"""What `vs-peers` makes of the runs: rates, delays, and results that are wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from holdfast.experiments import peer_environments, vs_peers
from holdfast.experiments.peer_results import (
    delays_ms,
    expected,
    problem,
    rows_per_s,
    summary,
    visible_at,
)
from holdfast.experiments.versus.workload import write_buckets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_buckets(tmp_path_factory.mktemp("in"), 25, 100, 7)


def test_the_expected_results_hold_every_row_of_the_complete_windows(files: list[str]) -> None:
    wanted = expected(files)
    assert sorted(set(wanted["window"].to_pylist())) == [0, 1]
    assert sum(wanted["n"].to_pylist()) == 20 * 100
    rows = pa.concat_tables(pq.read_table(file) for file in files[:20])
    assert sum(wanted["bytes"].to_pylist()) == sum(rows["bytes"].to_pylist())


def write_windows(out: Path, table: pa.Table) -> None:
    for window in (0, 1):
        rows = table.filter(pa.compute.equal(table["window"], window)).drop_columns("window")
        pq.write_table(rows, out / f"window-{window:06d}.parquet")


def test_results_in_either_format_are_accepted(files: list[str], tmp_path: Path) -> None:
    wanted = expected(files)
    (tmp_path / "parquet").mkdir()
    write_windows(tmp_path / "parquet", wanted)
    assert problem(tmp_path / "parquet", wanted) is None
    (tmp_path / "csv").mkdir()
    shuffled = wanted.take(list(reversed(range(wanted.num_rows))))
    without_header = pacsv.WriteOptions(include_header=False)
    pacsv.write_csv(shuffled, tmp_path / "csv" / "part-0", without_header)
    (tmp_path / "csv" / ".part-1.inprogress").write_text("half a row")
    assert problem(tmp_path / "csv", wanted) is None


def test_wrong_results_are_noticed(files: list[str], tmp_path: Path) -> None:
    wanted = expected(files)
    assert problem(tmp_path, wanted) == "no results"
    write_windows(tmp_path, wanted)
    first = pq.read_table(tmp_path / "window-000000.parquet")
    pq.write_table(first.slice(1), tmp_path / "window-000000.parquet")
    assert "wrong results: 13 rows" in (problem(tmp_path, wanted) or "")


def test_a_rate_leaves_out_the_warm_up() -> None:
    marks = [(10, 5.0), (20, 7.0), (30, 8.0), (40, 9.0)]
    assert rows_per_s(marks, rows=100, warm=20) == 1_000.0
    with pytest.raises(ValueError, match="expected marks after bucket 40"):
        rows_per_s(marks, rows=100, warm=40)


def test_a_delay_counts_from_the_last_bucket_of_the_window() -> None:
    available_at = [0.1 * bucket for bucket in range(30)]
    marks = [(10, 1.0), (15, 1.45), (20, 1.95), (30, 3.0), (40, 9.0)]
    assert delays_ms(marks, available_at, warm=10) == pytest.approx([50.0, 100.0])


def test_a_window_is_visible_with_its_last_file(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("0,a,1,1\n1,a,1,1\n")
    (tmp_path / "part-1").write_text("0,b,1,1\n")
    assert visible_at(tmp_path, {"part-0": 1.0, "part-1": 2.0}) == [(10, 2.0), (20, 1.0)]


RESULT: dict[str, Any] = {
    **summary({"holdfast": [3e6, 1e6, 2e6], "flink": [1e6]}, {"holdfast": [9.0, 1.0, 5.0]}),
    "durability": {"holdfast": "flushed"}, "versions": {"flink": "1"},
    "unavailable": {"pathway": "pathway: pip failed: no network"},
}  # fmt: skip


def test_the_summary_gives_medians_and_ranges() -> None:
    assert RESULT["rows_per_s"] == {"holdfast": 2_000_000, "flink": 1_000_000}
    assert RESULT["spread"]["holdfast"] == [1_000_000, 3_000_000]
    assert RESULT["delay_ms"]["holdfast"] == {"median": 5.0, "p99": 9.0, "windows": 3}


def test_the_table_names_the_systems_that_were_not_measured(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(vs_peers.table(RESULT))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "not measured: pathway: pip failed: no network" in text and "2.000" in text


def test_every_peer_has_a_script_and_pinned_packages() -> None:
    for system in {peer.system for peer in vs_peers.PEERS.values()} - {"holdfast"}:
        assert (peer_environments.SCRIPTS / f"{system}_peer.py").exists()
        lines = (peer_environments.SCRIPTS / f"{system}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#"))
        assert system in vs_peers.DURABILITY
