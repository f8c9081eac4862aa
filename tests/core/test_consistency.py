"""Transcripts of a path while inputs are missing. Sections and figures are those of Borealis;
helpers and times are in `transcripts`. The last number of a `Run` is the time for which its buckets
were held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from holdfast.core.consistency import (
    MOVES,
    RETRY_US,
    RETRY_US_MAX,
    Consistency,
)
from holdfast.core.job_size import JobLimits
from holdfast.core.policy import Policy
from holdfast.core.progress_events import (
    Acknowledge,
    Action,
    BoundaryArrived,
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

# -- section 3.3: upstream failure ----------------------------------------------------------------


@pytest.mark.parametrize("policy", [DELAY, PROCESS])
def test_3_3_a_path_blocks_until_a_bucket_has_been_held_for_max_delay(
    policy: Policy,
) -> None:
    core = stable(plan_of(policy))
    assert handle(core, came(100, "s1", 5)) == [Wake(1_100)]
    assert handle(core, Tick(1_099)) == [Wake(1_100)]
    assert handle(core, Tick(1_100)) == [
        UP_FAILURE,
        Enter("p", line=1, forget=False),
        RunTentative("p", 1, 5, 5, outputs=(("out", 5),), missing=("s2",), partial=HALF),
    ]


def test_3_3_a_failure_shorter_than_max_delay_has_no_effect() -> None:
    core = stable(plan_of(PROCESS))
    handle(core, came(100, "s1", 5))
    assert handle(core, came(1_099, "s2", 5)) == [Run("p", 5, 5, spent_us=999)]
    assert handle(core, done(1_150, 5)) == []
    assert handle(core, Tick(1_200)) == []
    assert core.paths["p"].consistency.line == 0


def test_a_path_with_policy_block_waits_forever() -> None:
    core = stable(plan_of(Policy()))
    assert handle(core, came(100, "s1", 5)) == []
    assert handle(core, Tick(10**12)) == []


def test_3_3_delay_holds_every_bucket_until_its_deadline() -> None:
    core = stable(plan_of(DELAY))
    assert (
        handle(core, came(100, "s1", 5), came(200, "s1", 6)) == []
    )  # the first wake-up is earlier
    handle(core, Tick(1_100))
    assert handle(core, tentative_done(1_110, 5)) == [Wake(1_200)]
    assert handle(core, Tick(1_200)) == [tentative_run(6, 6)]
    assert handle(core, tentative_done(1_210, 6)) == []
    assert handle(core, came(1_300, "s1", 7)) == [Wake(2_300)]


def test_3_3_process_holds_only_the_first_buckets_of_a_failure() -> None:
    core = stable(plan_of(PROCESS))
    handle(core, came(100, "s1", 5), came(200, "s1", 6), Tick(1_100))
    assert handle(core, tentative_done(1_110, 5)) == [
        tentative_run(6, 6),
    ]
    handle(core, tentative_done(1_120, 6))
    assert handle(core, came(1_300, "s1", 7)) == [
        tentative_run(7, 7),
    ]


def test_3_3_process_waits_again_for_an_input_that_returned() -> None:
    core = failed(PROCESS)
    handle(core, came(1_200, "s1", 6), tentative_done(1_210, 6))
    # s2 has caught up with the line as tentative: the failure continues, but s2 is not missing.
    handle(core, BoundaryArrived(1_300, "s2", 4, tentative_upto=6, missing=("x",)))
    assert handle(core, came(1_400, "s1", 7)) == [Wake(2_400)]
    assert handle(core, BoundaryArrived(1_500, "s2", 4, tentative_upto=7, missing=("x",))) == [
        tentative_run(7, 7, missing=("s2", "x")),
    ]


def test_3_3_a_tentative_input_bucket_was_held_upstream_and_is_held_for_less() -> None:
    core = stable(plan_of(DELAY))
    tentative = BoundaryArrived(100, "s1", 4, tentative_upto=5, missing=("far",))
    assert handle(core, tentative) == [Wake(400)]
    assert handle(core, Tick(400))[-1] == tentative_run(
        5, 5, missing=("s2", "far"), partial=Partial(0.5, 0.5)
    )


def test_inputs_that_only_the_tentative_line_still_needs_are_retained() -> None:
    """The windows of the tentative line refer to buckets that the stable line has released."""
    core = stable(plan_of(PROCESS), recovery="pairs")
    core.handle(came(100, "s1", 7))
    core.handle(Tick(1_100))
    core.handle(TentativeDone(1_110, "p", 1, 7, needs_from=4))
    core.handle(came(1_200, "s2", 5))
    retaining = core.handle(done(1_210, 5))
    assert {(a.received, a.no_longer_needed) for a in retaining if isinstance(a, Acknowledge)} == {
        (5, 3)
    }
    core.handle(came(1_220, "s2", 7))
    releasing = core.handle(done(1_230, 7))
    assert {(a.received, a.no_longer_needed) for a in releasing if isinstance(a, Acknowledge)} == {
        (7, 7)
    }


@pytest.mark.parametrize("convergent", [True, False])
def test_results_from_windows_or_state_with_partial_buckets_list_the_missing_inputs(
    *, convergent: bool
) -> None:
    """s2 is missing in buckets 5 and 6. Windows reach 3 buckets back; state may hold any bucket."""
    plan = plan_of(replace(PROCESS, while_correcting="process"), convergent=convergent)
    core = stable(plan, limits=JobLimits(1))
    handle(core, BoundaryArrived(100, "s1", 6, ((5, 1, 0), (6, 1, 0))), Tick(1_100))
    handle(core, tentative_done(1_110, 5), tentative_done(1_120, 6))
    assert handle(core, came(1_200, "s2", 6)) == [STABILIZATION, Run("p", 5, 5)]
    for bucket in range(7, 12):
        handle(core, came(1_300, "s1", bucket))
        held = not convergent or bucket <= 9
        label = (("s2",), Partial(0.5, 0.5)) if held else ((), WHOLE)
        (run,) = handle(core, came(1_300, "s2", bucket))
        assert isinstance(run, RunTentative) and (run.missing, run.partial) == label
        handle(core, tentative_done(1_310, bucket))


def test_missing_inputs_of_all_upstream_nodes_are_listed_once() -> None:
    trees: Mapping[str, Tree] = {"out": AnyOf(("s1", "s2", "s3"))}
    core = stable(plan_of(DELAY, trees, "s1", "s2", "s3"))
    handle(core, BoundaryArrived(100, "s3", 4, tentative_upto=5, missing=("s2", "far")))
    handle(core, BoundaryArrived(100, "s1", 4, tentative_upto=5, missing=("far", "farther")))
    assert handle(core, Tick(400))[-1] == tentative_run(
        5, 5, missing=("s2", "far", "farther"), partial=Partial(0.6667, 0.6667)
    )


def test_complete_buckets_run_before_tentative_ones() -> None:
    """A complete bucket runs as stable even if the deadline of another bucket has expired."""
    core = stable(plan_of(DELAY))
    assert handle(core, came(100, "s1", 6), came(1_100, "s2", 5)) == [
        Run("p", 5, 5, spent_us=1_000)
    ]
    assert handle(core, Tick(1_150)) == []
    assert handle(core, done(1_200, 5)) == [
        UP_FAILURE,
        Enter("p", 1, False),
        tentative_run(6, 6),
    ]


def test_a_stable_line_that_is_never_idle_does_not_prevent_a_tentative_line() -> None:
    """s2 is always late, and a step takes as long as a bucket: after each step the next bucket is
    complete. Buckets whose deadline had expired when a step started get a tentative result before
    the next step."""
    core = stable(plan_of(DELAY))
    handle(core, came(100, "s1", 8), came(1_100, "s2", 5), came(1_150, "s2", 6))
    assert handle(core, done(1_200, 5)) == [
        UP_FAILURE, Enter("p", 1, False), tentative_run(6, 8), Run("p", 6, 6, spent_us=50),
    ]  # fmt: skip


def test_a_path_whose_steps_take_as_long_as_a_bucket_becomes_stable() -> None:
    """Two steps ran all complete buckets; the waiting bucket arrived during the second step."""
    core = failed(PROCESS)
    handle(core, came(1_200, "s2", 5), came(1_250, "s1", 6), came(1_250, "s2", 6))
    assert handle(core, done(1_300, 5)) == [Leave("p"), Run("p", 6, 6, spent_us=50)]
    handle(core, came(1_350, "s1", 7), came(1_350, "s2", 7))
    assert handle(core, done(1_400, 6))[:2] == [STABLE, Run("p", 7, 7, spent_us=50)]


def test_a_path_is_not_stable_while_more_buckets_are_complete_than_one_step_may_run() -> None:
    core = failed(PROCESS, limits=JobLimits(rows=1))
    handle(core, came(1_200, "s2", 5))
    for stream in ("s1", "s2"):
        rows = tuple((bucket, 1, 0) for bucket in range(6, 12))
        handle(core, BoundaryArrived(1_250, stream, 11, rows))
    for bucket in range(5, 11):
        assert STABLE not in handle(core, done(1_300 + bucket, bucket))
    assert handle(core, done(1_400, 11)) == [STABLE]


def test_a_tentative_job_has_the_same_limits_as_a_stable_one() -> None:
    core = stable(plan_of(DELAY), limits=JobLimits(2))
    handle(core, came(100, "s1", 9))
    assert handle(core, Tick(1_100))[-1] == tentative_run(5, 6)
    assert handle(core, tentative_done(1_110, 6))[-1] == tentative_run(7, 8)


def test_property_1_the_last_buckets_of_an_ended_stream_are_given_in_time() -> None:
    core = stable(plan_of(DELAY))
    handle(core, came(100, "s1", 5), BoundaryArrived(200, "s1", 6, ended=True))
    assert handle(core, Tick(1_100))[-1] == tentative_run(5, 5)
    assert handle(core, tentative_done(1_110, 5)) == [Wake(1_200)]
    assert handle(core, Tick(1_200)) == [tentative_run(6, 6)]
    assert handle(core, tentative_done(1_210, 6), Tick(9_999)) == []  # the stream has ended


def test_property_1_an_input_that_ends_in_the_future_is_no_failure_of_the_others() -> None:
    """Its last row was ahead of the clock. Only the next bucket is due."""
    core = stable(plan_of(PROCESS))
    handle(core, came(100, "s1", 5), came(100, "s2", 5), done(150, 5))
    handle(core, BoundaryArrived(200, "s1", 60, ended=True))
    assert handle(core, came(300, "s2", 6)) == [Run("p", 6, 6, spent_us=100)]
    assert handle(core, done(350, 6), Tick(9_999), came(10_000, "s2", 7))[0] == Run("p", 7, 7)
    assert core.paths["p"].consistency.line == 0


# -- figure 6: trees ------------------------------------------------------------------------------


def test_3_5_a_blocking_tree_gives_no_tentative_results() -> None:
    core = stable(plan_of(PROCESS, {"out": AllOf(("s1", "s2"))}))
    assert handle(core, came(100, "s1", 5)) == [Wake(1_100)]
    assert handle(core, Tick(1_100)) == []
    assert handle(core, came(1_200, "s2", 5))[0] == Run("p", 5, 5)


TWO_OF_THREE = Partial(0.6667, 1.0)
FIGURE_6: Mapping[str, Tree] = {
    "joined": AllOf((AnyOf(("s1", "s2")), "s3")),
    "sums": AnyOf(("s1", "s2")),
}


def test_3_5_figure_6_without_one_input_of_the_union_both_outputs_continue() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    handle(core, came(100, "s2", 5), came(100, "s3", 5))
    assert handle(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 5), ("sums", 5)), ("s1",), TWO_OF_THREE
    )


def test_3_5_figure_6_without_the_other_side_of_the_join_only_the_union_continues() -> None:
    """The blocked output stays at bucket 4."""
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    handle(core, came(100, "s1", 5), came(100, "s2", 5))
    assert handle(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 5, (("joined", 4), ("sums", 5)), ("s3",), TWO_OF_THREE
    )


def test_3_5_an_output_continues_as_far_as_its_own_tree_allows() -> None:
    core = stable(plan_of(PROCESS, FIGURE_6, "s1", "s2", "s3"))
    handle(core, came(100, "s1", 7), came(100, "s3", 6))
    assert handle(core, Tick(1_100))[-1] == RunTentative(
        "p", 1, 5, 7, (("joined", 6), ("sums", 7)), ("s2", "s3"), Partial(0.3333, 1.0)
    )


def test_3_3_outputs_that_do_not_depend_on_the_missing_input_stay_stable() -> None:
    """Two paths of one node: the path that does not read s2 is not affected."""
    trees: Mapping[str, Tree] = {"other": "s1"}
    other = PathPlan("q", ("s1",), ("other",), True, 3, DELAY, trees)
    core = stable(plan_of(DELAY), other)
    assert handle(core, came(100, "s1", 5))[:2] == [Wake(1_100), Run("q", 5, 5)]
    assert handle(core, Tick(1_100))[:1] == [UP_FAILURE]
    assert handle(core, done(1_150, 5, "q")) == []
    assert core.paths["q"].consistency.state is OutputState.STABLE
    assert handle(core, came(1_200, "s1", 6))[0] == Run("q", 6, 6)


# -- tentative steps that fail --------------------------------------------------------------------


def test_a_failed_tentative_run_is_retried_after_a_pause_that_doubles() -> None:
    core, at = stable(plan_of(DELAY)), 1_100
    handle(core, came(100, "s1", 5), Tick(at))
    for number in range(12):
        pause = min(RETRY_US << number, RETRY_US_MAX)
        assert handle(core, tentative_done(at, None)) == [Wake(at + pause)]
        assert handle(core, Tick(at + pause - 1)) == [Wake(at + pause)]
        at += pause
        assert handle(core, Tick(at)) == [tentative_run(5, 5)]
    assert pause == RETRY_US_MAX
    handle(core, tentative_done(at, 5), came(at, "s1", 6))  # a success resets the pause
    assert handle(core, Tick(at + 1_000)) == [tentative_run(6, 6)]
    assert handle(core, tentative_done(at + 1_001, None)) == [Wake(at + 1_001 + RETRY_US)]


def test_a_tentative_run_that_found_the_disk_full_is_retried_without_a_further_pause() -> None:
    core, at = stable(plan_of(DELAY)), 1_100
    handle(core, came(100, "s1", 5), Tick(at))
    for _ in range(12):
        at += 1_000_000
        event = TentativeDone(at, "p", 1, None, no_pause=True)
        assert handle(core, event) == [tentative_run(5, 5)]


def test_failed_tentative_runs_never_stop_the_stable_line() -> None:
    """An input is always late, and every tentative step fails."""
    core, at, actions = stable(plan_of(PROCESS)), 0, list[Action]()
    for bucket in range(5, 1_000):
        at = 1_000 * bucket
        events = [came(at, "s1", bucket), Tick(at + 100)]
        events += [came(at + 200, "s2", bucket - 15)] if bucket - 15 > 4 else []
        for event in events:
            steps = handle(core, event)
            for action in steps:
                if isinstance(action, Run):
                    steps += handle(core, done(event.at, action.hi))
                elif isinstance(action, RunTentative):
                    steps += handle(core, tentative_done(event.at, None, action.line))
            actions += steps
    assert buckets(actions, Run) == list(range(5, 985))
    attempts = [action for action in actions if isinstance(action, RunTentative)]
    assert 2 < len(attempts) <= 1_000_000 // RETRY_US


# -- legal state transitions ----------------------------------------------------------------------


@pytest.mark.parametrize("before", OutputState)
@pytest.mark.parametrize("after", OutputState)
def test_figure_5_an_illegal_transition_is_a_protocol_violation(
    before: OutputState, after: OutputState
) -> None:
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


def test_figure_5_lists_the_legal_transitions() -> None:
    stable, up_failure, stabilization = OutputState
    assert {
        stable: (up_failure,),
        up_failure: (stabilization,),
        stabilization: (stable, up_failure),
    } == MOVES


def test_the_error_of_an_illegal_transition_lists_the_preceding_events() -> None:
    core = stable(plan_of(DELAY))
    handle(core, came(100, "s1", 5))
    core.paths["p"].consistency.state = OutputState.UP_FAILURE  # corrupted by the test
    with pytest.raises(ProtocolViolation) as caught:
        core.handle(Tick(1_100))
    first, *events, last = str(caught.value).splitlines()
    assert first.startswith("UP_FAILURE cannot become UP_FAILURE, only STABILIZATION")
    assert last == "Tick(at=1100) -> ?"
    assert events[-1].startswith("BoundaryArrived(at=100, stream='s1', upto=5")
    assert events[-1].endswith("-> [Wake(at=1100)]")
    assert len(events) == 6, "all events since the first input was opened"


def test_a_protocol_violation_lists_only_recent_events() -> None:
    core = stable(plan_of(DELAY))
    for at in range(1_000):
        handle(core, Tick(at))
    with pytest.raises(ProtocolViolation) as caught:
        handle(core, done(1_000, 7))
    assert len(str(caught.value).splitlines()) == 1 + 30 + 1
