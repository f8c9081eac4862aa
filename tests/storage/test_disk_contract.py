"""The in-memory disk behaves like a real one, also for a log."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import (
    LogCorrupted,
    LogError,
    StaleEpoch,
    StorageDenied,
    StorageFull,
    Trimmed,
)
from holdfast.storage import Counter, Ended, Log, Note, Token, Trim, read_only
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import make_folder
from holdfast.types import Segment, SegmentId, Stability
from holdfast.verify.sim.simulated_disk import MemoryDisk

Rows = Callable[..., pa.Table]
SCHEMA = "ts timestamp, src string, bytes bigint"


@dataclass
class Place:
    """An empty folder on a real or an in-memory disk."""

    disk: Disk
    root: str

    def __truediv__(self, name: str) -> str:
        return f"{self.root}/{name}"


def in_memory() -> Place:
    disk = MemoryDisk(random.Random(1))
    disk.make_folder("/m", fsync=True)
    return Place(disk, "/m")


@pytest.fixture(params=["real", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(OS_DISK, str(tmp_path)) if request.param == "real" else in_memory()


# The disk


@pytest.mark.parametrize("fsync", [True, False])
def test_put_writes_and_replaces_a_complete_file(place: Place, fsync: bool) -> None:
    disk, path = place.disk, place / "file"
    for data in (b"first", b"", memoryview(b"the second")):
        disk.put(path, data, fsync=fsync)
        assert disk.read(path) == bytes(data)
        assert disk.files(place.root) == {"file": len(data)}, "no other file is left"
    assert disk.exists(path) and not disk.is_folder(path)
    disk.delete(path)
    assert not disk.exists(path) and disk.files(place.root) == {}


@pytest.mark.parametrize("fsync", [True, False])
def test_files_lists_the_files_below_a_folder_in_order(place: Place, fsync: bool) -> None:
    disk = place.disk
    for folder in ("b", "b/inner", "a", "b"):
        disk.make_folder(place / folder, fsync=fsync)
    assert disk.is_folder(place / "b/inner") and disk.exists(place / "a")
    for size, name in enumerate(("b/z", "b/inner/y", "a/x", "w")):
        disk.put(place / name, bytes(size), fsync=fsync)
    assert list(disk.files(place.root).items()) == [
        ("a/x", 2),
        ("b/inner/y", 1),
        ("b/z", 0),
        ("w", 3),
    ]
    assert disk.files(place / "b") == {"inner/y": 1, "z": 0}
    make_folder(place / "c/d/e", fsync=fsync, disk=disk)
    assert disk.files(place / "c/d/e") == {}


#: Outcome of each call on: a folder, a path below a file, a path below a missing folder, a file,
#: and a missing path.
FATES: dict[str, tuple[Callable[[Disk, str], object], str]] = {
    "read": (lambda disk, path: disk.read(path), "folder nofolder gone fine gone"),
    "files": (lambda disk, path: disk.files(path), "fine nofolder gone nofolder gone"),
    "append": (
        lambda disk, path: disk.open_append(path, fsync=True).append(b"x"),
        "folder nofolder gone fine gone",
    ),
    "put": (
        lambda disk, path: disk.put(path, b"x", fsync=True),
        "folder nofolder gone fine fine",
    ),
    "make": (
        lambda disk, path: disk.make_folder(path, fsync=True),
        "fine nofolder gone exists fine",
    ),
    "delete": (lambda disk, path: disk.delete(path), "folder nofolder gone fine gone"),
    "lock": (lambda disk, path: disk.lock(path), "folder nofolder gone fine fine"),
    "sync": (
        lambda disk, path: disk.sync_tree(path, os.path.dirname(path)),
        "fine nofolder gone fine gone",
    ),
}
ERRORS = {
    "folder": IsADirectoryError,
    "nofolder": NotADirectoryError,
    "gone": FileNotFoundError,
    "exists": FileExistsError,
}


@pytest.mark.parametrize("call", FATES)
def test_both_disks_raise_the_same_errors_for_invalid_paths(place: Place, call: str) -> None:
    disk, (action, outcomes) = place.disk, FATES[call]
    disk.put(place / "file", b"1", fsync=False)
    disk.make_folder(place / "folder", fsync=False)
    disk.make_folder(place / "way.tmp", fsync=False)
    names = ("folder", "file/below", "missing/below", "file", "missing")
    for name, outcome in zip(names, outcomes.split(), strict=True):
        if outcome == "fine":
            action(disk, place / name)
            continue
        with pytest.raises(OSError) as caught:
            action(disk, place / name)
        assert type(caught.value) is ERRORS[outcome], name
        assert not disk.exists(place / "file/below") and not disk.exists(place / "missing/below")
    with pytest.raises(IsADirectoryError):
        disk.put(place / "way", b"something is in the way", fsync=True)


@pytest.mark.parametrize("fsync", [True, False])
def test_an_append_file_appends_truncates_and_detects_its_replacement(
    place: Place, fsync: bool
) -> None:
    disk, path = place.disk, place / "file"
    disk.put(path, b"head ", fsync=fsync)
    file = disk.open_append(path, fsync=fsync)
    file.append(b"one ")
    file.append(b"two")
    file.truncate(9)
    file.append(b"three")
    assert disk.read(path) == b"head one three" and file.in_place()
    disk.put(path, b"another", fsync=fsync)
    file.append(b"!")
    assert disk.read(path) == b"another" and not file.in_place()
    other = disk.open_append(path, fsync=fsync)
    disk.delete(path)
    assert not other.in_place()
    other.close()
    file.close()
    file.close()
    for use in (lambda: file.append(b"x"), lambda: file.truncate(0)):
        with pytest.raises(OSError) as caught:
            use()
        assert caught.value.errno == errno.EBADF
    assert not file.in_place()


def test_a_lock_has_one_holder(place: Place) -> None:
    disk, path = place.disk, place / "lock"
    lock = disk.lock(path)
    with pytest.raises(BlockingIOError):
        disk.lock(path)
    assert int(disk.read(path)) > 0, "the file contains the pid of the holder"
    disk.unlock(lock)
    second = disk.lock(path)
    disk.unlock(second)
    with pytest.raises(OSError) as caught:
        disk.unlock(second)
    assert caught.value.errno == errno.EBADF


def test_sync_tree_accepts_files_folders_and_the_root(place: Place) -> None:
    disk = place.disk
    make_folder(place / "a/b", fsync=False, disk=disk)
    disk.put(place / "a/b/file", b"x", fsync=False)
    disk.sync_tree(place / "a", place.root)
    disk.sync_tree(place / "a/b/file", place.root)
    disk.sync_tree(place.root, place.root)
    assert disk.read(place / "a/b/file") == b"x"


@pytest.fixture(params=["real", "memory"])
def full_place(request: pytest.FixtureRequest) -> tuple[Place, Callable[[bool], None]]:
    """A small disk, and a function that fills it or frees its space."""
    if request.param == "memory":
        place = in_memory()
        return place, lambda full: setattr(place.disk, "full", full)
    tiny: Path = request.getfixturevalue("tiny_disk")
    filler = tiny / "filler"

    def fill(full: bool) -> None:
        if full:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        else:
            filler.unlink()

    (tiny / "m").mkdir()
    return Place(OS_DISK, str(tiny / "m")), fill


def test_a_full_disk_refuses_writes_but_allows_truncation_and_deletion(
    full_place: tuple[Place, Callable[[bool], None]],
) -> None:
    place, fill = full_place
    disk, big = place.disk, bytes(10_000)
    disk.put(place / "file", b"head", fsync=True)
    disk.put(place / "other", b"other", fsync=True)
    file = disk.open_append(place / "file", fsync=True)
    fill(True)
    for write in (
        lambda: disk.put(place / "other", big, fsync=True),
        lambda: disk.put(place / "new", big, fsync=True),
        lambda: file.append(big),
    ):
        with pytest.raises(OSError) as caught:
            write()
        assert caught.value.errno == errno.ENOSPC
    data = disk.read(place / "file")
    assert (b"head" + big).startswith(data) and 4 <= len(data) < 10_004
    file.truncate(4)
    assert disk.files(place.root) == {"file": 4, "other": 5}
    disk.delete(place / "other")
    fill(False)
    file.append(b" tail")
    assert disk.read(place / "file") == b"head tail"
    file.close()


# The log


def start(place: Place, **options: object) -> Log:
    log = Log.open(place / "log", "a", fsync="always", disk=place.disk, **options)  # type: ignore[arg-type]
    log.open_stream("tap", SCHEMA, "ts", 0)
    return log


def put(log: Log, rows: Rows, bucket: int, count: int = 5) -> Segment:
    segment = log.write(rows(bucket, count), SegmentId("tap", 0, bucket), Stability.STABLE)
    log.commit("tap", [segment], bucket, Token("tap", f"offset {bucket}"))
    return segment


def kill(place: Place, log: Log) -> None:
    """The process is killed, the machine keeps running."""
    if isinstance(place.disk, MemoryDisk):
        place.disk.crash(power=False)
        return
    log._manifest.close()
    assert log._lock is not None
    os.close(log._lock)


def test_committed_buckets_survive_and_are_read_back(place: Place, rows: Rows) -> None:
    log = start(place)
    written = [put(log, rows, bucket) for bucket in (0, 3)]
    log.append(Counter("late", 7), Ended("tap"))
    log.write(rows(4), SegmentId("tap", 0, 4), Stability.STABLE)  # never committed
    kill(place, log)
    log = start(place)
    assert (log.epoch, log.info("tap").complete_upto, log.info("tap").ended) == (2, 3, True)
    assert log.segments("tap", 0, 9) == written and len(log.orphans) == 1
    assert log.read(written[1]).equals(rows(3))
    assert (log.token("tap"), log.counter("late")) == ("offset 3", 7)
    read_log = read_only(place / "log", disk=place.disk)
    assert read_log.state == log._state and read_log.read(written[0]).equals(rows(0))
    assert set(place.disk.files(place / "log/segments")) == {
        segment.path.removeprefix("segments/") for segment in written
    }


def test_a_log_folder_has_one_live_owner(place: Place) -> None:
    log = start(place)
    with pytest.raises(StorageDenied, match=r"is in use by process \d+; stop that process"):
        start(place)
    log.close()
    with pytest.raises(LogError, match="closed"):
        log.append(Note("a zombie"))
    assert start(place).epoch == 2
    place.disk.put(place / "file", b"", fsync=False)
    with pytest.raises(StorageDenied, match="file: File exists"):
        Log.open(place / "file/log", "a", fsync="never", disk=place.disk)


def test_current_consumers_allow_trimming_and_replaced_ones_do_not(
    place: Place, rows: Rows
) -> None:
    log = start(place)
    written = [put(log, rows, bucket) for bucket in range(4)]
    log.acknowledge("tap", "r", 3, 3, 1)
    log.acknowledge("tap", "r", 3, 1, 2)
    log.trim("tap", log.trimmable("tap"))
    kill(place, log)
    log = start(place)
    assert log.info("tap").trimmed_upto == log.trimmable("tap") == 1
    assert log.segments("tap", 2, 9) == written[2:]
    for call, error in (
        (lambda: log.segments("tap", 1, 9), Trimmed),
        (lambda: log.read(written[0]), Trimmed),
        (lambda: log.acknowledge("tap", "r", 3, 3, 1), StaleEpoch),
    ):
        with pytest.raises(error):
            call()
    log.append(Trim("tap", 2))
    kill(place, log)  # between record and deletion
    assert start(place).orphans == [written[2].path]


def test_state_versions_are_recorded_only_if_their_files_exist(place: Place) -> None:
    log, disk = start(place), place.disk
    disk.make_folder(place / "log/state/v1", fsync=False)
    disk.put(place / "log/state/v1/part", b"rows", fsync=False)
    log.save_state("top", 3, {"files": ("v1",)}, ["state/v1"])
    with pytest.raises(LogError, match="v2: No such file"):
        log.save_state("top", 6, {}, ["state/v2"])
    kill(place, log)
    log = start(place)
    assert log.states("top") == [(3, {"files": ["v1"]})]
    assert disk.read(place / "log/state/v1/part") == b"rows", "only the engine deletes state files"
    log.drop_states("top", 4)
    assert log.states("top") == []


def test_a_torn_tail_is_cut_and_other_damage_is_refused(place: Place, rows: Rows) -> None:
    log, disk, manifest = start(place), place.disk, place / "log/manifest"
    segment = put(log, rows, 0)
    good = len(disk.read(manifest))
    log.append(Counter("late", 1))
    kill(place, log)
    data = disk.read(manifest)
    disk.put(manifest + ".tmp", b"torn", fsync=False)
    for length in range(good, len(data), 9):
        disk.put(manifest, data[:length], fsync=False)
        log = start(place)
        assert (log.cut_bytes, log.counter("late")) == (length - good, 0)
        assert log.read(segment).equals(rows(0))
        kill(place, log)
    disk.put(manifest, data[: good - 9] + b"?" + data[good - 8 :], fsync=False)
    with pytest.raises(LogCorrupted, match="damaged at byte"):
        start(place)
    disk.put(manifest, data, fsync=False)
    path = place / f"log/{segment.path}"
    disk.put(path, disk.read(path)[:-1], fsync=False)
    with pytest.raises(LogCorrupted, match=r"expected .* bytes, found"):
        start(place)
    disk.delete(path)
    with pytest.raises(LogCorrupted, match="missing"):
        start(place)


def test_a_log_continues_after_space_is_freed(
    full_place: tuple[Place, Callable[[bool], None]], rows: Rows
) -> None:
    place, fill = full_place
    log = start(place)
    put(log, rows, 0)
    ready = log.write(rows(1), SegmentId("tap", 0, 1), Stability.STABLE)
    big = Token("tap", "t" * 10_000)
    fill(True)
    with pytest.raises(StorageFull, match="Free some space"):
        put(log, rows, 2, count=2_000)
    with pytest.raises(StorageFull):
        log.commit("tap", [ready], 1, big)
    assert log.info("tap").complete_upto == 0 and log.segments("tap", 0, 9)[1:] == []
    fill(False)
    log.commit("tap", [ready], 1, big)
    kill(place, log)
    log = start(place)
    assert log.token("tap") == big.token and log.read(ready).equals(rows(1))
    log.close()


# Folders that replace each other


def test_rename_folder_keeps_the_contents_and_replaces_no_folder(place: Place) -> None:
    disk = place.disk
    for folder in ("a", "a/inner"):
        disk.make_folder(place / folder, fsync=True)
    disk.put(place / "a/inner/x", b"1", fsync=True)
    disk.rename_folder(place / "a", place / "b")
    assert not disk.exists(place / "a") and disk.files(place.root) == {"b/inner/x": 1}
    disk.put(place / "b/inner/y", b"22", fsync=True)
    with pytest.raises(OSError):
        disk.rename_folder(place / "nothing", place / "c")
    disk.make_folder(place / "c", fsync=True)
    disk.put(place / "c/z", b"", fsync=True)
    with pytest.raises(OSError):
        disk.rename_folder(place / "b", place / "c")
    disk.remove_folder(place / "c")
    disk.remove_folder(place / "c")
    disk.rename_folder(place / "b", place / "c")
    assert disk.files(place.root) == {"c/inner/x": 1, "c/inner/y": 2}
