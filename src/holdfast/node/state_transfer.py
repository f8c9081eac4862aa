"""State movement (Flux sections 3.3.1 and 5.3.1): one replica of a pair is rebuilt from its peer.

The paper pauses the survivor and all its producers. Here no pause is needed: the survivor offers
the immutable state after its last computed bucket, and continues. Before the newcomer asks the
survivor, it has asked every producer to retain what it may need (`Service.hold`), so the inputs
after that bucket are available. The survivor also sends the results that it still retains, because
consumers may need them from the newcomer if the survivor dies.

The newcomer writes the fetched files to a folder beside its storage, builds a complete log from
them, and only then replaces the old storage. The newcomer then starts like any restarted node.
After a failure during the transfer, the transfer starts again from the beginning. `core.catch_up`
makes all decisions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from holdfast.core.catch_up_events import OwnPath, Piece
from holdfast.engine.state import Version
from holdfast.errors import LogCorrupted, LogError, TransportError, Trimmed
from holdfast.model.fragments import Path
from holdfast.storage import Added, Boundary, Log
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import make_folder, storage
from holdfast.storage.segment import PARQUET, Segments
from holdfast.streams.calls import Moving, OfferedState, Results, StateFile
from holdfast.types import Segment

# -- the survivor ---------------------------------------------------------------------------------


def describe(log: Log, version: Version, outputs: Sequence[str]) -> Moving:
    results = [_kept(log, stream) for stream in outputs]
    return Moving(
        version.path, version.bucket, version.body(), tuple(version.files()), tuple(results)
    )


def _kept(log: Log, stream: str) -> Results:
    while True:
        info = log.info(stream)
        with suppress(Trimmed):  # a consumer released buckets between the two calls
            segments = log.segments(stream, info.trimmed_upto + 1, info.complete_upto)
            return Results(
                stream, info.schema, info.time, info.starts_at, info.trimmed_upto,
                info.complete_upto, tuple(segments),
            )  # fmt: skip


class Fingerprints:
    """Sizes and digests of state files, which are immutable. Reading a large state takes a while,
    so results are cached: a repeated request continues where the previous one is."""

    def __init__(self, folder: str, disk: Disk = OS_DISK) -> None:
        self._folder, self._disk = folder, disk
        self._known: dict[str, StateFile] = {}

    def of(
        self, paths: Iterable[Moving], progressed: Callable[[], None] = lambda: None
    ) -> tuple[StateFile, ...]:
        """`progressed` is called after every file that was read."""
        names = list(dict.fromkeys(name for moving in paths for name in moving.files))
        for name in names:
            if name not in self._known:
                file = f"{self._folder}/{name}"
                with storage(file):
                    self._known[name] = StateFile(name, *_fingerprint(file, self._disk))
                progressed()
        fingerprints = {name: self._known[name] for name in names}
        self._known = dict(fingerprints)
        return tuple(fingerprints.values())


def _fingerprint(path: str, disk: Disk) -> tuple[int, str]:
    data = disk.read(path)
    return len(data), hashlib.blake2b(data, digest_size=16).hexdigest()


# -- the newcomer ---------------------------------------------------------------------------------


def own_paths(
    log: Log, paths: Iterable[Path], check: Callable[[Version], None]
) -> dict[str, OwnPath]:
    """For each path, the newest usable version on the replica's own disk. Versions with damaged
    files are skipped."""
    own = {}
    for path in paths:
        usable = None
        for bucket, body in reversed(log.states(path.name)):
            version = Version.of(path.name, bucket, body)
            with suppress(LogError):
                check(version)
                usable = (bucket, version.needs_from)
                break
        own[path.name] = OwnPath(path.inputs, usable)
    return own


def check_offer(offered: OfferedState, paths: Sequence[Path]) -> None:
    """Check that a peer's offer contains exactly the requested paths and their files. Otherwise
    files outside of the request could be written, read and later deleted here."""
    if sorted(moving.path for moving in offered.paths) != sorted(path.name for path in paths):
        raise _unfit(f"the paths {', '.join(path.name for path in paths)}, found other paths")
    for moving, path in zip(
        sorted(offered.paths, key=lambda moving: moving.path),
        sorted(paths, key=lambda path: path.name),
        strict=True,
    ):
        _check_path(moving, path)
    named = {name for moving in offered.paths for name in moving.files}
    if named != {file.name for file in offered.files}:
        raise _unfit("sizes and digests of the files of the state, found those of other files")


def _check_path(moving: Moving, path: Path) -> None:
    streams = [results.stream for results in moving.results]
    foreign = [s.id for r in moving.results for s in r.segments if s.id.stream != r.stream]
    if sorted(streams) != sorted(path.outputs) or foreign:
        raise _unfit(f"the outputs {path.outputs} of path {path.name!r}, found {streams}")
    try:
        files = Version.of(moving.path, moving.bucket, moving.body).files()
    except LogCorrupted as err:
        raise _unfit(f"a valid state version, found an invalid one ({err})") from None
    if sorted(files, key=str) != sorted(moving.files):
        raise _unfit("the files that the state version names, found other files")


def _unfit(text: str) -> TransportError:
    return TransportError(
        f"the peer offered unusable state: expected {text}; run the same version of Holdfast on "
        "all hosts"
    )


class Staging:
    """The folder for fetched files, beside the storage of a replica. In the end this folder
    replaces the storage.

    A crash leaves either the old storage or the new one; `settle` removes the leftovers.
    """

    def __init__(self, folder: str, disk: Disk = OS_DISK, segments: Segments = PARQUET) -> None:
        self._folder, self._new, self._old = folder, f"{folder}.new", f"{folder}.old"
        self._disk, self._encoding = disk, segments
        self._offered = OfferedState("state")
        #: Segments by the name of their piece; all other pieces are state files.
        self._segments: dict[str, Segment] = {}
        self._places: dict[str, str] = {}
        self.pieces: tuple[Piece, ...] = ()
        self.bytes = 0

    def settle(self) -> None:
        """Clean up after a crash. Must be called before the storage is opened."""
        with storage(self._folder):
            if self._disk.exists(self._old) and not self._disk.exists(self._folder):
                self._disk.rename_folder(self._old, self._folder)
            self._disk.remove_folder(self._old)
        self.discard()

    def discard(self) -> None:
        with storage(self._new):
            self._disk.remove_folder(self._new)

    def expect(self, offered: OfferedState) -> tuple[Piece, ...]:
        """Prepare for an offer, and return the pieces to fetch."""
        self._offered, self.bytes = offered, 0
        segments = [s for m in offered.paths for results in m.results for s in results.segments]
        self._segments = {segment.path: segment for segment in segments}
        self._places = {name: f"fetched/{number}" for number, name in enumerate(self._segments)}
        state = [Piece(f"state/{f.name}", f.size_bytes, f.digest) for f in offered.files]
        self.pieces = (*state, *(Piece(s.path, s.size_bytes, s.checksum) for s in segments))
        return self.pieces

    def place(self, piece: Piece) -> str:
        """The path to write a piece to; creates its folder."""
        path = f"{self._new}/{self._places.get(piece.name, piece.name)}"
        make_folder(os.path.dirname(path), fsync=False, disk=self._disk)
        return path

    def verify(self, piece: Piece) -> None:
        """Check a fetched piece against the peer's offer; raises `LogCorrupted` if they differ."""
        if (segment := self._segments.get(piece.name)) is not None:
            self._read(segment)
        else:
            path = self.place(piece)
            with storage(path):
                fingerprint = _fingerprint(path, self._disk)
            if fingerprint != (piece.size_bytes, piece.digest):
                raise LogCorrupted(
                    f"{piece.name}: expected {piece.size_bytes} bytes with digest {piece.digest}, "
                    f"found {fingerprint[0]} bytes with digest {fingerprint[1]}; the piece is "
                    "fetched again"
                )
        self.bytes += piece.size_bytes

    def install(self, open_log: Callable[[str], Log], epoch: int) -> None:
        """Build a complete log from all pieces; `replace` then puts it in place of the storage. The
        next instance that opens the log has `epoch`."""
        for name in ("state", "fetched"):
            make_folder(f"{self._new}/{name}", fsync=False, disk=self._disk)
        log = open_log(self._new)
        try:
            log.raise_epoch(epoch - 1)
            for moving in self._offered.paths:
                self._install(log, moving)
        finally:
            log.close()
        with storage(self._folder):
            self._disk.remove_folder(f"{self._new}/fetched")

    def replace(self) -> None:
        # The log of the old storage must be closed.
        with storage(self._folder):
            if self._disk.exists(self._folder):
                self._disk.rename_folder(self._folder, self._old)
            self._disk.rename_folder(self._new, self._folder)
            self._disk.remove_folder(self._old)

    def _install(self, log: Log, moving: Moving) -> None:
        for results in moving.results:
            log.open_stream(
                results.stream, results.schema, results.time, results.starts_at,
                gone_upto=results.trimmed_upto,
            )  # fmt: skip
            written = [log.write(self._read(s), s.id, s.stability) for s in results.segments]
            added = [Added(segment) for segment in written]
            if results.complete_upto > results.trimmed_upto:
                log.append(*added, Boundary(results.stream, results.complete_upto))
        files = [f"state/{name}" for name in moving.files]
        log.save_state(moving.path, moving.bucket, moving.body, files)

    def _read(self, segment: Segment) -> Any:
        path = f"{self._new}/{self._places[segment.path]}"
        return self._encoding.read(
            path, rows=segment.rows, checksum=segment.checksum, disk=self._disk
        )
