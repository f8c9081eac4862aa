"""The folder of a log: its lock, its file names, and the cleanup after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from holdfast.errors import InputError, LogCorrupted, StorageInUse
from holdfast.storage.disk import TEMPORARY, Disk
from holdfast.storage.files import storage, storage_error
from holdfast.storage.segment import REMEDY
from holdfast.types import SegmentId

MANIFEST = "manifest"
SEGMENTS = "segments"
#: Files of state versions. `State` records name them; only the engine deletes them.
STATE = "state"
#: A file that tells consumers whether they see this folder (`Service`).
MARK = "mark"
_LOCK = "lock"


def take_lock(root: str, disk: Disk) -> int:
    """Locks the folder against a second instance on this machine.

    Epochs reject messages of replaced instances; the lock keeps two live instances from writing the
    same manifest. The kernel releases the lock when the process ends in any way.
    """
    path = f"{root}/{_LOCK}"
    with storage(path):
        try:
            return disk.lock(path)
        except BlockingIOError:
            pid = disk.read(path)[:32].decode(errors="replace").strip() or "unknown"
            raise StorageInUse(
                f"{root} is in use by process {pid}; stop that process, or give this node a "
                "storage folder of its own"
            ) from None


def segment_path(identity: SegmentId, *, epoch: int, attempt: int) -> str:
    """Path of a segment file, relative to the root. Every attempt to write a segment has its own
    path, so a file that a record names never changes.

    Stream names are quoted: Spark takes `=` for a partition column, and `/` separates folders.
    """
    i = identity
    name = f"b{i.bucket}.p{i.partition}.v{i.version}.{i.part}.e{epoch}.{attempt}.parquet"
    return f"{stream_folder(i.stream)}/{name}"


@lru_cache(maxsize=1024)
def stream_folder(stream: str) -> str:
    folder = quote(stream, safe="")
    if folder in ("", ".", "..") or len(folder) > 200:
        raise InputError(f"{stream!r} cannot be the name of a stream; choose a short plain word")
    return f"{SEGMENTS}/{folder}"


def tidy(root: str, sizes: Mapping[str, int], disk: Disk, *, fresh: bool) -> list[str]:
    """Checks the segment files against the manifest and deletes orphans; returns their paths.

    Every file in `sizes` must exist with its size. Any other file is an orphan: a crash came after
    the file was written and before its record, or after a trim record and before the deletion. If
    the manifest is empty (`fresh`) but segment files exist, the manifest is lost: this raises
    `LogCorrupted`, and nothing is deleted.
    """
    folder = f"{root}/{SEGMENTS}"
    with storage(folder):
        sizes_on_disk = {f"{SEGMENTS}/{path}": size for path, size in disk.files(folder).items()}
    for path, size in sizes.items():
        if path not in sizes_on_disk:
            raise LogCorrupted(f"{root}/{path}: the segment file is missing; {REMEDY}")
        if sizes_on_disk[path] != size:
            raise LogCorrupted(
                f"{root}/{path}: expected {size} bytes, found {sizes_on_disk[path]}; {REMEDY}"
            )
    orphans = [path for path in sizes_on_disk if path not in sizes]
    if fresh and any(not path.endswith(TEMPORARY) for path in orphans):
        raise LogCorrupted(
            f"{root}/{MANIFEST}: missing or empty, but {len(orphans)} segment files exist, "
            f"such as {orphans[0]}; {REMEDY}"
        )
    if disk.exists(f"{root}/{MANIFEST}{TEMPORARY}"):
        orphans.append(f"{MANIFEST}{TEMPORARY}")
    delete(root, orphans, disk)
    return orphans


def delete(root: str, paths: list[str], disk: Disk) -> None:
    """Deletes as many of the files as possible, then raises the first failure."""
    failures: list[tuple[str, OSError]] = []
    for path in paths:
        try:
            disk.delete(f"{root}/{path}")
        except FileNotFoundError:
            pass
        except OSError as err:
            failures.append((path, err))
    for path, failure in failures:
        raise storage_error(failure, f"{root}/{path}") from failure
