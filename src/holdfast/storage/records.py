"""The record types of a manifest. The state of a log is derived from these records only.

Records are written as flat JSON objects with a "kind", so that a manifest can be inspected with
ordinary tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from holdfast.errors import LogCorrupted
from holdfast.frozen import dataclass
from holdfast.types import Segment, SegmentId, Stability


@dataclass(frozen=True, slots=True)
class Epoch:
    """A new instance of the owner has opened the log. Epochs only rise."""

    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Query:
    """The log belongs to the query with this digest (`model/identity.py`), and to no other."""

    digest: str


@dataclass(frozen=True, slots=True)
class Open:
    """A stream is opened: the schema of its rows, its time column and its first possible bucket."""

    stream: str
    schema: str
    time: str
    starts_at: int


@dataclass(frozen=True, slots=True)
class Added:
    """The segment's file is durable and part of its stream."""

    segment: Segment

    @property
    def stream(self) -> str:
        return self.segment.id.stream


@dataclass(frozen=True, slots=True)
class Boundary:
    """Every bucket up to `upto` is complete: no segment will be added to it."""

    stream: str
    upto: int


@dataclass(frozen=True, slots=True)
class Tentative:
    """The buckets `since` to `upto` were computed without the inputs `missing` (TENTATIVE). They
    remain valid until a boundary covers them. `inputs` and `rows` are the shares of the inputs and
    of the expected rows that were present."""

    stream: str
    since: int
    upto: int
    missing: tuple[str, ...]
    inputs: float = 1.0
    rows: float = 1.0


@dataclass(frozen=True, slots=True)
class Undo:
    """All tentative buckets, left behind by a crash, are discarded for the `number`-th time. Stable
    buckets up to `upto` remain."""

    stream: str
    upto: int
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The boundary will never rise again."""

    stream: str


@dataclass(frozen=True, slots=True)
class Retired:
    """A user has retired the stream: from `from_bucket` on, consumers continue without it."""

    stream: str
    from_bucket: int
    why: str


@dataclass(frozen=True, slots=True)
class Trim:
    """Segments up to `upto` are removed. Their files are deleted after this record only."""

    stream: str
    upto: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The two positions of a consumer, `received` up to and `needed`: released up to. Only the
    released position allows trimming."""

    #: Name of the consumer. The field is part of the format on disk and keeps its name.
    reader: str
    stream: str
    received: int
    needed: int
    #: Epoch of the consumer's instance.
    epoch: int


@dataclass(frozen=True, slots=True)
class Token:
    """The position from which the application resumes; durable together with the rows before it."""

    stream: str
    token: str


@dataclass(frozen=True, slots=True)
class Counter:
    """A durable number, such as the count of late rows. `value` replaces the previous value."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class State:
    """The state version of a path after `bucket`. The files of the version were synced before."""

    path: str
    bucket: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DropState:
    """State versions of the path before `upto` are dropped; the version of `upto` remains."""

    path: str
    upto: int


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for operators; does not change the state of the log."""

    text: str


_OfStreams = Open | Added | Boundary | Tentative | Undo | Ended | Retired | Trim | Ack | Token
Record = Epoch | Query | _OfStreams | Counter | State | DropState | Note

_KINDS: dict[str, type[Record]] = {
    "epoch": Epoch,
    "query": Query,
    "open": Open,
    "added": Added,
    "boundary": Boundary,
    "tentative": Tentative,
    "undo": Undo,
    "ended": Ended,
    "retired": Retired,
    "trim": Trim,
    "ack": Ack,
    "token": Token,
    "counter": Counter,
    "state": State,
    "drop_state": DropState,
    "note": Note,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_IDENTITY = tuple(field.name for field in fields(SegmentId))
#: Attribute path of each field of `Added`. `asdict` would take most of the time of an append.
_SPREAD = {name: f"segment.id.{name}" for name in _IDENTITY} | {
    field.name: f"segment.{field.name}" for field in fields(Segment) if field.name != "id"
}
#: By record type: the attribute path of each field.
_FIELDS = {kind: {field.name: field.name for field in fields(kind)} for kind in _NAMES}
_FIELDS[Added] = _SPREAD
#: By record type: a getter of all values. For a single field, `attrgetter` returns no tuple.
_VALUES = {kind: attrgetter(*found.values()) for kind, found in _FIELDS.items()}
#: By record type: the JSON text of a record, with a placeholder for each value.
_TEXTS = {
    kind: f'{{"kind":"{name}"' + "".join(f',"{field}":%s' for field in _FIELDS[kind]) + "}"
    for kind, name in _NAMES.items()
}
#: Records contain no cycles, so the check for them is off.
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _values(record: Record) -> tuple[Any, ...]:
    kind = type(record)
    values = _VALUES[kind](record)
    return values if len(_FIELDS[kind]) > 1 else (values,)


def to_json(record: Record) -> str:
    """The record as one flat JSON object; the fields of a segment's identity are inlined.

    The object is formatted here because most values are integers and short strings, for which the
    startup cost of a JSON encoder dominates.
    """
    texts = [str(value) if type(value) is int else _dumps(value) for value in _values(record)]
    return _TEXTS[type(record)] % tuple(texts)


def from_json(plain: dict[str, Any]) -> Record:
    """The inverse of `to_json`. An unknown kind or field was written by another version."""
    values = dict(plain)
    name = values.pop("kind", None)
    try:
        kind = _KINDS[name]
        if kind is Added:
            identity = SegmentId(*[values.pop(name) for name in _IDENTITY])
            stability = Stability(values.pop("stability"))
            return Added(Segment(id=identity, stability=stability, **values))
        if kind is Tentative:
            values["missing"] = tuple(values["missing"])
        return kind(**values)
    except (KeyError, TypeError, ValueError) as err:
        raise LogCorrupted(
            f"unknown record of kind {name!r} with fields {sorted(values)}: it was written by "
            "another version of Holdfast; start this storage with that version"
        ) from err


def encode(records: Sequence[Record]) -> bytes:
    """The payload of one frame: records that become durable together."""
    return f"[{','.join([to_json(record) for record in records])}]".encode()


def decode(payload: bytes) -> list[Record]:
    try:
        plain = json.loads(payload)
    except ValueError as err:
        raise LogCorrupted(f"expected records in JSON, found invalid JSON: {err}") from err
    return [from_json(record) for record in plain]
