"""Transcripts: when the state of a path is made durable, beside its steps (CEC sections II.B, III
and III.A)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.eventual_checkpoint import (
    EventualCheckpoint,
    Pace,
    Recovered,
    Settings,
    Targets,
)
from holdfast.core.progress import Progress
from holdfast.core.progress_events import (
    Acknowledge,
    Action,
    Began,
    BoundaryArrived,
    Checkpoint,
    CheckpointDone,
    CheckpointFailed,
    Event,
    InputOpened,
    PathPlan,
    RecoveryDone,
    Run,
    StepDone,
    Unpaired,
)
from holdfast.core.recovery_costs import RecoveryCosts
from holdfast.types import NO_UPKEEP, Upkeep

PLAN = PathPlan("p", ("s",), ("out",), convergent=False, extent=0)


class Node:
    """A node with one path. `run`: the step that is running; `released`: the last input bucket that
    upstream may delete."""

    def __init__(
        self, *, interval: int = 0, targets: Targets | None = None, pace: Pace | None = None,
        recovered: Recovered | None = None, resumed: int | None = None, recovery: str = "cec",
    ) -> None:  # fmt: skip
        control = None
        if targets is not None:
            control = EventualCheckpoint(Settings(targets, pace), recovered)
        self.core = Progress(
            [PLAN],
            resumed=None if resumed is None else {"p": (resumed, resumed + 1, 0)},
            recovery=recovery,
            checkpoint_buckets=interval,
            eventual=None if control is None else {"p": control},
        )
        self.run: Run | None = None
        self.at, self.released = 0, -1
        self.upto = -1 if resumed is None else resumed
        self.take(Began(0), InputOpened(0, "s", 0, -1))

    def take(self, *events: Event) -> list[Action]:
        """The actions of the last event that concern checkpoints and recoveries."""
        actions: list[Action] = []
        for event in events:
            actions = self.core.handle(event)
            for action in actions:
                if isinstance(action, Run):
                    self.run = action
                elif isinstance(action, Acknowledge):
                    self.released = action.no_longer_needed
        found = [a for a in actions if isinstance(a, Checkpoint | RecoveryDone)]
        self.logged_costs = [a.costs for a in found if isinstance(a, Checkpoint)]
        return [replace(a, costs=()) if isinstance(a, Checkpoint) else a for a in found]

    def gets(self, upto: int, rows: int = 1) -> None:
        """Buckets arrive, each with so many rows."""
        files = tuple((bucket, rows, 0) for bucket in range(self.upto + 1, upto + 1))
        self.upto = upto
        self.take(BoundaryArrived(self.at, "s", upto, files))

    def done(
        self, *, entries: int = 0, open_: int = 0, took_us: int = 0, needs_from: int | None = None
    ) -> list[Action]:
        """The running step is done."""
        assert self.run is not None
        run, self.run = self.run, None
        refers = run.hi + 1 if needs_from is None else needs_from
        return self.take(
            StepDone(self.at, "p", run.hi, refers, run.hi, entries, open_, took_us, entries)
        )

    def steps(self, upto: int, rows: int = 1, **of_step: int) -> list[Action]:
        """The buckets up to `upto` arrive and are computed in one step."""
        self.gets(upto, rows)
        return self.done(**of_step)

    def flushed(self, bucket: int, entries: int = 0) -> list[Action]:
        """The checkpoint after `bucket` is durable."""
        return self.take(CheckpointDone(self.at, "p", bucket, bucket + 1, entries, entries))

    def disk_full(self) -> list[Action]:
        return self.take(CheckpointFailed(self.at, "p"))


def checkpoint(bucket: int) -> list[Action]:
    return [Checkpoint("p", bucket)]


# -- beside the steps -----------------------------------------------------------------------------


def test_a_step_follows_without_waiting_for_the_checkpoint() -> None:
    node = Node(interval=2)
    node.gets(1)
    node.gets(5)
    assert node.done() == checkpoint(1)
    assert node.run == Run("p", 2, 5)


def test_one_checkpoint_is_in_flight_at_a_time() -> None:
    node = Node(interval=2)
    assert node.steps(1) == checkpoint(1)
    assert node.steps(3) == []
    assert node.steps(8) == []
    assert node.flushed(1) == [], "the next step requests the next one"
    assert node.steps(9) == checkpoint(9)


def test_the_interval_counts_from_the_bucket_of_the_durable_checkpoint() -> None:
    node = Node(interval=3)
    assert node.steps(2) == checkpoint(2)
    assert node.steps(4) == []
    node.flushed(2)
    assert node.steps(5) == checkpoint(5)


def test_inputs_are_released_when_the_checkpoint_is_durable() -> None:
    node = Node(interval=2)
    node.steps(1)
    assert node.released == -1
    node.steps(3)
    node.flushed(1)
    assert node.released == 1, "the inputs of bucket 2 and 3 are replayed"


# -- a full disk ----------------------------------------------------------------------------------


def test_a_failed_checkpoint_is_retried_with_the_current_state() -> None:
    node = Node(interval=2)
    assert node.steps(1) == checkpoint(1)
    assert node.steps(2) == []
    assert node.disk_full() == checkpoint(2)
    assert node.released == -1
    assert node.disk_full() == checkpoint(2), "also if nothing arrives any more"
    node.flushed(2)
    assert node.released == 2


def test_a_record_of_a_merge_is_retried() -> None:
    node = Node(targets=Targets(entries=50))
    node.steps(0, entries=60)
    node.gets(1)
    assert node.done(entries=30) == checkpoint(1)
    assert node.disk_full() == checkpoint(1)


def test_a_state_that_was_discarded_is_not_retried() -> None:
    """Its files may be deleted. The path is rebuilt from the older checkpoint's inputs, and the
    next step asks for a checkpoint."""
    node = Node(interval=2, recovery="checkpoint")
    node.steps(1)
    path = node.core.paths["p"]
    path.consistency.forgotten = True
    assert node.disk_full() == []
    path.consistency.forgotten = False
    path.rebuilds, path.running_upto = True, 2
    assert node.disk_full() == [], "being rebuilt"
    path.running_upto = None
    assert node.disk_full() == checkpoint(1)


# -- at once: the peer of a pair has died ---------------------------------------------------------


@pytest.fixture
def flushing() -> Node:
    """A replica of a pair: the checkpoint after bucket 1 is being written; the last step ended with
    bucket 2."""
    node = Node(interval=2, recovery="pairs")
    node.steps(1)
    node.steps(2)
    return node


def test_a_checkpoint_at_once_follows_the_one_in_flight(flushing: Node) -> None:
    assert flushing.take(Unpaired(0, True)) == []
    assert flushing.flushed(1) == checkpoint(2)
    assert flushing.flushed(2) == [], "only once"


def test_a_failed_checkpoint_is_retried_after_the_peer_has_died(flushing: Node) -> None:
    """No step may follow, and the inputs up to bucket 2 may have been released by the peer."""
    flushing.take(Unpaired(0, True))
    assert flushing.disk_full() == checkpoint(2)
    flushing.flushed(2)
    assert flushing.released == 2


def test_a_checkpoint_at_once_names_the_newest_state(flushing: Node) -> None:
    flushing.take(Unpaired(0, True))
    assert flushing.steps(7) == []
    assert flushing.flushed(1) == checkpoint(7)


def test_a_state_that_is_being_written_already_is_not_written_twice() -> None:
    node = Node(interval=2, recovery="pairs")
    node.steps(1)
    assert node.take(Unpaired(0, True)) == []
    assert node.flushed(1) == []


# -- limits ---------------------------------------------------------------------------------------


def test_rows_make_a_checkpoint_due_before_the_interval_is_over() -> None:
    node = Node(interval=10, targets=Targets(rows=100))
    assert node.steps(3, rows=10) == []
    assert node.steps(4, rows=90) == checkpoint(4)


def test_the_interval_is_a_limit_for_eventual_checkpoints_as_well() -> None:
    """Few rows: recovery would be short, but upstream should not retain old inputs for ever."""
    node = Node(interval=10, targets=Targets(rows=10**6), pace=Pace(5_000, 100_000))
    assert node.steps(8) == []
    assert node.steps(9) == checkpoint(9)
    node.flushed(9)
    assert node.steps(18) == []
    assert node.steps(19) == checkpoint(19)


def test_a_checkpoint_because_of_rows_counts_for_the_interval() -> None:
    node = Node(interval=10, targets=Targets(rows=100))
    node.steps(4, rows=100)
    node.flushed(4)
    assert node.steps(13) == []
    assert node.steps(14) == checkpoint(14)


def test_without_an_interval_only_the_length_of_a_recovery_matters() -> None:
    node = Node(targets=Targets(rows=10**6))
    assert node.steps(100_000) == []


def test_iii_a_a_merge_because_of_q_is_named_by_a_record() -> None:
    node = Node(targets=Targets(entries=50))
    assert node.steps(0, entries=60) == []
    node.gets(1)
    assert node.run == Run("p", 1, 1, upkeep=Upkeep(merges=True))
    assert node.done(entries=30) == checkpoint(1)
    node.flushed(1, entries=30)
    node.gets(2)
    assert node.run == Run("p", 2, 2, upkeep=Upkeep(merges=False))


def test_iii_a_a_step_folds_if_recovery_would_read_too_many_rows_again() -> None:
    """After bucket 0, time windows refer to its 60 rows."""
    node = Node(targets=Targets(rows=100))
    node.steps(0, rows=60, needs_from=0)
    node.gets(1, rows=40)
    assert node.run == Run("p", 1, 1)
    node.done(needs_from=0)
    node.gets(2, rows=1)
    assert node.run == Run("p", 2, 2, upkeep=Upkeep(folds=True))
    assert node.done(needs_from=3) == checkpoint(2)


def test_without_eventual_checkpoints_steps_do_nothing_for_recovery() -> None:
    node = Node(interval=1, recovery="checkpoint")
    assert node.steps(0, rows=10**7, entries=10**7) == checkpoint(0)
    node.gets(1, rows=10**7)
    assert node.run == Run("p", 1, 1) and node.run.upkeep == NO_UPKEEP


# -- recovery -------------------------------------------------------------------------------------


def restarted(upto: int, recoveries: int = 2, **options: object) -> Node:
    """The newest record is after bucket 9; results up to bucket `upto` are in the log."""
    costs = RecoveryCosts(entry_us=4.0, row_us=3.0, fixed_us=200_000, recoveries=recoveries)
    recovered = Recovered(upto, entries=20_000, load_us=80_000, opening_us=20_000, costs=costs)
    return Node(resumed=9, recovered=recovered, **options)  # type: ignore[arg-type]


def test_ii_b_a_replay_begins_after_the_record_and_ends_with_the_logged_results() -> None:
    node = restarted(upto=14, targets=Targets())
    node.gets(30)
    assert node.run == Run("p", 10, 14)
    assert node.done() == []
    assert node.run == Run("p", 15, 15), "the other buckets are a backlog"
    node.done()
    assert node.run == Run("p", 16, 30)


def test_the_recovery_is_over_when_the_first_new_bucket_is_committed() -> None:
    node = restarted(upto=14, targets=Targets(recovery_us=2_000_000))
    node.gets(30)
    assert node.done(took_us=300_000) == []
    over, logged = node.done(took_us=100_000)
    assert isinstance(over, RecoveryDone) and [logged] == checkpoint(15), "its costs are logged"
    assert (over.path, over.stated_us) == ("p", 2_000_000)
    assert (over.load_us, over.replay_us) == (80_000, 300_000)
    assert over.took_us == 500_000, "with the time to open the log"
    assert node.steps(31, took_us=100_000) == [], "reported once"


def test_a_recovery_without_a_replay_is_reported_as_well() -> None:
    """The node was stopped after its last record."""
    node = restarted(upto=9, targets=Targets())
    over = RecoveryDone("p", 200_000, None, 80_000, 0)
    assert node.steps(10, took_us=100_000) == [over, *checkpoint(10)]


def test_later_recoveries_are_logged_with_the_next_record() -> None:
    node = restarted(upto=9, targets=Targets(), recoveries=3)
    (over,) = node.steps(10, took_us=100_000)
    assert isinstance(over, RecoveryDone)


def test_a_node_that_starts_for_the_first_time_does_not_recover() -> None:
    node = Node(targets=Targets())
    assert node.steps(10, took_us=100_000) == []


def test_rows_make_no_checkpoint_due_before_the_recovery_is_over() -> None:
    node = restarted(upto=14, targets=Targets(rows=100))
    node.gets(14, rows=1_000)
    assert node.done() == []
    recovery, *due = node.steps(15, rows=1)
    assert isinstance(recovery, RecoveryDone)
    assert isinstance(due[0], Checkpoint) and due[0].bucket == 15


def test_the_costs_of_recoveries_are_logged_with_each_record() -> None:
    """The costs that are known when the record is requested, with the recovery just measured."""
    node = restarted(upto=9, targets=Targets(rows=0))
    control = node.core.paths["p"].eventual
    assert control is not None
    node.steps(10, took_us=100_000)
    (logged,) = node.logged_costs
    assert logged == control.costs.body()
    assert RecoveryCosts.of(logged).recoveries == 3
