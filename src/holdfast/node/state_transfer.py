"""State movement (Flux sections 3.3.1 and 5.3.1): one of a pair is made anew from the other.

The paper pauses the survivor and all its producers. Here a bucket boundary serves: the survivor
gives the state after the last bucket it has done, which is immutable, and goes on. Before it is
asked, every producer has been told to keep what the newcomer may need (`Service.hold`), so whatever
bucket it is, the inputs behind it are there. What the survivor still keeps of its own results goes
along: whoever reads may need them from the newcomer, should the survivor die.

The newcomer writes all of it into an empty storage as if it had been there, a durable version in
its own log, and from there on comes up like any node that was restarted. So moving again, after
any failure in the middle, is starting again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.engine.state import Version
from holdfast.errors import InputsLost, StaleEpoch, TransportError, Trimmed
from holdfast.storage import Added, Boundary, Log
from holdfast.transport.wire import segment_body, segment_of
from holdfast.types import Segment

#: How one of a pair finds out that it was declared dead: it is then made anew.
DECLARED_DEAD = (StaleEpoch, Trimmed, InputsLost)


@dataclass(frozen=True, slots=True)
class Results:
    """What is still kept of an output stream."""

    stream: str
    schema: str
    time: str
    starts_at: int
    trimmed_upto: int
    #: It may be ahead of the state: one that came back from its own disk computes again what it had
    #: logged before.
    complete_upto: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Moving:
    """A path as it is after `bucket`."""

    path: str
    bucket: int
    body: dict[str, Any]
    files: tuple[str, ...]
    results: tuple[Results, ...]


def describe(log: Log, version: Version, outputs: Sequence[str]) -> Moving:
    results = [_kept(log, stream) for stream in outputs]
    return Moving(
        version.path, version.bucket, version.body(), tuple(version.files()), tuple(results)
    )


def _kept(log: Log, stream: str) -> Results:
    while True:
        info = log.info(stream)
        with suppress(Trimmed):  # by a reader, between the two questions
            kept = log.segments(stream, info.trimmed_upto + 1, info.complete_upto)
            return Results(
                stream, info.schema, info.time, info.starts_at, info.trimmed_upto,
                info.complete_upto, tuple(kept),
            )  # fmt: skip


def moving_body(moving: Moving) -> dict[str, Any]:
    body = asdict(moving)
    for told, found in zip(body["results"], moving.results, strict=True):
        told["segments"] = [segment_body(segment) for segment in found.segments]
    return body


def moving_of(body: dict[str, Any]) -> Moving:
    try:
        results = tuple(
            Results(**{**told, "segments": tuple(map(segment_of, told["segments"]))})
            for told in body["results"]
        )
        return Moving(**{**body, "files": tuple(body["files"]), "results": results})
    except (TypeError, KeyError) as err:
        raise TransportError(f"a state that does not parse ({err})") from None


def install(log: Log, moving: Moving, rows: Callable[[Segment], Any]) -> None:
    """Into an empty log; the files of the state are in their place already."""
    for found in moving.results:
        log.open_stream(
            found.stream, found.schema, found.time, found.starts_at, gone_upto=found.trimmed_upto
        )
        written = [log.write(rows(s), s.id, s.stability) for s in found.segments]
        added = [Added(segment) for segment in written]
        if found.complete_upto > found.trimmed_upto:
            log.append(*added, Boundary(found.stream, found.complete_upto))
    files = [f"state/{name}" for name in moving.files]
    log.save_state(moving.path, moving.bucket, moving.body, files)
