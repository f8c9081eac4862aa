"""A real disk whose machine dies at any moment. Files that were never synced may then be gone, cut
off or full of zeros; the process itself may also die alone, which leaves all files as they are."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

from holdfast.storage.disk import AppendFile, OsDisk
from holdfast.verify.sim.simulated_disk import Crashed


class CrashingDisk(OsDisk):
    """Syncs nothing, but knows what would have been synced. State files are not written through
    this disk, as in production; only the log syncs them."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self._rng = str(root), rng
        #: The process dies in this change from now on; 1: the next one. None: it does not.
        self.crash_after: int | None = None
        #: Writes fail.
        self.full = False
        #: Files whose content is durable; files and folders whose name is.
        self._content: set[str] = set()
        self._names: set[str] = set()
        self._locks: list[int] = []
        self._open: list[AppendFile] = []

    def change(self) -> None:
        """The process is about to change something."""
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after <= 0:
                raise Crashed

    def crash(self, *, power: bool) -> None:
        self.crash_after, self.full = None, False
        for lock in self._locks:
            os.close(lock)
        for file in self._open:
            file.close()
        self._locks, self._open = [], []
        for path in self.not_durable() if power else ():
            self._tear(path)

    def not_durable(self) -> list[str]:
        """The files that a loss of power may damage."""
        files = (os.path.join(self.root, name) for name in self.files(self.root))
        return [path for path in files if not self._is_durable(path)]

    def _is_durable(self, path: str) -> bool:
        if path not in self._content:
            return False
        while path != self.root:
            if path not in self._names:
                return False
            path = os.path.dirname(path)
        return True

    def _tear(self, path: str) -> None:
        length = os.path.getsize(path)
        match self._rng.randrange(4):
            case 0:
                os.unlink(path)
            case 1:
                os.truncate(path, self._rng.randint(0, length))
            case 2:
                Path(path).write_bytes(bytes(length))

    # The `Disk` interface

    def put(self, path: str, data: bytes | memoryview, *, fsync: bool) -> None:
        self.change()
        self._has_space(path)
        super().put(path, data, fsync=False)
        self._content.discard(path)
        if fsync:
            self._content.add(path)
            self._sync_names(os.path.dirname(path))

    def make_folder(self, path: str, *, fsync: bool) -> None:
        self.change()
        super().make_folder(path, fsync=False)
        if fsync:
            self._sync_names(os.path.dirname(path))

    def delete(self, path: str) -> None:
        self.change()
        super().delete(path)

    def lock(self, path: str) -> int:
        self._locks.append(lock := super().lock(path))
        return lock

    def unlock(self, lock: int) -> None:
        self._locks.remove(lock)
        super().unlock(lock)

    def open_append(self, path: str, *, fsync: bool) -> AppendFile:
        self._open.append(file := _CrashingFile(self, path, super().open_append(path, fsync=False)))
        return file

    def sync_tree(self, path: str, root: str) -> None:
        self.change()
        with open(path, "rb"):
            self._content.add(path)
        while path != root:
            path = os.path.dirname(path)
            self._sync_names(path)

    def lose(self, path: str) -> None:
        """The content of the file is not durable after all."""
        self._content.discard(path)

    def _sync_names(self, folder: str) -> None:
        self._names.update(os.path.join(folder, name) for name in os.listdir(folder))

    def _has_space(self, path: str) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def dies_in(self, data: bytes) -> bytes | None:
        """The part of the data that is written before the process dies; None: it does not die."""
        try:
            self.change()
        except Crashed:
            return data[: self._rng.randint(0, len(data))]
        return None


class _CrashingFile:
    def __init__(self, disk: CrashingDisk, path: str, file: AppendFile) -> None:
        self._disk, self._path, self._file = disk, path, file

    def append(self, data: bytes) -> None:
        part = self._disk.dies_in(data)
        if part is not None:
            self._file.append(part)
            raise Crashed
        self._disk._has_space(self._path)
        self._file.append(data)

    def truncate(self, length: int) -> None:
        self._file.truncate(length)

    def in_place(self) -> bool:
        return self._file.in_place()

    def close(self) -> None:
        self._file.close()
