"""The log of one owner, a node or a source: its streams' segments, and what must survive with them.

    <root>/manifest                      the truth (`manifest`)
    <root>/segments/<stream>/*.parquet   the rows (`segment`)
    <root>/state/                        files of state versions, the engine's
    <root>/lock                          held by the live instance (`folder`)

The order is always: data durable, then the record that names it, then anybody is told. A log
decides nothing: when to trim, or which segment to read, is for its owner to say (ARCHITECTURE.md).
"""

from __future__ import annotations

import itertools
import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

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
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import make_folder, storage
from holdfast.storage.log_state import LogState, StreamState, fold, live_records, rehearse, snapshot
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

#: A manifest is rewritten when it has grown by so many records, and by so many times its contents.
_COMPACT_RECORDS = 1_000
_COMPACT_FACTOR = 4
FOREVER = 2**62


def _bucket(segment: Segment) -> int:
    return segment.id.bucket


class Log:
    """Thread-safe. Made by `Log.open`, which recovers whatever a predecessor left.

    Locks are taken in one order: `_appending`, then `changed`. Nobody may append while holding
    `changed`.
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
        #: Files of a crash that opening deleted.
        self.orphans: list[str] = []
        #: The fold of all durable records and of `_unwritten`. Changed under `changed`.
        self._state = state
        #: Acknowledgements that wait for the next append, by stream and reader.
        self._unwritten: dict[tuple[str, str], Ack] = {}
        self._appending = threading.Lock()
        self._manifest = manifest
        self._disk = disk
        self._encoding = segments
        #: The root again: joining paths is a matter of every append.
        self._base = str(root)
        self._fsync = fsync
        self._lock: int | None = lock
        self._attempts = itertools.count()
        #: Made when asked for; what an append may have changed goes with it.
        self._infos: dict[str, StreamInfo] = {}
        #: Records in the manifest beyond those its last rewrite left in it.
        self._grown = 0
        self._compact_at = 0

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
    ) -> Log:
        """`query`: digest of the query that the log is for, if it is to be refused to others."""
        root, sync = Path(root).absolute(), fsync == "always"
        base = str(root)
        for path in (base, f"{base}/{folder.SEGMENTS}", f"{base}/{folder.STATE}"):
            make_folder(path, fsync=sync, disk=disk)
        lock = folder.take_lock(base, disk)
        try:
            manifest, records = Manifest.open(f"{base}/{folder.MANIFEST}", fsync, disk)
            state = LogState()
            log = cls(
                root,
                manifest,
                state,
                lock,
                fsync=sync,
                archive=archive,
                disk=disk,
                segments=segments,
            )
            try:
                for record in records:
                    fold(state, record)
                if records and state.owner != owner:
                    raise InputError(f"{root} is the log of {state.owner!r}, not of {owner!r}")
                if query and state.query not in ("", query):
                    raise IdentityMismatch(
                        f"{root}: expected a log of query {query}, found one of query "
                        f"{state.query}: it was written by another query; put it back where it "
                        "came from, or delete it"
                    )
                sizes = {
                    segment.path: segment.size_bytes
                    for stream in state.streams.values()
                    for segment in stream.segments
                }
                log.orphans = folder.tidy(base, sizes, disk, fresh=not records)
                log._grown = len(records)
                # Tentative rows are not synced: what a crash left of them is taken back.
                undone = [
                    Undo(stream.name, stream.complete_upto, stream.undos + 1)
                    for stream in state.streams.values()
                    if stream.spans or stream.tentative
                ]
                named = [Query(query)] if query and not state.query else []
                log.append(Epoch(state.epoch + 1, owner), *named, *undone)
            except BaseException:
                manifest.close()
                raise
        except BaseException:
            disk.unlock(lock)
            raise
        return log

    @property
    def owner(self) -> str:
        return self._state.owner

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def raise_epoch(self, epoch: int) -> None:
        """Takes an epoch that the controller gave, when it is above the log's own."""
        if epoch > self.epoch:
            self.append(Epoch(epoch, self.owner))

    @property
    def cut_bytes(self) -> int:
        """Length of the torn tail that recovery cut off the manifest."""
        return self._manifest.cut_bytes

    def close(self) -> None:
        """Lets go of the folder. Whoever waits is woken."""
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
        """Opens the stream, or finds it as it was left, with the `starts_at` it had at first.

        `gone_upto`: a new stream lacks the buckets up to there; readers see that, not empty ones.
        """
        with self.changed:
            known = self._state.streams.get(stream)
        if known is None:
            path = f"{self._base}/{folder.stream_folder(stream)}"
            make_folder(path, fsync=self._fsync, disk=self._disk)
            records: list[Record] = [Open(stream, schema, time, starts_at)]
            if gone_upto is not None and gone_upto >= starts_at:
                records += [Boundary(stream, gone_upto), Trim(stream, gone_upto)]
            self.append(*records)
        elif (known.schema, known.time) != (schema, time):
            raise InputError(
                f"stream {stream!r} is logged as '{known.schema}' with time column {known.time!r}, "
                f"but declared as '{schema}' with {time!r}; go back to the logged schema, or give "
                "the stream another name"
            )
        return self.info(stream)

    def streams(self) -> list[str]:
        with self.changed:
            return list(self._state.streams)

    def has(self, stream: str) -> bool:
        """Streams are opened and never closed."""
        return stream in self._state.streams

    def info(self, stream: str) -> StreamInfo:
        """The same object until something is appended. Asked for many times between two appends,
        so it takes the lock only for the first."""
        known = self._infos.get(stream)
        if known is None:
            with self.changed:
                known = self._info(self._stream(stream))
        return known

    def wait(self, stream: str, news: Callable[[StreamInfo], bool], timeout_s: float) -> StreamInfo:
        """Returns when there is news for whoever asks, or the time is over."""
        with self.changed:
            known = self._stream(stream)
            self.changed.wait_for(lambda: self._lock is None or news(self._info(known)), timeout_s)
            return self._info(known)

    # Writing

    def write(self, table: pa.Table, id: SegmentId, stability: Stability) -> Segment:
        """Makes the rows durable in a file of their own; the log holds them once appended. What is
        tentative need not outlive the process."""
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
            id, stability, path, file.rows, file.checksum, file.t_max_us, file.size_bytes, epoch
        )

    def discard(self, segments: Sequence[Segment]) -> None:
        """Gives up segments that were written and will not be appended. On a full disk, what is
        tried again would otherwise fill it further."""
        with suppress(LogError):
            folder.delete(self._base, [segment.path for segment in segments], self._disk)

    def append(self, *records: Record) -> None:
        """Makes the records durable together, then visible, then known to whoever waits."""
        if not records:
            return
        with self._appending:
            with self.changed:
                rehearse(self._state, records)
                acks = list(self._unwritten.items())
            self._manifest.append([*records, *(ack for _, ack in acks)])
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
            self._grown += len(records) + len(acks)
            self._compact()

    def commit(
        self, stream: str, segments: Sequence[Segment], upto: int, *extra_records: Record
    ) -> None:
        """The segments and the boundary that closes their buckets, in one append."""
        added = [Added(segment) for segment in segments]
        strangers = [segment.id for segment in segments if segment.id.stream != stream]
        if strangers:
            raise ProtocolViolation(f"segments {strangers} are not of stream {stream!r}")
        self.append(*added, Boundary(stream, upto), *extra_records)

    # Reading

    def segments(self, stream: str, from_bucket: int, upto: int) -> list[Segment]:
        """By bucket; those of buckets that are not whole yet among them, if asked for."""
        with self.changed:
            known = self._stream(stream)
            if known.starts_at <= known.trimmed_upto and from_bucket <= known.trimmed_upto:
                raise Trimmed(
                    f"stream {stream!r} was asked for from bucket {from_bucket}, but its readers "
                    f"needed nothing up to bucket {known.trimmed_upto}, which is deleted"
                )
            return known.between(from_bucket, upto)

    def tentative(
        self, stream: str, from_bucket: int = -FOREVER, upto: int = FOREVER
    ) -> tuple[list[Segment], list[Tentative]]:
        """What was given on partial input and still stands: the segments by bucket, and the
        stretches, as far as they reach into those buckets."""
        with self.changed:
            known = self._stream(stream)
            first = bisect_left(known.tentative, from_bucket, key=_bucket)
            last = bisect_right(known.tentative, upto, lo=first, key=_bucket)
            spans = [s for s in known.spans if s.upto >= from_bucket and s.since <= upto]
            return known.tentative[first:last], spans

    def absolute(self, segment: Segment) -> str:
        return f"{self._base}/{segment.path}"

    def read(self, segment: Segment) -> pa.Table:
        """The rows, held against their checksum."""
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
                    raise TransportError(f"{segment.id} was taken back meanwhile") from None
                raise
            self.segments(segment.id.stream, bucket, bucket)  # it may have been trimmed meanwhile
            raise

    def check(self, segment: Segment) -> None:
        """Raises what `read` would raise of a file that is missing or cut off, without reading."""
        if self._disk.size(self.absolute(segment)) != segment.size_bytes:
            self.read(segment)

    # Acknowledging and trimming

    def acknowledge(self, stream: str, reader: str, received: int, needed: int, epoch: int) -> None:
        """Takes a reader's positions. Lost in a crash, they only make the reader say them again.

        That is why they wait for the next append; a new epoch of the reader does not, because
        after a crash of ours its predecessor must still be refused.
        """
        ack = Ack(reader, stream, received, needed, epoch)
        with self.changed:
            known = self._stream(stream)
            last = known.acks.get(reader)
            if last is not None and epoch < last.epoch:
                raise StaleEpoch(
                    f"reader {reader!r} of stream {stream!r} spoke with epoch {epoch}, but its "
                    f"instance of epoch {last.epoch} is known; the older one must stop"
                )
            if last is not None and epoch == last.epoch:
                fold(self._state, ack)
                if known.acks[reader] != last:
                    self._unwritten[stream, reader] = known.acks[reader]
                return
        self.append(ack)

    def readers(self, stream: str) -> list[str]:
        """Everybody who ever acknowledged anything."""
        with self.changed:
            return list(self._stream(stream).acks)

    def position(self, stream: str, reader: str) -> tuple[int, int, int]:
        """What a reader said last: received, no longer needed, and the epoch of the instance that
        said it, 0 if none did."""
        with self.changed:
            known = self._stream(stream)
            before = known.starts_at - 1
            last = known.acks.get(reader)
            return (before, before, 0) if last is None else (last.received, last.needed, last.epoch)

    def trimmable(self, stream: str) -> int:
        """The last bucket that no reader that ever acknowledged anything still needs."""
        with self.changed:
            return self._stream(stream).trimmable

    def received(self, stream: str, *, without: Collection[str] = ()) -> int:
        """The last bucket that all other readers that ever acknowledged anything have had."""
        with self.changed:
            return self._stream(stream).received(without)

    def trim(self, stream: str, upto: int) -> None:
        """Gives up the whole buckets up to `upto`: first the record, then the files."""
        if self.archive:
            return
        with self.changed:
            known = self._stream(stream)
            upto = min(upto, known.complete_upto)
            if upto <= known.trimmed_upto:
                return
            doomed = [segment.path for segment in known.between(known.starts_at, upto)]
        self.append(Trim(stream, upto))
        folder.delete(self._base, doomed, self._disk)

    # What survives beside the rows

    def save_state(self, path: str, bucket: int, body: dict[str, Any], files: list[str]) -> None:
        """Records a state version; `files` are its files and folders, below the root."""
        if self._fsync:
            for name in files:
                file = f"{self._base}/{name}"
                with storage(file):
                    self._disk.sync_tree(file, self._base)
        # As recovery would read it: what JSON cannot hold must not live on in memory alone.
        self.append(State(path, bucket, json.loads(json.dumps(body))))

    def drop_states(self, path: str, upto: int) -> None:
        """Forgets the versions before `upto`. Their files are the engine's to delete."""
        self.append(DropState(path, upto))

    def states(self, path: str) -> list[tuple[int, dict[str, Any]]]:
        """Durable versions, oldest first. Not to be changed."""
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
        with self.changed:
            return self._state.counters.get(name, 0)

    # Inside

    def _stream(self, name: str) -> StreamState:
        known = self._state.streams.get(name)
        if known is None:
            raise InputError(
                f"{self.owner!r} has no stream {name!r}; it has {sorted(self._state.streams)}"
            )
        return known

    def _info(self, stream: StreamState) -> StreamInfo:
        known = self._infos.get(stream.name)
        if known is None:
            known = self._infos[stream.name] = stream.info(self._state.epoch)
        return known

    def _compact(self) -> None:
        """Rewrites the manifest when most of it is history. A failure puts it off, no more."""
        if self._grown <= max(_COMPACT_RECORDS, self._compact_at):
            return
        with self.changed:
            if self._grown <= _COMPACT_FACTOR * live_records(self._state):
                return
            records = snapshot(self._state)
        try:
            self._manifest.rewrite(records)
        except LogError:
            # The append before it stands: reporting a failure would make its caller do it again.
            self._compact_at = 2 * self._grown
            return
        self._grown, self._compact_at = 0, 0
