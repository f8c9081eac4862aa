"""The file operations of a log: the only module that writes, syncs and renames files.

This module defines "durable". A file appears under its name completely or not at all: the content
is written to a temporary file and synced, the file is renamed, and then its folder is synced,
because the name is part of the folder and not of the file.

All functions raise `OSError`; `files` converts it into the errors of Holdfast. The in-memory
implementation, `holdfast.verify.sim.simulated_disk`, can also simulate a power loss. Both
implementations pass the same contract test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from typing import Protocol

#: Suffix of files that are being written; a crash leaves them behind. No record names such a file.
TEMPORARY = ".tmp"


class AppendFile(Protocol):
    """An append-only file. `fsync` of `open_append` decides whether every change is synced."""

    def append(self, data: bytes) -> None:
        """Writes all of `data`. After a failure, any part of `data` may be in the file."""

    def truncate(self, length: int) -> None:
        """Cuts the file off after `length` bytes."""

    def in_place(self) -> bool:
        """Whether the path still refers to the open file."""

    def close(self) -> None: ...


class Disk(Protocol):
    def read(self, path: str) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def is_folder(self, path: str) -> bool: ...

    def size(self, path: str) -> int | None:
        """Size of a file in bytes; None: the file does not exist."""

    def files(self, folder: str) -> dict[str, int]:
        """Sizes of all files below the folder, by relative path, sorted by path."""

    def put(self, path: str, data: bytes | memoryview, *, fsync: bool) -> None:
        """Writes or replaces the file atomically: the path has the old content or all of `data`."""

    def make_folder(self, path: str, *, fsync: bool) -> None:
        """Creates the folder in an existing parent. The parent is synced also if the folder exists:
        the process that created it may have crashed before the sync."""

    def delete(self, path: str) -> None:
        """Deletes the file. The file may reappear after a power loss."""

    def rename_folder(self, path: str, to: str) -> None:
        """Renames the folder within its parent. Atomic, and durable on return."""

    def remove_folder(self, path: str) -> None:
        """Deletes the folder and its contents, if it exists. A crash may leave a part behind."""

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        """Opens an existing file."""

    def lock(self, path: str) -> int:
        """Locks the file for this process, until `unlock` or until the process ends in any way.

        Raises `BlockingIOError` if another process holds the lock; the file then contains its pid.
        """

    def unlock(self, lock: int) -> None: ...

    def sync_tree(self, path: str, root: str) -> None:
        """Syncs a file, or a folder with its contents, and every folder from there up to `root`.

        State versions consist of files and of folders, because Spark writes a folder of files.
        """


class OsDisk:
    """The file systems of this machine."""

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def size(self, path: str) -> int | None:
        with suppress(OSError):
            return os.stat(path).st_size
        return None

    def files(self, folder: str) -> dict[str, int]:
        paths = {
            os.path.relpath(os.path.join(inner, name), folder): os.path.join(inner, name)
            for inner, _, names in os.walk(folder, onerror=_give_up)
            for name in names
        }
        return {path: os.lstat(paths[path]).st_size for path in sorted(paths)}

    def put(self, path: str, data: bytes | memoryview, *, fsync: bool) -> None:
        temporary = path + TEMPORARY
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _write_all(fd, data)
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        if fsync:
            _sync(os.path.dirname(path) or ".")

    def make_folder(self, path: str, *, fsync: bool) -> None:
        parent = os.path.dirname(path)
        try:
            os.mkdir(path)
        except OSError:
            if not os.path.isdir(path):
                raise
            if fsync:
                with suppress(OSError):  # a folder that this process may not sync is not its own
                    _sync(parent)
        else:
            if fsync:
                _sync(parent)

    def delete(self, path: str) -> None:
        os.unlink(path)

    def rename_folder(self, path: str, to: str) -> None:
        os.rename(path, to)
        _sync(os.path.dirname(to))

    def remove_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        return _OsAppendFile(path, fsync=fsync)

    def lock(self, path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, lock: int) -> None:
        os.close(lock)

    def sync_tree(self, path: str, root: str) -> None:
        if os.path.isdir(path):
            for folder, _, names in os.walk(path, onerror=_give_up):
                for name in sorted(names):
                    _sync(os.path.join(folder, name))
                _sync(folder)
        else:
            _sync(path)
        while path not in (root, "/"):
            path = os.path.dirname(path)
            _sync(path)


class _OsAppendFile:
    __slots__ = ("_fd", "_fsync", "_path")

    def __init__(self, path: str, *, fsync: bool) -> None:
        self._path = path
        self._fsync = fsync
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND)

    def append(self, data: bytes) -> None:
        _write_all(self._fd, data)
        if self._fsync:
            os.fdatasync(self._fd)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)
        if self._fsync:
            os.fsync(self._fd)

    def in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


OS_DISK = OsDisk()


def _write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes: `os.write` may write fewer than given, as on a nearly full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: str) -> None:
    """Syncs a file, or the directory entries of a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _give_up(err: OSError) -> None:
    """Error handler for `os.walk`: a folder that cannot be listed must not look empty."""
    raise err
