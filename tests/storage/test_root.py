"""The identity of a storage: the marker of its folder and the query of each log. No JVM."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.errors import IdentityMismatch, SetupError, StorageDenied, StorageInUse
from holdfast.model.identity import Identity, identity_of
from holdfast.storage import Epoch, Log, Query
from holdfast.storage.log_state import LogState, fold, snapshot
from holdfast.storage.root import MARKER, StorageRoot, delete_storage, read_marker
from holdfast.types import FORMAT


def identity(condition: str = "n > 0") -> Identity:
    net = hf.Network("net")
    net.output("out", net.source("tap", "ts timestamp, n long", time="ts").filter(condition))
    return identity_of(net)


def take(path: Path, owner: Identity | None = None, *, accept_versions: bool = False) -> None:
    root = StorageRoot.take(
        str(path), owner or identity(), fsync=False, accept_versions=accept_versions
    )
    root.release()


def test_a_storage_is_locked_by_one_run(tmp_path: Path) -> None:
    root = StorageRoot.take(str(tmp_path), identity(), fsync=True)
    with pytest.raises(StorageInUse, match=f"in use by process {os.getpid()}"):
        take(tmp_path)
    with pytest.raises(StorageInUse):
        delete_storage(str(tmp_path))
    root.release()
    take(tmp_path)


def test_other_library_versions_are_refused_until_they_are_accepted(tmp_path: Path) -> None:
    old, new = identity(), identity()
    old = replace(old, libraries={**old.libraries, "pyarrow": "1.0", "python": "2.7"})
    take(tmp_path, old)
    with pytest.raises(IdentityMismatch, match=r"pyarrow 1.0 -> .*\n.*--accept-versions") as raised:
        take(tmp_path, new)
    assert "library: python 2.7 -> 3." in str(raised.value)
    assert read_marker(str(tmp_path)) == old
    take(tmp_path, new, accept_versions=True)
    take(tmp_path, new)
    with pytest.raises(IdentityMismatch, match="another query"):
        take(tmp_path, identity("n > 1"), accept_versions=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found foreign or damaged content"),
        ("[]", "found foreign or damaged content"),
        ('{"nodes": []}', "found foreign or damaged content"),
        ('{"holdfast": 4, "x": 1}', "expected format 3, found 4"),
        ('{"holdfast": 3, "query": {}}', "another version of Holdfast wrote it"),
    ],
)
def test_a_marker_of_another_program_or_version_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    """C14: for example the marker of another version."""
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(SetupError, match=message):
        take(tmp_path)
    assert (tmp_path / MARKER).read_text() == text


def test_a_storage_without_its_marker_is_identified_by_the_controller_log(tmp_path: Path) -> None:
    take(tmp_path)
    query = identity().digest
    Log.open(tmp_path / "controller", "controller", fsync="never", query=query).close()
    (tmp_path / MARKER).unlink()
    with pytest.raises(IdentityMismatch, match=f"found {query}"):
        take(tmp_path, identity("n > 1"))
    assert not (tmp_path / MARKER).exists()
    take(tmp_path)
    assert read_marker(str(tmp_path)) == identity()


def test_a_foreign_folder_with_a_file_named_like_the_marker_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text('{"nodes": [], "edges": []}')
    (tmp_path / "sources").mkdir()
    with pytest.raises(SetupError, match="found foreign"):
        delete_storage(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [MARKER, "sources"]


def test_an_interrupted_deletion_can_be_repeated(tmp_path: Path) -> None:
    take(tmp_path)
    (tmp_path / MARKER).write_text(json.dumps({"holdfast": FORMAT, "deleting": True}))
    (tmp_path / "sources" / "tap" / "segments").mkdir(parents=True)
    with pytest.raises(SetupError, match="run with --fresh again"):
        take(tmp_path)
    assert delete_storage(str(tmp_path)) == ["sources"]
    take(tmp_path, identity("n > 1"))


def test_deleting_a_missing_or_empty_storage_does_nothing(tmp_path: Path) -> None:
    assert delete_storage(str(tmp_path / "nowhere")) == []
    assert delete_storage(str(tmp_path)) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageDenied, match="is a file"):
        delete_storage(str(tmp_path / "file"))


def test_every_file_that_runs_create_can_be_deleted(tmp_path: Path) -> None:
    """Hosts with several nodes, replaced and killed nodes, logs, feeds and incomplete files."""
    take(tmp_path)
    for folder, owner in {
        "controller": "controller", "sources/tap": "tap", "clients/out": "client-out",
        "nodes/main": "main", "nodes/main.1": "main", "nodes/main@2": "main@2",
        "nodes/host-1/a.0": "a.0", "nodes/host-1/a.0.old": "a.0",
    }.items():  # fmt: skip
        log = Log.open(tmp_path / folder, owner, fsync="never")
        log.open_stream("out", "ts timestamp", "ts", 0)
        log.close()
    for file in (
        "run.json", "run.json.tmp", "spark.log", "nodes/main.log", "nodes/main.spark.log",
        "nodes/main.warm-warm/tap.0.parquet", "nodes/main/state/out/x/part.parquet",
        "nodes/main/inputs/tap/b1.parquet", "sources/tap/read-stream/commits/0",
        "nodes/main/manifest.tmp",
    ):  # fmt: skip
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    assert "nodes" in delete_storage(str(tmp_path))
    assert os.listdir(tmp_path) == ["lock"]


def test_a_log_of_another_query_is_refused_and_not_changed(tmp_path: Path) -> None:
    """The storage of a node that was moved, or restored from another backup."""
    Log.open(tmp_path, "main", fsync="never", query="a" * 16).close()
    before = (tmp_path / "manifest").read_bytes()
    with pytest.raises(IdentityMismatch, match=f"expected a log of query {'b' * 16}"):
        Log.open(tmp_path, "main", fsync="never", query="b" * 16)
    assert (tmp_path / "manifest").read_bytes() == before
    Log.open(tmp_path, "main", fsync="never", query="a" * 16).close()


def test_a_log_without_a_query_records_the_query_of_its_first_run(tmp_path: Path) -> None:
    Log.open(tmp_path, "main", fsync="never").close()
    Log.open(tmp_path, "main", fsync="never", query="a" * 16).close()
    with pytest.raises(IdentityMismatch):
        Log.open(tmp_path, "main", fsync="never", query="b" * 16)


def test_a_snapshot_contains_the_query() -> None:
    state, rebuilt = LogState(), LogState()
    for record in (Epoch(1, "main"), Query("a" * 16)):
        fold(state, record)
    for record in snapshot(state):
        fold(rebuilt, record)
    assert rebuilt == state
