"""The words of a manifest. Whatever a log knows, it knows from records like these.

They are written as JSON objects with a "kind", flat and plain, so that a manifest can be read with
ordinary tools when something has gone wrong.
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
    """A stream begins: its rows, and the first bucket it can have."""

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
    """Every bucket up to `upto` is whole: nothing more will be added to it."""

    stream: str
    upto: int


@dataclass(frozen=True, slots=True)
class Tentative:
    """The buckets `since` to `upto` were computed without the inputs `missing` (TENTATIVE); they
    stand until a boundary covers them. `inputs` and `rows` are the shares that were there."""

    stream: str
    since: int
    upto: int
    missing: tuple[str, ...]
    inputs: float = 1.0
    rows: float = 1.0


@dataclass(frozen=True, slots=True)
class Undo:
    """Tentative rows that a crash left behind are given up, for the `number`-th time; `upto`
    stands. The files are deleted after this."""

    stream: str
    upto: int
    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The boundary will never rise again."""

    stream: str


@dataclass(frozen=True, slots=True)
class Retired:
    """It was decided that the stream is over: from this bucket on everybody goes on without it."""

    stream: str
    from_bucket: int
    why: str


@dataclass(frozen=True, slots=True)
class Trim:
    """Segments up to `upto` are given up. Their files are deleted after this, never before."""

    stream: str
    upto: int


@dataclass(frozen=True, slots=True)
class Ack:
    """A reader's two positions: only `needed` (no longer needed up to it) may trim."""

    reader: str
    stream: str
    received: int
    needed: int
    #: Epoch of the reader's instance.
    epoch: int


@dataclass(frozen=True, slots=True)
class Token:
    """Where the application resumes; durable together with the rows it speaks of."""

    stream: str
    token: str


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that must survive, such as rows that came late. The value replaces the last one."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class State:
    """A durable version of an engine path's state, after `bucket`. Its files are synced already."""

    path: str
    bucket: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DropState:
    """Versions of the path before `upto` are forgotten; the one of `upto` itself stays."""

    path: str
    upto: int


@dataclass(frozen=True, slots=True)
class Note:
    """For people: changes nothing."""

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
#: Where the fields of `Added` are. `asdict` would take most of the time of an append.
_SPREAD = {name: f"segment.id.{name}" for name in _IDENTITY} | {
    field.name: f"segment.{field.name}" for field in fields(Segment) if field.name != "id"
}
#: By kind: where each of its fields is.
_FIELDS = {kind: {field.name: field.name for field in fields(kind)} for kind in _NAMES}
_FIELDS[Added] = _SPREAD
#: The values of all of them at once; of a single one, just that.
_VALUES = {kind: attrgetter(*found.values()) for kind, found in _FIELDS.items()}
#: By kind: the JSON of a record with a place for each value.
_TEXTS = {
    kind: f'{{"kind":"{name}"' + "".join(f',"{field}":%s' for field in _FIELDS[kind]) + "}"
    for kind, name in _NAMES.items()
}
#: Records hold no cycles, so none are looked for.
_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _values(record: Record) -> tuple[Any, ...]:
    kind = type(record)
    values = _VALUES[kind](record)
    return values if len(_FIELDS[kind]) > 1 else (values,)


def to_json(record: Record) -> str:
    """One flat object; a segment's identity is spread out beside the rest of it.

    Most values are whole numbers and short texts, so the object is put together here: an encoder
    takes longer to begin than to write them.
    """
    texts = [str(value) if type(value) is int else _dumps(value) for value in _values(record)]
    return _TEXTS[type(record)] % tuple(texts)


def from_json(plain: dict[str, Any]) -> Record:
    """The inverse of `to_json`. Whoever wrote a kind or a field we do not know is newer than us."""
    given = dict(plain)
    name = given.pop("kind", None)
    try:
        kind = _KINDS[name]
        if kind is Added:
            identity = SegmentId(*[given.pop(name) for name in _IDENTITY])
            stability = Stability(given.pop("stability"))
            return Added(Segment(id=identity, stability=stability, **given))
        if kind is Tentative:
            given["missing"] = tuple(given["missing"])
        return kind(**given)
    except (KeyError, TypeError, ValueError) as err:
        raise LogCorrupted(
            f"a record of kind {name!r} with fields {sorted(given)} is unknown: it was written by "
            "another version of Holdfast; start this storage with that version"
        ) from err


def encode(records: Sequence[Record]) -> bytes:
    """Records that become durable together: one frame's payload."""
    return f"[{','.join([to_json(record) for record in records])}]".encode()


def decode(payload: bytes) -> list[Record]:
    try:
        plain = json.loads(payload)
    except ValueError as err:
        raise LogCorrupted(f"a record that is not JSON: {err}") from err
    return [from_json(record) for record in plain]
