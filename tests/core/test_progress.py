"""Transcripts of the decisions of a node. Section numbers refer to the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.job_size import JobLimits
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledge,
    Acknowledged,
    Asked,
    Began,
    BoundaryArrived,
    Change,
    Checkpoint,
    CheckpointDone,
    End,
    Enter,
    Fail,
    InputOpened,
    PathPlan,
    Reply,
    Run,
    RunTentative,
    Start,
    StepDone,
    TentativeDone,
    Tick,
    Wake,
)
from holdfast.core.sunion import Partial, SUnion
from holdfast.errors import ProtocolViolation
from holdfast.model.trees import AnyOf
from holdfast.types import OutputState

PATH = PathPlan("out", ("s1", "s2"), ("out",), convergent=True, extent=4)


def opened(stream: str, starts_at: int = 0, trimmed_upto: int | None = None) -> InputOpened:
    return InputOpened(
        0, stream, starts_at, starts_at - 1 if trimmed_upto is None else trimmed_upto
    )


def started(plan: PathPlan = PATH, **options: object) -> Progress:
    core = Progress([plan], **options)  # type: ignore[arg-type]
    for stream in plan.inputs:
        core.handle(opened(stream))
    return core


def test_borealis_3_2_a_bucket_is_complete_when_every_input_declared_its_boundary() -> None:
    core = started()
    assert core.handle(BoundaryArrived(1, "s1", 7)) == []
    assert core.handle(BoundaryArrived(2, "s2", 5)) == [Run("out", 0, 5)]


def test_borealis_3_2_an_input_without_a_boundary_blocks() -> None:
    sunion = SUnion(["s1", "s2", "s3"])
    sunion.boundary("s1", 9)
    sunion.boundary("s2", 9)
    assert sunion.all_complete_upto() is None
    assert sunion.waiting_for() == ["s3"]


def test_a_boundary_that_goes_back_is_a_protocol_violation() -> None:
    sunion = SUnion(["s1"])
    sunion.boundary("s1", 9)
    with pytest.raises(ProtocolViolation, match="went back from 9 to 8"):
        sunion.boundary("s1", 8)


def test_a_path_has_one_run_at_a_time_and_waiting_buckets_run_together() -> None:
    core = started()
    core.handle(BoundaryArrived(1, "s1", 0))
    assert core.handle(BoundaryArrived(1, "s2", 0)) == [Run("out", 0, 0)]
    for upto in (1, 2, 3):
        assert core.handle(BoundaryArrived(2, "s1", upto)) == []
        assert core.handle(BoundaryArrived(2, "s2", upto)) == []
    actions = core.handle(StepDone(3, "out", 0, needs_from=0, horizon=0))
    assert actions[-1] == Run("out", 1, 3)


def test_a_group_of_buckets_respects_the_limits_of_one_job() -> None:
    core = started(limits=JobLimits(2, 1_000))
    rows = tuple((bucket, 10, 0) for bucket in range(5))
    core.handle(BoundaryArrived(1, "s1", 4, rows))
    assert core.handle(BoundaryArrived(1, "s2", 4)) == [Run("out", 0, 1)]
    core = started(limits=JobLimits(rows=25))
    core.handle(BoundaryArrived(1, "s1", 4, rows))
    assert core.handle(BoundaryArrived(1, "s2", 4)) == [Run("out", 0, 1)]


def test_a_bucket_with_several_inputs_counts_once_towards_the_group_limit() -> None:
    core = started(limits=JobLimits(3))
    rows = tuple((bucket, 10, 0) for bucket in range(5))
    core.handle(BoundaryArrived(1, "s1", 4, rows))
    assert core.handle(BoundaryArrived(1, "s2", 4, rows)) == [Run("out", 0, 2)]


def test_a_single_bucket_larger_than_the_limit_still_runs() -> None:
    core = started(limits=JobLimits(rows=5))
    core.handle(BoundaryArrived(1, "s1", 1, ((0, 10, 0), (1, 10, 0))))
    assert core.handle(BoundaryArrived(1, "s2", 1)) == [Run("out", 0, 0)]


def test_a_checkpoint_is_written_every_checkpoint_buckets() -> None:
    core = started(checkpoint_buckets=3)
    core.handle(BoundaryArrived(1, "s1", 1))
    core.handle(BoundaryArrived(1, "s2", 1))
    assert Checkpoint("out", 1) not in core.handle(StepDone(2, "out", 1, 0, 0))
    core.handle(BoundaryArrived(3, "s1", 2))
    core.handle(BoundaryArrived(3, "s2", 2))
    assert Checkpoint("out", 2) in core.handle(StepDone(4, "out", 2, 0, 0))


def test_replay_retains_the_inputs_an_empty_node_needs_for_the_slowest_consumer() -> None:
    core = started(checkpoint_buckets=0)
    core.handle(BoundaryArrived(1, "s1", 20))
    core.handle(BoundaryArrived(1, "s2", 20))
    actions = core.handle(StepDone(2, "out", 20, needs_from=21, horizon=20))
    # No consumer has acknowledged yet: everything is received and nothing is released.
    assert Acknowledge("s1", 20, -1) in actions
    # The consumer has bucket 15. Bucket 16 reaches 4 buckets back, to 12: buckets up to 11 are
    # released, with the acknowledgement of the next step.
    assert core.handle(Acknowledged(3, "out", 15, 15)) == []
    core.handle(BoundaryArrived(4, "s1", 21))
    core.handle(BoundaryArrived(4, "s2", 21))
    actions = core.handle(StepDone(5, "out", 21, needs_from=22, horizon=21))
    assert Acknowledge("s1", 21, 11) in actions


def test_acknowledgements_are_forwarded_at_once_after_the_last_step() -> None:
    core = started(checkpoint_buckets=0)
    for stream in PATH.inputs:
        core.handle(BoundaryArrived(1, stream, 20, ended=True))
    assert core.handle(StepDone(2, "out", 20, needs_from=21, horizon=20))[-1] == End("out")
    assert core.handle(Acknowledged(3, "out", 20, 20)) == [
        Acknowledge("s1", 20, 16),
        Acknowledge("s2", 20, 16),
    ]


def test_checkpoint_recovery_retains_the_inputs_of_the_newest_checkpoint() -> None:
    core = started(recovery="checkpoint", checkpoint_buckets=10)
    core.handle(BoundaryArrived(1, "s1", 9))
    core.handle(BoundaryArrived(1, "s2", 9))
    assert Acknowledge("s1", 9, -1) in core.handle(StepDone(2, "out", 9, needs_from=6, horizon=9))
    assert core.handle(CheckpointDone(3, "out", 9, needs_from=6)) == [
        Acknowledge("s1", 9, 5),
        Acknowledge("s2", 9, 5),
    ]


def test_replay_retains_everything_for_operators_that_are_not_convergent() -> None:
    plan = PathPlan("out", ("s1",), ("out",), convergent=False, extent=0)
    core = started(plan)
    core.handle(BoundaryArrived(1, "s1", 500))
    core.handle(StepDone(2, "out", 500, needs_from=501, horizon=500))
    actions = core.handle(Acknowledged(3, "out", 500, 500))
    assert all(a.no_longer_needed == -1 for a in actions if isinstance(a, Acknowledge))


def test_a_lost_node_with_trimmed_inputs_starts_late_and_reports_its_first_valid_bucket() -> None:
    core = Progress([PATH])
    core.handle(opened("s1", 0, trimmed_upto=99))
    assert core.handle(opened("s2", 0, trimmed_upto=97)) == [
        Start("out", bucket=99, origin=0, valid_from=104)
    ]


def test_state_that_cannot_be_rebuilt_is_an_error_not_a_wrong_result() -> None:
    plan = PathPlan("out", ("s1",), ("out",), convergent=False, extent=0)
    (action,) = Progress([plan]).handle(opened("s1", 0, trimmed_upto=5))
    assert isinstance(action, Fail)
    assert "recovery='replay'" in action.why


# -- from a checkpoint ----------------------------------------------------------------------------

IS_STABLE = Change("out", OutputState.STABLE)
#: The checkpoint of bucket 42 needs its inputs from bucket 38; they start at bucket 3.
RESUMED = {"out": (42, 38, 3)}
#: `max_delay` (X in Borealis).
X = 1_000
AVAILABLE = replace(
    PATH,
    policy=Policy("process", "suspend", patience_us=X, own_us=X),
    trees={"out": AnyOf(("s1", "s2"))},
)


def test_a_recovered_node_continues_after_its_checkpoint() -> None:
    core = Progress([PATH], resumed=RESUMED)
    assert core.handle(Began(0)) == [Start("out", 42, origin=3, valid_from=3)]
    for stream in PATH.inputs:
        assert core.handle(opened(stream, 3, trimmed_upto=37)) == [], "the path has already started"
    core.handle(BoundaryArrived(1, "s1", 50))
    assert core.handle(BoundaryArrived(1, "s2", 50)) == [Run("out", 43, 50)]


def test_input_buckets_up_to_the_checkpoint_are_not_run_again() -> None:
    core = Progress([PATH], resumed=RESUMED)
    core.handle(Began(0))
    assert core.handle(BoundaryArrived(1, "s1", 40, ((38, 5, 0), (40, 5, 0)))) == []
    assert core.handle(BoundaryArrived(1, "s2", 40, ((38, 5, 0), (40, 5, 0)))) == [IS_STABLE]
    core.handle(BoundaryArrived(2, "s1", 43))
    assert core.handle(BoundaryArrived(2, "s2", 43)) == [Run("out", 43, 43)]


def test_a_node_restarted_without_an_input_gives_tentative_results_within_max_delay() -> None:
    """s2 has not even been opened since the restart."""
    core = Progress([AVAILABLE], resumed=RESUMED)
    core.handle(Began(0))
    core.handle(opened("s1", 3, trimmed_upto=37))
    assert core.handle(BoundaryArrived(100, "s1", 50, ((49, 1, 0), (50, 1, 0)))) == [Wake(100 + X)]
    assert core.handle(Tick(99 + X)) == [Wake(100 + X)]
    assert core.handle(Tick(100 + X)) == [
        Change("out", OutputState.UP_FAILURE),
        Enter("out", 1, forget=False),
        RunTentative("out", 1, 43, 50, (("out", 50),), ("s2",), Partial(0.5, 0.5)),
    ]
    # The missing input arrives, and the correction is the same as after any other failure.
    core.handle(TentativeDone(200 + X, "out", 1, 50))
    core.handle(opened("s2", 3, trimmed_upto=37))
    assert core.handle(BoundaryArrived(300 + X, "s2", 50)) == [
        Change("out", OutputState.STABILIZATION), Run("out", 43, 50),
    ]  # fmt: skip


def test_a_node_without_a_checkpoint_waits_for_all_its_inputs() -> None:
    """The node was never stable: it has no state from which to give tentative results."""
    core = Progress([AVAILABLE])
    assert core.handle(Began(0)) == []
    core.handle(opened("s1"))
    assert core.handle(BoundaryArrived(100, "s1", 50)) == []
    assert core.handle(Tick(100_000)) == []
    assert core.handle(opened("s2")) == [Start("out", -1, 0, 0)]


def test_each_path_starts_independently() -> None:
    other = replace(AVAILABLE, name="other", outputs=("other",), trees={"other": "s1"})
    core = Progress([AVAILABLE, other], resumed={"other": (42, 38, 3)})
    assert core.handle(Began(0)) == [Start("other", 42, 3, 3)]


def test_the_buffer_limit_does_not_apply_when_all_inputs_have_ended() -> None:
    """A consumer that has received everything reports no position to a rebuilt node."""
    core = started(buffer_buckets=2)
    core.handle(BoundaryArrived(1, "s1", 9))
    assert core.handle(BoundaryArrived(1, "s2", 9))[-1] == Run("out", 0, 1)
    core = started(buffer_buckets=2)
    core.handle(BoundaryArrived(1, "s1", 9, ended=True))
    assert core.handle(BoundaryArrived(1, "s2", 9, ended=True))[-1] == Run("out", 0, 9)


def test_a_checkpoint_whose_inputs_were_released_belongs_to_an_older_copy_of_the_storage() -> None:
    """Another path has no checkpoint, so the node requests the oldest bucket that is left."""
    other = replace(PATH, name="other", outputs=("other",))
    core = Progress([PATH, other], resumed=RESUMED)
    bucket, needs_from, _ = RESUMED["out"]
    core.handle(Began(0))
    assert not any(
        isinstance(action, Fail) for action in core.handle(opened("s1", 0, needs_from - 1))
    )
    (failed,) = core.handle(opened("s2", 0, needs_from))
    assert isinstance(failed, Fail)
    assert f"resumes from bucket {bucket} and needs 's2' from bucket {needs_from}" in failed.why


def test_eventual_checkpoints_skip_no_result_if_all_are_lost() -> None:
    """Convergent operators, too: upstream does not retain the inputs of unreleased results."""
    core = Progress([PATH], recovery="cec")
    assert core.handle(opened("s1", 0, 9)) == []
    (failed,) = core.handle(opened("s2", 0, 9))
    assert isinstance(failed, Fail)
    assert "it needs its inputs up to bucket 9, which were deleted" in failed.why


def test_a_replica_of_a_pair_acknowledges_its_start_position_at_once() -> None:
    core = Progress([replace(PATH, convergent=False)], recovery="pairs", resumed=RESUMED)
    actions = core.handle(Began(0))
    assert [action for action in actions if isinstance(action, Acknowledge)] == [
        Acknowledge("s1", 42, 37), Acknowledge("s2", 42, 37),
    ]  # fmt: skip


def test_a_node_that_catches_up_from_a_checkpoint_promises_no_results() -> None:
    plan = replace(AVAILABLE, policy=replace(AVAILABLE.policy, peers=("peer",)))
    core = Progress([plan], me="me", resumed=RESUMED, limits=JobLimits(10))
    core.handle(Began(0))
    rows = tuple((bucket, 1, 0) for bucket in range(43, 5_000))
    core.handle(BoundaryArrived(100, "s1", 4_999, rows))
    assert core.handle(BoundaryArrived(100, "s2", 4_999))[0] == Run("out", 43, 52)
    reply = core.handle(Asked(200, 1, "out", "peer", 1, 4_000))[0]
    assert reply == Reply(1, "away")


def test_open_windows_close_after_all_inputs_ended_and_then_the_path_ends() -> None:
    core = started()
    core.handle(BoundaryArrived(1, "s1", 5, ended=True))
    assert core.handle(BoundaryArrived(1, "s2", 7, ended=True)) == [Run("out", 0, 7)]
    actions = core.handle(StepDone(2, "out", 7, needs_from=4, horizon=9))
    assert actions[-1] == Run("out", 8, 9)
    assert core.handle(StepDone(3, "out", 9, needs_from=10, horizon=9))[-1] == End("out")


def test_a_path_that_resumes_at_the_end_of_its_inputs_still_closes_its_windows() -> None:
    """Only a step tells which windows are open, so a resumed path runs one before it ends."""
    core = Progress([PATH], resumed=RESUMED)
    core.handle(Began(0))
    core.handle(BoundaryArrived(1, "s1", 42, ended=True))
    assert core.handle(BoundaryArrived(1, "s2", 42, ended=True)) == [Run("out", 43, 43)]
    actions = core.handle(StepDone(2, "out", 43, needs_from=40, horizon=45))
    assert actions[-1] == Run("out", 44, 45)
    actions = core.handle(StepDone(3, "out", 45, needs_from=46, horizon=45))
    assert actions[-2:] == [IS_STABLE, End("out")]


def test_an_input_that_ends_without_any_bucket_does_not_extend_the_path() -> None:
    """A source was retired before its first row: its stream starts at the wall clock."""
    core = Progress([PATH])
    core.handle(opened("s1", 0))
    core.handle(opened("s2", 1_000_000))
    core.handle(BoundaryArrived(1, "s2", 999_999, ended=True))
    assert core.handle(BoundaryArrived(1, "s1", 5, ended=True)) == [Run("out", 0, 5)]
    assert core.handle(StepDone(2, "out", 5, needs_from=6, horizon=5))[-1] == End("out")


def test_the_result_of_a_step_that_was_not_started_is_a_protocol_violation() -> None:
    core = started()
    with pytest.raises(ProtocolViolation, match="expected the running step"):
        core.handle(StepDone(1, "out", 3, 0, 0))


@given(st.lists(st.tuples(st.sampled_from(["s1", "s2"]), st.integers(0, 4)), max_size=60))
def test_every_bucket_runs_exactly_once_and_in_order(moves: list[tuple[str, int]]) -> None:
    core = started(limits=JobLimits(3))
    upto = {"s1": -1, "s2": -1}
    next_bucket = 0
    for stream, added in moves:
        rows = tuple((b, 1, 0) for b in range(upto[stream] + 1, upto[stream] + added + 1))
        upto[stream] += added
        actions = core.handle(BoundaryArrived(0, stream, upto[stream], rows))
        while True:
            runs = [action for action in actions if isinstance(action, Run)]
            assert len(runs) <= 1
            if not runs:
                break
            assert runs[0].lo == next_bucket
            assert runs[0].hi <= min(upto.values())
            next_bucket = runs[0].hi + 1
            actions = core.handle(StepDone(0, "out", runs[0].hi, next_bucket, runs[0].hi))
    assert next_bucket == min(upto.values()) + 1
