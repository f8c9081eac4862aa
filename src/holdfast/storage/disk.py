"""What a log asks of the operating system: the only place that writes, syncs and renames.

What "durable" means is decided here, once. A file appears under its name whole or not at all: it is
written beside its place, synced, renamed, and then its folder is synced, because a name lives in
the folder and not in the file.

Everything here raises `OSError`; `files` turns that into ours. The twin in memory, which can also
lose power, is `holdfast.verify.sim.simulated_disk`; both pass one contract test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from typing import Protocol

#: Files that end so were being written when somebody died. No record ever names one.
TEMPORARY = ".tmp"


class AppendFile(Protocol):
    """A file that grows at its end, synced after every change or never, as it was opened."""

    def append(self, data: bytes) -> None:
        """Writes all of it. After a failure any part of it may be there."""

    def truncate(self, length: int) -> None:
        """Cuts the file off behind `length` bytes."""

    def in_place(self) -> bool:
        """Whether the file of that name is still the one that is open."""

    def close(self) -> None: ...


class Disk(Protocol):
    def read(self, path: str) -> bytes: ...

    def exists(self, path: str) -> bool: ...

    def is_folder(self, path: str) -> bool: ...

    def size(self, path: str) -> int | None:
        """Of a file; None: there is none."""

    def files(self, folder: str) -> dict[str, int]:
        """Sizes of all files below the folder, by their path below it, in its order."""

    def put(self, path: str, data: bytes | memoryview, *, fsync: bool) -> None:
        """Puts the whole file there in one step, or leaves what was there before."""

    def make_folder(self, path: str, *, fsync: bool) -> None:
        """Makes the folder in one that is there. One that is there already is synced like a new
        one: whoever made it may have died before the sync."""

    def delete(self, path: str) -> None:
        """Takes the file away. Its name may be back after a loss of power."""

    def rename_folder(self, path: str, to: str) -> None:
        """Gives the folder another name beside it, in one step, durable when it returns."""

    def remove_folder(self, path: str) -> None:
        """Takes away the folder and all in it, if it is there. A crash may leave a part of it."""

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        """Opens a file that is there."""

    def lock(self, path: str) -> int:
        """Locks the file for this process, until `unlock` or its death, however it dies.

        `BlockingIOError` if somebody has it locked; the file then holds the number of that process.
        """

    def unlock(self, lock: int) -> None: ...

    def sync_tree(self, path: str, root: str) -> None:
        """Syncs a file, or a folder and all in it, and every folder between it and `root`.

        Spark writes state as a folder of files, so both kinds come here.
        """


class OsDisk:
    """The disks of this machine."""

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
        found = {
            os.path.relpath(os.path.join(inner, name), folder): os.path.join(inner, name)
            for inner, _, names in os.walk(folder, onerror=_give_up)
            for name in names
        }
        return {path: os.lstat(found[path]).st_size for path in sorted(found)}

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
                with suppress(OSError):  # where it is not ours to sync, it was not ours to make
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
    """`os.write` may write less than asked, just before a disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync(path: str) -> None:
    """Syncs a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _give_up(err: OSError) -> None:
    """A folder that cannot be listed must not look like an empty one."""
    raise err
