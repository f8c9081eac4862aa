"""How many waiting buckets run as one job, and what follows a job that is too large."""

from __future__ import annotations

from holdfast.core.job_size import JobLimits, JobSize
from holdfast.core.policy import Policy
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    BoundaryArrived,
    GiveUp,
    InputOpened,
    PathPlan,
    Run,
    StepDone,
    StepTooLarge,
)

#: Ten buckets of 100 rows and 1,000 bytes.
WAITING = [(bucket, 100, 1_000) for bucket in range(10)]


def started(limits: JobLimits) -> Progress:
    plan = PathPlan("out", ("s",), ("out",), True, 0, Policy(), {"out": "s"})
    core = Progress([plan], checkpoint_buckets=0, limits=limits)
    core.handle(InputOpened(0, "s", 0, -1))
    return core


def runs(core: Progress, *events: BoundaryArrived | StepDone | StepTooLarge) -> list[Run]:
    actions = [action for event in events for action in core.handle(event)]
    return [action for action in actions if isinstance(action, Run)]


def test_each_limit_ends_a_job() -> None:
    for limits, last in (
        (JobLimits(), 9),
        (JobLimits(buckets=3), 2),
        (JobLimits(rows=250), 1),
        (JobLimits(bytes=4_500), 3),
        (JobLimits(bytes=1), 0),  # one bucket, however large
    ):
        assert JobSize(limits).last(WAITING, -1, 9) == last, limits


def test_empty_buckets_do_not_count() -> None:
    size = JobSize(JobLimits(buckets=2))
    assert size.last([(5, 1, 1), (900, 1, 1), (950, 1, 1)], -1, 1_000) == 949


def test_a_step_that_is_too_large_is_split_and_never_repeated_as_it_was() -> None:
    core = started(JobLimits())
    assert runs(core, BoundaryArrived(1, "s", 9, tuple(WAITING))) == [Run("out", 0, 9)]
    assert runs(core, StepTooLarge(2, "out", None, "why")) == [Run("out", 0, 4)]
    assert runs(core, StepTooLarge(3, "out", None, "why")) == [Run("out", 0, 1)]
    assert runs(core, StepDone(4, "out", 1, 0, 0)) == [Run("out", 2, 4)], "one bucket more"
    assert runs(core, StepDone(5, "out", 4, 0, 0)) == [Run("out", 5, 8)], "below five"
    assert runs(core, StepDone(6, "out", 8, 0, 0)) == [Run("out", 9, 9)]


def test_a_small_limit_of_buckets_does_not_hide_buckets_without_rows() -> None:
    core = started(JobLimits(buckets=2))
    assert runs(core, BoundaryArrived(1, "s", 9, ((0, 1, 1),))) == [Run("out", 0, 9)]
    assert runs(core, StepTooLarge(2, "out", None, "why")) == [Run("out", 0, 4)]
    assert runs(core, StepDone(3, "out", 4, 0, 0)) == [Run("out", 5, 9)]


def test_buckets_without_rows_are_split_too() -> None:
    """A window of an hour may close in a bucket without rows."""
    core = started(JobLimits())
    assert runs(core, BoundaryArrived(1, "s", 99, ((0, 1, 1),))) == [Run("out", 0, 99)]
    assert runs(core, StepTooLarge(2, "out", None, "why")) == [Run("out", 0, 49)]


def test_a_single_bucket_that_is_too_large_is_an_error() -> None:
    core = started(JobLimits())
    assert runs(core, BoundaryArrived(1, "s", 0, ((0, 1, 1),))) == [Run("out", 0, 0)]
    (action,) = core.handle(StepTooLarge(2, "out", None, "bucket 0: too large"))
    assert isinstance(action, GiveUp) and action.why.startswith("bucket 0: too large; stop the run")


def test_larger_jobs_are_tried_again_after_many_that_fit() -> None:
    """At a true limit of three buckets, one job in about thirty is too large."""
    size, failed, jobs, buckets = JobSize(JobLimits()), 0, 0, 0
    while buckets < 3_000:
        job = size.last([], 0, 1_000)
        if job > 3:
            assert size.too_large(job)
            failed += 1
        else:
            size.fitted(job)
            jobs, buckets = jobs + 1, buckets + job
    assert failed < jobs / 20 and buckets / jobs > 2.5


def test_jobs_are_no_longer_limited_once_large_ones_fit() -> None:
    size = JobSize(JobLimits())
    assert size.too_large(2_000)
    for _ in range(10_000):
        size.fitted(size.last([], 0, 1_000_000))
    assert size.last([], 0, 1_000_000) == 1_000_000


def test_jobs_that_are_smaller_than_allowed_do_not_raise_the_limit() -> None:
    size = JobSize(JobLimits())
    assert size.too_large(8)
    for _ in range(10_000):
        size.fitted(1)
    assert size.last([], 0, 1_000) == 4


def test_a_later_and_larger_failure_does_not_raise_the_limit() -> None:
    """The stable and the tentative line of a path share one limit."""
    size = JobSize(JobLimits())
    assert size.too_large(8) and size.too_large(256)
    assert size.last([], 0, 1_000) == 4


def test_a_node_begins_with_small_jobs_that_double() -> None:
    size, jobs, position = JobSize(JobLimits()), [], -1
    waiting = [(bucket, 1, 1) for bucket in range(500)]
    while position < 499:
        last = size.last(waiting[position + 1 :], position, 499)
        jobs.append(last - position)
        size.fitted(last - position)
        position = last
    assert jobs == [16, 32, 64, 128, 256, 4]
