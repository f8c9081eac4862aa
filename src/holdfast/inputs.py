"""Where the rows of a node's inputs are, by bucket. Grows with what is retained, not with time."""

from __future__ import annotations

import os
import shutil
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import pyarrow as pa

from holdfast.engine.inputs import InputFile
from holdfast.log.files import storage
from holdfast.log.segment import write_segment
from holdfast.transport.service import Delivery


class InputIndex:
    """Rows that came over the network without shared storage are put into `inputs/` of the node's
    own storage, a cache that a new instance starts without."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files: dict[str, list[InputFile]] = {}
        self._lock = threading.Lock()
        self._clear()

    def files(self, stream: str, lo: int, hi: int) -> list[InputFile]:
        with self._lock:
            held = self._files.get(stream, [])
            return held[bisect_left(held, lo, key=_bucket) : bisect_right(held, hi, key=_bucket)]

    def missing(self, streams: Iterable[str], lo: int, hi: int) -> str | None:
        """A file of somebody else's log that is gone, if there is one."""
        held = (file for stream in streams for file in self.files(stream, lo, hi))
        others = (file.path for file in held if not file.path.startswith(self.folder))
        return next((path for path in others if not os.path.exists(path)), None)

    def last(self, stream: str) -> int | None:
        """The newest bucket with rows."""
        with self._lock:
            held = self._files.get(stream)
            return held[-1].bucket if held else None

    def held(self, stream: str) -> int:
        with self._lock:
            return len(self._files.get(stream, []))

    def add(self, delivery: Delivery, time: str) -> list[tuple[int, int]]:
        """Bucket and rows of each segment. All of them or none: what fails comes again whole."""
        files = []
        for number, segment in enumerate(delivery.segments):
            if delivery.tables:
                name = f"{segment.id.bucket}.{segment.id.version}.{segment.id.part}.parquet"
                path = os.path.join(self.folder, delivery.stream, name)
                self._put(delivery.tables[number], path, time)
            else:
                path = delivery.paths[number]
            files.append(InputFile(segment.id.bucket, path, segment.rows))
        with self._lock:
            for file in files:
                insort(self._files.setdefault(delivery.stream, []), file, key=_bucket)
        return [(file.bucket, file.rows) for file in files]

    def forget(self, stream: str, upto: int) -> None:
        with self._lock:
            held = self._files.get(stream, [])
            cut = bisect_right(held, upto, key=_bucket)
            gone, self._files[stream] = held[:cut], held[cut:]
        for file in gone:
            if file.path.startswith(self.folder):
                self._delete(file.path)

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _put(self, table: pa.Table, path: str, time: str) -> None:
        with storage(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_segment(table, path, time=time, fsync=False)

    def _delete(self, path: str) -> None:
        os.unlink(path)


def _bucket(file: InputFile) -> int:
    return file.bucket
