"""The in-memory counterpart of `storage.disk.OsDisk`, which can also lose power, tear writes, fill
up, rot, and fail to read or to sync.

For every file the disk tracks how many bytes are durable, and for every folder which names are.
`crash` decides randomly about the rest: an unsynced tail survives up to any length, and a name that
was created, replaced or removed has its new or its old meaning. Data of a failed sync is lost with
the power, even if a later sync of the file succeeds, because an operating system reports such an
error only once.

Every simulated machine has its own disk. A disk is used by a single thread.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable

from holdfast.storage.disk import TEMPORARY, AppendFile


class Crashed(BaseException):
    """The machine died at this instant. No code in the process may catch this and continue."""


class _File:
    __slots__ = ("data", "durable", "uncut", "unwritten")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        #: Ranges that a failed sync did not write, as (from, to).
        self.unwritten: list[tuple[int, int]] = []
        #: Number of bytes from the start that survive any crash.
        self.durable = 0
        #: Content before a truncation that is not durable; a crash may restore all of it.
        self.uncut: bytearray | None = None

    def sync(self) -> None:
        self.durable, self.uncut = len(self.data), None


class _Folder:
    __slots__ = ("before",)

    def __init__(self) -> None:
        #: Names that changed since the last sync of the folder, with their previous file, if any.
        self.before: dict[str, _File | None] = {}


class MemoryDisk:
    def __init__(self, rng: random.Random) -> None:
        #: Writes fail; existing files can be read, truncated and deleted.
        self.full = False
        #: Reads, or syncs, fail with EIO.
        self.unreadable = self.unsyncable = False
        #: A file of the state is damaged.
        self.rotten = False
        #: The machine dies in this change from now on; 1: the next one. None: no crash.
        self.crash_after: int | None = None
        #: Number of changes made or attempted so far, each of which could have crashed.
        self.operations = 0
        self._rng = rng
        self._nodes: dict[str, _File | _Folder] = {"/": _Folder()}
        #: Path by lock number.
        self._locks: dict[int, str] = {}
        #: Numbers of locks and open files only increase; those up to `_void_upto` died in a crash.
        self._number = 0
        self._void_upto = 0
        self._dead = False

    # Injected failures

    def crash(self, power: bool = True) -> None:
        """The process dies, with its locks and open files. With `power` the machine dies too, and
        unsynced data survives randomly."""
        self._dead, self.crash_after = False, None
        self._locks.clear()
        self._void_upto = self._number
        if not power:
            return
        for path in sorted(self._nodes):
            folder = self._nodes.get(path)
            if isinstance(folder, _Folder):
                for name in sorted(folder.before):
                    if self._rng.random() < 0.5:
                        self._take_back(name, folder.before[name])
                folder.before.clear()
        for path in sorted(self._nodes):
            node = self._nodes[path]
            if isinstance(node, _File):
                self._tear(node)

    def rot(self, *, state: bool = False) -> tuple[str, Callable[[], None]] | None:
        """A bit flips at rest in a random file, one of the state or of the rest. Returns the path
        and a function that restores the bit; None if there is no such file with content."""
        files = [
            path
            for path, node in sorted(self._nodes.items())
            if isinstance(node, _File) and node.data and not path.endswith("/lock")
            if ("/state/" in path) == state
        ]
        if not files:
            return None
        path = self._rng.choice(files)
        file = self._nodes[path]
        assert isinstance(file, _File)
        at, bit = self._rng.randrange(len(file.data)), 1 << self._rng.randrange(8)
        file.data[at] ^= bit

        def restore() -> None:
            if at < len(file.data):  # otherwise power was lost before the byte was durable
                file.data[at] ^= bit

        return path, restore

    def wipe(self) -> None:
        """The machine gets a new, empty disk."""
        self.crash(power=False)
        self._nodes = {"/": _Folder()}

    def copied(self) -> MemoryDisk:
        """A copy of the files, as a snapshot of the file system takes it."""
        copy = MemoryDisk(self._rng)
        for path, node in self._nodes.items():
            copy._nodes[path] = _Folder()
            if isinstance(node, _File):
                copy._nodes[path] = file = _File(bytearray(node.data))
                file.sync()
        return copy

    def restore(self, copy: MemoryDisk) -> None:
        """The machine gets the files of an older copy."""
        self.crash(power=False)
        self._nodes = copy._nodes

    def _take_back(self, name: str, before: _File | None) -> None:
        if isinstance(self._nodes.pop(name, None), _Folder):
            for path in [path for path in self._nodes if path.startswith(f"{name}/")]:
                del self._nodes[path]
        if before is not None:
            self._nodes[name] = before

    def _tear(self, file: _File) -> None:
        if file.uncut is not None and self._rng.random() < 0.5:
            file.data = file.uncut
        if file.durable < len(file.data):
            length = len(file.data)
            del file.data[file.durable + self._part(length - file.durable) :]
            if self._rng.random() < 0.3:  # the length was written, the bytes were not
                file.data += bytes(length - len(file.data))
        for since, upto in file.unwritten:
            lost = len(file.data[since:upto])
            file.data[since : since + lost] = bytes(lost)
        file.unwritten.clear()
        file.sync()

    # The `Disk` interface

    def read(self, path: str) -> bytes:
        file = self._file(path)
        if self.unreadable:
            raise _error(errno.EIO, path)
        return bytes(file.data)

    def exists(self, path: str) -> bool:
        self._alive()
        return path in self._nodes

    def size(self, path: str) -> int | None:
        self._alive()
        node = self._nodes.get(path)
        return len(node.data) if isinstance(node, _File) else None

    def is_folder(self, path: str) -> bool:
        self._alive()
        return type(self._nodes.get(path)) is _Folder

    def files(self, folder: str) -> dict[str, int]:
        self._alive()
        if not self.is_folder(folder):
            raise _error(errno.ENOTDIR, folder) if self.exists(folder) else self._missing(folder)
        start = f"{folder.rstrip('/')}/"
        sizes = {
            path[len(start) :]: len(node.data)
            for path, node in self._nodes.items()
            if type(node) is _File and path.startswith(start)
        }
        return {path: sizes[path] for path in sorted(sizes)}

    def put(self, path: str, data: bytes | memoryview, *, fsync: bool) -> None:
        folder, temporary = self._parent(path), path + TEMPORARY
        for name in (temporary, path):
            if type(self._nodes.get(name)) is _Folder:
                raise _error(errno.EISDIR, name)
        dies = self._change()
        if self.full and not dies:
            raise _error(errno.ENOSPC, path)
        if fsync and self.unsyncable and not dies:
            raise _error(errno.EIO, path)
        # 0 nothing; 1 partial temporary file; 2 complete temporary file; 3 renamed; 4 folder synced
        step = self._rng.randint(0, 1 if self.full else 3) if dies else 4
        file = _File(bytearray(data))
        if step == 1:
            del file.data[self._part(len(file.data)) :]
        elif fsync:
            file.durable = len(file.data)
        if step in (1, 2):
            self._name(folder, temporary, file)
        elif step >= 3:
            if temporary in self._nodes:
                self._name(folder, temporary, None)
            self._name(folder, path, file)
        if dies:
            raise Crashed
        if fsync:
            folder.before.clear()

    def make_folder(self, path: str, *, fsync: bool) -> None:
        parent = self._parent(path)
        node = self._nodes.get(path)
        if type(node) is _File:
            raise _error(errno.EEXIST, path)
        dies = self._change()
        if node is None and self.full and not dies:
            raise _error(errno.ENOSPC, path)
        if node is None and not (dies and (self.full or self.by_chance())):
            parent.before.setdefault(path, None)
            self._nodes[path] = _Folder()
        if dies:
            raise Crashed
        if fsync:
            self._can_sync(path)
            parent.before.clear()

    def delete(self, path: str) -> None:
        self._file(path)
        folder = self._parent(path)
        dies = self._change()
        if not (dies and self.by_chance()):
            self._name(folder, path, None)
        if dies:
            raise Crashed

    def rename_folder(self, path: str, to: str) -> None:
        parent = self._parent(path)
        if not self.is_folder(path):
            raise _error(errno.ENOTDIR, path) if self.exists(path) else self._missing(path)
        if self.exists(to):
            raise _error(errno.ENOTEMPTY, to)
        dies = self._change()
        if not (dies and self.by_chance()):
            for name in [n for n in self._nodes if n == path or n.startswith(f"{path}/")]:
                node = self._nodes.pop(name)
                if isinstance(node, _Folder):
                    before = node.before.items()
                    node.before = {to + inner[len(path) :]: file for inner, file in before}
                self._nodes[to + name[len(path) :]] = node
            for name in (path, to):
                parent.before.pop(name, None)
        if dies:
            raise Crashed

    def remove_folder(self, path: str) -> None:
        parent = self._parent(path)
        if path not in self._nodes:
            return
        inside = sorted(n for n in self._nodes if n.startswith(f"{path}/"))
        dies = self._change()
        for name in inside[len(inside) - self._part(len(inside)) :] if dies else inside:
            del self._nodes[name]
        if dies:
            raise Crashed
        del self._nodes[path]
        parent.before.pop(path, None)

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        file = self._file(path)
        self._number += 1
        return _MemoryAppendFile(self, path, file, self._number, fsync=fsync)

    def lock(self, path: str) -> int:
        parent = self._parent(path)
        if self.is_folder(path):
            raise _error(errno.EISDIR, path)
        if path in self._locks.values():
            raise _error(errno.EWOULDBLOCK, path)
        dies = self._change()
        if self.full and not dies:
            raise _error(errno.ENOSPC, path)
        if not (dies and (self.full or self.by_chance())):
            self._name(parent, path, _File(bytearray(b"1\n")))
        if dies:
            raise Crashed
        self._number += 1
        self._locks[self._number] = path
        return self._number

    def unlock(self, lock: int) -> None:
        self._alive(lock)
        if lock not in self._locks:
            raise _error(errno.EBADF, "lock")
        del self._locks[lock]

    def sync_tree(self, path: str, root: str) -> None:
        self._alive()
        if path not in self._nodes:
            raise self._missing(path)
        start = f"{path.rstrip('/')}/"
        paths = sorted(name for name in self._nodes if name == path or name.startswith(start))
        while path not in (root, "/"):
            path = _above(path)
            paths.append(path)
        dies = self._change()
        if not dies:
            self._can_sync(path)
        for name in paths[: self._part(len(paths))] if dies else paths:
            node = self._nodes[name]
            if isinstance(node, _File):
                node.sync()
            else:
                node.before.clear()
        if dies:
            raise Crashed

    # Internal

    def _alive(self, number: int | None = None) -> None:
        """Raises `Crashed` for calls after a crash, and for locks and files from before a crash."""
        if self._dead or (number is not None and number <= self._void_upto):
            raise Crashed

    def _change(self) -> bool:
        """Counts a change; True if the machine dies in this change."""
        self.operations += 1
        if self.crash_after is None:
            return False
        self.crash_after -= 1
        self._dead = self.crash_after <= 0
        return self._dead

    def _can_sync(self, path: str) -> None:
        if self.unsyncable:
            raise _error(errno.EIO, path)

    def by_chance(self) -> bool:
        return self._rng.random() < 0.5

    def _part(self, length: int) -> int:
        """A random amount that survives: nothing, everything, or any part."""
        some = self._rng.randint(0, length)
        return self._rng.choice((0, length, some, some))

    def _name(self, folder: _Folder, path: str, file: _File | None) -> None:
        """Binds the name in the folder to the file, or removes the name."""
        old = self._nodes.get(path)
        assert not isinstance(old, _Folder)
        if file is not None:
            folder.before.setdefault(path, old)
            self._nodes[path] = file
        else:
            del self._nodes[path]
            if folder.before.setdefault(path, old) is None:
                del folder.before[path]  # created and removed: the disk cannot have changed

    def _file(self, path: str) -> _File:
        self._alive()
        node = self._nodes.get(path)
        if isinstance(node, _File):
            return node
        raise self._missing(path) if node is None else _error(errno.EISDIR, path)

    def _parent(self, path: str) -> _Folder:
        self._alive()
        node = self._nodes.get(_above(path))
        if isinstance(node, _Folder):
            return node
        raise self._missing(path)

    def _missing(self, path: str) -> OSError:
        """The error for a missing path: a file in place of a parent folder, or no such path."""
        while (path := _above(path)) not in self._nodes:
            pass
        return _error(errno.ENOENT if self.is_folder(path) else errno.ENOTDIR, path)


class _MemoryAppendFile:
    __slots__ = ("_disk", "_file", "_fsync", "_number", "_open", "_path")

    def __init__(
        self, disk: MemoryDisk, path: str, file: _File, number: int, *, fsync: bool
    ) -> None:
        self._disk, self._path, self._file, self._number = disk, path, file, number
        self._fsync = fsync
        self._open = True

    def append(self, data: bytes) -> None:
        self._usable()
        disk, file = self._disk, self._file
        if disk._change():
            if disk._rng.random() < 0.3 and not disk.full:  # the crash follows the complete write
                self._add(data)
            else:
                file.data += data[: disk._part(len(data))]
            raise Crashed
        if disk.full:
            file.data += data[: disk._rng.randrange(max(1, len(data)))]
            raise _error(errno.ENOSPC, self._path)
        self._add(data)

    def _add(self, data: bytes) -> None:
        file = self._file
        file.data += data
        if self._fsync:
            if self._disk.unsyncable:
                file.unwritten.append((len(file.data) - len(data), len(file.data)))
                raise _error(errno.EIO, self._path)
            file.durable, file.uncut = len(file.data), None

    def truncate(self, length: int) -> None:
        self._usable()
        disk, file = self._disk, self._file
        dies = disk._change()
        if not (dies and disk.by_chance()):
            if file.uncut is None and length < len(file.data):
                file.uncut = file.data[:]
            file.data[length:] = bytes(max(0, length - len(file.data)))
            file.durable = min(file.durable, length)
            file.unwritten = [(a, min(b, length)) for a, b in file.unwritten if a < length]
        if dies:
            raise Crashed
        if self._fsync:
            disk._can_sync(self._path)
            file.sync()

    def in_place(self) -> bool:
        self._disk._alive(self._number)
        return self._open and self._disk._nodes.get(self._path) is self._file

    def close(self) -> None:
        self._disk._alive(self._number)
        self._open = False

    def _usable(self) -> None:
        self._disk._alive(self._number)
        if not self._open:
            raise _error(errno.EBADF, self._path)


def _above(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
