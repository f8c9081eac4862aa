"""When a manifest is rewritten: most of it must be obsolete. Records count by their number, and
large ones by their bytes: a state version may name thousands of files."""

from __future__ import annotations

from holdfast.storage.log_state import LogState, live_records

#: A manifest is rewritten when it has grown by more than this many records, and by more than this
#: many times the records that are still live.
_RECORDS_MIN = 1_000
_FACTOR = 4
#: So many bytes count as a record.
_RECORD_BYTES = 512


class Compaction:
    def __init__(self) -> None:
        #: Records appended since the last rewrite.
        self._grown = 0
        self._retry_at = 0
        #: By path: bytes of its newest state version.
        self._state_bytes: dict[str, int] = {}

    def appended(self, records: int, size_bytes: int) -> None:
        self._grown += max(records, size_bytes // _RECORD_BYTES)

    def saved(self, path: str, size_bytes: int) -> None:
        """A state version was appended."""
        self._state_bytes[path] = size_bytes

    def is_possible(self) -> bool:
        """Whether to ask `is_due`. Fast, for every append."""
        return self._grown > max(_RECORDS_MIN, self._retry_at)

    def is_due(self, state: LogState) -> bool:
        # A path has two versions while a newer one replaces the older one.
        versions = 2 * sum(self._state_bytes.values()) // _RECORD_BYTES
        return self._grown > _FACTOR * (live_records(state) + versions)

    def failed(self) -> None:
        self._retry_at = 2 * self._grown

    def done(self) -> None:
        self._grown = self._retry_at = 0
