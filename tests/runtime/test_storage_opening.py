"""How a run opens an existing storage, before it starts anything. No JVM.

Runs that are admitted fail at a port that is in use: by then the storage is open."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.main import main
from holdfast.errors import SetupError, StorageInUse
from holdfast.model.identity import identity_of
from holdfast.runtime.running import Run
from holdfast.storage import Log
from holdfast.storage.root import StorageRoot

APP = """
import holdfast as hf
net = hf.Network("net", bucket="100ms")
tap = net.source("tap", "ts timestamp, n long", time="ts")
net.output("out", tap.filter("n > 0"))
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        yield occupied.getsockname()[1]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "app.py"
    file.write_text(APP)
    return file


def files(folder: Path) -> dict[str, str]:
    """Every file below the folder, with the hash of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def network(
    *, bucket: str = "100ms", schema: str = "ts timestamp, n long", condition: str = "n > 0",
    size: str = "2s", slide: str | None = None, aggregate: Any = None, fn: Any = None,
) -> hf.Network:  # fmt: skip
    net = hf.Network("net", bucket=bucket)
    tap = net.source("tap", schema, time="ts", clock="manual")
    filtered = tap.filter(condition).apply(fn or (lambda df: df.filter("n < 9")))
    aggregate = aggregate or hf.sum("n")
    net.output("out", filtered.window(size, slide=slide).group_by("n").agg(x=aggregate))
    return net


def start(net: hf.Network, storage: Path, port: int, **settings: Any) -> None:
    Run(
        net, storage=str(storage), deployment="processes", app="app.py",
        options=hf.Options(port=port), **settings,
    ).start()  # fmt: skip


def let_in(net: hf.Network, storage: Path, port: int, **settings: Any) -> None:
    with pytest.raises(SetupError, match="is the port in use"):
        start(net, storage, port, **settings)


CHANGES: dict[str, tuple[Callable[[], hf.Network], str]] = {
    "window": (lambda: network(size="4s"), r"window-3: size 2s -> 4s"),
    "slide": (lambda: network(slide="1s"), r"window-3: slide 2s -> 1s"),
    "filter": (lambda: network(condition="n > 5"), r"filter-1: condition 'n > 0' -> 'n > 5'"),
    "function": (
        lambda: network(fn=lambda df: df.filter("n < 8")),
        r"apply-2: the code of <lambda> changed",
    ),
    "bucket": (lambda: network(bucket="200ms"), r"network: bucket 100ms -> 200ms"),
    "schema": (
        lambda: network(schema="ts timestamp, n int"),
        r"tap: schema ts timestamp, n bigint -> ts timestamp, n int",
    ),
    "aggregate": (
        lambda: network(aggregate=hf.max("n")),
        r"window-3: aggregate x sum\(n\) -> max\(n\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_query_is_refused_before_anything_is_written(
    change: str, tmp_path: Path, port: int
) -> None:
    """H4: from the first bucket on, with the change; the old query is admitted again."""
    changed, message = CHANGES[change]
    let_in(network(), tmp_path, port)
    before = files(tmp_path)
    with pytest.raises(SetupError, match=message) as refused:
        start(changed(), tmp_path, port)
    assert "--storage" in str(refused.value) and "--fresh" in str(refused.value)
    assert files(tmp_path) == before
    let_in(network(), tmp_path, port)


def test_settings_outside_the_query_may_change(tmp_path: Path, port: int) -> None:
    """Feeds, sinks, contracts and protections do not change the results of a query."""
    let_in(network(), tmp_path, port)
    changed = hf.Network("net", bucket="100ms")
    tap = changed.source("tap", "ts timestamp , n long", time="ts", grace="1s")
    filtered = tap.filter("n > 0").apply(
        # a comment, and other formatting
        lambda df: df.filter(
            "n < 9"
        )
    )  # fmt: skip
    result = filtered.window("2000ms").group_by("n").agg(x=hf.sum("n"))
    changed.output("out", result, contract=hf.Contract(within="5s"), sink=print)
    changed.protect(replicas=2)
    let_in(changed, tmp_path, port)


def test_a_refused_second_run_does_not_disturb_the_first_run(tmp_path: Path, port: int) -> None:
    """C12: other commands find the first run by its run.json."""
    let_in(network(), tmp_path, port)
    described = tmp_path / "run.json"
    described.write_text(json.dumps({"address": "127.0.0.1:1"}))
    first = Log.open(tmp_path / "controller", "controller", fsync="never")
    before = files(tmp_path)
    with pytest.raises(StorageInUse, match="in use by process"):
        start(network(), tmp_path, port)
    after = files(tmp_path)
    first.close()
    assert after == before


def fresh(app: Path, storage: Path, port: int) -> int:
    return main(
        ["run", str(app), "--deployment", "processes", "--fresh", "--quiet", "--storage",
         str(storage), "--port", str(port)]
    )  # fmt: skip


def test_fresh_deletes_no_folder_of_another_program(
    app: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5: a folder that Holdfast did not create."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert fresh(app, folder, port) == 2
    assert files(folder).keys() == {"thesis.txt"}
    error = capsys.readouterr().err
    assert "thesis.txt" in error and "nothing was deleted" in error


def test_fresh_deletes_no_storage_with_foreign_files(
    app: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    let_in(network(), storage, port)
    (storage / "sources" / "notes.txt").write_text("mine")
    before = files(storage)
    assert fresh(app, storage, port) == 2
    assert files(storage) == before
    assert "sources/notes.txt" in capsys.readouterr().err


@pytest.mark.parametrize("log", ["controller", "sources/tap"])
def test_fresh_deletes_no_storage_in_use(
    log: str, app: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """C5, H3: in use by the run itself, or by a process that the run left behind."""
    storage = tmp_path / "storage"
    let_in(network(), storage, port)
    (storage / "run.json").write_text("{}")
    opened = Log.open(storage / log, log.removeprefix("sources/"), fsync="never")
    before = files(storage)
    assert fresh(app, storage, port) == 2
    after = files(storage)
    opened.close()
    assert after == before
    assert "in use by process" in capsys.readouterr().err


def test_fresh_follows_no_symbolic_link(
    app: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, elsewhere = tmp_path / "storage", tmp_path / "elsewhere"
    let_in(network(), storage, port)
    (storage / "clients").mkdir(exist_ok=True)
    (storage / "clients").rename(elsewhere)
    (elsewhere / "precious.txt").write_text("mine")
    (storage / "clients").symlink_to(elsewhere)
    assert fresh(app, storage, port) == 2
    assert (elsewhere / "precious.txt").exists()
    assert "clients is a link" in capsys.readouterr().err


def test_fresh_deletes_a_holdfast_storage_and_reports_it(
    app: Path, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    let_in(network(), storage, port)
    with pytest.raises(SetupError, match="another query"):
        start(network(size="4s"), storage, port)
    assert fresh(app, storage, port) == 2, "the port is in use"
    captured = capsys.readouterr()
    assert "is the port in use" in captured.err
    assert "deleted" in captured.out and "sources" in captured.out
    with pytest.raises(SetupError, match="another query"):
        start(network(), storage, port)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_storage_whose_first_query_was_refused_is_free_for_another_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Nothing was computed, so nothing would be mixed. Rows that were pushed meanwhile remain."""
    host, storage = tmp_path / "host", tmp_path / "data"
    host.write_text("#!/bin/sh\necho 'error: refused' >&2\nexit 2\n")
    host.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(host))
    run = Run(network(), storage=str(storage), deployment="processes", app="missing.py")
    start_processes = run._start_processes

    def pushed_meanwhile() -> None:
        run.sources["tap"].push([{"ts": 5, "n": 1}] * rows, flush=True)
        start_processes()

    monkeypatch.setattr(run, "_start_processes", pushed_meanwhile)
    with pytest.raises(SetupError, match=r"no output can be computed: .* refused"):
        run.start()
    if rows:
        assert (storage / "network.json").exists() and (storage / "sources").exists()
        return
    assert not (storage / "network.json").exists() and not (storage / "sources").exists()
    assert list((storage / "nodes").glob("*.log"))  # the reason
    root = StorageRoot.take(str(storage), identity_of(network(size="4s")), fsync=False)
    root.release()
