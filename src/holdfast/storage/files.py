"""Creates files and folders on a disk, and converts `OSError` into the errors of Holdfast."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from zlib import crc32

from holdfast.errors import LogError, StorageDenied, StorageFull, StorageLost
from holdfast.storage.disk import OS_DISK, Disk

#: Bytes of a file that are read at a time to verify it.
BLOCK_BYTES = 1 << 20

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_DENIED |= {errno.EEXIST}  # a file where a folder should be


def storage_error(err: OSError, path: str | Path) -> LogError:
    """The `LogError` for an `OSError`, with the remedy in its message."""
    why = os.strerror(err.errno) if err.errno else str(err)
    if err.errno in _FULL:
        return StorageFull(f"{path}: {why}. Free some space; nothing acknowledged is lost")
    if err.errno in _DENIED:
        return StorageDenied(f"{path}: {why}. Check the path, its owner and its mount options")
    if err.errno in _GONE:
        return StorageLost(
            f"{path}: {why}. The storage was deleted or unmounted; restore or mount it"
        )
    return LogError(f"{path}: {why}. Check the device that holds the storage")


class storage:
    """Context manager that converts every `OSError` into a `LogError` about `path`."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        if isinstance(err, OSError):
            raise storage_error(err, self._path) from err


class syncing(storage):
    """The same for a sync. A full disk is a plain `LogError`, which nobody tries again: another
    sync would succeed, without what was lost."""

    __slots__ = ()

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        try:
            super().__exit__(kind, err, trace)
        except StorageFull as full:
            raise LogError(str(full)) from err


def make_folder(path: str | Path, *, fsync: bool, disk: Disk = OS_DISK) -> None:
    """Creates the folder and its parents. With `fsync`, each is durable on return."""
    path = str(path)
    parent = os.path.dirname(path)
    if parent != path and not disk.is_folder(path):
        make_folder(parent, fsync=fsync, disk=disk)
    with storage(path):
        disk.make_folder(path, fsync=fsync)


def put_file(
    path: str | Path, data: bytes | memoryview, *, fsync: bool, disk: Disk = OS_DISK
) -> None:
    """Writes or replaces the file atomically: the path has the old content or all of `data`."""
    try:
        disk.put(str(path), data, fsync=fsync)
    except OSError as err:
        raise storage_error(err, path) from err


def crc_of(path: str) -> int:
    """CRC-32 of a file, read block by block."""
    crc = 0
    with storage(path), open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = crc32(block, crc)
    return crc


def is_intact(path: str, crc: int) -> bool:
    """Whether a file is the one that was written, to the bit."""
    try:
        return crc_of(path) == crc
    except LogError:
        return False
