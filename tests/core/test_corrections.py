"""Transcripts of the correction of tentative results, when the missing inputs return. Sections and
figures are those of Borealis; helpers and times are in `transcripts`. The last number of a `Run` is
the time for which its buckets were held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.consistency import (
    PIECE_BUCKETS,
)
from holdfast.core.job_size import JobLimits
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledged,
    Action,
    BoundaryArrived,
    Change,
    End,
    Enter,
    Leave,
    Run,
    RunTentative,
    Tick,
    Wake,
)
from holdfast.core.sunion import Partial
from holdfast.types import OutputState
from tests.core.transcripts import (
    DELAY,
    PROCESS,
    STABILIZATION,
    STABLE,
    UP_FAILURE,
    buckets,
    came,
    done,
    failed,
    handle,
    plan_of,
    stable,
    tentative_done,
    tentative_run,
)

# -- section 3.4: stabilization -------------------------------------------------------------------


def test_3_4_stabilization_starts_when_every_tentative_bucket_can_be_corrected() -> None:
    """Until then the stable line runs complete buckets, and the state is UP_FAILURE."""
    core = failed(PROCESS)
    handle(core, came(1_150, "s1", 6), tentative_done(1_160, 6))
    assert handle(core, came(1_200, "s2", 5)) == [Run("p", 5, 5)]
    assert handle(core, came(1_300, "s2", 6)) == []
    assert handle(core, done(1_310, 5)) == [STABILIZATION, Run("p", 6, 6)]
    assert handle(core, done(1_320, 6)) == [Leave("p"), STABLE]


def test_3_4_the_buckets_of_a_tentative_run_in_progress_are_corrected_too() -> None:
    core = failed(PROCESS)
    assert handle(core, came(1_150, "s1", 6)) == [tentative_run(6, 6)]
    assert handle(core, came(1_200, "s2", 5)) == [Run("p", 5, 5, spent_us=50)]
    assert handle(core, came(1_300, "s2", 6), tentative_done(1_305, 6)) == []
    assert handle(core, done(1_310, 5)) == [STABILIZATION, Run("p", 6, 6)]


def test_3_4_tentative_input_never_starts_a_correction() -> None:
    core = failed(PROCESS)
    assert handle(core, BoundaryArrived(1_200, "s2", 4, tentative_upto=5, missing=("far",))) == []


def test_3_4_2_stabilization_ends_with_rec_done_when_the_path_has_caught_up() -> None:
    core = failed(PROCESS)
    assert handle(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 5, 5)]
    assert handle(core, done(1_300, 5)) == [Leave("p"), STABLE]
    assert handle(core, Tick(9_999)) == []


def test_3_4_2_a_long_correction_runs_in_groups_and_drops_the_tentative_line_at_its_end() -> None:
    core = stable(plan_of(DELAY), limits=JobLimits(2))
    rows = tuple((bucket, 1, 0) for bucket in range(5, 9))
    handle(core, BoundaryArrived(100, "s1", 8, rows), Tick(1_100), tentative_done(1_110, 6))
    handle(core, tentative_done(1_120, 8))
    assert handle(core, came(1_200, "s2", 8)) == [STABILIZATION, Run("p", 5, 6)]
    assert handle(core, done(1_300, 6)) == [Run("p", 7, 8, spent_us=100)]
    assert handle(core, done(1_400, 8)) == [Leave("p"), STABLE]


def test_after_rec_done_a_path_is_stable_once_no_complete_bucket_waits() -> None:
    core = failed(PROCESS)
    handle(core, came(1_200, "s2", 5))
    assert handle(core, came(1_250, "s1", 6), came(1_250, "s2", 6)) == []
    assert handle(core, done(1_300, 5)) == [Leave("p"), Run("p", 6, 6, spent_us=50)]
    assert handle(core, done(1_400, 6)) == [STABLE]


def test_3_4_3_suspend_gives_no_new_results_during_the_correction() -> None:
    core = failed(replace(PROCESS, while_correcting="suspend"))
    handle(core, came(1_200, "s2", 5))
    assert handle(core, came(1_300, "s1", 6), came(1_300, "s2", 6), Tick(9_999)) == []


def test_3_4_3_delay_gives_a_new_bucket_at_its_deadline_during_the_correction() -> None:
    core = failed(replace(PROCESS, while_correcting="delay"))
    handle(core, came(1_200, "s2", 5))
    assert handle(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert handle(core, Tick(2_299)) == [Wake(2_300)]
    # The bucket is complete, but its result is tentative: it depends on tentative state.
    assert handle(core, Tick(2_300)) == [tentative_run(6, 6)]


def test_3_4_3_process_gives_new_buckets_at_once_during_the_correction() -> None:
    plan = plan_of(replace(PROCESS, while_correcting="process"))
    core = stable(plan, limits=JobLimits(1))
    handle(core, BoundaryArrived(100, "s1", 6, ((5, 1, 0), (6, 1, 0))), Tick(1_100))
    handle(core, tentative_done(1_110, 5), tentative_done(1_120, 6))
    assert handle(core, came(1_200, "s2", 6)) == [STABILIZATION, Run("p", 5, 5)]
    handle(core, came(1_300, "s1", 7))
    assert handle(core, came(1_300, "s2", 7)) == [tentative_run(7, 7, partial=Partial(0.5, 0.5))]


def test_3_4_3_a_bucket_next_to_the_correction_waits_for_it_for_at_most_max_delay() -> None:
    core = failed(replace(PROCESS, while_correcting="process"))
    handle(
        core, came(1_200, "s2", 5)
    )  # Run 5..5 is in progress, and 5 is the only bucket to correct
    assert handle(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert handle(core, Tick(2_300)) == [tentative_run(6, 6)]
    assert handle(core, tentative_done(2_310, 6)) == []
    assert handle(core, done(2_400, 5)) == [Run("p", 6, 6)]
    assert handle(core, done(2_500, 6)) == [Leave("p"), STABLE]


def test_3_5_a_new_failure_under_suspend_starts_a_new_line_after_max_delay() -> None:
    core = failed(replace(PROCESS, while_correcting="suspend"))
    handle(core, came(1_200, "s2", 5), came(1_300, "s1", 6))
    assert handle(core, done(1_400, 5)) == [Leave("p"), STABLE, Wake(2_300)]
    assert handle(core, Tick(2_300)) == [
        UP_FAILURE,
        Enter("p", 2, False),
        tentative_run(6, 6, line=2),
    ]


# -- section 3.5: repeated failures ---------------------------------------------------------------


def test_3_5_a_new_failure_during_stabilization_continues_the_tentative_line() -> None:
    """Its tentative results remain valid, and the line continues at its position."""
    core = failed(replace(PROCESS, while_correcting="process"))
    handle(core, came(1_200, "s2", 5))  # Run 5..5 is in progress when s2 fails again
    handle(core, came(1_300, "s1", 6))
    assert handle(core, Tick(2_300)) == [tentative_run(6, 6)]
    assert handle(core, tentative_done(2_310, 6)) == []
    assert handle(core, done(2_400, 5)) == [UP_FAILURE]
    assert handle(core, came(2_500, "s2", 6)) == [STABILIZATION, Run("p", 6, 6)]
    assert handle(core, done(2_600, 6)) == [Leave("p"), STABLE]


def test_3_5_with_an_input_that_fails_repeatedly_each_line_runs_a_bucket_once() -> None:
    core, actions = failed(replace(PROCESS, while_correcting="process")), list[Action]()
    at = 1_200
    for bucket in range(6, 30):
        # s2 returns for the duration of the correction, and fails again.
        actions += handle(core, came(at, "s2", bucket - 1))
        actions += handle(core, came(at + 10, "s1", bucket))
        at += 1_100
        actions += handle(core, Tick(at - 90))
        actions += handle(core, tentative_done(at - 80, bucket), done(at - 70, bucket - 1))
    assert buckets(actions, Run) == list(range(5, 29))
    assert buckets(actions, RunTentative) == list(range(6, 30))
    assert not any(isinstance(action, Enter | Leave) for action in actions)
    changes = [action for action in actions if isinstance(action, Change)]
    assert changes == 24 * [STABILIZATION, UP_FAILURE]


def test_the_stable_line_continues_while_inputs_are_missing() -> None:
    """Consumers get each correction as soon as it is possible, not at the end of the failure."""
    core = failed(PROCESS)
    handle(core, came(1_200, "s1", 9), tentative_done(1_210, 9))
    for bucket in range(5, 9):
        assert handle(core, came(1_300, "s2", bucket)) == [Run("p", bucket, bucket)]
        assert handle(core, done(1_400, bucket)) == []
        assert core.paths["p"].consistency.state is OutputState.UP_FAILURE
    assert handle(core, came(1_500, "s2", 9)) == [STABILIZATION, Run("p", 9, 9)]


def test_the_tentative_line_restarts_once_it_repeats_no_more_than_was_corrected() -> None:
    core = failed(PROCESS)
    handle(core, came(1_200, "s1", 9), tentative_done(1_210, 9))  # five buckets after 4
    handle(core, came(1_300, "s2", 6), done(1_310, 6))  # 2 corrected, 3 to repeat
    assert handle(core, came(1_320, "s1", 10)) == [tentative_run(10, 10)]
    handle(core, tentative_done(1_330, 10), came(1_400, "s2", 7), done(1_410, 7))
    # 3 corrected, 3 to repeat: line 2 starts after bucket 7, repeats 8 to 10, continues with 11.
    assert handle(core, came(1_420, "s1", 11)) == [
        Enter("p", 2, False),
        tentative_run(8, 11, line=2),
    ]
    handle(core, tentative_done(1_430, 11, line=2), came(1_500, "s2", 8), done(1_510, 8))
    assert handle(core, came(1_520, "s1", 12)) == [tentative_run(12, 12, line=2)], (
        "1 corrected, 3 to repeat"
    )


def test_the_tentative_line_does_not_restart_without_a_new_bucket() -> None:
    core = failed(PROCESS)
    handle(core, came(1_200, "s1", 6), tentative_done(1_210, 6))
    assert handle(core, came(1_300, "s2", 5), done(1_310, 5), Tick(1_320)) == []
    assert core.paths["p"].consistency.line == 1


def test_the_tentative_line_does_not_restart_while_a_stable_run_is_in_progress() -> None:
    core = failed(PROCESS)
    handle(
        core, came(1_200, "s1", 8), tentative_done(1_210, 8), came(1_300, "s2", 6), done(1_310, 6)
    )
    assert handle(core, came(1_320, "s2", 7)) == [Run("p", 7, 7)]  # in progress
    assert handle(core, came(1_330, "s1", 9)) == [tentative_run(9, 9)]
    handle(core, tentative_done(1_340, 9), done(1_350, 7))
    assert handle(core, came(1_360, "s1", 10)) == [
        Enter("p", 2, False),
        tentative_run(8, 10, line=2),
    ]


def test_the_tentative_line_does_not_restart_if_that_takes_more_than_one_job() -> None:
    core = failed(PROCESS, limits=JobLimits(3))
    handle(core, came(1_200, "s1", 10))
    for hi in (8, 10):
        handle(core, tentative_done(1_210, hi))
    handle(core, came(1_300, "s2", 7), done(1_310, 7))  # 3 corrected, 3 to repeat, 1 new
    assert handle(core, came(1_320, "s1", 11)) == [tentative_run(11, 11)]


@pytest.mark.parametrize("policy", [DELAY, PROCESS])
@pytest.mark.parametrize("late", [10, 11, 12, 40, 150])
def test_with_an_input_that_is_always_late_a_bucket_has_at_most_two_tentative_runs(
    policy: Policy, late: int
) -> None:
    """`max_delay` is ten buckets. A bucket runs once as stable. A restart of the tentative line
    repeats at most as many buckets as were corrected since the previous restart; so all restarts
    together repeat at most as many buckets as were corrected."""
    count = 1_000
    core, actions = stable(plan_of(policy)), list[Action]()
    for bucket in range(5, 5 + count):
        at = 100 * bucket
        actions += tell(core, came(at, "s1", bucket))
        if bucket - late > 4:
            actions += tell(core, came(at + 10, "s2", bucket - late))
        actions += tell(core, Tick(at + 99))
    assert buckets(actions, Run) == list(range(5, 5 + count - late))
    runs = buckets(actions, RunTentative)
    held = 10 if policy is DELAY else 0
    assert sorted(set(runs)) == list(range(5, 5 + count - held)), (
        "every bucket was given as tentative"
    )
    assert len(runs) - len(set(runs)) <= count - late, "no more are repeated than were corrected"


def tell(core: Progress, event: BoundaryArrived | Tick) -> list[Action]:
    """Actions of the event and of the steps that follow; each step takes no time."""
    actions = handle(core, event)
    for action in actions:
        if isinstance(action, Run):
            actions += handle(core, done(event.at, action.hi))
        elif isinstance(action, RunTentative):
            actions += handle(core, tentative_done(event.at, action.hi, action.line))
    return actions


def test_the_result_of_a_dropped_tentative_line_is_ignored() -> None:
    core = failed(replace(PROCESS, while_correcting="delay"))
    handle(core, came(1_200, "s1", 6))  # the run of bucket 6 is in progress
    handle(core, came(1_300, "s2", 6), done(1_310, 6))
    consistency = core.paths["p"].consistency
    assert consistency.position is None, "the stable line has overtaken the tentative run"
    assert handle(core, tentative_done(1_320, 6)) == []
    assert consistency.position is None


def test_a_tentative_step_that_is_ahead_of_the_stable_line_is_not_discarded() -> None:
    """Otherwise an input that is always late would discard every long tentative step."""
    core = failed(replace(PROCESS, while_correcting="delay"))
    handle(core, came(1_200, "s1", 6))  # the run of bucket 6 is in progress
    handle(core, came(1_300, "s2", 5), done(1_310, 5))
    consistency = core.paths["p"].consistency
    assert (consistency.position, consistency.running_upto) == (5, 6)
    handle(core, tentative_done(1_320, 6))
    assert consistency.position == 6 and consistency.line == 1


# -- section 3.4.1: undo/redo ---------------------------------------------------------------------

UNDO = replace(PROCESS, reconcile="undo")


def test_3_4_1_undo_discards_the_state_and_rebuilds_it_from_the_inputs_it_depends_on() -> None:
    core = stable(plan_of(UNDO))
    handle(core, came(100, "s1", 5))
    assert handle(core, Tick(1_100))[:2] == [UP_FAILURE, Enter("p", 1, forget=True)]
    handle(core, tentative_done(1_110, 5))
    # Windows reach 3 buckets back: 2, 3 and 4 run again to rebuild the state; their results are
    # discarded.
    assert handle(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 2, 5, rebuild_from=5)]
    assert handle(core, done(1_300, 5)) == [Leave("p"), STABLE]


def test_3_4_1_undo_rebuilds_from_no_earlier_than_the_start_of_the_stream() -> None:
    core = stable(replace(plan_of(UNDO), extent=100))
    handle(core, came(100, "s1", 5), Tick(1_100), tentative_done(1_110, 5))
    assert handle(core, came(1_200, "s2", 5))[-1] == Run("p", 0, 5, rebuild_from=5)


def test_3_4_1_undo_rebuilds_once_and_then_continues() -> None:
    core = stable(plan_of(UNDO), limits=JobLimits(1))
    handle(core, BoundaryArrived(100, "s1", 6, ((5, 1, 0), (6, 1, 0))), Tick(1_100))
    handle(core, tentative_done(1_110, 5), tentative_done(1_120, 6))
    assert handle(core, came(1_200, "s2", 6))[-1] == Run("p", 2, 5, rebuild_from=5)
    assert handle(core, done(1_300, 5)) == [Run("p", 6, 6, spent_us=100)]


def test_3_4_1_undo_rebuilds_for_at_least_piece_buckets_while_inputs_are_missing() -> None:
    """With an input that is always late, the state is not rebuilt for every bucket."""
    core = stable(plan_of(UNDO))
    handle(core, came(100, "s1", 5), Tick(1_100), tentative_done(1_110, 5))
    last = 4 + PIECE_BUCKETS
    for bucket in range(6, last + 1):
        handle(core, came(2_000, "s1", bucket), tentative_done(2_000, bucket))
        assert handle(core, came(2_000, "s2", bucket - 1)) == []
    handle(core, came(2_000, "s1", last + 1), tentative_done(2_000, last + 1))
    assert handle(core, came(2_000, "s2", last)) == [Run("p", 2, last, rebuild_from=5)]
    # From then on the state exists, and each bucket is corrected as soon as it is complete.
    assert handle(core, done(2_100, last)) == []
    handle(core, came(2_200, "s1", last + 2), tentative_done(2_200, last + 2))
    assert handle(core, came(2_200, "s2", last + 1)) == [Run("p", last + 1, last + 1)]


def test_3_4_1_undo_rebuilds_earlier_when_upstream_retains_fewer_buckets() -> None:
    core = stable(plan_of(UNDO), buffer_buckets=20)
    core.handle(Acknowledged(0, "out", 4, 4))
    handle(core, came(100, "s1", 20), Tick(1_100), tentative_done(1_110, 20))
    assert handle(core, came(1_200, "s2", 13)) == []
    assert handle(core, came(1_200, "s2", 14)) == [Run("p", 2, 14, rebuild_from=5)]


def test_3_4_1_undo_keeps_the_state_of_operators_that_are_not_convergent() -> None:
    core = stable(plan_of(UNDO, convergent=False))
    handle(core, came(100, "s1", 5))
    assert handle(core, Tick(1_100))[1] == Enter("p", 1, forget=False)
    handle(core, tentative_done(1_110, 5))
    assert handle(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_1_undo_retains_the_inputs_for_a_rebuild() -> None:
    """State after bucket 10 may refer to no bucket; a rebuild still needs buckets 8, 9 and 10."""
    with_checkpoint, with_undo = plan_of(PROCESS), plan_of(UNDO)
    assert (with_checkpoint.needs_from(10, 11), with_undo.needs_from(10, 11)) == (11, 8)
    assert (with_checkpoint.needs_from(10, 5), with_undo.needs_from(10, 5)) == (5, 5)
    assert plan_of(UNDO, convergent=False).needs_from(10, 11) == 11


# -- the end of the streams -----------------------------------------------------------------------


def test_streams_that_end_during_a_failure_are_corrected_before_the_path_ends() -> None:
    core = failed(PROCESS)
    handle(core, BoundaryArrived(1_200, "s1", 6, ended=True))
    assert handle(core, BoundaryArrived(1_300, "s2", 5, ended=True)) == [
        STABILIZATION,
        Run("p", 5, 6, spent_us=100),
    ]
    assert handle(core, done(1_400, 6)) == [Leave("p"), STABLE, End("p")]
    assert handle(core, Tick(9_999)) == []
