"""Read-only access to the log of a live owner, without the lock and without writes.

Appends and trims after the manifest was read are not visible. A frame that is being written looks
like a torn tail and is ignored, as in recovery.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from holdfast.errors import InputError
from holdfast.frozen import dataclass
from holdfast.storage import folder
from holdfast.storage.disk import OS_DISK, Disk
from holdfast.storage.files import storage
from holdfast.storage.log_state import LogState, fold
from holdfast.storage.manifest import read_records
from holdfast.storage.segment import PARQUET, Segments
from holdfast.types import Segment


@dataclass(frozen=True, slots=True)
class ReadOnlyLog:
    root: Path
    #: The fold of the records at the time of reading. Must not be modified.
    state: LogState
    disk: Disk = OS_DISK
    segments: Segments = PARQUET

    def absolute(self, segment: Segment) -> str:
        return str(self.root / segment.path)

    def read(self, segment: Segment) -> pa.Table:
        """The rows of a segment, verified against their checksum."""
        return self.segments.read(
            self.absolute(segment), rows=segment.rows, checksum=segment.checksum, disk=self.disk
        )


def read_only(
    root: str | Path, *, disk: Disk = OS_DISK, segments: Segments = PARQUET
) -> ReadOnlyLog:
    """The log in the folder `root`, as of now."""
    root = Path(root).absolute()
    path = str(root / folder.MANIFEST)
    try:
        with storage(path):
            data = disk.read(path)
    except Exception as err:
        if isinstance(err.__cause__, FileNotFoundError | NotADirectoryError):
            raise InputError(
                f"{root}: expected a log, found no manifest; pass the folder of a log of a run"
            ) from err
        raise
    state = LogState()
    for record in read_records(data, path):
        fold(state, record)
    return ReadOnlyLog(root, state, disk, segments)
