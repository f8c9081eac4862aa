"""Tentative buckets in a log: what may be written of them, and what is known after any crash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import LogCorrupted, ProtocolViolation, TransportError
from holdfast.storage import (
    Added,
    Boundary,
    Ended,
    Log,
    Open,
    RecDone,
    Record,
    Tentative,
    Trim,
    Undo,
)
from holdfast.storage.log_state import LogState, fold, live_records, rehearse, snapshot
from holdfast.types import Segment, SegmentId, Stability

Rows = Callable[..., pa.Table]
STABLE, TENTATIVE = Stability.STABLE, Stability.TENTATIVE
SCHEMA = "ts timestamp, src string, bytes bigint"


def added(bucket: int, stability: Stability = STABLE, version: int = 0) -> Added:
    identity = SegmentId("tap", 0, bucket, version)
    return Added(Segment(identity, stability, str(identity), 1, "", 0, 1, 1))


def guess(since: int, upto: int, *missing: str) -> Tentative:
    return Tentative("tap", since, upto, missing or ("far",))


def after(*records: Record) -> LogState:
    """Stable up to bucket 2; then this."""
    state = LogState()
    for record in (Open("tap", SCHEMA, "ts", 0), added(1), Boundary("tap", 2), *records):
        fold(state, record)
    return state


FAILED = (guess(3, 4), added(4, TENTATIVE), guess(5, 5, "farther"))


def test_a_failure_and_its_correction() -> None:
    tap = after(*FAILED).stream("tap")
    assert (tap.complete_upto, tap.tentative_upto) == (2, 5)
    assert [segment.id.bucket for segment in tap.tentative] == [4]
    assert [segment.id.bucket for segment in tap.segments] == [1]

    tap = after(*FAILED, Undo("tap", 2, 1), added(3, version=1), Boundary("tap", 5)).stream("tap")
    assert (tap.complete_upto, tap.tentative_upto, tap.undos) == (5, None, 1)
    assert (tap.spans, tap.tentative) == ([], [])
    assert [(s.id.bucket, s.id.version) for s in tap.segments] == [(1, 0), (3, 1)]


def test_what_is_tentative_is_no_part_of_what_is_whole() -> None:
    tap = after(*FAILED).stream("tap")
    assert tap.between(0, 99) == [added(1).segment]
    assert tap.trimmable == -1


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Boundary("tap", 3), "not yet undone"),
        (Boundary("tap", 9), "not yet undone"),
        (Undo("tap", 1, 1), "stable is never undone"),
        (Undo("tap", 3, 1), "stable is never undone"),
        (Undo("tap", 2, 0), "known already"),
        (RecDone("tap", 1, 1), "no other bucket is corrected"),
        (RecDone("tap", 2, 0), "are known"),
        (RecDone("tap", 2, 1), "tentative buckets stand"),
        (Ended("tap"), "tentative buckets stand"),
        (guess(5, 6), "was given up to 5"),
        (guess(2, 6), "was given up to 5"),
        (guess(7, 6), "was given up to 5"),
        (added(2, TENTATIVE), "whole already"),
        (added(4, TENTATIVE), "added before"),
        (Undo("nowhere", 2, 1), "not open"),
    ],
)
def test_what_must_not_be_written_is_refused_before_it_is(record: Record, why: str) -> None:
    state = after(*FAILED)
    before = copy.deepcopy(state)
    with pytest.raises(ProtocolViolation, match=why):
        rehearse(state, [record])
    assert state == before
    with pytest.raises(ProtocolViolation, match=why):
        fold(state, record)
    assert state == before


def test_a_boundary_below_what_is_tentative_may_rise() -> None:
    """An output that was blocked for a while has its first guess later than it could."""
    state = after(guess(5, 6))
    rehearse(state, [Boundary("tap", 4)])
    with pytest.raises(ProtocolViolation, match="not yet undone"):
        rehearse(state, [Boundary("tap", 5)])


def test_nothing_is_tentative_after_the_end() -> None:
    state = after(Ended("tap"))
    for record in (guess(3, 3), added(3, TENTATIVE)):
        with pytest.raises(ProtocolViolation, match="has ended"):
            fold(state, record)


def test_an_append_is_rehearsed_as_a_whole() -> None:
    """UNDO, corrections and boundary are one append: what the first allows the last may do."""
    state = after(*FAILED)
    corrected = [Undo("tap", 2, 1), added(3, version=1), Boundary("tap", 4), guess(5, 5)]
    rehearse(state, corrected)
    with pytest.raises(ProtocolViolation, match="not yet undone"):
        rehearse(state, corrected[1:])
    with pytest.raises(ProtocolViolation, match="known already"):
        rehearse(state, [*corrected, Undo("tap", 4, 1)])
    assert state == after(*FAILED)


@pytest.mark.parametrize(
    "story",
    [
        FAILED,
        (*FAILED, Undo("tap", 2, 1)),
        (*FAILED, Undo("tap", 2, 1), added(3, version=1), Boundary("tap", 3), guess(4, 4)),
        (*FAILED, Undo("tap", 2, 1), RecDone("tap", 2, 1), guess(3, 3), added(3, TENTATIVE, 1)),
        (*FAILED, Undo("tap", 2, 1), Boundary("tap", 5), RecDone("tap", 5, 1), Ended("tap")),
        (Trim("tap", 2), *FAILED, Undo("tap", 2, 4), RecDone("tap", 2, 7)),
    ],
)
def test_a_snapshot_tells_the_same_story(story: tuple[Record, ...]) -> None:
    state, again = after(*story), LogState()
    for record in snapshot(state):
        fold(again, record)
    assert again == state
    assert abs(live_records(state) - len(snapshot(state))) <= 2


# -- on a disk ------------------------------------------------------------------------------------


def start(root: Path) -> Log:
    log = Log.open(root, "a", fsync="always")
    log.open_stream("tap", SCHEMA, "ts", 0)
    return log


def put_guess(log: Log, rows: Rows, bucket: int) -> Segment:
    segment = log.write(rows(bucket), SegmentId("tap", 0, bucket), TENTATIVE)
    log.append(Added(segment), guess(bucket, bucket))
    return segment


def test_tentative_buckets_are_taken_back_when_the_log_is_opened_again(
    tmp_path: Path, rows: Rows
) -> None:
    """They are not synced, so nobody can rely on what a crash left of them."""
    log = start(tmp_path)
    log.append(RecDone("tap", -1, 3))
    put_guess(log, rows, 0)
    lost = put_guess(log, rows, 1)
    before = log.info("tap")
    assert (before.tentative_upto, before.complete_upto, before.rec_dones) == (1, -1, 3)
    log.close()
    (tmp_path / lost.path).unlink()
    log = start(tmp_path)
    assert log.tentative("tap") == ([], [])
    after = log.info("tap")
    assert (after.tentative_upto, after.undos, after.rec_dones) == (None, before.undos + 1, 3)
    assert len(log.orphans) == 1
    log.close()


def test_reading_what_was_taken_back_meanwhile_is_nobodys_fault(tmp_path: Path, rows: Rows) -> None:
    """A reader asks again; a file that is gone and should not be is another matter."""
    log = start(tmp_path)
    kept, undone = put_guess(log, rows, 0), put_guess(log, rows, 1)
    (tmp_path / kept.path).unlink()
    with pytest.raises(LogCorrupted):
        log.read(kept)
    log.append(Undo("tap", -1, 1))
    log.discard([undone])
    with pytest.raises(TransportError, match="taken back meanwhile"):
        log.read(undone)
    log.close()


def test_whoever_waits_is_woken_by_what_is_tentative(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    put_guess(log, rows, 0)
    assert log.wait("tap", lambda info: info.tentative_upto == 0, 10).tentative_upto == 0
    log.append(Undo("tap", -1, 1), RecDone("tap", -1, 1))
    assert log.wait("tap", lambda info: info.undos == info.rec_dones == 1, 10).undos == 1
    log.close()
