"""What a path does while inputs are missing, and how that is corrected, as transcripts.

Sections and figures are Borealis'; the words and the times are in `transcripts`. Of a `Run`, the
last number is how long its buckets were held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from holdfast.core.consistency import (
    MOVES,
    PIECE_BUCKETS,
    RETRY_US,
    RETRY_US_MAX,
    Consistency,
)
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledge,
    Acknowledged,
    Action,
    BoundaryArrived,
    Change,
    End,
    Enter,
    Leave,
    PathPlan,
    Run,
    RunTentative,
    TentativeDone,
    Tick,
    Wake,
)
from holdfast.core.sunion import WHOLE, Partial, SUnion
from holdfast.errors import ProtocolViolation
from holdfast.model.trees import AllOf, AnyOf, Tree
from holdfast.types import OutputState
from tests.core.transcripts import (
    DELAY,
    HALF,
    PROCESS,
    STABILIZATION,
    STABLE,
    UP_FAILURE,
    came,
    done,
    failed,
    guess,
    guessed,
    plan_of,
    said,
    stable,
)

# -- section 3.3: upstream failure ----------------------------------------------------------------


@pytest.mark.parametrize("policy", [DELAY, PROCESS])
def test_3_3_blocking_is_the_first_defence_until_a_bucket_has_been_held_for_x(
    policy: Policy,
) -> None:
    core = stable(plan_of(policy))
    assert said(core, came(100, "s1", 5)) == [Wake(1_100)]
    assert said(core, Tick(1_099)) == [Wake(1_100)]
    assert said(core, Tick(1_100)) == [
        UP_FAILURE,
        Enter("p", line=1, forget=False),
        RunTentative("p", 1, 5, 5, outputs=(("out", 5),), missing=("s2",), partial=HALF),
    ]


def test_3_3_a_failure_shorter_than_x_leaves_no_trace() -> None:
    core = stable(plan_of(PROCESS))
    said(core, came(100, "s1", 5))
    assert said(core, came(1_099, "s2", 5)) == [Run("p", 5, 5, spent_us=999)]
    assert said(core, done(1_150, 5)) == []
    assert said(core, Tick(1_200)) == []
    assert core.paths["p"].consistency.line == 0


def test_a_path_that_blocks_waits_for_ever() -> None:
    core = stable(plan_of(Policy()))
    assert said(core, came(100, "s1", 5)) == []
    assert said(core, Tick(10**12)) == []


def test_3_3_delay_holds_every_bucket_as_long_as_may_be() -> None:
    core = stable(plan_of(DELAY))
    assert said(core, came(100, "s1", 5), came(200, "s1", 6)) == []  # the first wake is due first
    said(core, Tick(1_100))
    assert said(core, guessed(1_110, 5)) == [Wake(1_200)]
    assert said(core, Tick(1_200)) == [guess(6, 6)]
    assert said(core, guessed(1_210, 6)) == []
    assert said(core, came(1_300, "s1", 7)) == [Wake(2_300)]


def test_3_3_process_holds_only_the_first_buckets_of_a_failure() -> None:
    core = stable(plan_of(PROCESS))
    said(core, came(100, "s1", 5), came(200, "s1", 6), Tick(1_100))
    assert said(core, guessed(1_110, 5)) == [
        guess(6, 6),
    ]
    said(core, guessed(1_120, 6))
    assert said(core, came(1_300, "s1", 7)) == [
        guess(7, 7),
    ]


def test_3_3_process_waits_again_for_an_input_that_came_back() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 6), guessed(1_210, 6))
    # s2 has caught up with the line as tentative: the failure goes on, but not for want of s2.
    said(core, BoundaryArrived(1_300, "s2", 4, tentative_upto=6, lacked=("x",)))
    assert said(core, came(1_400, "s1", 7)) == [Wake(2_400)]
    assert said(core, BoundaryArrived(1_500, "s2", 4, tentative_upto=7, lacked=("x",))) == [
        guess(7, 7, missing=("s2", "x")),
    ]


def test_3_3_what_came_as_tentative_was_held_before_and_is_held_shorter() -> None:
    core = stable(plan_of(DELAY))
    tentative = BoundaryArrived(100, "s1", 4, tentative_upto=5, lacked=("far",))
    assert said(core, tentative) == [Wake(400)]
    assert said(core, Tick(400))[-1] == guess(
        5, 5, missing=("s2", "far"), partial=Partial(0.5, 0.5)
    )


def test_inputs_that_only_the_tentative_line_still_needs_are_kept() -> None:
    """Its windows refer to buckets that the stable line has done with."""
    core = stable(plan_of(PROCESS), recovery="pairs")
    core.handle(came(100, "s1", 7))
    core.handle(Tick(1_100))
    core.handle(TentativeDone(1_110, "p", 1, 7, needs_from=4))
    core.handle(came(1_200, "s2", 5))
    kept = core.handle(done(1_210, 5))
    assert {(a.received, a.no_longer_needed) for a in kept if isinstance(a, Acknowledge)} == {
        (5, 3)
    }
    core.handle(came(1_220, "s2", 7))
    left = core.handle(done(1_230, 7))
    assert {(a.received, a.no_longer_needed) for a in left if isinstance(a, Acknowledge)} == {
        (7, 7)
    }


@pytest.mark.parametrize("convergent", [True, False])
def test_what_windows_and_state_hold_of_partial_buckets_is_named(*, convergent: bool) -> None:
    """Buckets 5 and 6 lacked s2. Windows reach 3 buckets back; a state may hold all there was."""
    plan = plan_of(replace(PROCESS, while_correcting="process"), convergent=convergent)
    core = stable(plan, group_buckets_max=1)
    said(core, BoundaryArrived(100, "s1", 6, ((5, 1), (6, 1))), Tick(1_100))
    said(core, guessed(1_110, 5), guessed(1_120, 6))
    assert said(core, came(1_200, "s2", 6)) == [STABILIZATION, Run("p", 5, 5)]
    for bucket in range(7, 12):
        said(core, came(1_300, "s1", bucket))
        held = not convergent or bucket <= 9
        label = (("s2",), Partial(0.5, 0.5)) if held else ((), WHOLE)
        (ran,) = said(core, came(1_300, "s2", bucket))
        assert isinstance(ran, RunTentative) and (ran.missing, ran.partial) == label
        said(core, guessed(1_310, bucket))


def test_what_is_missing_is_named_from_all_the_way_up_and_once() -> None:
    trees: Mapping[str, Tree] = {"out": AnyOf(("s1", "s2", "s3"))}
    core = stable(plan_of(DELAY, trees, "s1", "s2", "s3"))
    said(core, BoundaryArrived(100, "s3", 4, tentative_upto=5, lacked=("s2", "far")))
    said(core, BoundaryArrived(100, "s1", 4, tentative_upto=5, lacked=("far", "farther")))
    assert said(core, Tick(400))[-1] == guess(
        5, 5, missing=("s2", "far", "farther"), partial=Partial(0.6667, 0.6667)
    )


def test_stable_buckets_come_before_tentative_ones() -> None:
    """Buckets that are whole are run as stable, even where others have been held long enough."""
    core = stable(plan_of(DELAY))
    assert said(core, came(100, "s1", 6), came(1_100, "s2", 5)) == [Run("p", 5, 5, spent_us=1_000)]
    assert said(core, Tick(1_150)) == []
    assert said(core, done(1_200, 5)) == [
        UP_FAILURE,
        Enter("p", 1, False),
        guess(6, 6),
    ]


def test_a_stable_line_that_is_never_idle_does_not_keep_a_tentative_one_from_beginning() -> None:
    """s2 is always late, and a step takes as long as a bucket: after each of them the next bucket
    is complete. What was held too long when a step began is answered before the next one."""
    core = stable(plan_of(DELAY))
    said(core, came(100, "s1", 8), came(1_100, "s2", 5), came(1_150, "s2", 6))
    assert said(core, done(1_200, 5)) == [
        UP_FAILURE, Enter("p", 1, False), guess(6, 8), Run("p", 6, 6, spent_us=50),
    ]  # fmt: skip


def test_a_path_whose_steps_take_as_long_as_a_bucket_is_stable_when_it_has_caught_up() -> None:
    """Two steps took all there was, and what waits now came while the second one ran."""
    core = failed(PROCESS)
    said(core, came(1_200, "s2", 5), came(1_250, "s1", 6), came(1_250, "s2", 6))
    assert said(core, done(1_300, 5)) == [Leave("p"), Run("p", 6, 6, spent_us=50)]
    said(core, came(1_350, "s1", 7), came(1_350, "s2", 7))
    assert said(core, done(1_400, 6))[:2] == [STABLE, Run("p", 7, 7, spent_us=50)]


def test_a_path_is_not_stable_while_more_is_complete_than_a_step_may_take() -> None:
    core = failed(PROCESS, group_rows_max=1)
    said(core, came(1_200, "s2", 5))
    for stream in ("s1", "s2"):
        rows = tuple((bucket, 1) for bucket in range(6, 12))
        said(core, BoundaryArrived(1_250, stream, 11, rows))
    for bucket in range(5, 11):
        assert STABLE not in said(core, done(1_300 + bucket, bucket))
    assert said(core, done(1_400, 11)) == [STABLE]


def test_a_tentative_job_has_the_limits_of_any_other() -> None:
    core = stable(plan_of(DELAY), group_buckets_max=2)
    said(core, came(100, "s1", 9))
    assert said(core, Tick(1_100))[-1] == guess(5, 6)
    assert said(core, guessed(1_110, 6))[-1] == guess(7, 8)


def test_property_1_the_last_buckets_of_a_stream_that_ended_are_given_in_time_too() -> None:
    core = stable(plan_of(DELAY))
    said(core, came(100, "s1", 5), BoundaryArrived(200, "s1", 6, ended=True))
    assert said(core, Tick(1_100))[-1] == guess(5, 5)
    assert said(core, guessed(1_110, 5)) == [Wake(1_200)]
    assert said(core, Tick(1_200)) == [guess(6, 6)]
    assert said(core, guessed(1_210, 6), Tick(9_999)) == []  # there is no more


# -- figure 6: trees ------------------------------------------------------------------------------


def test_3_5_a_blocking_tree_gives_nothing_however_long_it_takes() -> None:
    core = stable(plan_of(PROCESS, {"out": AllOf(("s1", "s2"))}))
    assert said(core, came(100, "s1", 5)) == [Wake(1_100)]
    assert said(core, Tick(1_100)) == []
    assert said(core, came(1_200, "s2", 5))[0] == Run("p", 5, 5)


TWO_OF_THREE = Partial(0.6667, 1.0)
FIGURE_6: Mapping[str, Tree] = {
    "joined": AllOf((AnyOf(("s1", "s2")), "s3")),
    "sums": AnyOf(("s1", "s2")),
}


def test_3_5_figure_6_without_a_part_of_the_union_both_outputs_go_on() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s2", 5), came(100, "s3", 5))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 5), ("sums", 5)), ("s1",), TWO_OF_THREE
    )


def test_3_5_figure_6_without_the_other_side_of_the_join_only_the_union_goes_on() -> None:
    """The blocked output stays where it was: bucket 4."""
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s1", 5), came(100, "s2", 5))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 4), ("sums", 5)), ("s3",), TWO_OF_THREE
    )


def test_3_5_an_output_goes_on_up_to_where_its_own_tree_does() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s1", 7), came(100, "s3", 6))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 7, (("joined", 6), ("sums", 7)), ("s2", "s3"), Partial(0.3333, 1.0)
    )


def test_3_3_outputs_the_failure_does_not_reach_stay_stable() -> None:
    """Two paths of one node: the one that does not read s2 does not notice."""
    trees: Mapping[str, Tree] = {"other": "s1"}
    other = PathPlan("q", ("s1",), ("other",), True, 3, DELAY, trees)
    core = stable(plan_of(DELAY), other)
    assert said(core, came(100, "s1", 5))[:2] == [Wake(1_100), Run("q", 5, 5)]
    assert said(core, Tick(1_100))[:1] == [UP_FAILURE]
    assert said(core, done(1_150, 5, "q")) == []
    assert core.paths["q"].consistency.state is OutputState.STABLE
    assert said(core, came(1_200, "s1", 6))[0] == Run("q", 6, 6)


# -- section 3.4: stabilization -------------------------------------------------------------------


def test_3_4_a_node_reconciles_only_after_all_that_was_tentative_is_corrected() -> None:
    """Until then the stable line goes on with what is complete, and the state is UP_FAILURE."""
    core = failed(PROCESS)
    said(core, came(1_150, "s1", 6), guessed(1_160, 6))
    assert said(core, came(1_200, "s2", 5)) == [Run("p", 5, 5)]
    assert said(core, came(1_300, "s2", 6)) == []
    assert said(core, done(1_310, 5)) == [STABILIZATION, Run("p", 6, 6)]
    assert said(core, done(1_320, 6)) == [Leave("p"), STABLE]


def test_3_4_what_a_tentative_run_under_way_gives_must_be_corrected_too() -> None:
    core = failed(PROCESS)
    assert said(core, came(1_150, "s1", 6)) == [guess(6, 6)]
    assert said(core, came(1_200, "s2", 5)) == [Run("p", 5, 5, spent_us=50)]
    assert said(core, came(1_300, "s2", 6), guessed(1_305, 6)) == []
    assert said(core, done(1_310, 5)) == [STABILIZATION, Run("p", 6, 6)]


def test_3_4_tentative_input_is_never_corrected_with_tentative_input() -> None:
    core = failed(PROCESS)
    assert said(core, BoundaryArrived(1_200, "s2", 4, tentative_upto=5, lacked=("far",))) == []


def test_3_4_2_stabilization_ends_with_rec_done_when_it_has_caught_up() -> None:
    core = failed(PROCESS)
    assert said(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 5, 5)]
    assert said(core, done(1_300, 5)) == [Leave("p"), STABLE]
    assert said(core, Tick(9_999)) == []


def test_3_4_2_a_long_correction_is_run_in_groups_and_left_only_at_its_end() -> None:
    core = stable(plan_of(DELAY), group_buckets_max=2)
    rows = tuple((bucket, 1) for bucket in range(5, 9))
    said(core, BoundaryArrived(100, "s1", 8, rows), Tick(1_100), guessed(1_110, 6))
    said(core, guessed(1_120, 8))
    assert said(core, came(1_200, "s2", 8)) == [STABILIZATION, Run("p", 5, 6)]
    assert said(core, done(1_300, 6)) == [Run("p", 7, 8, spent_us=100)]
    assert said(core, done(1_400, 8)) == [Leave("p"), STABLE]


def test_after_rec_done_a_node_is_stable_once_nothing_whole_waits() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_250, "s1", 6), came(1_250, "s2", 6)) == []
    assert said(core, done(1_300, 5)) == [Leave("p"), Run("p", 6, 6, spent_us=50)]
    assert said(core, done(1_400, 6)) == [STABLE]


def test_3_4_3_suspend_gives_nothing_new_while_it_corrects_itself() -> None:
    core = failed(replace(PROCESS, while_correcting="suspend"))
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6), Tick(9_999)) == []


def test_3_4_3_delay_gives_what_was_held_long_enough_beside_the_correction() -> None:
    core = failed(replace(PROCESS, while_correcting="delay"))
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert said(core, Tick(2_299)) == [Wake(2_300)]
    # Whole, and tentative all the same: the state it is computed from is.
    assert said(core, Tick(2_300)) == [guess(6, 6)]


def test_3_4_3_process_gives_new_buckets_at_once_beside_the_correction() -> None:
    plan = plan_of(replace(PROCESS, while_correcting="process"))
    core = stable(plan, group_buckets_max=1)
    said(core, BoundaryArrived(100, "s1", 6, ((5, 1), (6, 1))), Tick(1_100))
    said(core, guessed(1_110, 5), guessed(1_120, 6))
    assert said(core, came(1_200, "s2", 6)) == [STABILIZATION, Run("p", 5, 5)]
    said(core, came(1_300, "s1", 7))
    assert said(core, came(1_300, "s2", 7)) == [guess(7, 7, partial=Partial(0.5, 0.5))]


def test_3_4_3_what_the_correction_is_about_to_reach_waits_for_it_unless_held_for_x() -> None:
    core = failed(replace(PROCESS, while_correcting="process"))
    said(core, came(1_200, "s2", 5))  # Run 5..5 is under way, and 5 is all there is to correct
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert said(core, Tick(2_300)) == [guess(6, 6)]
    assert said(core, guessed(2_310, 6)) == []
    assert said(core, done(2_400, 5)) == [Run("p", 6, 6)]
    assert said(core, done(2_500, 6)) == [Leave("p"), STABLE]


def test_3_5_a_new_failure_while_new_buckets_are_suspended_is_held_for_x_like_any_other() -> None:
    core = failed(replace(PROCESS, while_correcting="suspend"))
    said(core, came(1_200, "s2", 5), came(1_300, "s1", 6))
    assert said(core, done(1_400, 5)) == [Leave("p"), STABLE, Wake(2_300)]
    assert said(core, Tick(2_300)) == [UP_FAILURE, Enter("p", 2, False), guess(6, 6, line=2)]


# -- section 3.5: failures that come and go -------------------------------------------------------


def test_3_5_a_new_failure_during_stabilization_keeps_the_tentative_line() -> None:
    """What it gave stands, and it goes on from where it is."""
    core = failed(replace(PROCESS, while_correcting="process"))
    said(core, came(1_200, "s2", 5))  # Run 5..5 is under way when s2 fails again
    said(core, came(1_300, "s1", 6))
    assert said(core, Tick(2_300)) == [guess(6, 6)]
    assert said(core, guessed(2_310, 6)) == []
    assert said(core, done(2_400, 5)) == [UP_FAILURE]
    assert said(core, came(2_500, "s2", 6)) == [STABILIZATION, Run("p", 6, 6)]
    assert said(core, done(2_600, 6)) == [Leave("p"), STABLE]


def test_3_5_an_input_that_fails_again_and_again_costs_each_bucket_one_run_of_each_line() -> None:
    core, actions = failed(replace(PROCESS, while_correcting="process")), list[Action]()
    at = 1_200
    for bucket in range(6, 30):
        # s2 comes back for as long as the correction takes, and is gone again.
        actions += said(core, came(at, "s2", bucket - 1))
        actions += said(core, came(at + 10, "s1", bucket))
        at += 1_100
        actions += said(core, Tick(at - 90))
        actions += said(core, guessed(at - 80, bucket), done(at - 70, bucket - 1))
    assert buckets(actions, Run) == list(range(5, 29))
    assert buckets(actions, RunTentative) == list(range(6, 30))
    assert not any(isinstance(action, Enter | Leave) for action in actions)
    changes = [action for action in actions if isinstance(action, Change)]
    assert changes == 24 * [STABILIZATION, UP_FAILURE]


def buckets(actions: list[Action], kind: type[Run] | type[RunTentative]) -> list[int]:
    runs = [action for action in actions if isinstance(action, kind)]
    return [bucket for run in runs for bucket in range(run.lo, run.hi + 1)]


def test_the_stable_line_goes_on_while_inputs_are_missing() -> None:
    """Readers get each correction when it can be had, not when the failure is over."""
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 9), guessed(1_210, 9))
    for bucket in range(5, 9):
        assert said(core, came(1_300, "s2", bucket)) == [Run("p", bucket, bucket)]
        assert said(core, done(1_400, bucket)) == []
        assert core.paths["p"].consistency.state is OutputState.UP_FAILURE
    assert said(core, came(1_500, "s2", 9)) == [STABILIZATION, Run("p", 9, 9)]


def test_the_tentative_line_starts_again_once_as_much_was_corrected_as_it_has_to_repeat() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 9), guessed(1_210, 9))  # from 4 on: five buckets
    said(core, came(1_300, "s2", 6), done(1_310, 6))  # two are corrected, three would be repeated
    assert said(core, came(1_320, "s1", 10)) == [guess(10, 10)]
    said(core, guessed(1_330, 10), came(1_400, "s2", 7), done(1_410, 7))
    # Three of six: line 2 starts from bucket 7, repeats 8 to 10, and goes on with 11.
    assert said(core, came(1_420, "s1", 11)) == [Enter("p", 2, False), guess(8, 11, line=2)]
    said(core, guessed(1_430, 11, line=2), came(1_500, "s2", 8), done(1_510, 8))
    assert said(core, came(1_520, "s1", 12)) == [guess(12, 12, line=2)], "that was one bucket"


def test_the_tentative_line_does_not_start_again_when_there_is_nothing_new_to_give() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 6), guessed(1_210, 6))
    assert said(core, came(1_300, "s2", 5), done(1_310, 5), Tick(1_320)) == []
    assert core.paths["p"].consistency.line == 1


def test_the_tentative_line_does_not_start_again_from_a_state_that_is_about_to_be_newer() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 8), guessed(1_210, 8), came(1_300, "s2", 6), done(1_310, 6))
    assert said(core, came(1_320, "s2", 7)) == [Run("p", 7, 7)]  # under way
    assert said(core, came(1_330, "s1", 9)) == [guess(9, 9)]
    said(core, guessed(1_340, 9), done(1_350, 7))
    assert said(core, came(1_360, "s1", 10)) == [Enter("p", 2, False), guess(8, 10, line=2)]


def test_the_tentative_line_does_not_start_again_where_that_takes_more_than_one_job() -> None:
    core = failed(PROCESS, group_buckets_max=3)
    said(core, came(1_200, "s1", 10))
    for hi in (8, 10):
        said(core, guessed(1_210, hi))
    said(core, came(1_300, "s2", 7), done(1_310, 7))  # 3 corrected, 3 to repeat, and a new one
    assert said(core, came(1_320, "s1", 11)) == [guess(11, 11)]


@pytest.mark.parametrize("policy", [DELAY, PROCESS])
@pytest.mark.parametrize("late", [10, 11, 12, 40, 150])
def test_an_input_that_is_always_late_costs_at_most_two_tentative_runs_of_a_bucket(
    policy: Policy, late: int
) -> None:
    """X is ten buckets. A bucket is run once as stable. A restart of the tentative line repeats no
    more buckets than were corrected since the one before it, so all restarts together do not."""
    many = 1_000
    core, actions = stable(plan_of(policy)), list[Action]()
    for bucket in range(5, 5 + many):
        at = 100 * bucket
        actions += tell(core, came(at, "s1", bucket))
        if bucket - late > 4:
            actions += tell(core, came(at + 10, "s2", bucket - late))
        actions += tell(core, Tick(at + 99))
    assert buckets(actions, Run) == list(range(5, 5 + many - late))
    runs = buckets(actions, RunTentative)
    held = 10 if policy is DELAY else 0
    assert sorted(set(runs)) == list(range(5, 5 + many - held)), "each was due at some time"
    assert len(runs) - len(set(runs)) <= many - late, "no more are repeated than were corrected"


def tell(core: Progress, event: BoundaryArrived | Tick) -> list[Action]:
    """All that follows, with every step done at once."""
    actions = said(core, event)
    for action in actions:
        if isinstance(action, Run):
            actions += said(core, done(event.at, action.hi))
        elif isinstance(action, RunTentative):
            actions += said(core, guessed(event.at, action.hi, action.line))
    return actions


def test_the_result_of_a_line_that_is_over_does_not_count() -> None:
    core = failed(replace(PROCESS, while_correcting="delay"))
    said(core, came(1_200, "s1", 6))  # the run of bucket 6 is under way
    said(core, came(1_300, "s2", 6), done(1_310, 6))
    consistency = core.paths["p"].consistency
    assert consistency.position is None, "the stable line has overtaken what is under way"
    assert said(core, guessed(1_320, 6)) == []
    assert consistency.position is None


def test_a_tentative_step_that_is_ahead_of_a_stable_one_is_not_thrown_away() -> None:
    """With an input that is always late, long tentative steps would never be given."""
    core = failed(replace(PROCESS, while_correcting="delay"))
    said(core, came(1_200, "s1", 6))  # the run of bucket 6 is under way
    said(core, came(1_300, "s2", 5), done(1_310, 5))
    consistency = core.paths["p"].consistency
    assert (consistency.position, consistency.running_upto) == (5, 6)
    said(core, guessed(1_320, 6))
    assert consistency.position == 6 and consistency.line == 1


# -- tentative steps that fail --------------------------------------------------------------------


def test_a_tentative_run_that_failed_is_done_again_after_a_while_that_doubles() -> None:
    core, at = stable(plan_of(DELAY)), 1_100
    said(core, came(100, "s1", 5), Tick(at))
    for number in range(12):
        pause = min(RETRY_US << number, RETRY_US_MAX)
        assert said(core, guessed(at, None)) == [Wake(at + pause)]
        assert said(core, Tick(at + pause - 1)) == [Wake(at + pause)]
        at += pause
        assert said(core, Tick(at)) == [guess(5, 5)]
    assert pause == RETRY_US_MAX
    said(core, guessed(at, 5), came(at, "s1", 6))  # one that went well: from the start again
    assert said(core, Tick(at + 1_000)) == [guess(6, 6)]
    assert said(core, guessed(at + 1_001, None)) == [Wake(at + 1_001 + RETRY_US)]


def test_tentative_runs_that_fail_never_stop_the_stable_line() -> None:
    """An input that is always late, and tentative steps that fail one after the other."""
    core, at, actions = stable(plan_of(PROCESS)), 0, list[Action]()
    for bucket in range(5, 1_000):
        at = 1_000 * bucket
        events = [came(at, "s1", bucket), Tick(at + 100)]
        events += [came(at + 200, "s2", bucket - 15)] if bucket - 15 > 4 else []
        for event in events:
            told = said(core, event)
            for action in told:
                if isinstance(action, Run):
                    told += said(core, done(event.at, action.hi))
                elif isinstance(action, RunTentative):
                    told += said(core, guessed(event.at, None, action.line))
            actions += told
    assert buckets(actions, Run) == list(range(5, 985))
    attempts = [action for action in actions if isinstance(action, RunTentative)]
    assert 2 < len(attempts) <= 1_000_000 // RETRY_US


# -- legal moves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", OutputState)
@pytest.mark.parametrize("after", OutputState)
def test_figure_5_any_other_move_is_our_bug(before: OutputState, after: OutputState) -> None:
    consistency = Consistency(PROCESS, SUnion(["s1"]), {})
    consistency.state = before
    if after in MOVES[before]:
        consistency.move(after)
        assert consistency.state is after
        return
    legal = ", ".join(MOVES[before])
    with pytest.raises(ProtocolViolation, match=f"{before} cannot become {after}, only {legal}"):
        consistency.move(after)
    assert consistency.state is before


def test_figure_5_the_legal_moves() -> None:
    stable, up_failure, stabilization = OutputState
    assert {
        stable: (up_failure,),
        up_failure: (stabilization,),
        stabilization: (stable, up_failure),
    } == MOVES


def test_an_illegal_move_is_told_with_what_happened_before() -> None:
    core = stable(plan_of(DELAY))
    said(core, came(100, "s1", 5))
    core.paths["p"].consistency.state = OutputState.UP_FAILURE  # our bug
    with pytest.raises(ProtocolViolation) as caught:
        core.handle(Tick(1_100))
    first, *story, last = str(caught.value).splitlines()
    assert first.startswith("UP_FAILURE cannot become UP_FAILURE, only STABILIZATION")
    assert last == "Tick(at=1100) -> ?"
    assert story[-1].startswith("BoundaryArrived(at=100, stream='s1', upto=5")
    assert story[-1].endswith("-> [Wake(at=1100)]")
    assert len(story) == 6, "from the first input that was opened on"


def test_only_the_recent_story_is_told() -> None:
    core = stable(plan_of(DELAY))
    for at in range(1_000):
        said(core, Tick(at))
    with pytest.raises(ProtocolViolation) as caught:
        said(core, done(1_000, 7))
    assert len(str(caught.value).splitlines()) == 1 + 30 + 1


# -- section 3.4.1: undo/redo ---------------------------------------------------------------------

UNDO = replace(PROCESS, reconcile="undo")


def test_3_4_1_undo_forgets_the_state_and_rebuilds_it_from_the_inputs_that_matter() -> None:
    core = stable(plan_of(UNDO))
    said(core, came(100, "s1", 5))
    assert said(core, Tick(1_100))[:2] == [UP_FAILURE, Enter("p", 1, forget=True)]
    said(core, guessed(1_110, 5))
    # Windows reach 3 buckets back: 2, 3 and 4 are run again to heal, and count for nothing.
    assert said(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 2, 5, rebuild_from=5)]
    assert said(core, done(1_300, 5)) == [Leave("p"), STABLE]


def test_3_4_1_undo_starts_no_earlier_than_the_stream() -> None:
    core = stable(replace(plan_of(UNDO), extent=100))
    said(core, came(100, "s1", 5), Tick(1_100), guessed(1_110, 5))
    assert said(core, came(1_200, "s2", 5))[-1] == Run("p", 0, 5, rebuild_from=5)


def test_3_4_1_undo_rebuilds_once_and_then_goes_on() -> None:
    core = stable(plan_of(UNDO), group_buckets_max=1)
    said(core, BoundaryArrived(100, "s1", 6, ((5, 1), (6, 1))), Tick(1_100))
    said(core, guessed(1_110, 5), guessed(1_120, 6))
    assert said(core, came(1_200, "s2", 6))[-1] == Run("p", 2, 5, rebuild_from=5)
    assert said(core, done(1_300, 5)) == [Run("p", 6, 6, spent_us=100)]


def test_3_4_1_undo_rebuilds_for_no_less_than_a_piece_while_inputs_are_missing() -> None:
    """An input that is always late: the state is not rebuilt for every bucket."""
    core = stable(plan_of(UNDO))
    said(core, came(100, "s1", 5), Tick(1_100), guessed(1_110, 5))
    last = 4 + PIECE_BUCKETS
    for bucket in range(6, last + 1):
        said(core, came(2_000, "s1", bucket), guessed(2_000, bucket))
        assert said(core, came(2_000, "s2", bucket - 1)) == []
    said(core, came(2_000, "s1", last + 1), guessed(2_000, last + 1))
    assert said(core, came(2_000, "s2", last)) == [Run("p", 2, last, rebuild_from=5)]
    # From then on the state is there, and each bucket is corrected when it can be.
    assert said(core, done(2_100, last)) == []
    said(core, came(2_200, "s1", last + 2), guessed(2_200, last + 2))
    assert said(core, came(2_200, "s2", last + 1)) == [Run("p", last + 1, last + 1)]


def test_3_4_1_what_upstream_can_keep_limits_the_piece() -> None:
    core = stable(plan_of(UNDO), buffer_buckets=20)
    core.handle(Acknowledged(0, "out", 4, 4))
    said(core, came(100, "s1", 20), Tick(1_100), guessed(1_110, 20))
    assert said(core, came(1_200, "s2", 13)) == []
    assert said(core, came(1_200, "s2", 14)) == [Run("p", 2, 14, rebuild_from=5)]


def test_3_4_1_undo_falls_back_on_a_kept_state_where_rebuilding_does_not_heal() -> None:
    core = stable(plan_of(UNDO, convergent=False))
    said(core, came(100, "s1", 5))
    assert said(core, Tick(1_100))[1] == Enter("p", 1, forget=False)
    said(core, guessed(1_110, 5))
    assert said(core, came(1_200, "s2", 5)) == [STABILIZATION, Run("p", 5, 5)]


def test_3_4_1_undo_keeps_the_inputs_it_would_rebuild_from() -> None:
    """The state after bucket 10 may refer to nothing at all: to rebuild it takes 8, 9 and 10."""
    kept, rebuilt = plan_of(PROCESS), plan_of(UNDO)
    assert (kept.needs_from(10, 11), rebuilt.needs_from(10, 11)) == (11, 8)
    assert (kept.needs_from(10, 5), rebuilt.needs_from(10, 5)) == (5, 5)
    assert plan_of(UNDO, convergent=False).needs_from(10, 11) == 11


# -- the end --------------------------------------------------------------------------------------


def test_streams_that_end_during_a_failure_are_corrected_first() -> None:
    core = failed(PROCESS)
    said(core, BoundaryArrived(1_200, "s1", 6, ended=True))
    assert said(core, BoundaryArrived(1_300, "s2", 5, ended=True)) == [
        STABILIZATION,
        Run("p", 5, 6, spent_us=100),
    ]
    assert said(core, done(1_400, 6)) == [Leave("p"), End("p")]
    assert said(core, Tick(9_999)) == []
