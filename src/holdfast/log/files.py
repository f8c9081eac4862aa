"""The only place that writes, syncs and renames: what "durable" means is decided here, once.

A file appears under its name whole or not at all: it is written beside its place, synced, renamed,
and then its folder is synced, because a name lives in the folder and not in the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import LogError, StorageDenied, StorageFull

#: Files that end so were being written when somebody died. No record ever names one.
TEMPORARY = ".tmp"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR})
_DENIED |= {errno.EEXIST}  # a file where a folder should be


def storage_error(err: OSError, path: str | Path) -> LogError:
    """What the operating system said, as one of ours, with the remedy."""
    why = os.strerror(err.errno) if err.errno else str(err)
    if err.errno in _FULL:
        return StorageFull(f"{path}: {why}. Free some space; nothing acknowledged is lost")
    if err.errno in _DENIED:
        return StorageDenied(f"{path}: {why}. Check the path, its owner and how it is mounted")
    return LogError(f"{path}: {why}. Check the device that holds the storage")


@contextmanager
def storage(path: str | Path) -> Iterator[None]:
    """Turns every `OSError` inside into ours, about `path`."""
    try:
        yield
    except OSError as err:
        raise storage_error(err, path) from err


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` may write less than asked, just before a disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync(path: str | Path) -> None:
    """Syncs a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path, root: Path) -> None:
    """Syncs a file, or a folder and all in it, and every folder between it and `root`.

    Spark writes state as a folder of files, so both kinds come here.
    """
    if path.is_dir():
        for folder, _, names in os.walk(path):
            for name in sorted(names):
                sync(os.path.join(folder, name))
            sync(folder)
    else:
        sync(path)
    for parent in path.parents:
        sync(parent)
        if parent == root:
            return


def make_folder(path: Path, *, fsync: bool) -> None:
    """Makes the folder and its parents, each durable in the one above it."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent, fsync=fsync)
    with storage(path):
        path.mkdir(exist_ok=True)
        if fsync:
            sync(path.parent)


def put_file(path: Path, data: bytes | memoryview, *, fsync: bool) -> None:
    """Puts the whole file at `path` in one step, or leaves what was there before."""
    temporary = path.with_name(path.name + TEMPORARY)
    with storage(path):
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(fd, data)
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        if fsync:
            sync(path.parent)
