"""Messages as versioned plain JSON. Nothing is ever unpickled from the wire."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from holdfast import errors
from holdfast.errors import TransportError
from holdfast.streams.delivery import Delivery
from holdfast.types import FORMAT, OutputState, Segment, SegmentId, Stability, StreamInfo

_BOUNDARY = [
    field.name
    for field in fields(Delivery)
    if field.name not in ("segments", "paths", "tables", "info")
]


def encode(kind: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"v": FORMAT, "kind": kind, **body}, separators=(",", ":")).encode()


def decode(data: bytes, *kinds: str) -> dict[str, Any]:
    try:
        message = json.loads(bytes(data))
    except (ValueError, UnicodeDecodeError) as err:
        raise TransportError(f"a message that is not JSON ({err})") from None
    if not isinstance(message, dict) or message.get("kind") not in kinds:
        wanted = " or ".join(repr(kind) for kind in kinds)
        raise TransportError(f"expected a {wanted} message, got {str(message)[:80]!r}")
    if message.get("v") != FORMAT:
        raise TransportError(
            f"the peer speaks format {message.get('v')}, this is {FORMAT}; run the same version on "
            "both sides"
        )
    return message


def segment_body(segment: Segment) -> dict[str, Any]:
    body = asdict(segment)
    body["stability"] = segment.stability.value
    return body


def segment_of(body: dict[str, Any]) -> Segment:
    try:
        return Segment(
            **{**body, "id": SegmentId(**body["id"]), "stability": Stability(body["stability"])}
        )
    except (TypeError, ValueError, KeyError) as err:
        raise TransportError(f"a segment that does not parse ({err})") from None


def boundary_body(delivery: Delivery) -> dict[str, Any]:
    """A delivery without its segments, which go before."""
    body = {name: getattr(delivery, name) for name in _BOUNDARY}
    return body | {"info": asdict(delivery.info) if delivery.info else None}


def delivery_of(
    body: dict[str, Any], segments: list[Segment], paths: list[str], tables: list[Any]
) -> Delivery:
    try:
        plain = {name: body[name] for name in _BOUNDARY}
        plain |= {"state": OutputState(body["state"]), "missing": tuple(body["missing"])}
        plain["partial"] = tuple(body["partial"])
    except (KeyError, ValueError, TypeError) as err:
        raise TransportError(f"a delivery that does not parse ({err})") from None
    return Delivery(
        segments=tuple(segments), paths=tuple(paths), tables=tuple(tables),
        info=info_of(body["info"]) if body["info"] else None, **plain,
    )  # fmt: skip


def info_of(body: dict[str, Any]) -> StreamInfo:
    try:
        return StreamInfo(**body)
    except TypeError as err:
        raise TransportError(f"a stream description that does not parse ({err})") from None


def error_body(err: errors.HoldfastError) -> str:
    """An error as text that `error_of` on the other side turns back into the same class."""
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
