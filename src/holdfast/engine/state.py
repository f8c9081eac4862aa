"""State versions: the state of a path after a bucket, as a small immutable description of files.

A version never changes. A step creates the next version, which shares most files with the previous
one. A rollback selects an older version. A state transfer sends the files of a version. A
checkpoint is a version whose files were flushed and whose description is in the manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import InputError, LogCorrupted, LogError
from holdfast.storage.files import crc_of, put_file, storage

#: Steps of different lines of a path may run at the same time. Each line deletes only its own
#: files.
Line = Literal["stable", "tentative", "recomputation"]


def line_of(path: str, line: Line) -> str:
    """The name of a line."""
    return path if line == "stable" else f"{path} {line}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A file of rows or partials that covers buckets `lo` to `hi`."""

    file: str
    lo: int
    hi: int
    rows: int
    #: The buckets that have rows; empty if unknown.
    buckets: tuple[int, ...] = ()
    #: CRC-32 of the file.
    crc: int = 0
    #: How often its rows were merged, if chunks are merged level by level.
    level: int = 0
    #: All panes of this chunk as one, for windows that contain all of them, and the starts of the
    #: first and the last pane.
    total: Chunk | None = None
    panes_us: tuple[int, int] = (0, 0)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "file": self.file, "lo": self.lo, "hi": self.hi, "rows": self.rows,
            "buckets": list(self.buckets), "crc": self.crc,
        }  # fmt: skip
        if self.level:
            body["level"] = self.level
        if self.total is not None:
            body |= {"total": self.total.body(), "panes_us": list(self.panes_us)}
        return body

    @staticmethod
    def of(body: Mapping[str, Any]) -> Chunk:
        total, (first_us, last_us) = body.get("total"), body.get("panes_us", (0, 0))
        return Chunk(
            body["file"], body["lo"], body["hi"], body["rows"], tuple(body["buckets"]), body["crc"],
            body.get("level", 0), None if total is None else Chunk.of(total), (first_us, last_us),
        )  # fmt: skip


def runs_of_levels(levels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of equal levels, the newest first: the number of the first and after the last."""
    end = len(levels)
    while end:
        first = end - 1
        while first and levels[first - 1] == levels[first]:
            first -= 1
        yield first, end
        end = first


@dataclass(frozen=True, slots=True)
class Layer:
    """A file with the state of some keys of a shard (`layers.py`)."""

    file: str
    #: Rows, and removed keys.
    entries: int
    level: int
    #: How many blocks of rows and of timers the file has.
    blocks: int
    timer_blocks: int
    #: The first and the last timer.
    timers_us: tuple[int, int] | None
    #: CRC-32 of the index of blocks, and of the file.
    index_crc: int
    crc: int

    def body(self) -> list[Any]:
        return [self.file, self.entries, self.level, self.blocks, self.timer_blocks,
                self.timers_us, self.index_crc, self.crc]  # fmt: skip

    @staticmethod
    def of(body: Sequence[Any]) -> Layer:
        file, entries, level, blocks, timer_blocks, timers_us, index_crc, crc = body
        return Layer(
            file, entries, level, blocks, timer_blocks, timers_us and (timers_us[0], timers_us[1]),
            index_crc, crc,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """The keyed state of one shard."""

    #: From the oldest to the newest.
    layers: tuple[Layer, ...] = ()
    #: Rows of the state of all keys.
    rows: int = 0
    #: The earliest timer, and the hash of its key.
    timer: tuple[int, int] | None = None

    def body(self) -> list[Any]:
        return [[layer.body() for layer in self.layers], self.rows, self.timer]

    @staticmethod
    def of(body: Sequence[Any]) -> Shard:
        layers, rows, timer = body
        return Shard(tuple(map(Layer.of, layers)), rows, timer and (timer[0], timer[1]))


@dataclass(frozen=True, slots=True)
class Version:
    """State of one path after `bucket`. File names are relative to the state folder."""

    path: str
    bucket: int
    #: Panes of each time window, oldest first.
    panes: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    #: Retained rows of each input edge ("operator:port"), if not only references to input segments.
    edges: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    #: Shards of each keyed operator.
    shards: Mapping[str, Mapping[int, Shard]] = field(default_factory=dict)
    #: First bucket of the raw inputs that this version still refers to.
    needs_from: int = 0
    #: Hash of network, operators and schemas (`Engine.plan_hash`); another query refuses the state.
    plan: str = ""

    def _chunks(self) -> Iterator[Chunk]:
        for group in (self.panes, self.edges):
            for chunks in group.values():
                for chunk in chunks:
                    yield chunk
                    if chunk.total is not None:
                        yield chunk.total

    def _shards(self) -> Iterator[Shard]:
        for shards in self.shards.values():
            yield from shards.values()

    def files(self) -> list[str]:
        return list(self.crcs())

    def crcs(self) -> dict[str, int]:
        """CRC-32 of each file."""
        layers = (layer for shard in self._shards() for layer in shard.layers)
        return {file.file: file.crc for held in (self._chunks(), layers) for file in held}

    def entries(self) -> int:
        """Rows and entries of all files."""
        return sum(self.sizes().values())

    def layered(self) -> int:
        """Entries of all layers."""
        return sum(layer.entries for shard in self._shards() for layer in shard.layers)

    def sizes(self) -> dict[str, int]:
        """Rows, or entries of keys, of each file."""
        found = {chunk.file: chunk.rows for chunk in self._chunks()}
        for shard in self._shards():
            found |= {layer.file: layer.entries for layer in shard.layers}
        return found

    def rows(self) -> int:
        return sum(chunk.rows for chunk in self._chunks()) + sum(s.rows for s in self._shards())

    def keys(self) -> int:
        """Rows of keyed state: one of each open key, or several."""
        return sum(shard.rows for shard in self._shards())

    def rows_read(self, whole: Collection[str], by_key: Collection[str]) -> int:
        """Most rows of state that a step reads in addition to those of the keys that it touches.
        `whole`: operators whose state is read as a whole. `by_key`: edges whose rows are selected
        by key."""
        read = [held for op, held in self.shards.items() if op in whole]
        rows = sum(shard.rows for held in read for shard in held.values())
        return sum(chunk.rows for chunk in self.chunks_read(by_key)) + rows

    def chunks_read(self, by_key: Collection[str]) -> Iterator[Chunk]:
        """The chunks that a step reads as a whole. Of panes, it reads the oldest chunk, from which
        a window takes a part, and the totals of others."""
        for chunks in self.panes.values():
            for number, chunk in enumerate(chunks):
                yield chunk if number == 0 or chunk.total is None else chunk.total
        for edge, chunks in self.edges.items():
            if edge not in by_key:
                yield from chunks

    def timers_us(self) -> list[int]:
        """The earliest timer of each shard that has one."""
        return [shard.timer[0] for shard in self._shards() if shard.timer is not None]

    def body(self) -> dict[str, Any]:
        return {
            "panes": {op: [chunk.body() for chunk in held] for op, held in self.panes.items()},
            "edges": {op: [chunk.body() for chunk in held] for op, held in self.edges.items()},
            "shards": {
                op: {str(number): shard.body() for number, shard in held.items()}
                for op, held in self.shards.items()
            },
            "needs_from": self.needs_from,
            "plan": self.plan,
        }

    @staticmethod
    def of(path: str, bucket: int, body: Mapping[str, Any]) -> Version:
        try:
            return Version(
                path,
                bucket,
                panes={op: tuple(map(Chunk.of, held)) for op, held in body["panes"].items()},
                edges={op: tuple(map(Chunk.of, held)) for op, held in body["edges"].items()},
                shards={
                    op: {int(number): Shard.of(shard) for number, shard in held.items()}
                    for op, held in body["shards"].items()
                },
                needs_from=body["needs_from"],
                plan=body["plan"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
            raise LogCorrupted(
                f"the state of path {path!r} after bucket {bucket} is not in the format of this "
                f"version of Holdfast ({err!r}); start this storage with the version that wrote it"
            ) from None


def write_rows(table: pa.Table, path: str) -> int:
    """Write a state file atomically; return its CRC-32. A checkpoint flushes the file later."""
    return write_encoded(encoded(table, max(1, table.num_rows)), path)


def encoded(table: pa.Table, group_rows: int, *, plain: bool = False) -> memoryview:
    """The content of a state file with row groups of so many rows. `plain`: without dictionaries
    and statistics, which small row groups do not need."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="snappy",
        row_group_size=group_rows,
        write_page_checksum=True,
        use_dictionary=not plain,
        write_statistics=not plain,
    )
    return memoryview(sink.getvalue())


def write_encoded(data: memoryview, path: str) -> int:
    with storage(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    put_file(FilePath(path), data, fsync=False)
    return crc32(data)


def check_file(path: str, crc: int) -> None:
    """Raise LogCorrupted if a file is missing or was changed."""
    with present(path):
        compare_crc(path, crc, crc_of(path))


def read_table(path: str, crc: int) -> pa.Table:
    """The rows of a file, verified: the bytes that are decoded are the bytes that were checked."""
    data = read_verified(path, crc)
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)


def read_verified(path: str, crc: int) -> bytes:
    """The content of a file. Raise LogCorrupted if the file is missing or was changed."""
    with present(path), storage(path), open(path, "rb") as file:
        data = file.read()
    compare_crc(path, crc, crc32(data))
    return data


@contextmanager
def present(path: str) -> Iterator[None]:
    try:
        yield
    except LogError as err:
        if isinstance(err.__cause__, FileNotFoundError):
            raise LogCorrupted(f"{path} is missing") from None
        raise


def compare_crc(path: str, expected: int, found: int) -> None:
    if found != expected:
        raise LogCorrupted(f"{path} is damaged: expected CRC-32 {expected:08x}, found {found:08x}")


def check_files(version: Version, folder: str) -> None:
    """Raise LogCorrupted unless every file of a version has the content that was written."""
    for name, crc in version.crcs().items():
        check_file(os.path.join(folder, name), crc)


def export_version(version: Version, folder: str, target: str) -> dict[str, Any]:
    """Copy the files of a version to `target`. With these files and the returned description,
    another node can import the version."""
    check_files(version, folder)
    for name in version.files():
        _copy(os.path.join(folder, name), os.path.join(target, name))
    return {"path": version.path, "bucket": version.bucket, "body": version.body()}


def import_version(exported: Mapping[str, Any], source: str, folder: str, plan: str) -> Version:
    version = Version.of(exported["path"], exported["bucket"], exported["body"])
    if version.plan != plan:
        raise InputError(
            f"state of path {version.path!r} was written by another query (expected plan {plan}, "
            f"found {version.plan}); start without it, or run the network that wrote it"
        )
    check_files(version, source)
    for name in version.files():
        _copy(os.path.join(source, name), os.path.join(folder, name))
    return version


def _copy(file: str, into: str) -> None:
    with storage(into):
        os.makedirs(os.path.dirname(into), exist_ok=True)
        shutil.copyfile(file, into)


def files_below(folder: str) -> set[str]:
    """All files below `folder`, as paths relative to it."""
    return {
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    }


def release(folder: str, kept: Iterable[Version], made: set[str]) -> None:
    """Delete files in `made` that no version in `kept` refers to, and remove them from `made`."""
    needed = {name for version in kept for name in version.files()}
    for name in sorted(made - needed):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            os.unlink(path)
        step_folder = os.path.dirname(path)  # folder/PATH/STEP; both lines write to folder/PATH
        if os.path.dirname(os.path.dirname(step_folder)) == folder:
            with suppress(OSError):  # not empty
                os.rmdir(step_folder)
    made &= needed
