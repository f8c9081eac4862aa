"""Which windows leave a footprint, and when (CEC sections II.B and III.A)."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core.eventual_checkpoint import (
    CHECKS_MIN,
    EVERYTHING,
    NOTHING,
    Checks,
    Committed,
    EventualCheckpoint,
    Pace,
    Settings,
    Targets,
)
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.errors import ProtocolViolation


def path_of(
    targets: Targets, pace: Pace | None = None, check_us: float = 1.0, bucket: int = -(2**62)
) -> EventualCheckpoint:
    state = EventualCheckpoint(Settings(targets, pace), bucket)
    state.check_us = check_us
    return state


def opened(bucket: int, windows: int, rows: int | None = None) -> Committed:
    """Windows open, each with a footprint (Gopen)."""
    return Committed(bucket, {bucket: rows or windows}, {bucket: windows}, {bucket: windows})


def test_ii_b_recovery_begins_at_the_oldest_footprint_of_an_open_window() -> None:
    """As in Figure 2: a window that closes no longer holds T back."""
    state = path_of(Targets())
    state.committed(opened(1, 1))
    state.committed(opened(2, 1))
    state.committed(opened(3, 1))
    assert (state.oldest, state.open, state.extent, state.replayed) == (1, 3, 3, 2)
    state.committed(Committed(4, {4: 5}, {4: 1}, {1: -1}))  # the first one closes
    assert (state.oldest, state.open, state.extent, state.replayed) == (2, 2, 3, 6)


def test_ii_b_a_footprint_of_the_slowest_window_advances_t() -> None:
    state = path_of(Targets())
    for bucket in (1, 2, 3):
        state.committed(opened(bucket, 1, rows=10))
    state.committed(Committed(4, {4: 10}, {4: 1}, {1: -1, 4: 1}))  # a Gcheck
    assert (state.oldest, state.open, state.extent, state.replayed) == (2, 3, 3, 20)


def test_without_open_windows_nothing_is_replayed() -> None:
    state = path_of(Targets())
    state.committed(opened(1, 4))
    state.committed(Committed(2, {2: 4}, {2: 4}, {1: -4}))
    assert (state.oldest, state.open, state.replayed) == (2, 0, 0)


def test_a_window_without_a_footprint_is_opened_again_by_its_rows() -> None:
    """A window that opened in bucket 5 counts as if it had a footprint in bucket 4."""
    state = path_of(Targets())
    state.committed(Committed(5, {5: 7}, {}, {4: 2}))
    assert (state.oldest, state.extent, state.replayed) == (4, 0, 7)


def test_iii_a_no_footprints_while_both_targets_are_met() -> None:
    state = path_of(Targets(entries=6, rows=30))
    for bucket in range(1, 4):
        state.committed(opened(bucket, 2, rows=10))
        assert state.checks(0) == NOTHING


def test_iii_a_beyond_q_the_oldest_footprints_are_replaced_first() -> None:
    state = path_of(Targets(entries=8))
    state.committed(opened(1, 1))
    state.committed(opened(2, 1))
    state.committed(Committed(3, {3: 6}, {3: 6}, {3: 1}))  # five windows opened and closed
    state.committed(opened(4, 1))
    assert state.extent == 9
    # Replacing the first two footprints by new ones leaves nine entries; the third one leaves four.
    assert state.checks(0) == Checks(3, EVERYTHING)


def test_iii_a_as_few_footprints_as_possible_beyond_u() -> None:
    state = path_of(Targets(rows=25))
    for bucket in range(1, 5):
        state.committed(opened(bucket, 3, rows=10))
    assert state.replayed == 30
    assert state.checks(0) == Checks(1, EVERYTHING)


def test_iii_a_an_unattainable_target_checks_all_windows() -> None:
    """Section IV.B: Q below the number of open windows is an unattainable target."""
    state = path_of(Targets(entries=1))
    for bucket in range(1, 4):
        state.committed(opened(bucket, 3))
    assert state.checks(0) == Checks(3, EVERYTHING)


def test_iii_time_for_footprints_is_limited() -> None:
    state = path_of(Targets(rows=0), Pace(interval_us=5_000, period_us=100_000), 2.0)
    state.committed(opened(1, 10_000))
    state.committed(opened(2, 10_000))
    assert state.checks(1_000_000) == Checks(1, 2_500), "5 ms for footprints of 2 us"
    assert state.checks(1_099_999) == NOTHING
    assert state.checks(1_100_000).most == 2_500


def test_slow_footprints_do_not_stop_the_progress_of_t() -> None:
    """Writing a file takes some time, however few footprints it has: each would seem the slower,
    the fewer there are."""
    state = path_of(Targets(rows=0), Pace(5_000, 100_000), 1_000.0)
    state.committed(opened(1, 10_000))
    state.committed(opened(2, 10_000))
    assert state.checks(0).most == CHECKS_MIN


@pytest.mark.parametrize("entries", [0, 1])
def test_without_a_limit_of_the_user_records_count_as_many_entries(entries: int) -> None:
    """An idle window holds T back; steps with few rows leave few entries, but many records; so do
    time windows beside it, which leave none."""
    state = path_of(Targets(rows=10**9), bucket=0)
    state.committed(opened(1, 1))
    for bucket in range(2, 12_000):
        state.committed(Committed(bucket, {bucket: 1}, {bucket: entries}, {}, logged=True))
        if state.checks(0) != NOTHING:
            break
    assert bucket in range(9_000, 11_000)
    assert state.checks(0) == Checks(1, EVERYTHING)


def test_iii_the_duration_of_footprints_is_measured() -> None:
    state = path_of(Targets(rows=0), Pace(5_000, 100_000), 50.0)
    for bucket in range(1, 80):
        moved = {bucket - 1: -1} if bucket > 1 else {}
        step = Committed(bucket, {bucket: 1}, {bucket: 1}, {**moved, bucket: 1}, 1, 1)
        state.committed(step)
    state.committed(opened(80, 1))
    assert state.checks(0).most in range(4_900, 5_001)


def test_windows_that_open_during_a_replay_hold_t_where_recovery_began() -> None:
    state = path_of(Targets(), bucket=3)
    state.recover({}, 8)
    assert (state.replays, state.opened, state.last(20)) == (True, 3, 8)
    state.committed(Committed(5, {4: 1, 5: 1}, {}, {3: 2, 7: 1}))
    assert (state.replays, state.opened, state.last(6)) == (True, 3, 6)
    state.committed(Committed(8, {7: 1}, {}, {3: -1}))
    assert (state.replays, state.opened, state.last(20), state.oldest) == (False, 8, 20, 3)


def test_a_step_is_logged_if_it_left_footprints_or_moved_t() -> None:
    state, step = path_of(Targets(), bucket=3), Committed(4, {4: 1}, {}, {3: 1})
    assert state.must_log(step, footprints=False), "T was never logged"
    state.logged = state.oldest_after(step)
    assert not state.must_log(step, footprints=False)
    assert state.must_log(step, footprints=True)
    state.committed(step)
    assert state.must_log(Committed(5, {}, {}, {3: -1}), footprints=False), "T will move"


def test_t_after_a_step_is_known_before_the_step_is_committed() -> None:
    state = path_of(Targets(), bucket=0)
    for step, oldest in (
        (Committed(1, {}, {}, {0: 2, 1: 1}), 0),
        (Committed(2, {}, {}, {0: -2, 2: 1}), 1),
        (Committed(3, {}, {}, {1: -1, 2: -1}), 3),
        (Committed(4, {}, {}, {}), 4),
    ):
        assert state.oldest_after(step) == oldest
        state.committed(step)
        assert state.oldest == oldest


def test_iii_a_a_recovery_time_chooses_between_reading_and_replaying() -> None:
    """Each footprint adds an entry to be read, and saves the rows since the one that it replaces.
    The cost-benefit method that the paper leaves open."""
    state = path_of(Targets(recovery_us=1_000_000), bucket=0)
    state.costs = RecoveryCosts(entry_us=100.0, row_us=1.0, fixed_us=100_000.0)
    for bucket in range(1, 8):
        state.committed(opened(bucket, 100, rows=100_000))
        if state.predicted_us <= 700_000:
            assert state.checks(0) == NOTHING
    # 700 entries and 600,000 rows: 770 ms, of which 700 ms are allowed.
    assert state.predicted_us == 770_000
    state.costs.fixed_us = 5_000_000
    assert state.checks(0) != NOTHING, "100 ms are left for reading and replaying, whatever else"
    state.costs.fixed_us = 100_000
    assert state.checks(0) == Checks(1, EVERYTHING), "one bucket later, 680 ms"


def test_iii_a_an_unattainable_recovery_time_is_approached_as_far_as_it_pays() -> None:
    state = path_of(Targets(recovery_us=10_000), bucket=0)
    state.costs = RecoveryCosts(entry_us=100.0, row_us=1.0, fixed_us=100_000.0)
    state.committed(opened(1, 10, rows=100_000))
    state.committed(opened(2, 10, rows=100_000))
    state.committed(opened(3, 5_000, rows=1_000))
    assert state.checks(0) == Checks(2, EVERYTHING), "not the 5,000 windows with 1,000 rows"
    state = path_of(Targets(recovery_us=10_000), bucket=0)
    state.costs = RecoveryCosts(entry_us=1_000.0, row_us=1.0, fixed_us=100_000.0)
    state.committed(Committed(1, {1: 10}, {}, {0: 50}))
    assert state.checks(0) == NOTHING, "50 entries cost more than 10 rows"


@pytest.mark.parametrize("windows", [{1: -1}, {9: 1}])
def test_impossible_counts_are_refused(windows: dict[int, int]) -> None:
    state = path_of(Targets())
    with pytest.raises(ProtocolViolation):
        state.committed(Committed(5, {}, {}, windows))


@pytest.mark.parametrize("seed", range(40))
def test_counts_agree_with_a_log_that_is_read_backwards(seed: int) -> None:
    """Random windows open, close and are checked. Reading the log backwards until N windows are
    found gives T, and what recovery reads and replays (section II.B)."""
    rng = Random(seed)
    state = path_of(Targets(entries=rng.choice([None, 20, 60]), rows=rng.choice([50])))
    footprints: dict[int, int] = {}
    log: list[tuple[int, int | None]] = []
    rows: list[tuple[int, int]] = []
    window = 0
    for bucket in range(200):
        wanted = state.checks(bucket)
        count, changes, new = rng.randrange(4), {}, []
        for closing in rng.sample(sorted(footprints), min(len(footprints), rng.randrange(3))):
            old = footprints.pop(closing)
            changes[old] = changes.get(old, 0) - 1
            new.append((bucket, None))
        by_age = sorted(footprints.items(), key=lambda item: item[1])
        for open_, old in [item for item in by_age if item[1] <= wanted.upto][: wanted.most]:
            changes[old] = changes.get(old, 0) - 1
            changes[bucket] = changes.get(bucket, 0) + 1
            footprints[open_] = bucket
            new.append((bucket, open_))
        for _ in range(rng.randrange(3)):
            window += 1
            footprints[window] = bucket
            changes[bucket] = changes.get(bucket, 0) + 1
            new.append((bucket, window))
        log += new
        rows.append((bucket, count))
        state.committed(Committed(bucket, {bucket: count}, {bucket: len(new)}, changes))
        found: dict[int, int] = {}
        for at, name in reversed(log):
            if len(found) == state.open:
                break
            if name is not None and name in footprints:
                found.setdefault(name, at)
        assert found == footprints
        oldest = min(found.values(), default=bucket)
        assert state.oldest == oldest
        assert state.extent == sum(at >= oldest for at, _ in log)
        assert state.replayed == sum(n for at, n in rows if at > oldest)


def test_rows_that_time_windows_refer_to_count_into_u_but_ask_for_no_footprints() -> None:
    """Both are suffixes of the same inputs: the longer one contains the other."""
    state = path_of(Targets(rows=30))
    state.committed(Committed(1, {1: 10}, {}, {0: 2}, referred=31))
    assert (state.oldest, state.replayed, state.checks(0)) == (0, 31, NOTHING)
    state.committed(Committed(2, {2: 15}, {}, {}, referred=15))
    assert (state.oldest, state.replayed) == (0, 25)


def test_time_windows_and_joins_fold_if_they_refer_to_more_than_u_rows() -> None:
    state = path_of(Targets(entries=1, rows=30))
    assert [state.folds(rows) for rows in (0, 30, 31)] == [False, False, True]
    assert not path_of(Targets(entries=1)).folds(10**9)
