"""What a path does while inputs are missing, and how that is made good, as transcripts.

Sections and figures are Borealis'; the words and the times are in `transcripts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from holdfast.core.consistency import PIECE_BUCKETS, Policy
from holdfast.core.moves import (
    BoundaryArrived,
    End,
    Enter,
    Leave,
    PathPlan,
    Run,
    RunTentative,
    Tick,
    Wake,
)
from holdfast.model.trees import AllOf, AnyOf, Tree
from holdfast.types import OutputState
from tests.core.transcripts import (
    DELAY,
    PROCESS,
    STABILIZATION,
    STABLE,
    UP_FAILURE,
    came,
    done,
    failed,
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
    assert said(core, Tick(1_099)) == []
    assert said(core, Tick(1_100)) == [
        UP_FAILURE,
        Enter("p", line=1, forget=False),
        RunTentative("p", 1, 5, 5, outputs=(("out", 5),), missing=("s2",)),
    ]


def test_3_3_a_failure_shorter_than_x_leaves_no_trace() -> None:
    core = stable(plan_of(PROCESS))
    said(core, came(100, "s1", 5))
    assert said(core, came(1_099, "s2", 5)) == [Run("p", 5, 5)]
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
    assert said(core, Tick(1_200)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",))]
    assert said(core, guessed(1_210, 6)) == []
    assert said(core, came(1_300, "s1", 7)) == [Wake(2_300)]


def test_3_3_process_holds_only_the_first_buckets_of_a_failure() -> None:
    core = stable(plan_of(PROCESS))
    said(core, came(100, "s1", 5), came(200, "s1", 6), Tick(1_100))
    assert said(core, guessed(1_110, 5)) == [
        RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",)),
    ]
    said(core, guessed(1_120, 6))
    assert said(core, came(1_300, "s1", 7)) == [
        RunTentative("p", 1, 7, 7, (("out", 7),), ("s2",)),
    ]


def test_3_3_process_waits_again_for_an_input_that_came_back() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s1", 6), guessed(1_210, 6))
    # s2 has caught up with the line as tentative: the failure goes on, but not for want of s2.
    said(core, BoundaryArrived(1_300, "s2", 4, tentative_upto=6, lacked=("x",)))
    assert said(core, came(1_400, "s1", 7)) == [Wake(2_400)]
    assert said(core, BoundaryArrived(1_500, "s2", 4, tentative_upto=7, lacked=("x",))) == [
        RunTentative("p", 1, 7, 7, (("out", 7),), missing=("x",)),
    ]


def test_3_3_what_came_as_tentative_was_held_before_and_is_held_shorter() -> None:
    core = stable(plan_of(DELAY))
    tentative = BoundaryArrived(100, "s1", 4, tentative_upto=5, lacked=("far",))
    assert said(core, tentative) == [Wake(400)]
    assert said(core, Tick(400))[-1] == RunTentative(
        "p", 1, 5, 5, (("out", 5),), missing=("s2", "far")
    )


def test_what_is_missing_is_named_from_all_the_way_up_and_once() -> None:
    trees: Mapping[str, Tree] = {"out": AnyOf(("s1", "s2", "s3"))}
    core = stable(plan_of(DELAY, trees, "s1", "s2", "s3"))
    said(core, BoundaryArrived(100, "s3", 4, tentative_upto=5, lacked=("s2", "far")))
    said(core, BoundaryArrived(100, "s1", 4, tentative_upto=5, lacked=("far", "farther")))
    assert said(core, Tick(400))[-1] == RunTentative(
        "p", 1, 5, 5, (("out", 5),), missing=("s2", "far", "farther")
    )


def test_stable_buckets_come_before_tentative_ones() -> None:
    """Buckets that are whole are run as stable, even where others have been held long enough."""
    core = stable(plan_of(DELAY))
    assert said(core, came(100, "s1", 6), came(1_100, "s2", 5)) == [Run("p", 5, 5)]
    assert said(core, Tick(1_150)) == []
    assert said(core, done(1_200, 5)) == [
        UP_FAILURE,
        Enter("p", 1, False),
        RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",)),
    ]


def test_a_tentative_job_has_the_limits_of_any_other() -> None:
    core = stable(plan_of(DELAY), group_buckets_max=2)
    said(core, came(100, "s1", 9))
    assert said(core, Tick(1_100))[-1] == RunTentative("p", 1, 5, 6, (("out", 6),), ("s2",))
    assert said(core, guessed(1_110, 6))[-1] == RunTentative("p", 1, 7, 8, (("out", 8),), ("s2",))


def test_a_tentative_run_that_could_not_be_done_is_done_again() -> None:
    core = stable(plan_of(DELAY))
    said(core, came(100, "s1", 5))
    (*_, run) = said(core, Tick(1_100))
    assert said(core, guessed(1_110, None)) == [run]


def test_property_1_the_last_buckets_of_a_stream_that_ended_are_given_in_time_too() -> None:
    core = stable(plan_of(DELAY))
    said(core, came(100, "s1", 5), BoundaryArrived(200, "s1", 6, ended=True))
    assert said(core, Tick(1_100))[-1] == RunTentative("p", 1, 5, 5, (("out", 5),), ("s2",))
    assert said(core, guessed(1_110, 5)) == [Wake(1_200)]
    assert said(core, Tick(1_200)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",))]
    assert said(core, guessed(1_210, 6), Tick(9_999)) == []  # there is no more


# -- figure 6: trees ------------------------------------------------------------------------------


def test_3_5_a_blocking_tree_gives_nothing_however_long_it_takes() -> None:
    core = stable(plan_of(PROCESS, {"out": AllOf(("s1", "s2"))}))
    assert said(core, came(100, "s1", 5)) == [Wake(1_100)]
    assert said(core, Tick(1_100)) == []
    assert said(core, came(1_200, "s2", 5)) == [Run("p", 5, 5)]


FIGURE_6: Mapping[str, Tree] = {
    "joined": AllOf((AnyOf(("s1", "s2")), "s3")),
    "sums": AnyOf(("s1", "s2")),
}


def test_3_5_figure_6_without_a_part_of_the_union_both_outputs_go_on() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s2", 5), came(100, "s3", 5))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 5), ("sums", 5)), missing=("s1",)
    )


def test_3_5_figure_6_without_the_other_side_of_the_join_only_the_union_goes_on() -> None:
    """The blocked output stays where it was: bucket 4."""
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s1", 5), came(100, "s2", 5))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 4), ("sums", 5)), missing=("s3",)
    )


def test_3_5_an_output_goes_on_up_to_where_its_own_tree_does() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    said(core, came(100, "s1", 7), came(100, "s3", 6))
    assert said(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 7, (("joined", 6), ("sums", 7)), missing=("s2", "s3")
    )


def test_3_3_outputs_the_failure_does_not_reach_stay_stable() -> None:
    """Two paths of one node: the one that does not read s2 does not notice."""
    trees: Mapping[str, Tree] = {"other": "s1"}
    other = PathPlan("q", ("s1",), ("other",), True, 3, DELAY, trees)
    core = stable(plan_of(DELAY), other)
    assert said(core, came(100, "s1", 5)) == [Wake(1_100), Run("q", 5, 5)]
    assert said(core, Tick(1_100))[:1] == [UP_FAILURE]
    assert said(core, done(1_150, 5, "q")) == []
    assert core.paths["q"].consistency.state is OutputState.STABLE
    assert said(core, came(1_200, "s1", 6)) == [Run("q", 6, 6)]


# -- section 3.4: stabilization -------------------------------------------------------------------


def test_3_4_a_node_reconciles_only_after_all_that_was_tentative_is_corrected() -> None:
    core = failed(PROCESS)
    said(core, came(1_150, "s1", 6), guessed(1_160, 6))
    assert said(core, came(1_200, "s2", 5)) == []
    assert said(core, came(1_300, "s2", 6)) == [STABILIZATION, Run("p", 5, 6)]


def test_3_4_what_a_tentative_run_under_way_gives_must_be_corrected_too() -> None:
    core = failed(PROCESS)
    assert said(core, came(1_150, "s1", 6)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",))]
    assert said(core, came(1_200, "s2", 5)) == []
    assert said(core, came(1_300, "s2", 6)) == [STABILIZATION, Run("p", 5, 6)]


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
    assert said(core, done(1_300, 6)) == [Run("p", 7, 8)]
    assert said(core, done(1_400, 8)) == [Leave("p"), STABLE]


def test_after_rec_done_a_node_is_stable_once_nothing_whole_waits() -> None:
    core = failed(PROCESS)
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_250, "s1", 6), came(1_250, "s2", 6)) == []
    assert said(core, done(1_300, 5)) == [Leave("p"), Run("p", 6, 6)]
    assert said(core, done(1_400, 6)) == [STABLE]


def test_3_4_3_suspend_gives_nothing_new_while_it_corrects_itself() -> None:
    core = failed(replace(PROCESS, stabilization="suspend"))
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6), Tick(9_999)) == []


def test_3_4_3_delay_gives_what_was_held_long_enough_beside_the_correction() -> None:
    core = failed(replace(PROCESS, stabilization="delay"))
    said(core, came(1_200, "s2", 5))
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert said(core, Tick(2_299)) == []
    # Whole, and tentative all the same: the state it is computed from is.
    assert said(core, Tick(2_300)) == [RunTentative("p", 1, 6, 6, (("out", 6),), missing=())]


def test_3_4_3_process_gives_new_buckets_at_once_beside_the_correction() -> None:
    plan = plan_of(replace(PROCESS, stabilization="process"))
    core = stable(plan, group_buckets_max=1)
    said(core, BoundaryArrived(100, "s1", 6, ((5, 1), (6, 1))), Tick(1_100))
    said(core, guessed(1_110, 5), guessed(1_120, 6))
    assert said(core, came(1_200, "s2", 6)) == [STABILIZATION, Run("p", 5, 5)]
    said(core, came(1_300, "s1", 7))
    assert said(core, came(1_300, "s2", 7)) == [RunTentative("p", 1, 7, 7, (("out", 7),), ())]


def test_3_4_3_what_the_correction_is_about_to_reach_waits_for_it_unless_held_for_x() -> None:
    core = failed(replace(PROCESS, stabilization="process"))
    said(core, came(1_200, "s2", 5))  # Run 5..5 is under way, and 5 is all there is to correct
    assert said(core, came(1_300, "s1", 6), came(1_300, "s2", 6)) == []
    assert said(core, Tick(2_300)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ())]
    assert said(core, guessed(2_310, 6)) == []
    assert said(core, done(2_400, 5)) == [Run("p", 6, 6)]
    assert said(core, done(2_500, 6)) == [Leave("p"), STABLE]


def test_3_5_a_new_failure_during_stabilization_forces_rec_done_between_the_two() -> None:
    core = failed(replace(PROCESS, stabilization="process"))
    said(core, came(1_200, "s2", 5))  # Run 5..5 is under way when s2 fails again
    said(core, came(1_300, "s1", 6))
    assert said(core, Tick(2_300)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",))]
    assert said(core, guessed(2_310, 6)) == []
    # The line is at 6, the stable one cannot get there: the next one starts behind bucket 5.
    assert said(core, done(2_400, 5)) == [
        Leave("p"),
        STABLE,
        UP_FAILURE,
        Enter("p", 2, False),
        RunTentative("p", 2, 6, 6, (("out", 6),), ("s2",)),
    ]
    assert said(core, guessed(2_410, 6, line=2), came(2_500, "s2", 6)) == [
        STABILIZATION,
        Run("p", 6, 6),
    ]
    assert said(core, done(2_600, 6)) == [Leave("p"), STABLE]


def test_3_5_a_new_failure_while_new_buckets_are_suspended_is_held_for_x_like_any_other() -> None:
    core = failed(replace(PROCESS, stabilization="suspend"))
    said(core, came(1_200, "s2", 5), came(1_300, "s1", 6))
    assert said(core, done(1_400, 5)) == [Leave("p"), STABLE, Wake(2_300)]
    assert said(core, Tick(2_300))[:2] == [UP_FAILURE, Enter("p", 2, False)]


def test_the_result_of_a_line_that_is_over_does_not_count() -> None:
    core = failed(replace(PROCESS, stabilization="process"))
    said(core, came(1_200, "s2", 5), came(1_300, "s1", 6))
    assert said(core, Tick(2_300)) == [RunTentative("p", 1, 6, 6, (("out", 6),), ("s2",))]
    said(core, done(2_400, 5))  # Leave; the run of line 1 is still under way
    assert core.paths["p"].consistency.line == 2
    assert said(core, guessed(2_410, 6, line=1)) == []
    assert core.paths["p"].consistency.position == 5
    assert said(core, guessed(2_420, 6, line=2)) == []
    assert core.paths["p"].consistency.position == 6
    # Nor does one that comes when there is no line at all.
    said(core, came(2_500, "s2", 6), done(2_600, 6))
    assert said(core, guessed(2_610, 6, line=2)) == []
    assert core.paths["p"].consistency.position is None


def test_an_input_that_is_always_late_is_corrected_in_pieces() -> None:
    core = stable(plan_of(PROCESS))
    said(core, came(100, "s1", 5), Tick(1_100), guessed(1_110, 5))
    for bucket in range(6, 4 + PIECE_BUCKETS + 1):
        said(core, came(2_000, "s1", bucket), guessed(2_000, bucket))
        assert said(core, came(2_000, "s2", bucket - 1)) == []
    last = 4 + PIECE_BUCKETS
    said(core, came(2_000, "s1", last + 1), guessed(2_000, last + 1))
    assert said(core, came(2_000, "s2", last)) == [STABILIZATION, Run("p", 5, last)]
    # The line is ahead, and what it has ahead is not whole: the next line starts from here.
    assert said(core, done(2_100, last)) == [Leave("p"), STABLE, Wake(3_000)]


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
    assert said(core, done(1_300, 5)) == [Run("p", 6, 6)]


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
        Run("p", 5, 6),
    ]
    assert said(core, done(1_400, 6)) == [Leave("p"), End("p")]
    assert said(core, Tick(9_999)) == []
