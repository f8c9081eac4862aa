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

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from holdfast.engine.state import Version
from holdfast.errors import InputsLost, StaleEpoch, TransportError, Trimmed
from holdfast.model.fragments import Path
from holdfast.storage import Added, Boundary, Log
from holdfast.streams.calls import Moving, Results
from holdfast.types import Segment

#: How one of a pair finds out that it was declared dead: it is then made anew.
DECLARED_DEAD = (StaleEpoch, Trimmed, InputsLost)


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


def check_offer(moving: Moving, paths: Iterable[Path]) -> None:
    """A peer says what it gives. It must be what was asked for, or files of others could be
    written, read and later deleted here."""
    path = next((path for path in paths if path.name == moving.path), None)
    if path is None:
        raise _unfit(f"a path of this node, found {moving.path!r}")
    streams = [results.stream for results in moving.results]
    of_others = [s.id for r in moving.results for s in r.segments if s.id.stream != r.stream]
    if sorted(streams) != sorted(path.outputs) or of_others:
        raise _unfit(f"the outputs {path.outputs} of path {path.name!r}, found {streams}")
    try:
        files = Version.of(moving.path, moving.bucket, moving.body).files()
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise _unfit(f"a state version, found one without {err}") from None
    if sorted(files, key=str) != sorted(moving.files):
        raise _unfit("the files that the state version names, found others")


def _unfit(text: str) -> TransportError:
    return TransportError(f"a state to rebuild from: expected {text}; run the same version")


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
