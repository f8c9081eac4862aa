"""A log as somebody else's: read beside its live owner, without the lock and without a write.

What is appended or trimmed after the manifest was read is not seen; a frame that is just being
written looks like a torn tail and is left out, as recovery would leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from holdfast.errors import InputError
from holdfast.log import folder
from holdfast.log.files import storage
from holdfast.log.manifest import read_records
from holdfast.log.segment import read_segment
from holdfast.log.state import LogState, fold
from holdfast.types import Segment


@dataclass(frozen=True, slots=True)
class ReadOnlyLog:
    root: Path
    #: The fold of the records that were there. Not to be changed.
    state: LogState

    def absolute(self, segment: Segment) -> str:
        return str(self.root / segment.path)

    def read(self, segment: Segment) -> pa.Table:
        """The rows, held against their checksum."""
        return read_segment(self.absolute(segment), rows=segment.rows, checksum=segment.checksum)


def read_only(root: str | Path) -> ReadOnlyLog:
    """The log in the folder `root`, as it stands now."""
    root = Path(root).absolute()
    path = root / folder.MANIFEST
    try:
        with storage(path):
            data = path.read_bytes()
    except Exception as err:
        if isinstance(err.__cause__, FileNotFoundError | NotADirectoryError):
            raise InputError(f"{root}: there is no log here; name a folder of a run") from err
        raise
    state = LogState()
    for record in read_records(data, path):
        fold(state, record)
    return ReadOnlyLog(root, state)
