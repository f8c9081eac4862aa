"""Transcripts of the contract monitor: promises that are broken and kept again. Sections are those
of ECOC.

Buckets are 100 wide and results are promised within 250. So bucket b becomes overdue at
100 (b + 1) + 250: bucket 0 at 350, bucket 1 at 450.
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


def test_ecoc_2_5_lide_a_result_on_time_is_not_reported() -> None:
    monitor = began()
    for bucket in range(10):
        at = WIDTH * (bucket + 1) + WITHIN - 1
        assert monitor.handle(Known(at, "out", bucket)) == []
        assert monitor.handle(Tick(at)) == []
    assert monitor.status("out", 1_500).kept


def test_ecoc_2_5_lide_a_bucket_becomes_overdue_exactly_within_after_its_end() -> None:
    monitor = began()
    monitor.handle(Known(120, "out", 0))
    assert monitor.next_due(120) == 450
    assert monitor.handle(Tick(449)) == []
    assert monitor.handle(Tick(450)) == [
        broken(450, 1, 0, "the client has received buckets up to 0")
    ]


def test_an_output_without_any_result_is_overdue_too() -> None:
    monitor = began(at=730)
    assert monitor.next_due(730) == 1_050
    assert monitor.handle(Tick(1_049)) == []
    assert monitor.handle(Tick(1_053)) == [
        broken(1_053, 7, 3, "the client has received nothing yet")
    ]


def test_an_episode_of_overdue_buckets_is_reported_once() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(350))) == 1
    for at in range(351, 2_000, 10):
        assert monitor.handle(Tick(at)) == []
    assert monitor.next_due(2_000) is None  # only a known bucket ends an episode
    # Catching up: the known buckets were late, and the next ones are overdue.
    assert monitor.handle(Known(2_000, "out", 0)) == []
    assert monitor.handle(Known(2_010, "out", 15)) == []
    assert monitor.handle(Known(2_020, "out", 17)) == [Kept(2_020, "out", "within", 17, 1_670)]
    assert monitor.next_due(2_020) == 2_150
    status = monitor.status("out", 2_020)
    assert (status.kept, status.breaks["within"], status.worst_us) == (True, 1, 1_650)
    assert len(monitor.handle(Tick(2_150))) == 1


def test_the_status_contains_the_start_and_the_amount_of_the_delay() -> None:
    monitor = began()
    monitor.handle(Tick(360))
    monitor.handle(Known(600, "out", 1))
    status = monitor.status("out", 700)
    assert not status.kept
    assert status.broken_since_us == 350
    assert status.overdue_us == 700 - 550  # bucket 2 is the first missing one
    assert status.worst_us == 600 - 350  # bucket 0, when it arrived
    assert status.known_upto == 1


def test_outputs_are_monitored_independently() -> None:
    monitor = Monitor(WIDTH, {"out": Promised(WITHIN), "other": Promised(1_000)})
    monitor.handle(Began(0, "out"))
    monitor.handle(Began(0, "other"))
    monitor.handle(Known(100, "other", 0))
    assert monitor.next_due(100) == 350
    assert [action.output for action in monitor.handle(Tick(350))] == ["out"]
    assert monitor.next_due(350) == 1_200


def test_buckets_from_before_the_start_of_the_monitor_are_not_due() -> None:
    """A network restarts after an hour: its client has old buckets, and time to catch up."""
    monitor = began(at=36_000)
    assert monitor.handle(Known(36_000, "out", 17)) == []
    assert monitor.handle(Tick(36_349)) == []
    assert monitor.handle(Tick(36_350)) == [
        broken(36_350, 360, 0, "the client has received buckets up to 17")
    ]


def test_ecoc_2_5_lilo_a_gap_is_a_loss_and_is_reported_once() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    lost = Broken(
        120, "out", "loss", 1, 0, "buckets 1 to 4 were deleted before the client received them"
    )
    assert monitor.handle(Gap(120, "out", 1, 4)) == [lost]
    assert monitor.handle(Gap(130, "out", 1, 4)) == []
    assert [action.bucket for action in monitor.handle(Gap(140, "out", 1, 6))] == [5]
    status = monitor.status("out", 150)
    assert (status.kept, status.lost_buckets, status.breaks["loss"]) == (False, 6, 2)


def test_ecoc_2_5_the_delay_promise_does_not_cover_lost_buckets() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    monitor.handle(Gap(120, "out", 2, 4))
    assert monitor.next_due(120) == 450  # bucket 1 can still arrive
    monitor.handle(Known(130, "out", 1))
    assert monitor.next_due(130) == 850  # buckets 2 to 4 cannot


def test_a_client_that_returns_too_late_has_lost_buckets_that_others_received() -> None:
    monitor = began()
    monitor.handle(Known(900, "out", 8))
    assert [action.bucket for action in monitor.handle(Gap(910, "out", 1, 6))] == [1]
    assert monitor.next_due(910) == 1_250


def test_a_gap_ends_the_delay_of_the_lost_buckets() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(360))) == 1
    actions = monitor.handle(Gap(400, "out", 0, 3))
    assert [type(action) for action in actions] == [Broken, Kept]
    assert actions[1] == Kept(400, "out", "within", 3, 50)


def test_ecoc_2_5_lilo_a_gap_breaks_no_promise_if_loss_is_allowed() -> None:
    monitor = began(lossless=False)
    assert monitor.handle(Gap(10, "out", 0, 4)) == []
    assert monitor.status("out", 10).kept
    assert monitor.status("out", 10).lost_buckets == 5


def test_without_a_promised_delay_only_gaps_are_reported() -> None:
    monitor = began(within_us=None)
    assert monitor.next_due(0) is None
    assert monitor.handle(Tick(10**9)) == []
    assert [action.promise for action in monitor.handle(Gap(1, "out", 0, 0))] == ["loss"]


def test_an_ended_output_has_no_due_buckets() -> None:
    monitor = began()
    monitor.handle(Known(110, "out", 0))
    assert monitor.handle(Ended(120, "out")) == []
    assert monitor.next_due(120) is None
    assert monitor.handle(Tick(10**9)) == []
    assert monitor.handle(Known(10**9, "out", 5)) == []
    assert monitor.handle(Gap(10**9, "out", 1, 5)) == []
    assert monitor.status("out", 10**9).missing is None


def test_a_broken_promise_is_not_kept_just_because_the_client_left() -> None:
    monitor = began()
    monitor.handle(Tick(400))
    assert monitor.handle(Ended(500, "out")) == []  # bucket 0 never arrived
    assert not monitor.status("out", 600).kept
    assert monitor.next_due(600) is None
    # Other buckets are due for the next client; the counters are not reset.
    monitor.handle(Began(1_000, "out"))
    assert monitor.status("out", 1_000).kept
    assert monitor.next_due(1_000) == 1_350
    assert monitor.status("out", 1_000).breaks["within"] == 1
    assert monitor.handle(Known(1_010, "out", 9)) == []
    assert len(monitor.handle(Tick(1_350))) == 1


def test_a_promise_stays_broken_if_the_client_leaves_while_it_catches_up() -> None:
    monitor = began()
    monitor.handle(Tick(900))
    assert monitor.handle(Known(900, "out", 3)) == []  # bucket 4 is overdue too
    assert monitor.handle(Ended(900, "out")) == []
    assert not monitor.status("out", 900).kept


def test_the_complete_end_of_a_stream_ends_the_episode() -> None:
    monitor = began()
    monitor.handle(Tick(900))
    assert monitor.handle(Known(900, "out", 3)) == []
    kept = Kept(900, "out", "within", 3, 550)
    assert monitor.handle(Ended(900, "out", whole=True)) == [kept]
    assert monitor.status("out", 900).kept


@pytest.mark.parametrize(
    ("within", "clock", "reported"),
    [("1s", "wall", False), ("1s", "manual", False), (None, "wall", True)],
)
def test_a_contract_that_is_not_monitored_is_not_reported_as_kept(
    within: str | None, clock: str, reported: bool
) -> None:
    """The output has no client here. Without a promised delay, losses are still monitored."""
    net = hf.Network("quiet", bucket="100ms")
    rows = net.source("s", "ts timestamp, x double", time="ts", clock=clock)
    net.output("rows", rows.filter("x > 0"), contract=hf.Contract(within=within))
    monitor = monitor_shell.Monitor(net, fragments(net), {}, {}, [], [])
    monitor.look(0)
    parts = Parts(net, {}, lambda host: [], lambda host: {})
    registry = Metrics(monitor, {}, {}, {}, parts).registry
    value = registry.get_sample_value("holdfast_contract_kept", {"output": "rows"})
    assert value == (1 if reported else None)


def test_a_clock_that_is_stepped_back_neither_keeps_nor_breaks_a_promise() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(460))) == 1
    assert monitor.handle(Tick(200)) == []  # bucket 0 is not due at this time, but was due before
    assert not monitor.status("out", 200).kept
    assert monitor.status("out", 200).overdue_us == 0
    assert monitor.handle(Tick(460)) == []  # the same episode
    assert monitor.handle(Known(210, "out", 0)) == [Kept(210, "out", "within", 0, 0)]
    assert monitor.next_due(210) == 450
    assert monitor.handle(Tick(449)) == []
    assert len(monitor.handle(Tick(450))) == 1


def test_a_clock_that_was_wrong_for_a_moment_has_no_lasting_effect() -> None:
    monitor = began()
    assert len(monitor.handle(Tick(3_600_000))) == 1
    assert len(monitor.handle(Known(110, "out", 0))) == 1
    assert monitor.next_due(110) == 450


def test_a_client_that_is_behind_does_not_move_the_known_position_back() -> None:
    monitor = began()
    monitor.handle(Known(500, "out", 4))
    monitor.handle(Known(510, "out", 1))
    assert monitor.next_due(510) == 850


def test_an_output_has_no_due_buckets_before_its_monitoring_starts() -> None:
    monitor = Monitor(WIDTH, {"out": Promised(WITHIN)})
    assert monitor.next_due(0) is None
    assert monitor.handle(Tick(10**9)) == []
    assert monitor.handle(Known(10**9, "out", 7)) == []
    assert monitor.status("out", 10**9).known_upto is None


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 6), st.booleans()), max_size=80))
def test_a_promise_is_broken_exactly_while_a_bucket_is_overdue(
    moves: list[tuple[int, int, bool]],
) -> None:
    """By definition: a bucket that ended at least `WITHIN` ago is not known."""
    monitor = began()
    at, known_upto, broken_now = 0, -1, False
    for pause, added, reports in moves:
        at += pause
        actions: list[Action] = []
        if reports and (known_upto + 1) * WIDTH <= at:
            known_upto += added
            actions += monitor.handle(Known(at, "out", known_upto))
        actions += monitor.handle(Tick(at))
        for action in actions:
            assert isinstance(action, Kept) == broken_now  # they alternate
            broken_now = isinstance(action, Broken)
        overdue = [b for b in range(at // WIDTH + 1) if (b + 1) * WIDTH + WITHIN <= at]
        assert broken_now == any(bucket > known_upto for bucket in overdue)
        assert monitor.status("out", at).kept == (not broken_now)
        due = monitor.next_due(at)
        assert (due is None) == broken_now
        assert due is None or due > at
