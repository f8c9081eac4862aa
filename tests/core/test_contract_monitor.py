"""Transcripts of the monitor: promises broken and kept again. Sections are ECOC's.

Buckets are 100 wide and results are promised within 250, so bucket b is overdue from
100 (b + 1) + 250 on: bucket 0 from 350, bucket 1 from 450.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.core.contract_monitor import (
    Action,
    Began,
    Broken,
    Ended,
    Gap,
    Kept,
    Known,
    Monitor,
    Promised,
    Tick,
)
from holdfast.model.fragments import fragments
from holdfast.runtime import contracts as monitor_shell
from holdfast.runtime.component_health import Parts
from holdfast.runtime.metrics import Metrics

WIDTH, WITHIN = 100, 250


def began(at: int = 0, within_us: int | None = WITHIN, *, lossless: bool = True) -> Monitor:
    monitor = Monitor(WIDTH, {"out": Promised(within_us, lossless)})
    assert monitor.handle(Began(at, "out")) == []
    return monitor


def broken(at: int, bucket: int, overdue_us: int, why: str) -> Broken:
    return Broken(at, "out", "within", bucket, overdue_us, why)


def test_ecoc_2_5_lide_a_result_on_time_is_not_spoken_of() -> None:
    monitor = began()
    for bucket in range(10):
        at = WIDTH * (bucket + 1) + WITHIN - 1
        assert monitor.handle(Known(at, "out", bucket)) == []
        assert monitor.handle(Tick(at)) == []
    assert monitor.standing("out", 1_500).kept


def test_ecoc_2_5_lide_a_bucket_is_overdue_within_after_its_end_and_not_before() -> None:
    monitor = began()
    monitor.handle(Known(120, "out", 0))
    assert monitor.next_due(120) == 450
    assert monitor.handle(Tick(449)) == []
    assert monitor.handle(Tick(450)) == [broken(450, 1, 0, "the reader has up to bucket 0")]


def test_an_output_that_never_gave_anything_is_overdue_too() -> None:
    monitor = began(at=730)
    assert monitor.next_due(730) == 1_050
    assert monitor.handle(Tick(1_049)) == []
    assert monitor.handle(Tick(1_053)) == [broken(1_053, 7, 3, "the reader has nothing yet")]


def test_one_report_for_an_episode_however_many_buckets_it_takes() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(350))) == 1
    for at in range(351, 2_000, 10):
        assert monitor.handle(Tick(at)) == []
    assert monitor.next_due(2_000) is None  # the end of an episode comes with what is known
    # Catching up: what has come is late, and so is what has not.
    assert monitor.handle(Known(2_000, "out", 0)) == []
    assert monitor.handle(Known(2_010, "out", 15)) == []
    assert monitor.handle(Known(2_020, "out", 17)) == [Kept(2_020, "out", "within", 17, 1_670)]
    assert monitor.next_due(2_020) == 2_150
    standing = monitor.standing("out", 2_020)
    assert (standing.kept, standing.breaks["within"], standing.worst_us) == (True, 1, 1_650)
    assert len(monitor.handle(Tick(2_150))) == 1


def test_standing_tells_since_when_and_by_how_much() -> None:
    monitor = began()
    monitor.handle(Tick(360))
    monitor.handle(Known(600, "out", 1))
    standing = monitor.standing("out", 700)
    assert not standing.kept
    assert standing.broken_since_us == 350
    assert standing.overdue_us == 700 - 550  # of bucket 2, the first that is missing
    assert standing.worst_us == 600 - 350  # of bucket 0, when it came
    assert standing.known_upto == 1


def test_outputs_are_judged_apart() -> None:
    monitor = Monitor(WIDTH, {"out": Promised(WITHIN), "other": Promised(1_000)})
    monitor.handle(Began(0, "out"))
    monitor.handle(Began(0, "other"))
    monitor.handle(Known(100, "other", 0))
    assert monitor.next_due(100) == 350
    assert [action.output for action in monitor.handle(Tick(350))] == ["out"]
    assert monitor.next_due(350) == 1_200


def test_what_began_before_the_monitor_is_not_owed_on_time() -> None:
    """A network comes back after an hour: its reader has old buckets, and time to catch up."""
    monitor = began(at=36_000)
    assert monitor.handle(Known(36_000, "out", 17)) == []
    assert monitor.handle(Tick(36_349)) == []
    assert monitor.handle(Tick(36_350)) == [
        broken(36_350, 360, 0, "the reader has up to bucket 17")
    ]


def test_ecoc_2_5_lilo_a_gap_is_a_loss_and_is_told_once() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    lost = Broken(
        120, "out", "loss", 1, 0, "buckets 1 to 4 were deleted before the reader had them"
    )
    assert monitor.handle(Gap(120, "out", 1, 4)) == [lost]
    assert monitor.handle(Gap(130, "out", 1, 4)) == []
    assert [action.bucket for action in monitor.handle(Gap(140, "out", 1, 6))] == [5]
    standing = monitor.standing("out", 150)
    assert (standing.kept, standing.lost_buckets, standing.breaks["loss"]) == (False, 6, 2)


def test_ecoc_2_5_delay_puts_no_constraint_on_what_is_lost() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    monitor.handle(Gap(120, "out", 2, 4))
    assert monitor.next_due(120) == 450  # bucket 1 can still come
    monitor.handle(Known(130, "out", 1))
    assert monitor.next_due(130) == 850  # buckets 2 to 4 cannot


def test_a_reader_that_comes_back_too_late_has_lost_what_others_had() -> None:
    monitor = began()
    monitor.handle(Known(900, "out", 8))
    assert [action.bucket for action in monitor.handle(Gap(910, "out", 1, 6))] == [1]
    assert monitor.next_due(910) == 1_250


def test_a_gap_ends_a_delay_that_nothing_else_can_end() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(360))) == 1
    told = monitor.handle(Gap(400, "out", 0, 3))
    assert [type(action) for action in told] == [Broken, Kept]
    assert told[1] == Kept(400, "out", "within", 3, 50)


def test_ecoc_2_5_lilo_where_loss_is_allowed_a_gap_breaks_nothing() -> None:
    monitor = began(lossless=False)
    assert monitor.handle(Gap(10, "out", 0, 4)) == []
    assert monitor.standing("out", 10).kept
    assert monitor.standing("out", 10).lost_buckets == 5


def test_without_a_promised_delay_only_gaps_are_watched() -> None:
    monitor = began(within_us=None)
    assert monitor.next_due(0) is None
    assert monitor.handle(Tick(10**9)) == []
    assert [action.promise for action in monitor.handle(Gap(1, "out", 0, 0))] == ["loss"]


def test_an_output_that_ended_owes_nothing() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    assert monitor.handle(Ended(120, "out")) == []
    assert monitor.next_due(120) is None
    assert monitor.handle(Tick(10**9)) == []
    assert monitor.handle(Known(10**9, "out", 5)) == []
    assert monitor.handle(Gap(10**9, "out", 1, 5)) == []
    assert monitor.standing("out", 10**9).missing is None


def test_a_promise_is_not_kept_by_nobody_watching_any_more() -> None:
    monitor = began()
    monitor.handle(Tick(400))
    assert monitor.handle(Ended(500, "out")) == []  # bucket 0 never came
    assert not monitor.standing("out", 600).kept
    assert monitor.next_due(600) is None
    # The next reader is owed other buckets, and what was counted stays.
    monitor.handle(Began(1_000, "out"))
    assert monitor.standing("out", 1_000).kept
    assert monitor.next_due(1_000) == 1_350
    assert monitor.standing("out", 1_000).breaks["within"] == 1
    assert monitor.handle(Known(1_010, "out", 9)) == []
    assert len(monitor.handle(Tick(1_350))) == 1


def test_who_leaves_while_catching_up_has_not_been_given_everything() -> None:
    monitor = began()
    monitor.handle(Tick(900))
    assert monitor.handle(Known(900, "out", 3)) == []  # bucket 4 is overdue too
    assert monitor.handle(Ended(900, "out")) == []
    assert not monitor.standing("out", 900).kept


def test_a_stream_that_came_whole_ends_the_episode() -> None:
    monitor = began()
    monitor.handle(Tick(900))
    assert monitor.handle(Known(900, "out", 3)) == []
    kept = Kept(900, "out", "within", 3, 550)
    assert monitor.handle(Ended(900, "out", whole=True)) == [kept]
    assert monitor.standing("out", 900).kept


@pytest.mark.parametrize(
    ("within", "clock", "reported"),
    [("1s", "wall", False), ("1s", "manual", False), (None, "wall", True)],
)
def test_what_is_not_judged_is_not_reported_as_kept(
    within: str | None, clock: str, reported: bool
) -> None:
    """Nobody reads it here; where no delay is promised, there are still losses to speak of."""
    net = hf.Network("quiet", bucket="100ms")
    rows = net.source("s", "ts timestamp, x double", time="ts", clock=clock)
    net.output("rows", rows.filter("x > 0"), contract=hf.Contract(within=within))
    watching = monitor_shell.Monitor(net, fragments(net), {}, {}, [], [])
    watching.look(0)
    parts = Parts(net, {}, lambda host: [], lambda host: {})
    registry = Metrics(watching, {}, {}, {}, parts).registry
    kept = registry.get_sample_value("holdfast_contract_kept", {"output": "rows"})
    assert kept == (1 if reported else None)


def test_a_clock_that_goes_back_neither_keeps_a_promise_nor_breaks_one() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(460))) == 1
    assert monitor.handle(Tick(200)) == []  # bucket 0 would not be due now, but it was
    assert not monitor.standing("out", 200).kept
    assert monitor.standing("out", 200).overdue_us == 0
    assert monitor.handle(Tick(460)) == []  # the same episode
    assert monitor.handle(Known(210, "out", 0)) == [Kept(210, "out", "within", 0, 0)]
    assert monitor.next_due(210) == 450
    assert monitor.handle(Tick(449)) == []
    assert len(monitor.handle(Tick(450))) == 1


def test_a_clock_that_was_wrong_for_a_moment_does_no_lasting_harm() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(3_600_000))) == 1
    assert len(monitor.handle(Known(110, "out", 0))) == 1
    assert monitor.next_due(110) == 450


def test_a_reader_that_comes_later_does_not_take_back_what_was_known() -> None:
    monitor = began()
    monitor.handle(Known(500, "out", 4))
    monitor.handle(Known(510, "out", 1))
    assert monitor.next_due(510) == 850


def test_an_output_owes_nothing_before_it_is_watched() -> None:
    monitor = Monitor(WIDTH, {"out": Promised(WITHIN)})
    assert monitor.next_due(0) is None
    assert monitor.handle(Tick(10**9)) == []
    assert monitor.handle(Known(10**9, "out", 7)) == []
    assert monitor.standing("out", 10**9).known_upto is None


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 6), st.booleans()), max_size=80))
def test_broken_exactly_when_a_bucket_is_overdue(moves: list[tuple[int, int, bool]]) -> None:
    """Against the definition: some bucket of all that ended so long ago is not known."""
    monitor = began()
    at, known, told_broken = 0, -1, False
    for pause, more, looks in moves:
        at += pause
        actions: list[Action] = []
        if looks and (known + 1) * WIDTH <= at:
            known += more
            actions += monitor.handle(Known(at, "out", known))
        actions += monitor.handle(Tick(at))
        for action in actions:
            assert isinstance(action, Kept) == told_broken  # they take turns
            told_broken = isinstance(action, Broken)
        overdue = [b for b in range(at // WIDTH + 1) if (b + 1) * WIDTH + WITHIN <= at]
        assert told_broken == any(bucket > known for bucket in overdue)
        assert monitor.standing("out", at).kept == (not told_broken)
        due = monitor.next_due(at)
        assert (due is None) == told_broken
        assert due is None or due > at
