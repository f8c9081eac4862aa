"""Index of the files with the rows of a node's inputs, by bucket. The size of the index depends on
the retained buckets, not on the duration of the run."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from holdfast.engine.inputs import InputFile
from holdfast.errors import InputsLost
from holdfast.storage.files import is_intact, storage
from holdfast.storage.segment import write_segment
from holdfast.streams.delivery import Delivery
from holdfast.types import Stability


class InputIndex:
    """Files of the inputs. Rows that arrive over the network without shared storage are written to
    `inputs/` in the node's own storage, a cache that a new instance clears."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        #: Stable files per stream, in order of their buckets.
        self._files: dict[str, list[InputFile]] = {}
        #: Tentative files per stream and bucket, until stable ones replace them.
        self._tentative: dict[str, dict[int, InputFile]] = {}
        #: Tentative files that were replaced: a step may still be reading them.
        self._replaced: dict[str, list[InputFile]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._clear()

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        with self._lock:
            held = self._files.get(stream, [])
            return held[bisect_left(held, lo, key=_bucket) : bisect_right(held, hi, key=_bucket)]

    def best(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        """The best available files: stable ones, and tentative ones where those are missing."""
        with self._lock:
            tentative = self._tentative.get(stream, {})
            extra = [tentative[bucket] for bucket in sorted(tentative) if lo <= bucket <= hi]
        return sorted([*self.files(stream, lo, hi), *extra], key=_bucket) if extra else (
            self.files(stream, lo, hi)
        )  # fmt: skip

    def drop_gone(self, streams: Iterable[str]) -> bool:
        """Remove tentative files that their producer has deleted. True if any file was deleted."""
        deleted = False
        with self._lock:
            for stream in streams:
                held = self._tentative.get(stream, {})
                for bucket in [b for b, file in held.items() if not self._there(file.path)]:
                    del held[bucket]
                    deleted = True
                # A file that a step reads may have been replaced here before it was deleted.
                deleted |= any(not self._there(f.path) for f in self._replaced.get(stream, ()))
        return deleted

    def check(self, streams: Iterable[str], lo: int, hi: int, node: str, err: Exception) -> None:
        """Raise InputsLost if a file in a producer's log is missing or damaged, the probable cause
        of `err`."""
        held = (file for stream in streams for file in self.files(stream, lo, hi))
        others = (file for file in held if not file.path.startswith(self.folder))
        for file in others:
            if not self._readable(file):
                raise InputsLost(
                    f"{file.path}: this input segment of node {node!r} is missing or damaged; the "
                    "node requests the segment from its producer again"
                ) from err

    def last(self, stream: str) -> int | None:
        """The newest bucket with rows."""
        with self._lock:
            held = self._files.get(stream)
            return held[-1].bucket if held else None

    def held(self, stream: str) -> int:
        """Number of buckets of a stream that have rows."""
        with self._lock:
            return len({file.bucket for file in self._files.get(stream, [])})

    def add(self, delivery: Delivery, time: str) -> list[tuple[int, int, int]]:
        """Add the files of a delivery: all or none. A delivery that fails is repeated completely.
        Returns bucket, rows and bytes of each stable segment."""
        files: list[InputFile] = []
        tentative: list[InputFile] = []
        for number, segment in enumerate(delivery.segments):
            stable = segment.stability is Stability.STABLE
            if delivery.tables:
                kind = "" if stable else f".t{next(self._numbers)}"
                name = f"{segment.id.bucket}.{segment.id.version}.{segment.id.part}{kind}.parquet"
                path = os.path.join(self.folder, delivery.stream, name)
                crc = self._put(delivery.tables[number], path, time)
            else:
                path, crc = delivery.paths[number], segment.crc
            (files if stable else tentative).append(
                InputFile(segment.id.bucket, path, segment.rows, crc)
            )
        with self._lock:
            for file in files:
                insort(self._files.setdefault(delivery.stream, []), file, key=_bucket)
            held = self._tentative.setdefault(delivery.stream, {})
            replaced = [held.pop(bucket) for bucket in list(held) if bucket <= delivery.upto]
            replaced += [held.pop(file.bucket) for file in tentative if file.bucket in held]
            held |= {file.bucket: file for file in tentative}
            self._replaced.setdefault(delivery.stream, []).extend(replaced)
        return [
            (segment.id.bucket, segment.rows, segment.size_bytes)
            for segment in delivery.segments
            if segment.stability is Stability.STABLE
        ]

    def forget(self, stream: str, upto: int) -> None:
        with self._lock:
            held = self._files.get(stream, [])
            cut = bisect_right(held, upto, key=_bucket)
            forgotten, self._files[stream] = held[:cut], held[cut:]
            replaced = self._replaced.get(stream, [])
            forgotten += [file for file in replaced if file.bucket <= upto]
            self._replaced[stream] = [file for file in replaced if file.bucket > upto]
        for file in forgotten:
            if file.path.startswith(self.folder):
                self._delete(file.path)

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put(self, table: pa.Table, path: str, time: str) -> int:
        """Write the rows to a file; return its CRC-32."""
        with storage(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return write_segment(table, path, time=time, fsync=False).crc

    def _delete(self, path: str) -> None:
        os.unlink(path)

    def _there(self, path: str) -> bool:
        return os.path.exists(path)

    def _readable(self, file: InputFile) -> bool:
        return is_intact(file.path, file.crc)

    def table(self, path: str) -> Any:
        raise NotImplementedError("rows are in files")


class Best:
    """The best available inputs, stable or tentative, for the tentative line of a path."""

    def __init__(self, index: InputIndex) -> None:
        self.index = index

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        return self.index.best(stream, lo, hi)

    def table(self, path: str) -> Any:
        """The rows of a file, for engines that hold rows in memory."""
        return self.index.table(path)


def _bucket(file: InputFile) -> int:
    return file.bucket
