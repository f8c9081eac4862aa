"""Storage: rows as segments, everything else as records; the only package that calls fsync."""

from holdfast.storage.reading import ReadOnlyLog, read_only
from holdfast.storage.records import (
    Ack,
    Added,
    Boundary,
    Counter,
    DropState,
    Ended,
    Epoch,
    Note,
    Open,
    Query,
    Record,
    Retired,
    State,
    Tentative,
    Token,
    Trim,
    Undo,
)
from holdfast.storage.rows import canonical, digest, sort_canonical, times_us
from holdfast.storage.store import Log

__all__ = [
    "Ack",
    "Added",
    "Boundary",
    "Counter",
    "DropState",
    "Ended",
    "Epoch",
    "Log",
    "Note",
    "Open",
    "Query",
    "ReadOnlyLog",
    "Record",
    "Retired",
    "State",
    "Tentative",
    "Token",
    "Trim",
    "Undo",
    "canonical",
    "digest",
    "read_only",
    "sort_canonical",
    "times_us",
]
