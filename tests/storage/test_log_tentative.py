"""Tentative buckets in a log: legal records, and the state after a crash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import LogCorrupted, ProtocolViolation, TransportError
from holdfast.storage import Added, Boundary, Ended, Log, Open, Record, Tentative, Trim, Undo
from holdfast.storage.log_state import LogState, fold, live_records, rehearse, snapshot
from holdfast.types import Segment, SegmentId, Stability

Rows = Callable[..., pa.Table]
STABLE, TENTATIVE = Stability.STABLE, Stability.TENTATIVE
SCHEMA = "ts timestamp, src string, bytes bigint"


def added(bucket: int, stability: Stability = STABLE, version: int = 0) -> Added:
    identity = SegmentId("tap", 0, bucket, version)
    return Added(Segment(identity, stability, str(identity), 1, "", 0, 1, 1))


def tentative_span(
    since: int, upto: int, *missing: str, shares: tuple[float, float] = (0.5, 0.5)
) -> Tentative:
    return Tentative("tap", since, upto, missing or ("far",), *shares)


def after(*records: Record) -> LogState:
    """The state of a stream that is stable up to bucket 2, after further records."""
    state = LogState()
    for record in (Open("tap", SCHEMA, "ts", 0), added(1), Boundary("tap", 2), *records):
        fold(state, record)
    return state


FAILED = (tentative_span(3, 4), added(4, TENTATIVE), tentative_span(5, 5, "farther"))


def buckets(segments: list[Segment]) -> list[tuple[int, int]]:
    return [(segment.id.bucket, segment.id.version) for segment in segments]


def test_a_correction_replaces_the_tentative_buckets_of_a_failure() -> None:
    tap = after(*FAILED).stream("tap")
    assert (tap.complete_upto, tap.tentative_upto) == (2, 5)
    assert buckets(tap.tentative) == [(4, 0)]
    assert buckets(tap.segments) == [(1, 0)]

    tap = after(*FAILED, added(3, version=1), Boundary("tap", 5)).stream("tap")
    assert (tap.complete_upto, tap.tentative_upto, tap.undos) == (5, None, 0)
    assert (tap.spans, tap.tentative) == ([], [])
    assert buckets(tap.segments) == [(1, 0), (3, 1)]


def test_a_boundary_replaces_only_the_tentative_buckets_up_to_it() -> None:
    failed = (tentative_span(3, 6), added(3, TENTATIVE), added(4, TENTATIVE), added(6, TENTATIVE))
    tap = after(*failed, added(4, version=1), Boundary("tap", 4)).stream("tap")
    assert (tap.complete_upto, tap.tentative_upto, tap.undos) == (4, 6, 0)
    assert tap.spans == [tentative_span(5, 6)], "the span starts after the stable buckets"
    assert buckets(tap.tentative) == [(6, 0)]
    assert buckets(tap.segments) == [(1, 0), (4, 1)]


def test_an_unchanged_boundary_replaces_nothing() -> None:
    assert after(*FAILED, Boundary("tap", 2)) == after(*FAILED)


def test_adjacent_spans_with_equal_inputs_and_shares_are_merged() -> None:
    """A failure of an hour is one span, not one per bucket."""
    tap = after(*(tentative_span(bucket, bucket) for bucket in range(3, 100))).stream("tap")
    assert tap.spans == [tentative_span(3, 99)]
    for other in (tentative_span(6, 6, "near"), tentative_span(6, 6, shares=(0.5, 0.25))):
        assert after(tentative_span(3, 5), other).stream("tap").spans == [
            tentative_span(3, 5),
            other,
        ]


def test_tentative_segments_are_not_part_of_the_complete_buckets() -> None:
    tap = after(*FAILED).stream("tap")
    assert tap.between(0, 99) == [added(1).segment]
    assert tap.trimmable == -1


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Undo("tap", 1, 1), "stable buckets are never undone"),
        (Undo("tap", 3, 1), "stable buckets are never undone"),
        (Undo("tap", 2, 0), "the last undo was 0"),
        (Ended("tap"), "tentative buckets are uncorrected"),
        (tentative_span(5, 6), "is published up to 5"),
        (tentative_span(2, 6), "is published up to 5"),
        (tentative_span(7, 6), "is published up to 5"),
        (added(2, TENTATIVE), "already complete"),
        (added(4, TENTATIVE), "the last tentative segment"),
        (Undo("nowhere", 2, 1), "not open"),
    ],
)
def test_illegal_records_are_refused_before_they_are_written(record: Record, why: str) -> None:
    state = after(*FAILED)
    before = copy.deepcopy(state)
    with pytest.raises(ProtocolViolation, match=why):
        rehearse(state, [record])
    assert state == before
    with pytest.raises(ProtocolViolation, match=why):
        fold(state, record)
    assert state == before


def test_rehearse_refuses_a_tentative_segment_that_is_out_of_order() -> None:
    state = after(*FAILED, added(5, TENTATIVE))
    refused = []
    for attempt in (lambda: rehearse(state, [added(4, TENTATIVE)]),
                    lambda: fold(state, added(4, TENTATIVE))):  # fmt: skip
        try:
            attempt()
        except ProtocolViolation as err:
            refused.append(str(err))
    assert len(refused) == 2


def test_a_boundary_below_the_tentative_buckets_may_rise() -> None:
    """The tentative buckets of an output that was blocked start later."""
    state = after(tentative_span(5, 6), Boundary("tap", 4))
    assert state.stream("tap").spans == [tentative_span(5, 6)]


def test_tentative_records_after_the_end_are_refused() -> None:
    state = after(Ended("tap"))
    for record in (tentative_span(3, 3), added(3, TENTATIVE)):
        with pytest.raises(ProtocolViolation, match="has ended"):
            fold(state, record)


def test_rehearse_applies_the_records_of_an_append_in_order() -> None:
    """Corrections, a boundary and later tentative buckets: each record sees those before it."""
    state = after(*FAILED)
    corrected = [added(3, version=1), Boundary("tap", 5), tentative_span(6, 6)]
    rehearse(state, corrected)
    with pytest.raises(ProtocolViolation, match="is published up to 6"):
        rehearse(state, [*corrected, tentative_span(6, 7)])
    with pytest.raises(ProtocolViolation, match="already complete"):
        rehearse(state, [*corrected, added(3, version=2)])
    assert state == after(*FAILED)


@pytest.mark.parametrize(
    "story",
    [
        FAILED,
        (*FAILED, Undo("tap", 2, 1)),
        (*FAILED, added(3, version=1), Boundary("tap", 3)),
        (*FAILED, added(3, version=1), Boundary("tap", 4), tentative_span(6, 6)),
        (*FAILED, Undo("tap", 2, 1), tentative_span(3, 3), added(3, TENTATIVE, 1)),
        (*FAILED, Boundary("tap", 5), Ended("tap")),
        (Trim("tap", 2), *FAILED, Undo("tap", 2, 4)),
    ],
)
def test_a_snapshot_folds_to_the_same_state(story: tuple[Record, ...]) -> None:
    state, rebuilt = after(*story), LogState()
    for record in snapshot(state):
        fold(rebuilt, record)
    assert rebuilt == state
    assert abs(live_records(state) - len(snapshot(state))) <= 2


# -- on a disk ------------------------------------------------------------------------------------


def start(root: Path) -> Log:
    log = Log.open(root, "a", fsync="always")
    log.open_stream("tap", SCHEMA, "ts", 0)
    return log


def put_tentative(log: Log, rows: Rows, bucket: int) -> Segment:
    segment = log.write(rows(bucket), SegmentId("tap", 0, bucket), TENTATIVE)
    log.append(Added(segment), tentative_span(bucket, bucket))
    return segment


def test_reopening_a_log_undoes_tentative_buckets(tmp_path: Path, rows: Rows) -> None:
    """They are not synced, so their files are not reliable after a crash."""
    log = start(tmp_path)
    put_tentative(log, rows, 0)
    lost = put_tentative(log, rows, 1)
    before = log.info("tap")
    assert (before.tentative_upto, before.complete_upto, before.undos) == (1, -1, 0)
    log.close()
    (tmp_path / lost.path).unlink()
    log = start(tmp_path)
    assert log.tentative("tap") == ([], [])
    after = log.info("tap")
    assert (after.tentative_upto, after.complete_upto, after.undos) == (None, -1, 1)
    assert len(log.orphans) == 1
    log.close()
    log = start(tmp_path)
    assert log.info("tap").undos == 1, "nothing is left to undo"
    log.close()


def test_tentative_segments_and_spans_are_selected_by_bucket(tmp_path: Path, rows: Rows) -> None:
    """A consumer receives only the spans and segments that are new to it."""
    log = start(tmp_path)
    log.append(tentative_span(0, 1))
    for bucket in (2, 3):
        segment = log.write(rows(bucket), SegmentId("tap", 0, bucket), TENTATIVE)
        log.append(Added(segment), tentative_span(bucket, bucket, f"far{bucket}"))
    segments, spans = log.tentative("tap")
    assert [s.id.bucket for s in segments] == [2, 3] and len(spans) == 3
    segments, spans = log.tentative("tap", 3)
    assert [s.id.bucket for s in segments] == [3] and spans == [tentative_span(3, 3, "far3")]
    segments, spans = log.tentative("tap", upto=2)
    assert [s.id.bucket for s in segments] == [2]
    assert spans == [tentative_span(0, 1), tentative_span(2, 2, "far2")]
    assert log.tentative("tap", 1, 1) == ([], [tentative_span(0, 1)])
    log.close()


def test_reading_a_replaced_tentative_segment_is_retried_and_not_damage(
    tmp_path: Path, rows: Rows
) -> None:
    """The consumer requests it again; a missing file of a valid segment is damage."""
    log = start(tmp_path)
    valid, undone = put_tentative(log, rows, 0), put_tentative(log, rows, 1)
    (tmp_path / valid.path).unlink()
    with pytest.raises(LogCorrupted):
        log.read(valid)
    log.append(Undo("tap", -1, 1))
    log.discard([undone])
    with pytest.raises(TransportError, match="replaced meanwhile"):
        log.read(undone)
    log.close()


def test_wait_returns_on_tentative_buckets(tmp_path: Path, rows: Rows) -> None:
    log = start(tmp_path)
    put_tentative(log, rows, 0)
    assert log.wait("tap", lambda info: info.tentative_upto == 0, 10).tentative_upto == 0
    log.commit("tap", [], 0)
    assert log.wait("tap", lambda info: info.tentative_upto is None, 10).complete_upto == 0
    log.close()
