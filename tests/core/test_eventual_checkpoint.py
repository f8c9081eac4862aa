"""When footprints become durable, and how much a recovery would then have to do (CEC sections II.B,
III and III.A)."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.core.eventual_checkpoint import (
    EventualCheckpoint,
    Named,
    Pace,
    Recovered,
    Settings,
    Stepped,
    Targets,
)
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.model.protection import Protection
from holdfast.types import NO_UPKEEP, Upkeep

MS = 1_000
#: One millisecond for records of every 10 ms.
PACE = Pace(1 * MS, 10 * MS)


class Operator:
    """Steps of one bucket each, and records. Keyed state refers to no inputs of earlier buckets."""

    def __init__(
        self, targets: Targets, pace: Pace | None = None, recovered: Recovered | None = None
    ) -> None:
        self.control = EventualCheckpoint(Settings(targets, pace), recovered)
        self.bucket = -1

    def step(
        self, rows: int = 0, entries: int = 0, open_: int = 0, took_us: int = 0, *,
        merging: bool = False,
    ) -> None:  # fmt: skip
        self.bucket += 1
        rows_of = {self.bucket: rows}
        self.control.stepped(
            Stepped(self.bucket, rows_of, entries, open_, took_us, entries, merging)
        )

    def is_due(self, at_us: int = 0) -> bool:
        return self.control.is_due(at_us, self.bucket + 1)

    def upkeep(self, at_us: int = 0, rows: int = 0) -> Upkeep:
        return self.control.upkeep(at_us, self.bucket + 1, rows)

    def record(self, at_us: int = 0, took_us: int = 0) -> None:
        """A record of the current state."""
        entries = self.control.entries
        self.control.began(at_us)
        named = Named(self.bucket + 1, entries, entries, took_us)
        self.control.named(at_us + took_us, named)


# -- what a recovery would have to do (section II.B) ----------------------------------------------


def test_ii_b_the_extent_is_what_the_newest_record_names() -> None:
    """A footprint counts only when its file is durable and a record names it."""
    operator = Operator(Targets())
    operator.step(rows=10, entries=7, open_=5)
    assert (operator.control.extent, operator.control.open) == (0, 5)
    operator.record()
    operator.step(rows=10, entries=9, open_=6)
    assert (operator.control.extent, operator.control.open) == (7, 6)


def test_ii_b_input_rows_since_the_newest_record_are_replayed() -> None:
    operator = Operator(Targets())
    for rows in (10, 20, 0, 5):
        operator.step(rows)
    assert operator.control.replayed == 35
    operator.record()
    assert operator.control.replayed == 0
    operator.step(rows=3)
    assert operator.control.replayed == 3


def test_rows_that_arrive_while_a_record_is_written_are_replayed() -> None:
    operator = Operator(Targets())
    operator.step(rows=10)
    operator.control.began(0)
    operator.step(rows=4)
    operator.control.named(0, Named(needs_from=1, entries=0, new_entries=0, took_us=0))
    assert operator.control.replayed == 4


def test_rows_that_time_windows_still_refer_to_are_read_again() -> None:
    """The record is after bucket 2; the oldest open window began in bucket 1."""
    operator = Operator(Targets())
    for rows in (10, 20, 40):
        operator.step(rows)
    operator.control.began(0)
    operator.control.named(0, Named(needs_from=1, entries=0, new_entries=0, took_us=0))
    assert operator.control.replayed == 60


@pytest.mark.parametrize("seed", range(20))
def test_counts_agree_with_the_history_of_steps_and_records(seed: int) -> None:
    """Steps of several buckets, some without rows, records that are durable only later, and state
    that refers to earlier inputs."""
    rng, control = Random(seed), EventualCheckpoint(Settings(Targets(rows=0), pace=None))
    arrived: dict[int, int] = {}
    bucket, referred, durable_from, extent = -1, 0, 0, 0
    pending: list[Named] = []
    for _ in range(100):
        rows = {}
        for _ in range(rng.randrange(1, 4)):
            bucket += 1
            rows[bucket] = rng.choice([0, rng.randrange(50)])
        entries = rng.randrange(100)
        control.stepped(Stepped(bucket, rows, entries, entries, 0))
        arrived |= rows
        referred = rng.randrange(referred, bucket + 2)
        if rng.random() < 0.3 and not pending:
            control.began(0)
            pending.append(Named(referred, entries, rng.randrange(1 + entries), 0))
        if rng.random() < 0.4 and pending:
            named = pending.pop()
            durable_from, extent = named.needs_from, named.entries
            control.named(0, named)
        assert control.replayed == sum(n for b, n in arrived.items() if b >= durable_from)
        assert (control.extent, control.entries) == (extent, entries)
        shortens = any(n for b, n in arrived.items() if durable_from <= b < referred)
        assert control.is_due(0, referred) == shortens


def test_footprints_are_counted_once_for_each_file_that_becomes_durable() -> None:
    operator = Operator(Targets())
    for entries, new in ((10, 10), (14, 4), (12, 12)):
        operator.step(rows=1)
        operator.control.began(0)
        operator.control.named(0, Named(operator.bucket + 1, entries, new, 0))
    assert operator.control.status["footprints"] == 26


# -- targets for u and q (section III.A) ----------------------------------------------------------


def test_iii_a_no_record_while_all_targets_are_met() -> None:
    operator = Operator(Targets(entries=100, rows=30, recovery_us=3_600_000 * MS))
    for entries in (40, 70, 100):
        assert operator.upkeep() == Upkeep(merges=False)
        operator.step(rows=10, entries=entries)
        assert not operator.is_due()


def test_iii_a_a_record_is_due_when_u_exceeds_its_target() -> None:
    operator = Operator(Targets(rows=30))
    for rows in (10, 20, 1):
        assert not operator.is_due()
        operator.step(rows)
    assert operator.is_due()
    operator.record()
    assert not operator.is_due()


def test_a_record_that_would_shorten_nothing_is_not_due() -> None:
    """The windows still refer to all rows that recovery would read anyway."""
    operator = Operator(Targets(rows=30))
    operator.step(rows=100)
    assert not operator.control.is_due(0, needs_from=0)
    assert operator.control.is_due(0, needs_from=1)


def test_iii_a_beyond_q_all_layers_become_one_and_a_record_names_the_result() -> None:
    """Slow windows keep old layers alive; a merge writes a new footprint (Gcheck) of each."""
    operator = Operator(Targets(entries=100))
    operator.step(entries=60, open_=50)
    operator.record()
    operator.step(entries=101, open_=50)
    assert not operator.is_due(), "a record would name all layers again"
    assert operator.upkeep() == Upkeep(merges=True)
    operator.step(entries=50, open_=50)
    assert operator.is_due()
    operator.record()
    assert operator.control.extent == 50
    assert operator.upkeep() == Upkeep(merges=False)


def test_iii_a_a_merge_beside_the_steps_is_requested_until_a_step_uses_it() -> None:
    """Large layers are merged by a job of its own, which takes several steps."""
    operator = Operator(Targets(entries=100))
    for entries in (110, 115, 120):
        operator.step(entries=entries, open_=50)
        assert operator.upkeep() == Upkeep(merges=True)
        assert not operator.is_due()
    operator.step(entries=55, open_=50)
    assert operator.is_due() and operator.upkeep() == Upkeep(merges=False)


def test_iii_a_merges_beside_the_steps_may_take_long() -> None:
    """Several partitions, one after the other, each for longer than steps may take to merge."""
    operator, entries = Operator(Targets(entries=100)), 150
    for merged in (20, 20, 20):
        for _ in range(50):
            operator.step(entries=entries, open_=50, merging=True)
            assert operator.upkeep() == Upkeep(merges=True)
        entries -= merged
    operator.step(entries=entries, open_=50)
    assert operator.is_due() and operator.upkeep() == Upkeep(merges=False)


def test_iii_a_a_merge_while_q_is_not_exceeded_makes_no_record_due() -> None:
    """Few keys change all the time: the steps merge their layers, level by level."""
    operator = Operator(Targets(entries=1_000))
    for step in range(100):
        operator.step(entries=100 if step % 2 else 50, open_=10)
        assert not operator.is_due()


def test_a_record_from_before_the_merge_does_not_shorten_the_extent() -> None:
    operator = Operator(Targets(entries=100))
    operator.step(entries=110, open_=50)
    operator.control.began(0)
    operator.upkeep()
    operator.step(entries=50, open_=50)
    operator.control.named(0, Named(operator.bucket, entries=110, new_entries=110, took_us=0))
    assert operator.control.extent == 110
    assert operator.is_due(), "the record after the merge"


def test_iii_a_an_unattainable_q_merges_when_a_fifth_of_the_entries_is_obsolete() -> None:
    """Section IV.B: Q is below the number of open windows."""
    operator, entries, merges = Operator(Targets(entries=10), PACE), 100, 0
    for ms in range(1_000):
        merged = operator.upkeep(ms * MS).merges
        merges += merged is True
        entries = 100 if merged else entries + 1
        operator.step(entries=entries, open_=100)
        assert entries <= 127
        if operator.is_due(ms * MS):
            operator.record(ms * MS)
    assert 30 <= merges <= 40, "a merge writes 100 entries, after 26 others"


def test_iii_a_layers_without_obsolete_entries_are_not_merged() -> None:
    """More windows open than close, so that a merge does not make the layers smaller."""
    operator = Operator(Targets(entries=10))
    for entries in range(1, 1_000):
        operator.step(entries=entries, open_=entries)
        assert operator.upkeep() == Upkeep(merges=False)


def test_iii_a_rows_of_other_files_cannot_be_merged_away() -> None:
    """They count among the entries that recovery reads. If they are more than Q, a merge hardly
    helps."""
    control = EventualCheckpoint(Settings(Targets(entries=100), pace=None))
    control.stepped(Stepped(0, {}, entries=1_050, open=15, took_us=0, layered=25))
    assert not control.upkeep(0, 1, 0).merges
    control.stepped(Stepped(1, {}, entries=1_050, open=15, took_us=0, layered=26))
    assert control.upkeep(0, 1, 0).merges


def test_iii_a_a_merge_that_does_not_help_is_tried_again_when_layers_have_grown() -> None:
    """The step has no rows of the partition with the obsolete entries."""
    operator, merges = Operator(Targets(entries=100)), 0
    for step in range(100):
        merges += operator.upkeep().merges is True
        operator.step(entries=200 + step // 50, open_=50)
        if operator.is_due():
            operator.record()
    assert merges == 16
    operator.step(entries=251, open_=50)
    assert operator.upkeep() == Upkeep(merges=True)


def test_one_slow_record_does_not_switch_off_the_targets() -> None:
    """A disk that hung for a minute: 5 % of the time would be a pause of 20 minutes."""
    operator = Operator(Targets(rows=10), Pace())
    operator.step(rows=11)
    operator.record(0, took_us=60_000 * MS)
    operator.step(rows=11)
    assert not operator.is_due(69_999 * MS)
    assert operator.is_due(70_000 * MS)


def test_without_a_target_for_q_the_steps_decide_when_layers_are_merged() -> None:
    operator = Operator(Targets(rows=100))
    operator.step(rows=10, entries=10**9)
    assert operator.upkeep() == NO_UPKEEP


def test_time_windows_fold_before_they_refer_to_more_rows_than_u() -> None:
    operator = Operator(Targets(rows=30))
    operator.step(rows=20)
    refers = operator.control.upkeep(0, needs_from=0, coming=10)
    assert refers == NO_UPKEEP
    assert operator.control.upkeep(0, needs_from=0, coming=11) == Upkeep(folds=True)
    assert operator.control.upkeep(0, needs_from=1, coming=11) == NO_UPKEEP, "folded already"


# -- the time for records (section III) -----------------------------------------------------------


def test_iii_at_most_an_interval_of_every_period_is_spent_on_records() -> None:
    operator = Operator(Targets(rows=0), PACE)
    spent_us, at_us = 0, 0
    while at_us < 1_000 * MS:
        operator.step(rows=1)
        if operator.is_due(at_us):
            took_us = 3 * MS
            operator.record(at_us, took_us)
            spent_us += took_us
        at_us += MS
    assert 0.08 < spent_us / at_us <= 0.11


def test_iii_short_records_are_at_least_a_period_apart() -> None:
    operator = Operator(Targets(rows=0), PACE)
    operator.step(rows=1)
    assert operator.is_due(500 * MS)
    operator.record(500 * MS, took_us=1)
    operator.step(rows=1)
    assert not operator.is_due(510 * MS - 1)
    assert operator.is_due(510 * MS)


def test_iii_the_pause_is_no_matter_of_correctness() -> None:
    """What no record has named yet is named by the next one."""
    operator = Operator(Targets(rows=0), PACE)
    operator.step(rows=1, entries=5)
    operator.record(0)
    for _ in range(9):
        operator.step(rows=1, entries=8)
        assert not operator.is_due(5 * MS)
    assert operator.is_due(10 * MS)
    operator.record(10 * MS)
    assert (operator.control.extent, operator.control.replayed) == (8, 0)


# -- a stated recovery time (section III.A) -------------------------------------------------------


def costs(entry_us: float = 100.0, row_us: float = 1.0, fixed_us: float = 100_000) -> RecoveryCosts:
    return RecoveryCosts(entry_us, row_us, fixed_us, recoveries=1, replays=1)


def test_iii_a_a_record_is_due_before_the_predicted_recovery_takes_too_long() -> None:
    """The cost-benefit method that the paper leaves open. 30 % are left for what was not
    predicted."""
    operator = Operator(Targets(recovery_us=1_000 * MS))
    operator.control.costs = costs()
    operator.step(entries=2_000)
    operator.record()
    operator.step(rows=400_000)
    assert operator.control.predicted_us == 700 * MS
    assert not operator.is_due()
    operator.step(rows=1)
    assert operator.is_due()
    operator.control.costs = costs(row_us=0.5)
    assert not operator.is_due(), "rows are cheaper than thought"


@pytest.mark.parametrize(("fixed_us", "entry_us"), [(5_000_000, 100.0), (100_000, 1_000.0)])
def test_iii_a_an_unattainable_recovery_time_leaves_a_tenth_for_replaying(
    fixed_us: float, entry_us: float
) -> None:
    """Starting Spark's first jobs alone takes longer than stated, or reading the state does. More
    records cannot help, so they are not written all the time."""
    operator = Operator(Targets(recovery_us=1_000 * MS))
    operator.control.costs = costs(entry_us, fixed_us=fixed_us)
    operator.step(entries=2_000)
    operator.record()
    operator.step(rows=100_000)
    assert not operator.is_due()
    operator.step(rows=1)
    assert operator.is_due()


def test_iii_a_a_slow_step_leaves_a_tenth_for_replaying() -> None:
    """Any replay takes longer than all that is left, so that a few rows less do not help."""
    operator = Operator(Targets(recovery_us=5_000 * MS))
    operator.control.costs = costs(fixed_us=2_000 * MS)
    operator.control.costs.step_us = 2_000 * MS
    operator.step(rows=500_000)
    assert not operator.is_due()
    operator.step(rows=1)
    assert operator.is_due()


def test_with_a_stated_recovery_time_records_do_not_wait_for_each_other() -> None:
    operator = Operator(Targets(recovery_us=1_000 * MS), pace=None)
    operator.control.costs = costs()
    for at_us in range(5):
        operator.step(rows=700_000)
        assert operator.is_due(at_us)
        operator.record(at_us, took_us=0)


def test_the_settings_follow_the_protection_of_the_fragment() -> None:
    assert Settings.of(Protection(recovery="cec")) == Settings(Targets(rows=1_000_000), Pace())
    chosen = Protection(recovery="cec", recovery_entries=7, recovery_rows=9)
    assert Settings.of(chosen) == Settings(Targets(7, 9), Pace())
    stated = Protection(recovery="cec", recovery_time="2s")
    assert Settings.of(stated) == Settings(Targets(recovery_us=2_000 * MS), pace=None)


# -- a recovery -----------------------------------------------------------------------------------


def recovered(
    upto: int, entries: int = 20_000, load_us: int = 100 * MS, opening_us: int = 0
) -> Recovered:
    return Recovered(upto, entries, load_us, opening_us, RecoveryCosts())


def test_the_replay_and_the_first_new_bucket_are_steps_of_their_own() -> None:
    control = EventualCheckpoint(Settings(Targets()), recovered(8))
    assert [control.last(3, hi) for hi in (6, 8, 20)] == [6, 8, 8]
    assert control.last(8, 20) == 9, "the other buckets have arrived since the crash"
    assert control.last(9, 20) == 10, "inputs that have ended: no results are logged after bucket 8"
    assert EventualCheckpoint(Settings(Targets())).last(3, 20) == 20


def test_a_recovery_is_measured_until_the_first_new_bucket() -> None:
    control = EventualCheckpoint(Settings(Targets()), recovered(8))
    assert control.extent == 20_000, "read again after the next crash"
    control.stepped(Stepped(5, {4: 10_000, 5: 10_000}, 0, 0, took_us=300 * MS))
    control.stepped(Stepped(8, {6: 20_000}, 0, 0, took_us=500 * MS))
    assert control.recovery is not None and control.recovery_us is None
    control.stepped(Stepped(9, {9: 1}, 0, 0, took_us=200 * MS))
    assert control.recovery is None and control.recovery_us == 1_100 * MS
    assert (control.costs.entry_us, control.costs.row_us) == (5.0, 15.0)
    assert control.costs.step_us == 200 * MS, "the next bucket is one step, too"
    assert (control.costs.fixed_us, control.costs.recoveries) == (200 * MS, 1)
    control.stepped(Stepped(10, {10: 1}, 0, 0, took_us=900 * MS))
    assert control.recovery_us == 1_100 * MS, "not a part of the recovery"


def test_a_record_is_due_only_after_the_recovery() -> None:
    """Otherwise records would delay the results that consumers are waiting for."""
    operator = Operator(Targets(rows=10), recovered=recovered(1))
    operator.step(rows=1_000)
    operator.step(rows=1_000)
    assert not operator.is_due()
    operator.step(rows=1)
    assert operator.is_due()


def test_the_status_shows_what_a_recovery_would_do_and_what_the_last_one_took() -> None:
    operator = Operator(Targets(recovery_us=2_000 * MS), recovered=recovered(-1, entries=1_000))
    operator.control.costs = costs(fixed_us=300_000)
    operator.step(rows=5_000, entries=1_200, open_=900, took_us=400 * MS)
    assert operator.control.status == {
        "open": 900, "entries_to_read": 1_000, "rows_to_replay": 5_000, "footprints": 0,
        "recovery_ms_predicted": round(operator.control.predicted_us / MS),
        "recovery_ms_fixed": round(operator.control.costs.fixed_us / MS),
        "recoveries_measured": 2, "recovery_ms_stated": 2_000, "recovery_ms_last": 500,
    }  # fmt: skip
