"""The wire format: versioned plain JSON messages. No data from the wire is ever unpickled.

A message is the JSON object of a dataclass (`streams/codec.py`) with two more fields, the version
and the kind of the message. Calls and their replies are in `streams/calls.py`; this module has the
messages of exchanges that also carry rows or bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from holdfast import errors
from holdfast.errors import HoldfastError, InputError, TransportError
from holdfast.streams import codec
from holdfast.streams.codec import FileName
from holdfast.streams.delivery import Delivery
from holdfast.types import FORMAT, Segment

T = TypeVar("T")
#: Fields of a delivery that are sent before its boundary, each segment in its own message.
_APART = ("segments", "paths", "tables")


@dataclass(frozen=True, slots=True)
class Follow:
    """Request for the deliveries of a stream from a bucket on. The server sends rows, or paths if
    the consumer `sees` its files."""

    stream: str
    from_bucket: int | None
    sees: bool
    tentative_after: int | None


@dataclass(frozen=True, slots=True)
class Push:
    """Announces rows for a source."""

    source: str
    token: str | None
    flush: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Request for the bytes of an offered file."""

    name: FileName


@dataclass(frozen=True, slots=True)
class Arrival:
    """A segment of a delivery. If `path` is None, its rows were sent before this message."""

    segment: Segment
    path: str | None


def encode(kind: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"v": FORMAT, "kind": kind, **body}, separators=(",", ":")).encode()


def decode(
    data: bytes, *kinds: str, error: type[HoldfastError] = TransportError
) -> tuple[str, dict[str, Any]]:
    """Kind and body of a message. A malformed message raises `error`. Servers raise `InputError`,
    which the caller does not retry."""
    try:
        message = json.loads(bytes(data))
    except (ValueError, RecursionError) as err:
        raise error(
            f"expected a JSON message, found bytes that are not JSON ({type(err).__name__})"
        ) from None
    expected = " or ".join(repr(kind) for kind in kinds)
    if not isinstance(message, dict):
        raise error(f"expected a {expected} message, found {codec.shown(message)}")
    kind, version = message.pop("kind", None), message.pop("v", None)
    if kind not in kinds:
        raise error(f"expected a {expected} message, found {codec.shown(kind)}")
    if type(version) is not int or version != FORMAT:
        raise error(
            f"the other process uses wire format {codec.shown(version)}, this process {FORMAT}; "
            "run the same version of Holdfast on both sides"
        )
    return kind, message


def question(kind: str, ask: Follow | Push | Fetch) -> bytes:
    return encode(kind, codec.encode(ask))


def question_of(data: bytes, kind: str, cls: type[T]) -> T:
    _, body = decode(data, kind, error=InputError)
    return codec.decode(cls, body, InputError, f"request {kind!r}")


def arrival_of(body: dict[str, Any]) -> Arrival:
    return codec.decode(Arrival, body, TransportError, "a segment")


def boundary_body(delivery: Delivery) -> dict[str, Any]:
    """A delivery without its segments, which are sent before."""
    return codec.encode(delivery, without=_APART)


def delivery_of(
    body: dict[str, Any], segments: list[Segment], paths: list[str], tables: list[Any]
) -> Delivery:
    bare = codec.decode(Delivery, body, TransportError, "a delivery", without=_APART)
    return replace(bare, segments=tuple(segments), paths=tuple(paths), tables=tuple(tables))


def error_body(err: errors.HoldfastError) -> str:
    """An error as text, which `error_of` at the receiver converts back into the same class."""
    return f"holdfast:{type(err).__name__}:{err}"


def error_of(text: str, fallback: str) -> errors.HoldfastError:
    at = text.find("holdfast:")
    if at >= 0:
        name, _, message = text[at + len("holdfast:") :].partition(":")
        cls = getattr(errors, name, None)
        message = message.split(". Detail:", 1)[0].split(". gRPC client debug", 1)[0]
        if isinstance(cls, type) and issubclass(cls, errors.HoldfastError):
            if cls is errors.NetworkError:
                return errors.HoldfastError(message)
            return cls(message)
    return TransportError(fallback)
