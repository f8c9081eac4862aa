"""The folder of a log as the operating system sees it: whose it is, which files belong in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from holdfast.errors import InputError, LogCorrupted, StorageDenied
from holdfast.log.files import TEMPORARY, storage, storage_error
from holdfast.log.segment import REMEDY
from holdfast.types import SegmentId

MANIFEST = "manifest"
SEGMENTS = "segments"
#: Files of state versions. The engine's: named by its records, deleted by it alone.
STATE = "state"
_LOCK = "lock"


def take_lock(root: Path) -> int:
    """Keeps out a second instance on this machine for as long as the descriptor is open.

    Epochs keep zombies from being believed; this keeps two live ones from writing one manifest. The
    kernel lets go when the process dies, however it dies.
    """
    path = root / _LOCK
    with storage(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with storage(path):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise StorageDenied(
                    f"{root} is in use by process {pid}; stop it, or give this node a storage "
                    "folder of its own"
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def segment_path(identity: SegmentId, *, epoch: int, attempt: int) -> str:
    """Below the root; no two attempts share a name, so a file once named by a record never changes.

    Stream names are quoted: `=` would be a partition column to Spark, and `/` another folder.
    """
    i = identity
    name = f"b{i.bucket}.p{i.partition}.v{i.version}.{i.part}.e{epoch}.{attempt}.parquet"
    return f"{stream_folder(i.stream)}/{name}"


def stream_folder(stream: str) -> str:
    folder = quote(stream, safe="")
    if folder in ("", ".", "..") or len(folder) > 200:
        raise InputError(f"{stream!r} cannot be the name of a stream; choose a short plain word")
    return f"{SEGMENTS}/{folder}"


def tidy(root: Path, sizes: Mapping[str, int], *, fresh: bool) -> list[str]:
    """Holds the segment files against the manifest: all of `sizes` must be there, nothing else.

    What is left over was never acknowledged (a crash came between file and record) or is trimmed (a
    crash came between record and deletion), and is deleted; returns those paths. A manifest that
    knows nothing at all beside files that are there is another matter: then it is the manifest that
    is lost, and nothing is deleted.
    """
    with storage(root / SEGMENTS):
        found = {
            os.path.relpath(os.path.join(folder, name), root): os.lstat(os.path.join(folder, name))
            for folder, _, names in os.walk(root / SEGMENTS, onerror=_give_up)
            for name in sorted(names)
        }
    for path, size in sizes.items():
        if path not in found:
            raise LogCorrupted(f"{root / path}: the segment's file is missing; {REMEDY}")
        if found[path].st_size != size:
            raise LogCorrupted(
                f"{root / path}: {size} bytes were written, but {found[path].st_size} are there; "
                f"{REMEDY}"
            )
    orphans = [path for path in found if path not in sizes]
    if fresh and any(not path.endswith(TEMPORARY) for path in orphans):
        raise LogCorrupted(
            f"{root / MANIFEST}: missing or empty, but {len(orphans)} segment files are there, "
            f"such as {orphans[0]}; {REMEDY}"
        )
    orphans += [name for name in os.listdir(root) if name.endswith(TEMPORARY)]
    delete(root, orphans)
    return orphans


def delete(root: Path, paths: list[str]) -> None:
    """Deletes all it can, then says what it could not."""
    failures: list[tuple[str, OSError]] = []
    for path in paths:
        try:
            os.unlink(root / path)
        except FileNotFoundError:
            pass
        except OSError as err:
            failures.append((path, err))
    for path, failure in failures:
        raise storage_error(failure, root / path) from failure


def _give_up(err: OSError) -> None:
    """A folder that cannot be listed must not look like an empty one."""
    raise err
