"""The folder of a log: whose it is, which files belong in it."""

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
#: Files of state versions. The engine's: named by its records, deleted by it alone.
STATE = "state"
_LOCK = "lock"


def take_lock(root: str, disk: Disk) -> int:
    """Keeps out a second instance on this machine for as long as it is held.

    Epochs keep zombies from being believed; this keeps two live ones from writing one manifest. The
    kernel lets go when the process dies, however it dies.
    """
    path = f"{root}/{_LOCK}"
    with storage(path):
        try:
            return disk.lock(path)
        except BlockingIOError:
            pid = disk.read(path)[:32].decode(errors="replace").strip() or "unknown"
            raise StorageInUse(
                f"{root} is in use by process {pid}; stop it, or give this node a storage "
                "folder of its own"
            ) from None


def segment_path(identity: SegmentId, *, epoch: int, attempt: int) -> str:
    """Below the root; no two attempts share a name, so a file once named by a record never changes.

    Stream names are quoted: `=` would be a partition column to Spark, and `/` another folder.
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
    """Holds the segment files against the manifest: all of `sizes` must be there, nothing else.

    What is left over was never acknowledged (a crash came between file and record) or is trimmed (a
    crash came between record and deletion), and is deleted; returns those paths. A manifest that
    knows nothing at all beside files that are there is another matter: then it is the manifest that
    is lost, and nothing is deleted.
    """
    folder = f"{root}/{SEGMENTS}"
    with storage(folder):
        found = {f"{SEGMENTS}/{path}": size for path, size in disk.files(folder).items()}
    for path, size in sizes.items():
        if path not in found:
            raise LogCorrupted(f"{root}/{path}: the segment's file is missing; {REMEDY}")
        if found[path] != size:
            raise LogCorrupted(
                f"{root}/{path}: {size} bytes were written, but {found[path]} are there; {REMEDY}"
            )
    orphans = [path for path in found if path not in sizes]
    if fresh and any(not path.endswith(TEMPORARY) for path in orphans):
        raise LogCorrupted(
            f"{root}/{MANIFEST}: missing or empty, but {len(orphans)} segment files are there, "
            f"such as {orphans[0]}; {REMEDY}"
        )
    if disk.exists(f"{root}/{MANIFEST}{TEMPORARY}"):
        orphans.append(f"{MANIFEST}{TEMPORARY}")
    delete(root, orphans, disk)
    return orphans


def delete(root: str, paths: list[str], disk: Disk) -> None:
    """Deletes all it can, then says what it could not."""
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
