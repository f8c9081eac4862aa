"""The log of one owner, such as a node or a source: the segments of its streams, and other records.

    <root>/manifest                      the records (`manifest`)
    <root>/segments/<stream>/*.parquet   the rows (`segment`)
    <root>/state/                        files of state versions, managed by the engine
    <root>/lock, <root>/mark             of the live instance (`folder`)

The order is always: write the data durably, append the record that names the data, then notify
consumers. A log makes no decisions: its owner decides when to trim and which segment to read.
"""

from __future__ import annotations

import itertools
import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.clock import monotonic_us
from holdfast.config import FsyncPolicy
from holdfast.errors import (
    IdentityMismatch,
    InputError,
    LogCorrupted,
    LogError,
    ProtocolViolation,
    StaleEpoch,
    TransportError,
    Trimmed,
)
from holdfast.storage import folder
from holdfast.storage.compaction import Compaction
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import make_folder, syncing
from holdfast.storage.log_state import LogState, StreamState, fold, rehearse, snapshot
from holdfast.storage.manifest import Manifest
from holdfast.storage.records import (
    Ack,
    Added,
    Boundary,
    DropState,
    Epoch,
    Open,
    Query,
    Record,
    Retired,
    State,
    Tentative,
    Trim,
    Undo,
)
from holdfast.storage.segment import PARQUET, Segments
from holdfast.types import Segment, SegmentId, Stability, StreamInfo

FOREVER = 2**62
_bucket = attrgetter("id.bucket")


class Log:
    """A log. Thread-safe. Created by `Log.open`, which recovers the files of its predecessor.

    Lock order: `_appending`, then `changed`. A thread that holds `changed` must not append.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        state: LogState,
        lock: int,
        *,
        fsync: bool,
        archive: bool,
        disk: Disk,
        segments: Segments,
    ) -> None:
        self.root = root
        self.archive = archive
        #: Notified after each durable append, and when the log is closed.
        self.changed = threading.Condition()
        #: Files left behind by a crash, which `open` deleted.
        self.orphans: list[str] = []
        #: How long `open` took.
        self.opening_us = 0
        #: The fold of all durable records and of `_unwritten`. Modified only under `changed`.
        self._state = state
        #: By stream and consumer: acknowledgements that wait for the next append.
        self._unwritten: dict[tuple[str, str], Ack] = {}
        self._appending = threading.Lock()
        self._manifest = manifest
        self._disk = disk
        self._encoding = segments
        #: `root` as a string: appends join paths, and `Path` is slow.
        self._base = str(root)
        self._fsync = fsync
        self._lock: int | None = lock
        self._attempts = itertools.count()
        #: Cache of `info`. An append removes the entries that it may have changed.
        self._infos: dict[str, StreamInfo] = {}
        self._compaction = Compaction()

    @classmethod
    def open(
        cls,
        root: str | Path,
        owner: str,
        *,
        fsync: FsyncPolicy,
        archive: bool = False,
        disk: Disk = OS_DISK,
        segments: Segments = PARQUET,
        query: str = "",
        clock: Callable[[], int] = monotonic_us,
    ) -> Log:
        """Opens and recovers the log. A log of another `query` (a digest; '': any) is refused."""
        began_us = clock()
        root, sync = Path(root).absolute(), fsync == "always"
        base = str(root)
        for path in (base, f"{base}/{folder.SEGMENTS}", f"{base}/{folder.STATE}"):
            make_folder(path, fsync=sync, disk=disk)
        lock = folder.take_lock(base, disk)
        try:
            manifest, records = Manifest.open(f"{base}/{folder.MANIFEST}", fsync, disk)
            state = LogState()
            log = cls(
                root, manifest, state, lock, fsync=sync, archive=archive, disk=disk,
                segments=segments,
            )  # fmt: skip
            try:
                for record in records:
                    fold(state, record)
                if records and state.owner != owner:
                    raise InputError(
                        f"{root}: expected the log of {owner!r}, found the log of {state.owner!r}; "
                        "use another storage folder"
                    )
                if query and state.query not in ("", query):
                    raise IdentityMismatch(
                        f"{root}: expected a log of query {query}, found a log of query "
                        f"{state.query}; move the log back to the storage of that query, or delete "
                        "the log"
                    )
                sizes = {
                    segment.path: segment.size_bytes
                    for stream in state.streams.values()
                    for segment in stream.segments
                }
                log.orphans = folder.tidy(base, sizes, disk, fresh=not records)
                log._compaction.appended(len(records), manifest.size_bytes)
                # Tentative rows are not synced, so those of a previous instance are discarded.
                undos = [
                    Undo(stream.name, stream.complete_upto, stream.undos + 1)
                    for stream in state.streams.values()
                    if stream.spans or stream.tentative
                ]
                named = [Query(query)] if query and not state.query else []
                log.append(Epoch(state.epoch + 1, owner), *named, *undos)
            except BaseException:
                manifest.close()
                raise
        except BaseException:
            disk.unlock(lock)
            raise
        log.opening_us = clock() - began_us
        return log

    @property
    def owner(self) -> str:
        return self._state.owner

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def raise_epoch(self, epoch: int) -> None:
        """Adopts an epoch from the controller if it is above the epoch of the log."""
        if epoch > self.epoch:
            self.append(Epoch(epoch, self.owner))

    @property
    def cut_bytes(self) -> int:
        """Bytes of the torn tail that recovery cut off the manifest."""
        return self._manifest.cut_bytes

    def close(self) -> None:
        """Closes the log, releases its folder and wakes all waiting threads."""
        with self._appending:
            with self.changed:
                if self._lock is None:
                    return
                lock, self._lock = self._lock, None
                acks = list(self._unwritten.values())
                self.changed.notify_all()
            try:
                with suppress(LogError):
                    self._manifest.append(acks)
            finally:
                self._manifest.close()
                self._disk.unlock(lock)

    # Streams

    def open_stream(
        self, stream: str, schema: str, time: str, starts_at: int, *, gone_upto: int | None = None
    ) -> StreamInfo:
        """Opens the stream. An existing stream keeps its contents and its original `starts_at`.

        `gone_upto`: buckets up to this one that the log does not have count as trimmed, not empty.
        """
        with self.changed:
            state = self._state.streams.get(stream)
        if state is None:
            path = f"{self._base}/{folder.stream_folder(stream)}"
            make_folder(path, fsync=self._fsync, disk=self._disk)
            records: list[Record] = [Open(stream, schema, time, starts_at)]
            if gone_upto is not None and gone_upto >= starts_at:
                records += [Boundary(stream, gone_upto), Trim(stream, gone_upto)]
            self.append(*records)
        elif (state.schema, state.time) != (schema, time):
            raise InputError(
                f"stream {stream!r} is logged as '{state.schema}' with time column {state.time!r}, "
                f"but declared as '{schema}' with {time!r}; return to the logged schema, or give "
                "the stream another name"
            )
        elif gone_upto is not None and self.info(stream).complete_upto < gone_upto:
            # An older copy of the storage: the missing buckets existed, so they are not empty.
            self.append(Boundary(stream, gone_upto), Trim(stream, gone_upto))
        return self.info(stream)

    def streams(self) -> list[str]:
        with self.changed:
            return list(self._state.streams)

    def has(self, stream: str) -> bool:
        """Whether the stream is open. An open stream is never closed."""
        return stream in self._state.streams

    def info(self, stream: str) -> StreamInfo:
        """Status of the stream: the same object until an append changes it. Callers ask many times
        between two appends, so only the first call takes the lock."""
        info = self._infos.get(stream)
        if info is None:
            with self.changed:
                info = self._info(self._stream(stream))
        return info

    def wait(self, stream: str, news: Callable[[StreamInfo], bool], timeout_s: float) -> StreamInfo:
        """Waits until `news` is true for the stream, the log is closed, or the timeout expires."""
        with self.changed:
            state = self._stream(stream)
            self.changed.wait_for(lambda: self._lock is None or news(self._info(state)), timeout_s)
            return self._info(state)

    # Writing

    def write(self, table: pa.Table, id: SegmentId, stability: Stability) -> Segment:
        """Writes the rows to a file of their own. They become part of the log with a later append.
        Tentative segments are not synced, because they need not survive a crash."""
        with self.changed:
            time, epoch = self._stream(id.stream).time, self._state.epoch
        path = folder.segment_path(id, epoch=epoch, attempt=next(self._attempts))
        file = self._encoding.write(
            table,
            f"{self._base}/{path}",
            time=time,
            fsync=self._fsync and stability is Stability.STABLE,
            disk=self._disk,
        )
        return Segment(
            id, stability, path, file.rows, file.checksum, file.t_max_us, file.size_bytes, epoch,
            file.crc,
        )  # fmt: skip

    def discard(self, segments: Sequence[Segment]) -> None:
        """Deletes the files of segments that are not, or no longer, part of the log. Otherwise
        retries on a full disk would fill it further."""
        with suppress(LogError):
            folder.delete(self._base, [segment.path for segment in segments], self._disk)

    def append(self, *records: Record) -> None:
        """Makes the records durable in one frame, then visible, then wakes waiting threads."""
        if not records:
            return
        with self._appending:
            with self.changed:
                rehearse(self._state, records)
                acks = list(self._unwritten.items())
            size_bytes = self._manifest.append([*records, *(ack for _, ack in acks)])
            with self.changed:
                for record in records:
                    self._infos.pop(getattr(record, "stream", ""), None)
                    if isinstance(record, Epoch):
                        self._infos.clear()
                    fold(self._state, record)
                for key, ack in acks:
                    if self._unwritten[key] is ack:
                        del self._unwritten[key]
                self.changed.notify_all()
            self._compaction.appended(len(records) + len(acks), size_bytes)
            self._compact()

    def commit(
        self, stream: str, segments: Sequence[Segment], upto: int, *extra_records: Record
    ) -> None:
        """Appends the segments and the boundary that closes their buckets in one frame."""
        foreign = [segment.id for segment in segments if segment.id.stream != stream]
        if foreign:
            raise ProtocolViolation(f"segments {foreign} are not of stream {stream!r}")
        self.append(*map(Added, segments), Boundary(stream, upto), *extra_records)

    # Reading

    def segments(self, stream: str, from_bucket: int, upto: int) -> list[Segment]:
        """Stable segments of the buckets `from_bucket` to `upto`, sorted by bucket. Segments of
        incomplete buckets in that range are included."""
        with self.changed:
            state = self._stream(stream)
            if state.starts_at <= state.trimmed_upto and from_bucket <= state.trimmed_upto:
                raise Trimmed.before(state.trimmed_upto + 1, stream, from_bucket)
            return state.between(from_bucket, upto)

    def tentative(
        self, stream: str, from_bucket: int = -FOREVER, upto: int = FOREVER
    ) -> tuple[list[Segment], list[Tentative]]:
        """The tentative segments that are still valid in that range of buckets, sorted by bucket,
        and the `Tentative` records that overlap the range."""
        with self.changed:
            state = self._stream(stream)
            first = bisect_left(state.tentative, from_bucket, key=_bucket)
            last = bisect_right(state.tentative, upto, lo=first, key=_bucket)
            spans = [s for s in state.spans if s.upto >= from_bucket and s.since <= upto]
            return state.tentative[first:last], spans

    def absolute(self, segment: Segment) -> str:
        return f"{self._base}/{segment.path}"

    def read(self, segment: Segment) -> pa.Table:
        """The rows of a segment, verified against their checksum."""
        try:
            return self._encoding.read(
                self.absolute(segment),
                rows=segment.rows,
                checksum=segment.checksum,
                disk=self._disk,
            )
        except LogCorrupted:
            bucket = segment.id.bucket
            if segment.stability is Stability.TENTATIVE:
                if segment not in self.tentative(segment.id.stream, bucket, bucket)[0]:
                    raise TransportError(f"{segment.id} was replaced meanwhile") from None
                raise
            self.segments(segment.id.stream, bucket, bucket)  # raises `Trimmed` if trimmed since
            raise

    def check(self, segment: Segment) -> None:
        """Raises what `read` would for a missing or truncated file; compares sizes first."""
        if self._disk.size(self.absolute(segment)) != segment.size_bytes:
            self.read(segment)

    # Acknowledging and trimming

    def acknowledge(
        self, stream: str, consumer: str, received: int, needed: int, epoch: int
    ) -> None:
        """Records the positions of a consumer, `received` up to and `needed`: released up to.

        Positions wait for the next append, because the consumer repeats them after a crash. A new
        epoch of the consumer is appended at once: the older instance must be refused also after a
        crash of this process.
        """
        ack = Ack(consumer, stream, received, needed, epoch)
        with self.changed:
            state = self._stream(stream)
            last = state.acks.get(consumer)
            if last is not None and epoch < last.epoch:
                raise StaleEpoch(
                    f"consumer {consumer!r} of stream {stream!r}: epoch {epoch} was replaced by "
                    f"epoch {last.epoch}; the older instance must stop"
                )
            if last is not None and epoch == last.epoch:
                fold(self._state, ack)
                if state.acks[consumer] != last:
                    self._unwritten[stream, consumer] = state.acks[consumer]
                return
        self.append(ack)

    def consumers(self, stream: str) -> list[str]:
        """All consumers that have ever acknowledged."""
        with self.changed:
            return list(self._stream(stream).acks)

    def position(self, stream: str, consumer: str) -> tuple[int, int, int]:
        """Last acknowledgement of a consumer: received up to, released up to, and the epoch of the
        instance; the epoch is 0 if the consumer has never acknowledged."""
        with self.changed:
            state = self._stream(stream)
            before, last = state.starts_at - 1, state.acks.get(consumer)
            return (before, before, 0) if last is None else (last.received, last.needed, last.epoch)

    def trimmable(self, stream: str) -> int:
        """Last complete bucket that all consumers that have ever acknowledged have released."""
        with self.changed:
            return self._stream(stream).trimmable

    def received(self, stream: str, *, without: Collection[str] = ()) -> int:
        """Last bucket that all known consumers have received, except the consumers `without`."""
        with self.changed:
            return self._stream(stream).received(without)

    def trim(self, stream: str, upto: int) -> None:
        """Removes complete buckets up to `upto`, record first, then files; not in an archive."""
        if self.archive:
            return
        with self.changed:
            state = self._stream(stream)
            upto = min(upto, state.complete_upto)
            if upto <= state.trimmed_upto:
                return
            paths = [segment.path for segment in state.between(state.starts_at, upto)]
        self.append(Trim(stream, upto))
        folder.delete(self._base, paths, self._disk)

    # State versions, tokens and counters

    def save_state(self, path: str, bucket: int, body: dict[str, Any], files: list[str]) -> None:
        """Syncs and records a state version; `files` are its files and folders below the root."""
        self.sync(files)  # the round trip through JSON gives memory what recovery would read
        text = json.dumps(body)
        self._compaction.saved(path, len(text))
        self.append(State(path, bucket, json.loads(text)))

    def sync(self, files: Sequence[str]) -> None:
        """Syncs files and folders below the root, if the log syncs its writes."""
        last = {name.rpartition("/")[0]: name for name in files}.values()
        for name in files if self._fsync else ():
            with syncing(file := f"{self._base}/{name}"):  # the folder with its last file
                self._disk.sync_tree(file, self._base if name in last else file)

    def drop_states(self, path: str, upto: int) -> None:
        """Drops the records of versions before `upto`. The engine deletes their files."""
        self.append(DropState(path, upto))

    def states(self, path: str) -> list[tuple[int, dict[str, Any]]]:
        """Durable versions, oldest first. Must not be modified."""
        with self.changed:
            return list(self._state.states.get(path, []))

    def token(self, stream: str) -> str | None:
        with self.changed:
            return self._state.tokens.get(stream)

    def retired(self, stream: str) -> Retired | None:
        with self.changed:
            return self._stream(stream).retired

    def counters(self) -> dict[str, int]:
        with self.changed:
            return dict(self._state.counters)

    def counter(self, name: str) -> int:
        return self.counters().get(name, 0)

    # Internals

    def _stream(self, name: str) -> StreamState:
        state = self._state.streams.get(name)
        if state is None:
            raise InputError(
                f"{self.owner!r} has no stream {name!r}; it has {sorted(self._state.streams)}"
            )
        return state

    def _info(self, stream: StreamState) -> StreamInfo:
        info = self._infos.get(stream.name)
        if info is None:
            info = self._infos[stream.name] = stream.info(self._state.epoch)
        return info

    def _compact(self) -> None:
        """Rewrites the manifest when most of its records are obsolete. A failure only delays it."""
        if not self._compaction.is_possible():
            return
        with self.changed:
            if not self._compaction.is_due(self._state):
                return
            records = snapshot(self._state)
        try:
            self._manifest.rewrite(records)
        except LogError:
            # The preceding append is durable: an error would make its caller repeat it.
            self._compaction.failed()
            return
        self._compaction.done()
