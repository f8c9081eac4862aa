"""`holdfast dead-letters`: the rows that a source rejected. No JVM."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.cli.status_view import show_status
from holdfast.edge.source import Source
from holdfast.model.network import Network
from holdfast.runtime.folders import source_folder
from holdfast.storage import Log


@pytest.fixture
def source(tmp_path: Path) -> Source:
    net = Network("net", bucket="500ms")
    net.source("tap", "ts timestamp, n long", time="ts")
    log = Log.open(source_folder(str(tmp_path), "tap"), "tap", fsync="never")
    source = Source(net.sources[0], log, net.width_us)
    source.tick()
    return source


def late(source: Source, rows: int) -> None:
    for n in range(rows):
        source.push([{"ts": datetime(2020, 1, 1, tzinfo=UTC), "n": n}], flush=True)


def test_dead_letters_are_listed_while_the_source_runs(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late(source, 3)
    assert main(["dead-letters", "tap", "--storage", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "_reason=late  ts=2020-01-01 00:00:00+00:00  n=0" in lines[0]


def test_the_newest_dead_letters_are_shown_and_all_on_request(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late(source, 25)
    assert main(["dead-letters", "tap", "--storage", str(tmp_path), "--json", "-n", "2"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["n"] for line in captured.out.splitlines()] == [23, 24]
    assert "the newest 2" in captured.err
    assert main(["dead-letters", "tap", "--storage", str(tmp_path), "-n", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 25


def test_no_dead_letters_and_an_unknown_source_give_different_messages(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dead-letters", "tap", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "source tap: no dead letters\n"
    assert main(["dead-letters", "tab", "--storage", str(tmp_path)]) == 2
    assert "there is no source 'tab'" in (error := capsys.readouterr().err)
    assert "(sources: tap)" in error


def test_status_counts_dead_letters(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    late(source, 7)
    status = {
        "network": "net", "deployment": "local", "bucket_us": 500_000,
        "sources": {"tap": source.status()}, "nodes": [], "hosts": {}, "contracts": {},
        "failures": [], "unhealthy": [], "stopped": {},
    }  # fmt: skip
    show_status(status, as_json=False)
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if "tap" in line]
    assert row.split()[-4:] == ["0", "7", "0", "7"]
