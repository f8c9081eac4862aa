"""How long a bucket may be held, and how partial it is when its deadline expires."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from holdfast.core.progress_events import BoundaryArrived, Run, RunTentative, Tick, Wake
from holdfast.core.sunion import WHOLE, Partial, SUnion
from tests.core.transcripts import (
    DELAY,
    PROCESS,
    came,
    done,
    failed,
    handle,
    plan_of,
    stable,
    tentative_done,
)


def holding(*inputs: str, upto: int = 4) -> SUnion:
    """Every input is complete up to bucket 4. A bucket is held for 1000 (`max_delay`, X in
    Borealis), and for 300 if the complete delay was spent upstream.
    """
    sunion = SUnion(inputs or ("s1", "s2"), patience_us=1_000, own_us=300)
    for stream in sunion.complete_upto:
        sunion.boundary(stream, upto, at=0)
    sunion.done(upto)
    return sunion


# -- deadlines ------------------------------------------------------------------------------------


def test_a_bucket_is_held_for_max_delay_after_its_arrival() -> None:
    sunion = holding()
    sunion.boundary("s1", 5, at=100)
    sunion.boundary("s1", 7, at=200)
    assert sunion.next_expiry(4, 200) == 1_100
    assert [sunion.expired_upto(at) for at in (1_099, 1_100, 1_200)] == [None, 5, 7]
    assert sunion.next_expiry(7, 1_200) is None


def test_an_earlier_bucket_that_expires_later_does_not_revoke_bucket_0() -> None:
    sunion = holding(upto=-3)
    sunion.boundary("s1", 0, at=100)
    sunion.boundary("s2", -1, at=150)
    assert [sunion.expired_upto(at) for at in (1_100, 1_150)] == [0, 0]


def test_the_first_input_of_a_bucket_starts_its_deadline() -> None:
    sunion = holding("s1", "s2", "s3")
    sunion.boundary("s2", 5, at=400)
    sunion.boundary("s1", 5, at=100)
    assert sunion.next_expiry(4, 400) == 1_100


def test_the_delay_spent_upstream_shortens_the_deadline() -> None:
    for spent_us, until in ((0, 1_100), (400, 700), (700, 400), (5_000, 400)):
        sunion = holding()
        sunion.boundary("s1", 5, at=100, spent_us=spent_us)
        assert sunion.next_expiry(4, 100) == until, f"{spent_us} us were spent upstream"


def test_a_tentative_bucket_is_held_only_for_the_own_share_of_the_path() -> None:
    sunion = holding()
    sunion.tentative("s1", 5, 100, ("far",))
    assert sunion.next_expiry(4, 100) == 400


def test_the_deadline_of_a_newer_bucket_also_applies_to_older_ones() -> None:
    """Buckets run in order: an older bucket cannot run after a newer one."""
    sunion = holding()
    sunion.boundary("s1", 5, at=100)  # until 1100
    sunion.boundary("s1", 6, at=200, spent_us=700)  # until 500
    assert sunion.next_expiry(4, 200) == 500
    assert sunion.expired_upto(500) == 6


def test_the_delay_of_a_stable_result_counts_from_the_first_of_its_inputs() -> None:
    sunion = holding()
    assert sunion.spent_us(100) == 0
    sunion.boundary("s1", 5, at=100, spent_us=250)
    sunion.boundary("s2", 5, at=300)
    assert sunion.spent_us(300) == 450
    sunion.done(5)
    assert sunion.spent_us(400) == 0


def test_a_path_that_blocks_has_no_deadlines() -> None:
    sunion = SUnion(["s1", "s2"])
    sunion.boundary("s1", 5, at=100)
    assert sunion.next_expiry(4, 100) is None and sunion.expired_upto(10**12) is None


def test_a_correction_does_not_change_the_deadline_of_its_bucket() -> None:
    sunion = holding()
    sunion.tentative("s1", 5, 100, ("far",))
    sunion.boundary("s1", 5, at=350)  # the correction of the bucket that arrived at 100
    assert sunion.next_expiry(4, 350) == 400


def test_after_a_restart_only_buckets_after_the_checkpoint_are_new() -> None:
    sunion = SUnion(["s1", "s2"], patience_us=1_000, own_us=300)
    sunion.resume(9)
    assert sunion.all_complete_upto() == 9
    sunion.boundary("s1", 7, at=100)  # the log is read from an earlier bucket
    assert (sunion.all_complete_upto(), sunion.next_expiry(9, 100)) == (9, None)
    sunion.boundary("s1", 12, at=200)
    assert sunion.waiting_for() == ["s2"] and sunion.next_expiry(9, 200) == 1_200


# -- section 3.3 over a chain of nodes: kX --------------------------------------------------------

X = 1_000


def chain(came_after_us: int) -> int:
    """Return the time at which the second of two nodes in a chain gives a tentative result.

    Both nodes miss an input. The first node holds a bucket from 0 until its second input arrives
    at `came_after_us`; the stable result then goes to the second node.
    """
    first = stable(plan_of(DELAY))
    second = stable(plan_of(DELAY_OF_TWO))
    handle(first, came(0, "s1", 5))
    (run,) = handle(first, came(came_after_us, "s2", 5))
    assert isinstance(run, Run)
    handle(second, BoundaryArrived(came_after_us, "s1", 5, spent_us=run.spent_us))
    for at in range(came_after_us, 4 * X):
        if any(isinstance(action, RunTentative) for action in handle(second, Tick(at))):
            return at
    raise AssertionError("the second node gave no tentative result")


#: The second node may hold a bucket that comes directly from a source for 2 X; its own share is X.
DELAY_OF_TWO = type(DELAY)("delay", "suspend", patience_us=2 * X, own_us=X)


@pytest.mark.parametrize("held_us", [0, 1, X // 2, X - 1])
def test_property_1_a_bucket_held_upstream_is_held_only_for_the_rest_of_k_x(held_us: int) -> None:
    assert chain(held_us) == 2 * X


def test_property_1_the_second_node_holds_a_bucket_that_was_late_upstream_for_its_own_x() -> None:
    first, second = failed(DELAY), stable(plan_of(DELAY_OF_TWO))
    assert first.paths["p"].consistency.position == 5
    handle(second, BoundaryArrived(1_110, "s1", 4, tentative_upto=5, missing=("far",)))
    assert handle(second, Tick(1_110 + X - 1)) == [Wake(1_110 + X)]
    assert isinstance(handle(second, Tick(1_110 + X))[-1], RunTentative)


# -- how partial a bucket is ----------------------------------------------------------------------


def test_partial_inputs_is_the_share_of_the_available_inputs() -> None:
    sunion = holding("s1", "s2", "s3", "s4")
    for stream in ("s1", "s2", "s3"):
        sunion.boundary(stream, 5, at=100)
    assert sunion.missing(5, 5) == (("s4",), Partial(0.75, 1.0)), (
        "no rows have arrived yet, so no rate is known"
    )
    assert sunion.missing(4, 4) == ((), WHOLE)


def test_partial_rows_is_estimated_from_the_recent_rates_of_all_inputs() -> None:
    sunion = holding()
    sunion.boundary("s1", 14, at=100, rows=900)  # 90 a bucket
    sunion.boundary("s2", 14, at=100, rows=100)  # 10 a bucket
    sunion.boundary("s1", 15, at=200, rows=90)
    assert sunion.missing(15, 15) == (("s2",), Partial(0.5, 0.9))
    sunion.boundary("s2", 16, at=300, rows=20)
    assert sunion.missing(16, 16) == (("s1",), Partial(0.5, 0.1))


def test_the_rate_of_an_input_follows_its_recent_buckets() -> None:
    """The average covers about ten buckets: it forgets a burst and follows a lasting change."""
    sunion = holding()
    for stream in ("s1", "s2"):
        sunion.boundary(stream, 14, at=0, rows=1_000)
    for bucket in range(15, 60):
        sunion.boundary("s1", bucket, at=bucket, rows=300)
    _, partial = sunion.missing(59, 59)
    assert 0.73 < partial.rows < 0.76, "300 of 400"


def test_an_input_that_never_arrived_counts_with_the_average_rate() -> None:
    sunion = SUnion(["s1", "s2", "s3"], patience_us=1_000, own_us=300)
    for stream in ("s1", "s2"):
        sunion.boundary(stream, 4, at=0)
        sunion.boundary(stream, 5, at=100, rows=50)
    assert sunion.missing(5, 5) == (("s3",), Partial(0.6667, 0.6667))


def test_partial_shares_multiply_along_a_chain_of_nodes() -> None:
    """The producer of s1 had half of its inputs, with a fifth of the rows."""
    sunion = holding()
    for stream in ("s1", "s2"):
        sunion.boundary(stream, 14, at=0, rows=100)
    sunion.tentative("s1", 15, 100, ("far",), Partial(0.5, 0.2))
    sunion.boundary("s2", 15, at=100, rows=10)
    assert sunion.missing(15, 15) == (("far",), Partial(0.75, 0.6))
    sunion.boundary("s1", 15, at=200, rows=10)  # corrected
    assert sunion.missing(15, 15) == ((), WHOLE)


def test_each_tentative_bucket_has_its_own_partial_share() -> None:
    """While older buckets are held, newer ones may arrive with no or with other missing inputs."""
    sunion = holding()
    for stream in ("s1", "s2"):
        sunion.boundary(stream, 14, at=0, rows=100)
    sunion.boundary("s2", 18, at=100, rows=40)
    sunion.tentative("s1", 15, 100, ("far",), Partial(0.5, 0.2))
    sunion.tentative("s1", 16, 110, (), WHOLE)
    sunion.tentative("s1", 18, 120, ("near",), Partial(0.5, 0.5))
    assert sunion.missing(15, 15) == (("far",), Partial(0.75, 0.6))
    assert sunion.missing(16, 16) == ((), WHOLE)
    assert sunion.missing(17, 18) == (("near",), Partial(0.75, 0.75))
    assert sunion.missing(15, 18) == (("far", "near"), Partial(0.75, 0.6)), "the worst"
    sunion.boundary("s1", 16, at=200, rows=20)
    assert sunion.missing(17, 17) == (("near",), Partial(0.75, 0.75))


def test_a_tentative_run_carries_its_partial_share() -> None:
    core = stable(plan_of(DELAY))
    for stream, rows in (("s1", 30), ("s2", 10)):
        handle(core, BoundaryArrived(10, stream, 5, ((5, rows, 0),)))
    handle(core, done(20, 5), BoundaryArrived(100, "s1", 6, ((6, 30, 0),)))
    run = handle(core, Tick(1_100))[-1]
    assert isinstance(run, RunTentative) and run.partial == Partial(0.5, 0.75)


# -- cost of a query ------------------------------------------------------------------------------


def lines_run(fn: Callable[[], Any]) -> int:
    """Number of executed Python lines: a cost that does not depend on the load of the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


def test_a_query_costs_the_same_after_100_000_held_buckets_as_after_10() -> None:
    costs, sizes = [], []
    sunion = holding()
    for bucket in range(5, 100_005):
        at = 100 * bucket
        sunion.boundary("s1", bucket, at=at)
        sunion.expired_upto(at)
        sunion.next_expiry(bucket - 11, at)
        if bucket in (30, 100_004):
            sizes.append([len(held) for held in sunion._held.values()])
            costs.append(lines_run(lambda: ask(sunion, bucket)))  # noqa: B023
    assert costs[0] == costs[1]
    assert sizes[0] == sizes[1] == [10, 0], "only unexpired deadlines are stored"


def ask(sunion: SUnion, bucket: int) -> None:
    at = 100 * bucket + 1
    sunion.expired_upto(at)
    sunion.next_expiry(bucket, at)
    sunion.missing(bucket, bucket)
    sunion.newest()
    sunion.waiting_for()
    sunion.spent_us(at)


@pytest.mark.parametrize("policy", [DELAY, PROCESS])
def test_a_decision_costs_the_same_late_in_a_failure_as_at_its_start(policy: Any) -> None:
    core, costs, last = failed(policy), [], 20_000
    for bucket in range(6, last + 1):
        at = 2_000 + 100 * bucket
        events = (BoundaryArrived(at, "s1", bucket, ((bucket, 1, 0),)), Tick(at + 50))
        if bucket in (50, last):
            costs.append(lines_run(lambda: [core.handle(event) for event in events]))  # noqa: B023
        else:
            for event in events:
                core.handle(event)
        run = core.paths["p"].consistency.running_upto
        if run is not None:
            core.handle(tentative_done(at + 60, run))
    assert abs(costs[0] - costs[1]) <= 0.1 * costs[0]


def test_the_first_decision_of_a_correction_costs_the_same_after_a_long_failure() -> None:
    costs = []
    for buckets in (600, 20_000):
        core, last = failed(PROCESS), 6 + buckets
        for bucket in range(6, last):
            handle(core, BoundaryArrived(2_000 + bucket, "s1", bucket, ((bucket, 1, 0),)))
            handle(core, tentative_done(2_000 + bucket, bucket))
        correction = came(90_000, "s2", last - 1)
        costs.append(lines_run(lambda: handle(core, correction)))  # noqa: B023
        assert core.paths["p"].running_upto == 5 + 256, "one job, however many buckets wait"
    assert costs[0] == costs[1]
