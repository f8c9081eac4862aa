"""The manifest: the append-only file of records that is the single source of truth of a log.

    HOLDFAST 2\\n
    u32 length | u32 crc32(length, payload) | payload: JSON list of records      (little endian)
    ...

One append is one frame, so records of one append become durable together or not at all, and at most
one frame is unsynced at any time. A crash can therefore damage only the last frame. Recovery relies
on that: a damaged tail was never acknowledged and is cut off; a damaged frame before a valid one
cannot come from a crash, and recovery refuses it, because acknowledged rows would be lost.

With fsync 'never' this holds after the crash of a process, but not after a power loss.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.config import FsyncPolicy
from holdfast.errors import LogCorrupted, LogError, LogUnusable
from holdfast.storage.disk import OS_DISK, AppendFile, Disk
from holdfast.storage.files import put_file, storage, storage_error
from holdfast.storage.records import Note, Record, decode, encode
from holdfast.storage.segment import REMEDY
from holdfast.types import FORMAT

_MAGIC = b"HOLDFAST "
HEADER = _MAGIC + str(FORMAT).encode() + b"\n"
_PREFIX = struct.Struct("<II")
#: Records per frame of a rewritten manifest. The rewrite is atomic because of its rename.
_REWRITE_RECORDS = 1_000
_REOPEN = "check the disk. A host restarts its node by itself; otherwise start the run again"


def frame(payload: bytes) -> bytes:
    return _PREFIX.pack(len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))


def _frame_at(data: bytes, offset: int) -> bytes | None:
    """Payload of the frame at the offset; None if there is no valid frame."""
    start = offset + _PREFIX.size
    if start > len(data):
        return None
    length, checksum = _PREFIX.unpack_from(data, offset)
    payload = data[start : start + length]
    return payload if len(payload) == length and _checksum(payload) == checksum else None


def _next_frame(data: bytes, after: int) -> int | None:
    """Offset of the first valid frame at or after `after`.

    Payloads are JSON lists of objects, so the search computes checksums only at offsets where the
    payload would start with `[{` and end with `}]`. That keeps the search linear for any damage.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    if len(raw) < after + _PREFIX.size + 4:
        return None
    begins = raw[after + _PREFIX.size : -1]
    places = after + np.flatnonzero((begins == ord("[")) & (raw[after + 9 :] == ord("{")))
    lengths = sum(raw[places + byte].astype(np.int64) << (8 * byte) for byte in range(4))
    ends = places + _PREFIX.size + lengths
    fits = (ends <= len(raw)) & (lengths >= 4)
    places, ends = places[fits], ends[fits]
    places = places[(raw[ends - 1] == ord("]")) & (raw[ends - 2] == ord("}"))]
    return next((place for place in places.tolist() if _frame_at(data, place) is not None), None)


def _read(data: bytes, path: str) -> tuple[list[Record], int]:
    """The records, and the length of the valid prefix of the file in bytes."""
    if not data.startswith(HEADER):
        if HEADER.startswith(data):  # a torn header: no record was ever written
            return [], 0
        line = data[: data.find(b"\n") + 1]
        version = line[len(_MAGIC) : -1]
        if line.startswith(_MAGIC) and version.isdigit():
            raise LogCorrupted(
                f"{path}: expected format {FORMAT}, found {int(version)}; start this storage with "
                "the version of Holdfast that wrote it, or use another storage"
            )
        raise LogCorrupted(
            f"{path}: expected the header of a manifest, found other content; {REMEDY}"
        )
    records: list[Record] = []
    good = len(HEADER)
    while (payload := _frame_at(data, good)) is not None:
        try:
            records += decode(payload)
        except LogCorrupted as err:
            raise LogCorrupted(f"{path}, byte {good}: {err}") from err
        good += _PREFIX.size + len(payload)
    survivor = _next_frame(data, good + 1)
    if survivor is not None:
        raise LogCorrupted(
            f"{path}: damaged at byte {good}, but valid records follow from byte {survivor} on. No "
            f"crash causes such damage, and acknowledged rows would be lost; {REMEDY}"
        )
    return records, good


def read_records(data: bytes, path: str) -> list[Record]:
    """The records of a manifest, for read-only access; a torn tail is ignored."""
    return _read(data, path)[0]


class Manifest:
    """The open manifest file. Not thread-safe: the log serializes its appends."""

    def __init__(
        self, path: str, file: AppendFile, disk: Disk, *, good: int, cut_bytes: int, fsync: bool
    ) -> None:
        self.path = path
        #: Bytes of a torn tail that recovery cut off.
        self.cut_bytes = cut_bytes
        self._file = file
        self._disk = disk
        #: Length of the file up to the last durable frame.
        self._good = good
        self._fsync = fsync
        #: Set when the content of the file is uncertain, with the reason. Appends are refused then.
        self._poison: str | None = None

    @classmethod
    def open(
        cls, path: str | Path, fsync: FsyncPolicy, disk: Disk = OS_DISK
    ) -> tuple[Manifest, list[Record]]:
        path, sync = os.path.abspath(path), fsync == "always"
        with storage(path):
            data = disk.read(path) if disk.exists(path) else b""
        records, good = _read(data, path)
        cut_bytes = len(data) - good
        if good == 0:
            put_file(path, HEADER, fsync=sync, disk=disk)
            good, cut_bytes = len(HEADER), 0
        with storage(path):
            file = disk.open_append(path, fsync=sync)
            try:
                if cut_bytes:
                    file.truncate(good)
                if sync:
                    # A killed predecessor may have written or renamed without a sync. The records
                    # must be durable before files are deleted because of them.
                    disk.sync_tree(path, os.path.dirname(path))
            except OSError:
                file.close()
                raise
        return cls(path, file, disk, good=good, cut_bytes=cut_bytes, fsync=sync), records

    @property
    def size_bytes(self) -> int:
        return self._good

    def append(self, records: Sequence[Record]) -> int:
        """Makes the records durable, all or none, and returns their size in bytes. After a failure
        the next append works again, unless the failed one could not be rolled back."""
        self._refuse_if_poisoned()
        if not records:
            return 0
        data = frame(encode(records))
        try:
            self._file.append(data)
        except BaseException as err:
            try:
                self._file.truncate(self._good)
            except OSError as second:
                self._poison = (
                    f"an append failed ({err!r}) and was not rolled back ({second!r}); {_REOPEN}"
                )
            if isinstance(err, OSError):
                raise storage_error(err, self.path) from err
            raise
        self._good += len(data)
        return len(data)

    def rewrite(self, records: Sequence[Record]) -> None:
        """Atomically replaces the file by one that holds only these records.

        The `Note` at the end protects the records before it: a crash cannot tear any of them, and
        damage to them is always followed by a valid frame, so recovery detects it.
        """
        self._refuse_if_poisoned()
        groups = range(0, len(records), _REWRITE_RECORDS)
        frames = [frame(encode(records[start : start + _REWRITE_RECORDS])) for start in groups]
        data = HEADER + b"".join(frames) + frame(encode([Note(f"rewritten as {len(records)}")]))
        try:
            put_file(self.path, data, fsync=self._fsync, disk=self._disk)
            with storage(self.path):
                file = self._disk.open_append(self.path, fsync=self._fsync)
        except LogError as err:
            if not self._file.in_place():
                self._poison = (
                    f"a rewrite failed, and the content of the file is uncertain ({err}); {_REOPEN}"
                )
            raise
        with suppress(OSError):
            self._file.close()
        self._file, self._good = file, len(data)

    def close(self) -> None:
        self._poison = self._poison or "the log is closed"
        with suppress(OSError):
            self._file.close()

    def _refuse_if_poisoned(self) -> None:
        if self._poison is not None:
            raise LogUnusable(f"{self.path}: nothing can be appended: {self._poison}")
